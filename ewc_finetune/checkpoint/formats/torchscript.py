"""TorchScript archives, scripted or traced: the program travels with the weights, and is trained as it is."""

from __future__ import annotations

import pickletools
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.archive import Archive
from ewc_finetune.checkpoint.formats.program import RECORD, Program, silent
from ewc_finetune.checkpoint.formats.torchscript_code import find_refused, is_printable
from ewc_finetune.errors import CheckpointError, first_line

# The members that torch.jit.save writes. Archives of torch's first releases have others, with code in other places.
_MEMBERS = re.compile(
    r"version|byteorder|\.data/.+|extra/.+|data/\d+|constants/\d+|traced_inputs/\d+|(data|constants|traced_inputs)\.pkl|"
    r"code/.+\.py(\.debug_pkl)?"
)

_CLASSES = b"torch.classes"


class TorchScript(Program):
    """An archive that `torch.jit.save` wrote.

    Args:
        archive: The file.
        trust_code: Whether its code may do more than compute.

    Raises:
        CheckpointError: if it is damaged, or its code does more than it may.
    """

    format = "torchscript"
    ending = ".pt"

    what = "a TorchScript archive"
    untrainable = (
        ": torch.jit.freeze made its weights constants, which nothing can train. Use the archive from before it was "
        "frozen"
    )

    def __init__(self, archive: Archive, trust_code: bool = False) -> None:
        if not trust_code:
            _check_code(archive)
        path = archive.path
        self._extra = [name.partition("/")[2] for name in archive.members if name.startswith("extra/")]
        extra, module = _load(path, self._extra)
        super().__init__(path, module, ModelMetadata.read_text(extra.get(RECORD), str(path)))

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """See `Checkpoint`."""
        extra, module = _load(self.path, self._extra)  # loaded again, so that its mode is as it was
        module.load_state_dict(state)
        extra[RECORD] = metadata.to_text()
        with silent():
            # Into memory, because torch would write the temporary path's name into the archive.
            temporary.write_bytes(module.save_to_buffer(_extra_files=extra))


def _check_code(archive: Archive) -> None:
    strange = (reason for name in archive.members if (reason := _strange(name, archive)) is not None)
    code = (archive.read(name) for name in archive.members if name.endswith(".py"))
    reason = next(strange, None) or find_refused(code)
    if reason is not None:
        raise CheckpointError(
            f"{archive.path} is TorchScript that may do more than compute, so it was not loaded: {reason}. If you know "
            "who made the file, and trust them: --trust-code"
        )


def _strange(name: str, archive: Archive) -> str | None:
    """Say what is strange about a member that is no code."""
    if not _MEMBERS.fullmatch(name):
        return f"its archive has {name!r:.100}"
    if name not in ("data.pkl", "constants.pkl"):  # torch unpickles no others
        return None
    content = archive.read(name)
    if _CLASSES in content:  # such classes restore their state in C++
        return "it has an object of a class of torch's own"
    texts = (value for _, value, _ in pickletools.genops(content) if isinstance(value, str))
    return next((f"it has the text {text!r:.40}" for text in texts if not is_printable(text)), None)


def _load(path: Path, texts: Sequence[str]) -> tuple[dict[str, Any], torch.jit.ScriptModule]:
    """Have torch load an archive, with the texts of these names beside the program."""
    extra = dict.fromkeys(texts, "")
    try:
        with silent():
            module: torch.jit.ScriptModule = torch.jit.load(  # type: ignore[no-untyped-call]
                str(path), map_location="cpu", _extra_files=extra
            )
    except Exception as error:
        raise CheckpointError(f"{path} is not a whole TorchScript archive ({first_line(error)})") from error
    return extra, module
