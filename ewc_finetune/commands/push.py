"""`push`: an anchor to the Hub, with a card that says what it is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from ewc_finetune.anchor import describe
from ewc_finetune.anchor.anchor import Anchor, validate
from ewc_finetune.anchor.probe_tensors import bytes_of, records_of
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.anchor.schema import groups_of, open_source
from ewc_finetune.anchor.summary import Inspection
from ewc_finetune.checkpoint.location import locate
from ewc_finetune.commands.inspect import inspect
from ewc_finetune.commands.push_options import PushOptions
from ewc_finetune.errors import HubError, UsageError, few
from ewc_finetune.hub.address import HubAddress, parse_address
from ewc_finetune.hub.anchor_files import STEM
from ewc_finetune.hub.client import MissingRepositoryError, UnreachableError, endpoint
from ewc_finetune.hub.committing import changed_files, commit, make_branch, make_repository
from ewc_finetune.hub.repository import Repository, look_up_now
from ewc_finetune.model_card.card import updated_card
from ewc_finetune.model_card.importance import largest
from ewc_finetune.model_card.published import Published
from ewc_finetune.model_card.text import REVISION
from ewc_finetune.reporting.plots import draw_importance
from ewc_finetune.specs.options import takes
from ewc_finetune.storage.atomic import storage_errors
from ewc_finetune.storage.shards import INDEX, cut, write_groups
from ewc_finetune.storage.workspace import Workspace, recover

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_CARD = "README.md"
_FIGURE = "anchor-importance.png"
_PART = re.compile(rf"{STEM}-\d{{5}}-of-\d{{5}}\.safetensors")
# How often a push is prepared again because somebody else changed the branch in the meantime.
_TRIES = 3


@dataclass(frozen=True)
class Pushed:
    """What `push` did.

    Attributes:
        place: Where the anchor is now, at a commit.
        url: A page that shows it: the repository's, or the pull request's.
        digest: SHA-256 of the anchor.
        changed: The files that the commit added or changed.
        removed: Those that it removed, of an anchor in other parts. Nothing in both: there was nothing to commit.
    """

    place: HubAddress
    url: str
    digest: str
    changed: list[str]
    removed: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        return {
            "hub": str(self.place),
            "url": self.url,
            "sha256": self.digest,
            "changed": self.changed,
            "removed": self.removed,
        }


@takes(PushOptions)
def push(options: PushOptions) -> Pushed:
    """Put an anchor on the Hub with a model card, in one commit; there is none where nothing has changed.

    Of a card that is there already, only what this wrote before is renewed. Memory does not grow with an anchor that
    is a file.

    Args:
        options: The anchor and the repository, and by their names the others of `PushOptions`.

    Raises:
        UsageError: for an option that cannot be.
        AnchorError: if the anchor cannot be used.
        HubError: if the Hub does not allow it, or cannot be reached, or the card that is there has marks or front
            matter that cannot be read. The branch is then as it was.
        StorageError: if there is no room for the parts.
    """
    address = _target(options.repository, options.revision)
    limit = parse_size(options.max_shard_size)
    scratch = Path(gettempdir())
    recover(scratch, options.progress.note)
    with Workspace(scratch) as space:
        folder = space.path
        path = _as_file(options, folder)
        inspection = inspect(path)
        source = open_source(path)
        if source.header.data <= limit and not path.name.endswith(INDEX):
            names = {f"{STEM}.safetensors": path}
        else:
            with storage_errors(folder):
                names = {file.name: file for file in cut(source, folder, STEM, limit)}
        place = Published(
            address.repository,
            address.revision,
            list(names)[-1],
            source.digest(),
            None if inspection.provenance.curvature == "identity" else _FIGURE,  # where all bars mean the same
            options.license,
            *_base_of(inspection.provenance),
        )
        with _making(address, options):
            for _ in range(_TRIES):
                source.check_unchanged()
                done = _push_once(names, inspection, place, folder, options)
                if done is not None:
                    return done
    raise HubError(f"{address.repository} is changed by others again and again. Run the command again later")


@contextlib.contextmanager
def _making(address: HubAddress, options: PushOptions) -> Iterator[None]:
    """See to it that there is a repository inside the block, and say so if nothing comes into one that was made."""
    try:
        there = look_up_now(HubAddress(address.repository))
    except MissingRepositoryError as error:
        if options.create_pr:
            raise MissingRepositoryError(
                f"{error}. A pull request is to one that is there; without it, one is made"
            ) from None
        there = None
    except UnreachableError as error:
        raise UnreachableError(f"nothing was pushed to {address.repository}: {error}") from None
    if options.private and there is not None and there.private is False:
        options.progress.note(
            f"{address.repository} was there already, and is public; --private is for one that is made"
        )
    made = False
    try:
        if not options.create_pr:
            make_repository(HubAddress(address.repository), options.private)
            made = there is None
            make_branch(address)
        yield
    except BaseException:
        if made:
            options.progress.note(
                f"{address.repository} was made, and nothing was pushed to it: {endpoint()}/{address.repository}"
            )
        raise


def _push_once(
    names: Mapping[str, Path],
    inspection: Inspection,
    place: Published,
    folder: Path,
    options: PushOptions,
) -> Pushed | None:
    """Commit what the repository has not; None if somebody else was faster."""
    address = HubAddress(place.repository, place.revision)
    there = look_up_now(address)
    card, remarks = updated_card(_card_in(there) if _CARD in there.files else None, inspection, place)
    additions = changed_files(there, {**names, _CARD: card.encode()})
    if place.figure is not None and (additions.keys() & names or place.figure not in there.files):
        figure = folder / place.figure
        layers = largest(inspection.provenance.importance)
        draw_importance(figure, layers, f"{inspection.provenance.name}: share of the curvature by layer")
        additions |= changed_files(there, {place.figure: figure})
    removed = [name for name in there.files if name not in names and _is_stale(name)]
    if place.figure is None and _FIGURE in there.files:
        removed.append(_FIGURE)
    done = None
    if additions or removed:
        options.progress.note(f"{address}: pushing {_sizes(additions)}")
        message = options.message or f"Anchor {inspection.provenance.name}"
        done = commit(there, additions, removed, message, options.create_pr)
        if done is None:
            return None
    for remark in remarks:
        options.progress.note(remark)
    if options.probes is False and any(map(_is_stale, there.files)):
        options.progress.note(
            f"samples that were pushed before, if there were any, stay in the history of {address.repository} until it "
            "is squashed, or the repository deleted"
        )
    url = there.page if done is None else done.url
    at = address.at(there.commit if done is None else done.hash, place.file)
    return Pushed(at, url, place.digest, sorted(additions), removed)


def _card_in(there: Repository) -> str:
    """Return the card that a repository has."""
    try:
        return there.fetch(_CARD).path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise HubError(
            f"{there.page}: its {_CARD} is not in UTF-8 ({error}). Write it in UTF-8, and push again"
        ) from error


def _target(repository: str, revision: str | None) -> HubAddress:
    """Return where an anchor is to go."""
    try:
        address = parse_address(repository)
    except UsageError as error:
        raise UsageError(f"an anchor is pushed to ORG/NAME: {error}") from error
    if address.file is not None or (address.revision is not None and revision is not None):
        raise UsageError(f"{repository} should name a repository alone, ORG/NAME; the branch goes into --revision")
    branch = revision or address.revision
    if branch is not None and not REVISION.fullmatch(branch):
        raise UsageError(f"{branch!r} is no branch to push to; expected letters, digits and . / - _")
    return parse_address(str(HubAddress(address.repository, branch)))


def parse_size(text: int | str) -> int:
    """Return how many bytes a text such as `5GB` means.

    Raises:
        UsageError: if it means none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B)?\s*", str(text), re.IGNORECASE)
    size = 0 if match is None else int(float(match[1]) * _UNITS[(match[2] or "B").upper()])
    if size < 1:
        raise UsageError(f"the size of a shard is {text!r}; expected a number of bytes, such as 5GB or 500MB")
    return size


def _as_file(options: PushOptions, folder: Path) -> Path:
    """Return a file with what is to be pushed: the anchor's own where nothing is to be left out of it."""
    given, probes, progress = options.anchor, options.probes, options.progress
    anchor = given if isinstance(given, Anchor) else Anchor.open(given, digest=False)
    for remark in anchor.remarks:
        progress.note(remark)
    validate(anchor)
    held = [describe.probe(*known) for known in zip(records_of(anchor.probes), bytes_of(anchor.probes), strict=True)]
    if held and probes is None:
        raise UsageError(
            f"{anchor.label} holds {' and '.join(held)}; say whether the Hub may have them: --probes or --no-probes"
        )
    if held and probes:
        progress.note(f"the anchor holds {' and '.join(held)}: whoever may read the repository has them")
    path = folder / "whole.safetensors"
    if held and not probes:
        anchor = anchor.without_probes()
        progress.note(
            "the samples in the anchor were left out, so that what is pushed has another digest than the file"
        )
    if isinstance(given, Anchor) or anchor.path is None:
        return Path(str(anchor.save(path).path))
    if held and not probes:
        with storage_errors(folder):
            kept = tuple(group for group in groups_of(anchor.provenance) if group != "probe.")
            write_groups(open_source(anchor.path), kept, anchor.metadata, path)
        return path
    return anchor.path


def _sizes(additions: Mapping[str, Path | bytes]) -> str:
    """Name files with their sizes."""
    sizes = {n: len(c) if isinstance(c, bytes) else c.stat().st_size for n, c in additions.items()}
    return few([f"{name} ({size:,} bytes)" for name, size in sizes.items()])


def _base_of(origin: Provenance) -> tuple[str | None, str | None]:
    """Return the Hub's name of the model that an anchor was made from, and its commit, if it came from there."""
    try:
        location = locate(origin.checkpoint.get("file") or "")
    except UsageError:  # what others wrote into the anchor may be anything
        return None, None
    return (location.repository, location.revision) if isinstance(location, HubAddress) else (None, None)


def _is_stale(name: str) -> bool:
    """Whether a file is of an anchor that was pushed before in another number of parts."""
    return name in (f"{STEM}.safetensors", f"{STEM}{INDEX}") or _PART.fullmatch(name) is not None
