import errno
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ewc_finetune.errors import StorageError
from ewc_finetune.runs.folder import check_run_folder
from ewc_finetune.storage.atomic import atomic_folder, atomic_write, atomic_writes, check_output, sha256
from ewc_finetune.storage.workspace import recover


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


def write(path, content=b"new", **options):
    with atomic_write(path, **options) as temporary:
        temporary.write_bytes(content)


def test_through_a_link_its_target_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    check_output(tmp_path / "link", overwrite=True)
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "file").read_bytes() == b"new"
    (tmp_path / "ahead").symlink_to(tmp_path / "there" / "not yet")
    check_output(tmp_path / "ahead", overwrite=False)
    write(tmp_path / "ahead", overwrite=False)
    assert (tmp_path / "there" / "not yet").read_bytes() == b"new"
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["file", "not yet"]


def test_only_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        place = Path.cwd()
        os.chdir(tmp_path)  # their names are short
        server.bind("socket")
        os.chdir(place)
        for name, kind in (("pipe", "a pipe"), ("link", "a pipe"), ("socket", "a socket")):
            with pytest.raises(StorageError, match=f"it is {kind}, and only files are replaced"):
                check_output(tmp_path / name, overwrite=True)
            with pytest.raises(StorageError, match=f"it is {kind}"):
                write(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_link_that_leads_to_itself(tmp_path):
    (tmp_path / "link").symlink_to("link")
    for overwrite in (True, False):
        with pytest.raises(StorageError, match="cannot write .*link: it is a link that leads back to itself"):
            check_output(tmp_path / "link", overwrite)
        with pytest.raises(StorageError, match="it is a link that leads"):
            write(tmp_path / "link", overwrite=overwrite)
    with pytest.raises(StorageError, match="leads back to itself"):
        check_run_folder(tmp_path / "link", overwrite=True)
    with pytest.raises(StorageError, match="leads back to itself"):
        check_output(tmp_path / "link" / "file", overwrite=True)
    assert (tmp_path / "link").is_symlink()


def test_names_that_are_too_long_are_refused_first(tmp_path):
    longest = tmp_path / ("n" * 255)
    check_output(longest, overwrite=False)
    write(longest, overwrite=False)
    write(longest)
    assert longest.read_bytes() == b"new"
    for check in (check_output, check_run_folder):
        with pytest.raises(StorageError, match="its name has 256 bytes, which is too long. Choose a shorter one"):
            check(tmp_path / ("ä" * 128), overwrite=False)


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_file_that_is_there_is_never_replaced_unasked(tmp_path, monkeypatch, hard_links):
    if not hard_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
    write(tmp_path / "file", b"old", overwrite=False)
    with pytest.raises(StorageError, match=r"file came into being .*; what was to be there is .*file-2"):
        write(tmp_path / "file", overwrite=False)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert (tmp_path / "file-2").read_bytes() == b"new"
    with (
        pytest.raises(StorageError, match="came into being .*; nothing was written"),
        atomic_writes([tmp_path / "other", tmp_path / "file"], overwrite=False),
    ):
        pass
    with (
        pytest.raises(StorageError, match="came into being"),
        atomic_folder(tmp_path / "file", overwrite=False),
    ):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file-2"]


@pytest.mark.parametrize("hard_links", [True, False])
def test_of_eight_at_once_one_makes_the_file(tmp_path, hard_links):
    program = f"""
import os, sys
from pathlib import Path
from ewc_finetune.errors import StorageError
from ewc_finetune.storage.atomic import atomic_write
if not {hard_links}:
    def link(*_): raise PermissionError(1, "no links")
    os.link = link
try:
    with atomic_write(Path("file"), overwrite=False) as temporary:
        temporary.write_text(str(os.getpid()))
        print(flush=True)
        sys.stdin.readline()
except StorageError as error:
    sys.exit(str(error))
"""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, **options) for _ in range(8)]
    for racer in racers:
        racer.stdout.readline()
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    told = [racer.communicate()[1] for racer in racers]
    assert sorted(racer.returncode for racer in racers) == [0] + [1] * 7, told
    kept = sorted(path.read_text() for path in tmp_path.iterdir())
    assert kept == sorted(str(racer.pid) for racer in racers)
    winner = next(racer for racer in racers if racer.returncode == 0)
    assert (tmp_path / "file").read_text() == str(winner.pid)
    assert sum("what was to be there is file-" in text for text in told) == 7


@pytest.mark.parametrize("name", ["../kept", "a/../../kept", "", ".."])
def test_a_journal_from_somebody_else_moves_nothing_elsewhere(tmp_path, name):
    folder = tmp_path / "folder"
    space = folder / ".ewc-ft-00000000.tmp"
    space.mkdir(parents=True)
    (tmp_path / "kept").write_text("kept")
    (space / "old-0").write_text("other")
    made = (tmp_path / "kept").stat().st_ino
    things = [{"name": name, "had": True, "made": made}]
    journal = json.dumps({"folder": space.stat().st_ino, "provisional": True, "things": things})
    (space / "journal").write_text(journal)
    recover(folder, print)
    assert (tmp_path / "kept").read_text() == "kept"
