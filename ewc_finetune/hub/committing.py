"""Changing a repository on the Hub: one commit, made on what was seen, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ewc_finetune.hub.address import HubAddress
from ewc_finetune.hub.client import api, hub_errors, patiently
from ewc_finetune.hub.repository import Promise, Repository, git_hash, look_up_now
from ewc_finetune.storage.atomic import sha256

# The statuses with which the Hub answers where the branch has changed.
_OVERTAKEN = (409, 412)


@dataclass(frozen=True)
class Commit:
    """A commit that was made.

    Attributes:
        hash: Its hash.
        url: A page that shows it, or the pull request that it is in.
    """

    hash: str
    url: str


def make_repository(address: HubAddress, private: bool) -> None:
    """Make a repository unless it is there.

    Raises:
        HubError: if the Hub does not allow it.
    """
    with hub_errors(address):
        patiently(lambda: api().create_repo(address.repository, private=private or None, exist_ok=True))


def make_branch(address: HubAddress) -> None:
    """Make the branch that an address names unless it is there.

    Raises:
        HubError: if the Hub does not allow it.
    """
    branch = address.revision
    if branch is not None and not branch.startswith("refs/"):
        with hub_errors(address):
            patiently(lambda: api().create_branch(address.repository, branch=branch, exist_ok=True))


def changed_files(repository: Repository, files: Mapping[str, Path | bytes]) -> dict[str, Path | bytes]:
    """Return which of the files are others than those that the repository has."""
    return {name: content for name, content in files.items() if not _is_there(repository.files.get(name), content)}


def _is_there(promise: Promise | None, content: Path | bytes) -> bool:
    if promise is None:
        return False
    if promise.sha256 is not None:
        digest = sha256(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest()
        return promise.sha256 == digest
    return promise.blob == git_hash(content)


def commit(
    repository: Repository,
    additions: Mapping[str, Path | bytes],
    deletions: Sequence[str],
    message: str,
    create_pr: bool,
) -> Commit | None:
    """Add or replace some files, and delete others, in one commit.

    Args:
        repository: As it was when the change was prepared.
        additions: Their contents by path; files are read a part at a time.
        deletions: Paths.
        message: Of the commit.
        create_pr: Whether to open a pull request instead of changing the branch.

    Returns:
        The commit; None if the branch is no longer what it was, so that nothing was done.

    Raises:
        HubError: if the Hub does not allow it, or cannot be reached. Nothing is changed then.
    """
    from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.errors import HfHubHTTPError

    address = repository.address

    def send() -> CommitInfo:
        return api().create_commit(
            address.repository,
            [
                *(CommitOperationAdd(name, content) for name, content in additions.items()),
                *(CommitOperationDelete(name) for name in deletions),
            ],
            commit_message=message,
            revision=address.revision,
            create_pr=create_pr,
            parent_commit=repository.commit,
        )

    with hub_errors(address):
        try:
            # A pull request is not tried again: where only the answer was lost, there would be two.
            done = send() if create_pr else patiently(send)
        except HfHubHTTPError as error:
            if error.response.status_code in _OVERTAKEN and look_up_now(address).commit != repository.commit:
                return None
            raise
    return Commit(done.oid, done.pr_url or repository.page)
