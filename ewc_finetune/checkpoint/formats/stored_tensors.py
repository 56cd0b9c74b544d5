"""How many bytes the tensors of an archive take by its pickles, against what it has of them.

torch takes a storage from an archive without comparing the two: of a record that was cut short it reads what lies
behind it in memory.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from ewc_finetune.checkpoint.formats.archive import Archive
from ewc_finetune.checkpoint.formats.unpickling import check_pickle
from ewc_finetune.errors import CheckpointError

# The pickles of a torch.save archive and of TorchScript, with the folder that the tensors of each are in.
_PICKLES = {"data.pkl": ("data",), "constants.pkl": ("constants", "data")}
_LARGEST_PICKLE = 100 << 20
# Bytes of an element, by the class of the storage.
_SIZES = {
    **dict.fromkeys(("UntypedStorage", "ByteStorage", "CharStorage", "BoolStorage"), 1),
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}


def check_archive(archive: Archive, trusted: bool = False) -> None:
    """Compare all bytes of an archive with their checksums, and its records with what its pickles say of them.

    Args:
        archive: The archive.
        trusted: Whether its pickles may ask for any amount of work.

    Raises:
        CheckpointError: if it is damaged, or made to do harm.
    """
    if not trusted:
        check_pickle(archive)
    archive.verify()
    _check_lengths(archive)


def _check_lengths(archive: Archive) -> None:
    """Compare what the pickles of an archive say of their tensors with the records that it has.

    Nothing is imported or called that a pickle names.

    Raises:
        CheckpointError: naming a record that is missing or of another length, or a pickle that is damaged.
    """
    for name, folders in _PICKLES.items():
        if name not in archive.members:
            continue
        if archive.members[name] > _LARGEST_PICKLE:
            raise _wrong(archive, f"its {name} has {archive.members[name]:,} bytes, which are no names of tensors")
        reader = _Reader(archive.read(name))
        try:
            reader.load()
        except Exception as error:
            raise _wrong(archive, f"its {name} is no pickle of tensors: {error or type(error).__name__}") from error
        for key, size in reader.storages.items():
            length = next((archive.members[f"{f}/{key}"] for f in folders if f"{f}/{key}" in archive.members), None)
            if length != size:
                has = "no record" if length is None else f"a record of {length:,} bytes"
                raise _wrong(archive, f"a tensor needs {size:,} bytes, and there is {has} for it, {folders[0]}/{key}")


def _wrong(archive: Archive, reason: str) -> CheckpointError:
    return CheckpointError(f"{archive.path} is not a checkpoint that can be read ({reason:.300}). Copy it again, whole")


class _Inert:
    """What stands for everything that a pickle names: it takes all that is done to it, and does nothing."""

    def __new__(cls, *arguments: object, **named: object) -> _Inert:
        return super().__new__(cls)

    def __call__(self, *arguments: object, **named: object) -> _Inert:
        return self

    def _ignore(self, *arguments: object, **named: object) -> None:
        pass

    __init__ = __setstate__ = __setitem__ = append = extend = add = _ignore


class _Reader(pickle.Unpickler):
    """Reads a pickle for the storages that it refers to.

    Attributes:
        storages: Their bytes by their keys.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.storages: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of ours of that name, whatever it is."""
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Note a storage: `("storage", its class, the key, where it was, the number of its elements)`."""
        if isinstance(pid, tuple) and len(pid) > 4 and pid[0] == "storage":
            size = _SIZES.get(getattr(pid[1], "__name__", ""))
            if size is None or not isinstance(pid[4], int) or pid[4] < 0:
                raise ValueError(f"a storage of {pid[4]!r:.40} elements of {getattr(pid[1], '__name__', pid[1])!r:.40}")
            if self.storages.setdefault(str(pid[2]), size * pid[4]) != size * pid[4]:
                raise ValueError(f"the storage {pid[2]!r:.40} has two sizes")
        return _Inert()
