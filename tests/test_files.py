import errno
import os
import stat
from pathlib import Path

import pytest

from ewc_finetune.errors import StorageError
from ewc_finetune.files import atomic_write, check_output, sha256


def test_writes_and_renames(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_leaves_the_old_file_when_interrupted(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write():
        with atomic_write(path) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path):
    def write():
        with atomic_write(tmp_path / "file"), Path("/dev/full").open("wb") as full:
            full.write(b"x" * 100_000)

    with pytest.raises(StorageError, match="the disk is full") as caught:
        write()
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_checked_before_the_work(tmp_path):
    (tmp_path / "there").write_text("")
    with pytest.raises(StorageError, match="exists. Choose another path, or replace it with --overwrite"):
        check_output(tmp_path / "there", overwrite=False)
    check_output(tmp_path / "there", overwrite=True)
    check_output(tmp_path / "new", overwrite=False)
    with pytest.raises(StorageError, match="is a folder"):
        check_output(tmp_path, overwrite=True)
    with pytest.raises(StorageError, match="does not exist"):
        check_output(tmp_path / "none" / "new", overwrite=False)


def test_digest(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert sha256(tmp_path / "file") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
