"""Which file of a repository is its anchor, and how that gets here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

from ewc_finetune.errors import HubError, few
from ewc_finetune.hub.address import HubAddress, parse_address
from ewc_finetune.hub.client import UnreachableError
from ewc_finetune.hub.remote import RemoteSource
from ewc_finetune.hub.repository import Fetched, Repository, look_into_cache, look_up, look_up_now, remember
from ewc_finetune.storage.safetensors_source import FileSource, LocalSource, TensorSource
from ewc_finetune.storage.shards import INDEX, JoinedSource, ShardedSource, parts_named

# The name without ending that `push` gives an anchor in its repository.
STEM = "anchor"
_FILE, _PARTS = f"{STEM}.safetensors", f"{STEM}{INDEX}"
# The files of an anchor, in a repository that may have other files.
ANCHOR_FILES = (_FILE, _PARTS, f"{STEM}-*-of-*.safetensors", f"*.{_FILE}", f"*.{_PARTS}", "anchor-importance.png")


@dataclass(frozen=True)
class HubAnchor:
    """An anchor from the Hub, on this machine now.

    Attributes:
        place: Where it is for good: repository, commit and file.
        path: Its file in the cache, or its index.
        source: Its tensors.
        digest: SHA-256 of all of it as one file.
        remarks: What a reader should know.
    """

    place: HubAddress
    path: Path
    source: LocalSource
    digest: str
    remarks: tuple[str, ...]


def fetch_anchor(text: str) -> HubAnchor:
    """Return the anchor at an address; see `anchor_in`.

    Raises:
        UsageError: if it is no address.
    """
    return anchor_in(look_up(parse_address(text)))


def anchor_in(repository: Repository) -> HubAnchor:
    """Return the anchor that a repository was looked up for, downloaded unless it is in the cache.

    Raises:
        HubError: if there is none, or not one alone, or it cannot be had, or is not what was promised.
        AnchorError: if its files cannot be used.
    """
    file = anchor_file(repository)
    place = repository.address.at(repository.commit, file)
    main = fetch_with_parts(repository, file)
    remember(repository)
    if not main.parts:
        return HubAnchor(place, main.path, FileSource(main.path, str(place)), main.sha256, repository.remarks)
    source = ShardedSource(main.path, str(place), main.parts)
    return HubAnchor(place, main.path, source, source.digest(), repository.remarks)


def fetch_with_parts(repository: Repository, file: str) -> Fetched:
    """Fetch a file, and if it is an index the files that it names."""
    fetched = repository.fetch(file)
    if not file.endswith(INDEX):
        return fetched
    names = parts_named(fetched.path, str(repository.address.at(repository.commit, file)))
    return replace(fetched, parts={n: repository.fetch(str(PurePosixPath(file).with_name(n))).path for n in names})


@dataclass(frozen=True)
class Peeked:
    """An anchor on the Hub of which hardly anything was fetched.

    Attributes:
        source: Its tensors.
        place: Where it is for good: repository, commit and file.
        sha256: Digest of its file, as the Hub promises it; None for several files.
        remarks: What a reader should know.
    """

    source: TensorSource
    place: HubAddress
    sha256: str | None
    remarks: tuple[str, ...]


def peek(address: HubAddress) -> Peeked | None:
    """Open what an address means without fetching it: by range requests, or from the cache where it is there whole.

    Returns:
        What is there; None if it is no safetensors file, nor an index of such.

    Raises:
        HubError: if there is no such file, no anchor where none is named, or it cannot be had.
        AnchorError: if the file is damaged.
    """
    repository = look_up(address)
    file = anchor_file(repository)
    place = repository.address.at(repository.commit, file)
    cached = look_into_cache(place)

    @cache
    def there() -> Repository:
        return repository if repository.cached is None else look_up_now(place)

    def part(name: str) -> TensorSource:
        path = str(PurePosixPath(file).with_name(name))
        at = place.at(repository.commit, path)
        if cached is not None and path in cached.files:
            return FileSource(cached.fetch(path).path, str(at))
        if path not in there().files:
            raise HubError(f"{place} names {path}, which is not in the repository. Don't use it")
        return RemoteSource(at, there().files[path].size or 0)

    if file.endswith(INDEX):
        return Peeked(JoinedSource(repository.fetch(file).path, str(place), part), place, None, repository.remarks)
    if not file.endswith(".safetensors"):
        return None
    return Peeked(part(PurePosixPath(file).name), place, repository.files[file].sha256, repository.remarks)


def has_anchor(repository: Repository) -> bool:
    """Whether there is an anchor, or several, in a repository."""
    return any(is_pushed(name) or name.endswith((f".{_FILE}", f".{_PARTS}")) for name in repository.files)


def is_pushed(file: str) -> bool:
    """Whether a file is called as `push` calls anchors."""
    return PurePosixPath(file).name in (_FILE, _PARTS)


def anchor_file(repository: Repository) -> str:
    """Return the path of the file, or index, that is the anchor which an address means.

    Raises:
        HubError: if there is none, or several and the address does not say which.
    """
    asked = repository.address.file
    if asked is not None and asked in repository.files:
        return asked
    within = "" if asked is None else f"{asked.rstrip('/')}/"
    for name in (_FILE, _PARTS):
        if within + name in repository.files:
            return within + name
    anchors = [
        name
        for name in sorted(repository.files)
        if name.startswith(within) and name.endswith((f".{_FILE}", f".{_PARTS}"))
    ]
    if len(anchors) == 1:
        return anchors[0]
    where = repository.address.at(repository.commit)
    if repository.cached is not None and not anchors:
        raise UnreachableError(f"there is no anchor of {where} in the cache, and the Hub could not be asked")
    if anchors:
        raise HubError(f"{where} has several anchors ({few(anchors)}). Name one: {repository.address}/{anchors[0]}")
    if asked is not None:
        raise HubError(f"{where} is not there: the repository has {few(sorted(repository.files)) or 'no files'}")
    hint = ""
    if "config.json" in repository.files:
        hint = (
            f". It is a plain model; with its data, `ewc-ft consolidate hf:{repository.address.repository}` makes one"
        )
    elif any(name.endswith(".safetensors") for name in repository.files):
        hint = f". If one of its files is an anchor, name it: {repository.address}/FILE"
    raise HubError(f"there is no anchor in {where}{hint}")
