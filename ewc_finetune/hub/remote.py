"""A safetensors file on the Hub of which only what is asked for is fetched, by range requests."""

from __future__ import annotations

from safetensors.torch import load
from torch import Tensor

from ewc_finetune.errors import HubError
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.hub.client import hub_errors
from ewc_finetune.tensor_source import Entry, TensorSource, header_length, make_header, parse_header, unreadable

# Nearly every header is shorter, so that it takes one request.
_FIRST = 1 << 17


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
        found = self._bytes(0, min(_FIRST, size))
        end = 8 + header_length(found, self.label)
        if end > size:
            raise unreadable(self.label, "its size is not what its header says")
        if end > len(found):
            found += self._bytes(len(found), end)
        self.header = parse_header(found[:end], self.label)
        if end + self.header.data != size:
            raise unreadable(self.label, "its size is not what its header says")
        self.metadata, self.entries = self.header.metadata, self.header.entries

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        entry = self.entries[name]
        behind = len(self.header.bytes)
        found = self._bytes(behind + entry.start, behind + entry.end) if entry.end > entry.start else b""
        alone = Entry(entry.kind, entry.shape, 0, entry.end - entry.start)
        return load(make_header({}, {name: alone}).bytes + found)[name]

    def _bytes(self, start: int, end: int) -> bytes:
        """Fetch the bytes from one place to another."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        place = self.place
        url = hf_hub_url(place.repository, str(place.file), revision=place.revision)
        headers = {**build_hf_headers(library_name="ewc-finetune"), "Range": f"bytes={start}-{end - 1}"}
        headers["Accept-Encoding"] = "identity"  # what is packed has other ranges
        with hub_errors(place), http_stream_backoff("GET", url, headers=headers, follow_redirects=True) as answer:
            hf_raise_for_status(answer)
            if answer.status_code != 206:
                raise HubError(
                    f"{place}: the Hub sends no parts of files. Use `ewc-ft pull`, and inspect what it wrote"
                )
            found: bytes = answer.read()
        if len(found) != end - start:
            raise HubError(f"{place}: the Hub sent {len(found):,} bytes where {end - start:,} were asked for")
        return found
