"""What was generated, kept as a file: token ids of every sample, so that nothing is generated twice.

One JSON document with `format`, `format_version`, `asked` (what the samples were to be) and `samples`, a list of token
ids for each. Who reads it takes it for somebody else's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ewc_finetune.data.texts import Generated
from ewc_finetune.errors import DataError
from ewc_finetune.storage.atomic import atomic_write

FORMAT = "ewc-generated"
FORMAT_VERSION = 1
# Bytes of a token in the file at most, and of all that is no token.
_TOKEN_BYTES, _OTHER_BYTES = 24, 1 << 16


def write_generated(path: Path, samples: Sequence[Sequence[int]], asked: Generated, length: int) -> None:
    """Keep samples.

    Args:
        path: The file; what is there is replaced.
        samples: The token ids of each, those that it began with first.
        asked: What was to be generated.
        length: How many tokens at most, a request aside.

    Raises:
        StorageError: if it cannot be written.
    """
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "asked": _told(asked, length),
        "samples": [list(sample) for sample in samples],
    }
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(document), encoding="utf-8")


def read_generated(
    path: Path, asked: Generated, length: int, begins: Sequence[Sequence[int]], words: int
) -> list[list[int]]:
    """Return the samples that were kept.

    Args:
        path: The file.
        asked: What is to be generated.
        length: How many tokens at most, a request aside.
        begins: What the samples begin with, in turn.
        words: How many tokens the model knows.

    Raises:
        DataError: if it is none of these samples, in a sentence.
    """
    try:
        return _read(path, asked, length, begins, words)
    except _UnfitError as error:
        raise DataError(
            f"{path} does not hold the samples that were generated for this run: {error}. Put it back, or remove it to "
            "have them generated again"
        ) from None


class _UnfitError(Exception):
    """Why a file is not what it should be."""


def _read(path: Path, asked: Generated, length: int, begins: Sequence[Sequence[int]], words: int) -> list[list[int]]:
    document = _document(path, _OTHER_BYTES + _TOKEN_BYTES * asked.count * (length + max(map(len, begins)) + 1))
    if document.get("format") != FORMAT or document.get("format_version") != FORMAT_VERSION:
        raise _UnfitError(f"it is no {FORMAT} file of version {FORMAT_VERSION}")
    then, now = document.get("asked"), _told(asked, length)
    if not isinstance(then, dict):
        raise _UnfitError("it does not say what they are")
    for name, value in now.items():
        if then.get(name) != value:
            known = "" if name == "prompts" else f" ({then.get(name)!r:.40}, and asked for is {value!r})"
            raise _UnfitError(f"they were generated with another {name}{known}")
    samples = document.get("samples")
    if not isinstance(samples, list) or len(samples) != asked.count:
        found = f"{len(samples)} are" if isinstance(samples, list) else "nothing is"
        raise _UnfitError(f"{found} in it, and it should be {asked.count}")
    for number, sample in enumerate(samples):
        begin = list(begins[number % len(begins)])
        if not isinstance(sample, list) or any(type(token) is not int or not 0 <= token < words for token in sample):
            raise _UnfitError(f"sample {number} is no list of tokens from 0 to {words - 1}")
        if sample[: len(begin)] != begin or not len(begin) < len(sample) <= len(begin) + length:
            raise _UnfitError(f"sample {number} does not begin as it should, or has {len(sample)} tokens")
    return samples


def _document(path: Path, most: int) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise _UnfitError("it is no file")
        if path.stat().st_size > most:
            raise _UnfitError("it is larger than they can be")
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _UnfitError(f"it cannot be read ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise _UnfitError("it is no JSON object")
    return document


def _told(asked: Generated, length: int) -> dict[str, Any]:
    """Return what samples are to be; requests by their digest."""
    prompts = hashlib.sha256(json.dumps(asked.prompts).encode()).hexdigest()
    return {"count": asked.count, "length": length, "seed": asked.seed, "prompts": prompts}
