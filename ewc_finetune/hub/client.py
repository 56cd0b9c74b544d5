"""The Hub's own client, and what its errors mean: one sentence each, with what to do, and never a token in it."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from ewc_finetune.errors import EwcError, HubError, StorageError, redacted
from ewc_finetune.hub.address import HubAddress

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

T = TypeVar("T")

_TROUBLE = (500, 502, 503, 504)
_CUT_OFF = ("ReadError", "WriteError", "RemoteProtocolError")
# Seconds before each new try, where the Hub does not say how long to wait.
_WAITS = (1.0, 2.0, 4.0)
# Seconds that the Hub may ask to wait at most.
_LONGEST_WAIT = 60.0
# Seconds to wait for an answer.
PATIENCE = 30.0


class MissingRepositoryError(HubError):
    """There is no such repository, or it may not be seen."""


class UnreachableError(HubError):
    """The Hub cannot be asked: no connection, it has trouble, or the user wants to stay offline."""


def api() -> HfApi:
    """Return the client, which takes HF_ENDPOINT, HF_TOKEN and the rest from the environment."""
    from huggingface_hub import HfApi

    return HfApi(library_name="ewc-finetune")


def endpoint() -> str:
    """Return the address of the Hub, for messages and links; without a password, should it have one."""
    from huggingface_hub import constants

    return re.sub(r"//[^/@]*@", "//", constants.ENDPOINT)


def is_offline() -> bool:
    """Whether the user wants nothing sent (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


# Whether the client may draw bars of its own, as the command line allows on a terminal.
_BARS = ContextVar("bars", default=False)
# Whether the client may warn that it waits and tries again.
_WARNINGS = ContextVar("warnings", default=True)


@contextlib.contextmanager
def showing(bars: bool, warnings: bool) -> Iterator[None]:
    """Let the client draw bars inside the block, or not, and say that it waits and tries again, or not."""
    tokens = _BARS.set(bars), _WARNINGS.set(warnings)
    try:
        yield
    finally:
        _BARS.reset(tokens[0])
        _WARNINGS.reset(tokens[1])


class _Discreet(logging.Filter):
    """Takes what is signed, and tokens, out of what the client logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = _without_secrets(record.getMessage()), ()
        return _WARNINGS.get() or record.levelno >= logging.ERROR


@contextlib.contextmanager
def hub_errors(address: HubAddress) -> Iterator[None]:
    """Turn what the client raises into errors of ours, and see to it that its own log tells no secrets.

    Raises:
        HubError: saying what is wrong with the repository, the revision, the file, the token or the connection.
        StorageError: if the disk is full.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils.tqdm import progress_bar_states

    discreet, handlers = _Discreet(), logging.getLogger("huggingface_hub").handlers
    for handler in handlers:
        handler.addFilter(discreet)
    before = dict(progress_bar_states)
    if not _BARS.get() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    try:
        yield
    except EwcError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told in our words
        # The cause is left out, for it has signed addresses, and perhaps other secrets.
        raise _meaning(error, address) from None
    finally:
        for handler in handlers:
            handler.removeFilter(discreet)
        progress_bar_states.clear()
        progress_bar_states.update(before)


def patiently(call: Callable[[], T]) -> T:
    """Call, and again where the Hub asks to wait, has trouble or is cut off, as the client does for some calls only."""
    for wait in _WAITS:
        try:
            return call()
        except Exception as error:
            asked = asked_to_wait(error)
            if not _may_pass(error) or (asked or 0) > _LONGEST_WAIT:
                raise
            time.sleep(wait if asked is None else asked)
    return call()


def _may_pass(error: Exception) -> bool:
    """Whether what failed may well succeed when it is tried again."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (*_TROUBLE, 429)
    return type(error).__name__ in _CUT_OFF and type(error).__module__.startswith("httpx")


def asked_to_wait(error: Exception) -> float | None:
    """Return how many seconds the Hub says to wait."""
    from huggingface_hub.errors import HfHubHTTPError

    if not isinstance(error, HfHubHTTPError):
        return None
    told = error.response.headers.get("Retry-After", "")
    if told.isdecimal():
        return float(told)
    limit = re.search(r"\bt=(\d+)", error.response.headers.get("RateLimit", ""))
    return float(limit[1]) + 1 if limit and error.response.status_code == 429 else None


def _meaning(error: Exception, address: HubAddress) -> EwcError:
    """Return the error of ours that one of the client's stands for."""
    from huggingface_hub import errors

    wrapped = isinstance(error, (errors.LocalEntryNotFoundError, RuntimeError)) and error.__cause__
    if isinstance(wrapped, Exception):
        return _meaning(wrapped, address)
    if isinstance(error, OSError) and error.errno is not None:
        return _of_disk(error, address)
    place = f"{endpoint()}/{address.repository}"
    words = {"address": address, "repository": address.repository, "place": place}
    for name, sentence in _OF_KIND.items():
        if isinstance(error, getattr(errors, name)):
            return HubError(sentence.format(**words, revision=address.revision or "main"))
    if isinstance(error, errors.RepositoryNotFoundError):
        return MissingRepositoryError(_NOT_FOUND[has_token()].format(**words))
    if isinstance(error, errors.HfHubHTTPError):
        return _of_status(error, words)
    return _of_connection(error, address)


# What to say for the client's errors, by class; the first that fits is taken.
_OF_KIND = {
    "GatedRepoError": "{repository} is gated. Ask for access at {place}, and log in: hf auth login, or HF_TOKEN",
    "RevisionNotFoundError": "{repository} has no revision {revision!r} (any more): no branch, tag or commit is called "
    "that. See {place}/commits",
    "DisabledRepoError": "{repository} has been disabled on the Hub. See {place}",
    "RemoteEntryNotFoundError": "{address} is not there: the repository has no such file. See {place}/tree/main",
}
# What to say without and with a token. The Hub does not tell a private repository from one that does not exist.
_NOT_FOUND = (
    "there is no repository {repository} on the Hub, or it is private. Check the name; for a private one log in: hf "
    "auth login, or HF_TOKEN",
    "there is no repository {repository} on the Hub that your token may read. Check the name, and whether you have "
    "access",
)
_OF_STATUS = {
    401: "the Hub does not know who you are{told}. Log in (again): hf auth login, or HF_TOKEN",
    403: "the Hub does not allow this for {repository}{told}. Check what your token may do: {settings}",
    409: "{repository} is at odds with another change{told}. Run the command again",
    412: "somebody else has changed {repository} meanwhile. Run the command again",
}


def _of_status(error: HfHubHTTPError, words: Mapping[str, object]) -> HubError:
    """Return the error of an answer that has a number and no kind of its own."""
    status = error.response.status_code
    said = _without_secrets(str(error.server_message or "").strip().partition("\n")[0])[:200].rstrip(".")
    told = f" ({said})" if said else ""
    if status == 429:
        wait = asked_to_wait(error)
        until = f"in {wait:.0f} seconds" if wait else "in a few minutes"
        return UnreachableError(f"the Hub has had too many requests (error 429){told}. Try again {until}")
    if status in _TROUBLE:
        return UnreachableError(f"the Hub has trouble (error {status}){told}. Try again later")
    sentence = _OF_STATUS.get(status, "{address}: the Hub answered with error {status}{told}")
    return HubError(sentence.format(**words, told=told, status=status, settings=f"{endpoint()}/settings/tokens"))


def not_in_the_cache(place: object, why: object) -> UnreachableError:
    """Return the error of what is needed, was never fetched and cannot be asked for, with what can be done."""
    return UnreachableError(
        f"{place} is not in the cache, and {why}. Fetch it once where there is a connection (and no HF_HUB_OFFLINE): "
        "it is kept in the cache, the folder that HF_HOME names, which may be copied here. Or name a file or folder "
        "of this machine in its place"
    )


def _of_connection(error: Exception, address: HubAddress) -> HubError:
    """Return the error of what came to no answer at all."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    reason = f"{type(error).__name__}: {_first_line(error)}"
    if isinstance(error, OfflineModeIsEnabled):
        return UnreachableError("HF_HUB_OFFLINE is set, so that nothing is asked of the Hub")
    if type(error).__module__.startswith("httpx"):
        return UnreachableError(f"the Hub at {endpoint()} cannot be reached ({reason})")
    return HubError(f"{address}: the Hub's client failed ({reason})")


def _of_disk(error: OSError, address: HubAddress) -> StorageError:
    """Return the error of a cache that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"{address} cannot be stored: the disk is full. Free some space, or set HF_HOME elsewhere")
    where = error.filename or "the cache"
    return StorageError(f"{address} cannot be stored in {where}: {error.strerror}. Set HF_HOME elsewhere")


def has_token() -> bool:
    """Whether the user is logged in, by HF_TOKEN or otherwise."""
    from huggingface_hub import get_token

    return get_token() is not None


def _without_secrets(text: str) -> str:
    """Return a text without the user's token, what looks like one, and the signed part of addresses."""
    from huggingface_hub import get_token

    return re.sub(r"\?[^\s'\"]+", "?...", redacted(text.replace(get_token() or "\0", "***")))


def _first_line(error: Exception) -> str:
    """Return what an error says, without secrets."""
    return _without_secrets(str(error).strip().partition("\n")[0])[:200] or "no reason given"
