"""A repository on the Hub at one commit: what is in it, and its files, each checked against what was promised."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from ewc_finetune.errors import HubError, StorageError
from ewc_finetune.hub.address import HubAddress, is_commit
from ewc_finetune.hub.client import (
    PATIENCE,
    UnreachableError,
    api,
    endpoint,
    hub_errors,
    is_offline,
    not_in_the_cache,
    patiently,
)
from ewc_finetune.storage.atomic import atomic_write, sha256

_DEFAULT_BRANCH = "main"
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Promise:
    """What the Hub says of a file before it is fetched.

    Attributes:
        size: Its bytes; None where only the cache is asked.
        sha256: The SHA-256 of a large file.
        blob: Git's hash of a small file.
    """

    size: int | None = None
    sha256: str | None = None
    blob: str | None = None


@dataclass(frozen=True)
class Fetched:
    """A file that is on this machine now, as it was promised.

    Attributes:
        path: Where it is in the cache.
        sha256: Digest of its bytes.
        parts: For an index, where the files are that it names.
    """

    path: Path
    sha256: str
    parts: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Repository:
    """A repository at one commit.

    Attributes:
        address: As it was asked for.
        commit: What its revision is.
        files: What is in it, or of it in the cache, by path.
        cached: Its folder in the cache, where the Hub was not asked.
        remarks: What a reader should know.
        private: Whether only some may see it, where the Hub was asked.
    """

    address: HubAddress
    commit: str
    files: Mapping[str, Promise]
    cached: Path | None = None
    remarks: tuple[str, ...] = ()
    private: bool | None = None

    @property
    def page(self) -> str:
        """The page that shows it."""
        branch = "" if self.address.revision is None else f"/tree/{quote(self.address.revision, safe='')}"
        return f"{endpoint()}/{self.address.repository}{branch}"

    def fetch(self, file: str) -> Fetched:
        """Return a file, downloaded unless it is in the cache.

        The client goes on by itself where a connection is cut; what it gives up leaves nothing behind.

        Raises:
            HubError: if it cannot be had, or is not what was promised.
            StorageError: if it cannot be stored.
        """
        promise = self.files.get(file)
        place = self.address.at(self.commit, file)
        if promise is None and self.cached is not None:  # the cache may have only some of a commit's files
            try:
                return look_up_now(place).fetch(file)
            except UnreachableError as error:
                raise not_in_the_cache(place, error) from None
        if promise is None:
            raise HubError(f"{place} is not there: {self._contents()}")
        path = self._download(file) if self.cached is None else self.cached / file
        return Fetched(path, self.check(file, path))

    def check(self, file: str, path: Path) -> str:
        """Return the SHA-256 of a file that was fetched.

        Raises:
            HubError: if it is not what was promised.
        """
        promise = self.files.get(file) or Promise()
        if promise.sha256 is None and promise.blob is None:
            promise = _promised(path)  # some Hubs list files without their hashes
        return _checked(path, promise, self.address.at(self.commit, file))

    def _download(self, file: str) -> Path:
        from huggingface_hub import hf_hub_download

        with hub_errors(self.address.at(self.commit, file)):
            return Path(
                patiently(
                    lambda: hf_hub_download(
                        self.address.repository, file, revision=self.commit, library_name="ewc-finetune"
                    )
                )
            )

    def _contents(self) -> str:
        shown = sorted(self.files)
        return f"the repository has {', '.join(shown[:8])}" + (f" and {len(shown) - 8} more" if shown[8:] else "")


def look_up(address: HubAddress) -> Repository:
    """Find out what commit an address means and what is there: from the Hub, or without a connection from the cache.

    Nothing is asked of the Hub for a file at a commit that is in the cache.

    Raises:
        HubError: if there is no such repository or revision, or it may not be read.
        UnreachableError: if the Hub cannot be asked and it is not in the cache.
    """
    cached = look_into_cache(address)
    if address.is_pinned and cached is not None and address.file in cached.files:
        return cached
    try:
        return look_up_now(address)
    except UnreachableError as error:
        if cached is None:
            raise not_in_the_cache(address, error) from None
        if is_offline():
            return cached
        return replace(cached, remarks=(f"{address}: taken from the cache (commit {cached.commit[:12]}), for {error}",))


def look_up_now(address: HubAddress) -> Repository:
    """Do what `look_up` does, by asking the Hub alone.

    Raises:
        HubError: as `look_up` raises it.
    """
    with hub_errors(address):
        info = patiently(
            lambda: api().model_info(
                address.repository, revision=address.revision, files_metadata=True, timeout=PATIENCE
            )
        )
    if info.sha is None or not is_commit(info.sha):
        raise HubError(f"{address}: the Hub does not say what commit this is. Is HF_ENDPOINT that of a Hub?")
    files = {
        sibling.rfilename: Promise(
            sibling.size, None if sibling.lfs is None else sibling.lfs["sha256"], sibling.blob_id
        )
        for sibling in info.siblings or ()
    }
    return Repository(address, info.sha, files, private=info.private)


def remember(repository: Repository) -> None:
    """Have the cache know the commit of a branch, as the client does, for when there is no connection.

    Called once all files are fetched that are needed without one.
    """
    revision = repository.address.revision or _DEFAULT_BRANCH
    if is_commit(revision) or repository.cached is not None:
        return
    ref = _folder_of(repository.address) / "refs" / revision
    with contextlib.suppress(OSError, StorageError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(ref) as temporary:
            temporary.write_text(repository.commit)


def _folder_of(address: HubAddress) -> Path:
    """Return where the cache has a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{address.repository.replace('/', '--')}"


def look_into_cache(address: HubAddress) -> Repository | None:
    """Return what the cache has of an address, by the layout that huggingface_hub documents."""
    folder = _folder_of(address)
    revision = address.revision or _DEFAULT_BRANCH
    try:
        commit = revision if is_commit(revision) else (folder / "refs" / revision).read_text().strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    if not is_commit(commit) or not snapshot.is_dir():
        return None
    files = {
        path.relative_to(snapshot).as_posix(): _promised(path) for path in sorted(snapshot.rglob("*")) if path.is_file()
    }
    return Repository(address, commit, files, snapshot)


def _promised(path: Path) -> Promise:
    """Return what the cache knows of a file: it is a link to one that is named by its hash."""
    name = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return Promise(sha256=name)
    return Promise(blob=name) if is_commit(name) else Promise()


def _checked(path: Path, promise: Promise, place: HubAddress) -> str:
    """Return the digest of a file, and remove it from the cache if it is not what was promised."""
    digest = sha256(path)
    if promise.sha256 is not None:
        kind, expected, own = "SHA-256", promise.sha256, digest
    elif promise.blob is not None:
        kind, expected, own = "git hash", promise.blob, git_hash(path)
    else:
        return digest
    if own != expected:
        with contextlib.suppress(OSError):  # a shared cache may be read only
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise HubError(
            f"{place} is not what the Hub promised: its {kind} is {own}, and should be {expected}. It was taken out of "
            "the cache if that may be written to; run the command again, and if it stays so, don't use it"
        )
    return digest


def git_hash(content: Path | bytes) -> str:
    """Return the hash by which git knows a file, or what would be in it."""
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
