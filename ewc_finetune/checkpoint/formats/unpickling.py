"""How much work a pickle asks for, told from its opcodes before any of them is obeyed.

torch's safe unpickler imports nothing, but it goes through each opcode in Python; and a tuple that is the key of a
dictionary is hashed through all of its parts, which may be the same one billions of times over, or so deep within one
another that the process crashes.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ewc_finetune.checkpoint.formats.archive import Archive, is_archive
from ewc_finetune.errors import CheckpointError

# A tensor takes some 30 opcodes, so that this is a checkpoint of some 60,000 tensors.
_MOST_OPCODES = 2_000_000
# Values on the stack. A pickler writes the items of a list or dictionary a thousand at a time.
_MOST_WAITING = 100_000
# Marks on the stack: lists, dictionaries and tuples that are begun and not yet made.
_MOST_OPEN = 1_000
# Levels of tuples within tuples.
_DEEPEST = 100
# Parts of a tuple and of the tuples in it, each counted as often as it occurs.
_LARGEST = 1_000_000
# A file from before torch 1.6 has five pickles: two numbers, a dictionary, the checkpoint, its keys.
_PICKLES = 5

# Depth and number of parts of anything but a tuple.
_PLAIN = (0, 1)
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}


class NoPickleError(CheckpointError):
    """A file that should be a pickle, and is none."""


def check_pickle(file: Path | Archive) -> None:
    """Refuse a checkpoint whose pickle would take long, or more than the process can take, to be read.

    Raises:
        NoPickleError: if what it asks for cannot be told, for it is none.
        CheckpointError: saying of what there is too much.
    """
    path = file if isinstance(file, Path) else file.path
    for pickled in _pickles(file):
        try:
            _check(pickled, path)
        except CheckpointError:
            raise
        except Exception as error:  # pickletools raises errors of many kinds
            reason = str(error) or type(error).__name__
            raise NoPickleError(
                f"{path} is not a checkpoint that can be read: its pickle is none ({reason:.200}). Copy it again, whole"
            ) from error


def _pickles(file: Path | Archive) -> Iterator[IO[bytes]]:
    """Go through the pickles in a file, each opened where it begins."""
    if isinstance(file, Archive):
        for name in file.members:
            if name.rpartition("/")[2] in ("data.pkl", "constants.pkl"):
                yield io.BytesIO(file.read(name))
    elif is_archive(file):
        with Archive(file) as archive:
            yield from _pickles(archive)
    else:
        with file.open("rb") as content:
            for number in range(_PICKLES):
                if number and not content.peek(1):  # a single pickle, which torch will refuse
                    return
                yield content


def _check(pickled: IO[bytes], path: Path) -> None:
    """Follow what a pickle puts on its stack, and how deep and how large its tuples are.

    A tuple holds what was there before it, so that both are known when it is made. Lists and dictionaries can be no
    keys, so that nothing hashes what they hold.
    """
    stack: list[tuple[int, int]] = []
    marks: list[int] = []
    kept: dict[Any, tuple[int, int]] = {}
    for number, (opcode, value, _) in enumerate(pickletools.genops(pickled)):
        name = opcode.name
        if name in _PUTS:
            kept[len(kept) if value is None else value] = stack[-1]
        elif name in _GETS:
            stack.append(kept.get(value, _PLAIN))
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _TUPLES:
            taken = _TUPLES[name]
            start = marks.pop() if taken is None else len(stack) - taken
            parts = stack[start:]
            del stack[start:]
            made = 1 + max((part[0] for part in parts), default=0), 1 + sum(part[1] for part in parts)
            if made[0] > _DEEPEST or made[1] > _LARGEST:
                _refuse(path, f"tuples of tuples, more than {_DEEPEST} deep or with more than {_LARGEST:,} parts")
            stack.append(made)
        else:
            marked, taken, given = _EFFECTS[name]
            start = (marks.pop() if marked else len(stack)) - taken
            stack[start:] = given
        if number > _MOST_OPCODES:
            _refuse(path, f"more than {_MOST_OPCODES:,} steps")
        if len(stack) > _MOST_WAITING or len(marks) > _MOST_OPEN:
            _refuse(path, f"more than {_MOST_WAITING:,} values, or {_MOST_OPEN:,} lists, that wait for one another")


def _effect(opcode: pickletools.OpcodeInfo) -> tuple[bool, int, list[tuple[int, int]]]:
    """Return whether an opcode takes all down to a mark, what it takes besides, and what it gives."""
    before = list(opcode.stack_before)
    marked = pickletools.markobject in before
    taken = before.index(pickletools.markobject) if marked else len(before)
    return marked, taken, [_PLAIN] * len(opcode.stack_after)


_EFFECTS = {opcode.name: _effect(opcode) for opcode in pickletools.opcodes}
# How many values each opcode makes a tuple of; None stands for all down to a mark.
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}


def _refuse(path: Path, what: str) -> None:
    raise CheckpointError(
        f"{path} was made to do harm, or holds more than a model: its pickle has {what}, so it was not loaded. Save "
        "the weights alone: torch.save(model.state_dict(), path)"
    )
