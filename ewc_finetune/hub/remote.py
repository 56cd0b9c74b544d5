"""A safetensors file on the Hub of which only what is asked for is fetched, by range requests."""

from __future__ import annotations

from collections.abc import Iterator

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ewc_finetune.errors import HubError
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.hub.client import PATIENCE, hub_errors, patiently
from ewc_finetune.storage.safetensors_source import (
    TensorSource,
    header_length,
    make_header,
    parse_header,
    unreadable,
)

# Bytes of the first request, which hold nearly every header whole.
_FIRST = 1 << 17
_BLOCK = 1 << 16


class RemoteSource(TensorSource):
    """A safetensors file at a commit on the Hub; its digest is not checked, for which all of it would be needed.

    Args:
        place: Where it is.
        size: Its bytes.

    Raises:
        HubError: if it cannot be had.
        AnchorError: if it is no safetensors file.
    """

    def __init__(self, place: HubAddress, size: int) -> None:
        self.place = place
        self.label = str(place)
        self.size = size
        if size == 0:
            raise unreadable(self.label, "it is empty")
        head = self._bytes(0, min(_FIRST, size))
        end = 8 + header_length(head, self.label)
        if end > size:
            raise unreadable(self.label, "its size is not what its header says")
        if end > len(head):
            head += self._bytes(len(head), end)
        self.header = parse_header(head[:end], self.label)
        if end + self.header.data != size:
            raise unreadable(self.label, "its size is not what its header says")
        self.metadata, self.entries = self.header.metadata, self.header.entries

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        entry = self.entries[name]
        behind = self.header.length
        content = self._bytes(behind + entry.start, behind + entry.end) if entry.end > entry.start else b""
        alone = entry._replace(start=0, end=entry.end - entry.start)
        try:
            return load(make_header({}, {name: alone}) + content)[name]
        except (SafetensorError, KeyError) as error:
            raise unreadable(self.label, str(error)) from error

    def _bytes(self, start: int, end: int) -> bytes:
        """Fetch the bytes from one place to another; where the connection is cut, go on from there."""
        received = bytearray()

        def fetch_rest() -> None:
            if len(received) < end - start:  # the connection may have been cut after the last byte
                for block in self._answer(start + len(received), end):
                    received.extend(block)

        with hub_errors(self.place):
            while len(received) < end - start:
                before = len(received)
                patiently(fetch_rest)
                if len(received) == before:
                    raise HubError(f"{self.place}: the Hub sent less than was asked for. Run the command again")
        return bytes(received)

    def _answer(self, start: int, end: int) -> Iterator[bytes]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        place, left = self.place, end - start
        url = hf_hub_url(place.repository, str(place.file), revision=place.revision)
        headers = {**build_hf_headers(library_name="ewc-finetune"), "Range": f"bytes={start}-{end - 1}"}
        headers["Accept-Encoding"] = "identity"  # ranges of a compressed answer would be others
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=PATIENCE) as answer:
            hf_raise_for_status(answer)
            if answer.status_code != 206:
                raise HubError(
                    f"{place}: the Hub sends no parts of files. Use `ewc-ft pull`, and inspect what it wrote"
                )
            for block in answer.iter_bytes(_BLOCK):
                left -= len(block)
                if left < 0:
                    raise HubError(f"{place}: the Hub sent more than was asked for")
                yield block
