"""Killed between any two calls to the system, a command leaves what the next puts in order: old or new, whole."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import count

import pytest
from killing import files_in, runs_through
from sizes import SHARE, times

from ewc_finetune.errors import StorageError
from ewc_finetune.runs.folder import RunFolder, check_run_folder
from ewc_finetune.runs.record import read_run
from ewc_finetune.storage.atomic import atomic_folder, atomic_write, atomic_writes, check_output
from ewc_finetune.storage.workspace import Workspace, recover

# Each of them takes a process.
STEPS = range(1, 1000, 3 if SHARE is None else 1)
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and signals")


def one(folder, overwrite):
    with atomic_write(folder / "a", overwrite=overwrite) as temporary:
        temporary.write_bytes(b"new")


def several(folder, overwrite):
    with atomic_writes([folder / name for name in "abc"], overwrite=overwrite) as temporaries:
        for n, temporary in enumerate(temporaries):
            temporary.write_bytes(b"new %d" % n)


def model_folder(folder, overwrite):
    with atomic_folder(folder / "a", overwrite=overwrite) as temporary:
        (temporary / "config.json").write_bytes(b"{}")
        (temporary / "weights").write_bytes(b"new")


def old_files(folder, names):
    for name in names:
        (folder / name).write_bytes(b"old " + name.encode())


def old_folder(folder, _):
    (folder / "a").mkdir()
    old_files(folder / "a", ["config.json", "other"])


SCENES = {
    "a file": (one, old_files, "", True),
    "a file anew": (one, old_files, "a", True),
    "a file without links": (one, old_files, "", False),
    "several files": (several, old_files, "", True),
    "several files anew": (several, old_files, "abc", True),
    "some files anew": (several, old_files, "b", False),
    "several files without links": (several, old_files, "", False),
    "several files anew without links": (several, old_files, "abc", False),
    "a folder": (model_folder, None, "", True),
    "a folder anew": (model_folder, old_folder, "a", True),
}


def prepared(folder, scene):
    act, before, names, _ = SCENES[scene]
    folder.mkdir()
    if before is not None:
        before(folder, names)
    return lambda: act(folder, bool(names))


def outcomes(tmp_path, scene):
    """Return what there is before and after, if nobody is killed."""
    act = prepared(tmp_path / "whole", scene)
    old = files_in(tmp_path / "whole")
    act()
    return old, files_in(tmp_path / "whole")


def next_command(folder, scene=""):
    told = []
    check_output(folder / "a", True, folder="folder" in scene, note=told.append)
    return told


@pytest.mark.parametrize("scene", SCENES)
def test_old_or_new_after_a_kill_at_any_step(tmp_path, scene):
    states = outcomes(tmp_path, scene)
    seen = []
    for step in STEPS:
        folder = tmp_path / str(step)
        done = runs_through(prepared(folder, scene), step, SCENES[scene][3])
        left = files_in(folder)
        told = next_command(folder, scene)
        assert files_in(folder) in states, step
        assert len(told) == (left != files_in(folder)), step
        seen.append(files_in(folder))
        if done:
            break
    assert step > 8
    assert [found for found in states if found in seen] == list(states)


@pytest.mark.parametrize("scene", ["some files anew", "several files anew", "a folder anew"])
def test_old_or_new_if_the_next_command_is_killed_too(tmp_path, scene):
    states = outcomes(tmp_path, scene)
    draw = random.Random(0)
    for number in times(12, 340):
        folder = tmp_path / str(number)
        runs_through(prepared(folder, scene), draw.randint(1, 40), SCENES[scene][3])
        while not runs_through(lambda folder=folder: next_command(folder, scene), draw.randint(1, 20)):
            pass
        next_command(folder, scene)
        assert files_in(folder) in states
        shutil.rmtree(folder)


def make_run(folder, seed, end="finished"):
    run = RunFolder.create(folder / "m.run", True, {"seed": seed, "output": "m.pt"}, None)
    run.log({"step": 1, "loss": 1.0})
    if end == "stopped before it had a state":
        run.stop("interrupted")
        return
    if end == "stopped":
        run.save_state({"step": 1})
        run.stop("interrupted")
        return
    run.save_state({"step": 1})
    run.log({"step": 2, "loss": 1.0})
    run.finish(keep_last=False)


@pytest.mark.parametrize("end", ["finished", "stopped", "stopped before it had a state"])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_run_folder_is_the_old_or_the_new_after_a_kill_at_any_step(tmp_path, end, replaced):
    seen = set()
    for step in STEPS:
        folder = tmp_path / str(step)
        folder.mkdir()
        if replaced:
            make_run(folder, 1)
        old = files_in(folder)
        done = runs_through(lambda folder=folder: make_run(folder, 2, end), step)
        told = []
        check_run_folder(folder / "m.run", True, told.append)
        assert len(told) <= 2
        left = files_in(folder)
        if left != old:
            run = read_run(folder / "m.run")
            assert run.document["options"]["seed"] == 2
            kept = (folder / "m.run" / "state.pt").exists()
            assert kept or run.document["status"] == "finished" or not replaced
            assert not [name for name in left if ".ewc-ft" in name], (step, left)
        seen.add(left == old)
        if done:
            break
    assert step > 20
    assert seen == {True} if end == "stopped before it had a state" and replaced else {True, False}


def test_what_a_living_process_makes_is_not_touched(tmp_path):
    told = []
    with atomic_write(tmp_path / "a") as temporary:
        temporary.write_bytes(b"new")
        before = files_in(tmp_path)
        recover(tmp_path, told.append)
        check_output(tmp_path / "a", True, note=told.append)
        assert files_in(tmp_path) == before
    assert files_in(tmp_path) == {"a": b"new"}
    assert not told


def test_where_nobody_can_tell_nothing_is_touched(tmp_path, monkeypatch):
    """Without locks a folder of a process that lives looks like one of a process that is dead."""
    runs_through(lambda: one(tmp_path, True), 8)
    left = files_in(tmp_path)
    assert left
    monkeypatch.setattr("ewc_finetune.storage.workspace.lock", lambda file: None)
    check_output(tmp_path / "a", True)
    assert files_in(tmp_path) == left
    one(tmp_path, True)
    assert files_in(tmp_path) == left | {"a": b"new"}


def test_a_copy_of_what_was_left_changes_nothing_beside_it(tmp_path):
    """What comes in an archive from elsewhere may say that any file is to be moved."""
    folder = tmp_path / "whole"
    folder.mkdir()
    make_run(folder, 1)
    space = Workspace(folder)
    space.new(0).write_bytes(b"hostile")
    space.place(["m.pt"], overwrite=True, provisional=True)
    shutil.copytree(folder, tmp_path / "copy")
    before = files_in(tmp_path / "copy")
    recover(tmp_path / "copy", lambda _: None)
    assert files_in(tmp_path / "copy") == before
    space.undo()
    space.close()
    assert "m.pt" not in files_in(folder)


def test_a_newer_file_is_not_taken_back(tmp_path):
    """Somebody may write a file by hand before the next command comes."""
    folder = tmp_path / "f"
    prepared(folder, "several files anew")
    for step in count(1):  # until one of the files is in its place
        runs_through(lambda: several(folder, True), step)
        if files_in(folder).get("a") == b"new 0":
            break
        next_command(folder)
    by_hand = folder / "by hand"
    by_hand.write_bytes(b"newer")
    by_hand.rename(folder / "a")
    next_command(folder)
    assert (folder / "a").read_bytes() == b"newer"


def test_several_files_in_several_folders(tmp_path):
    """In each folder there is all or nothing."""
    for step in STEPS:
        folder = tmp_path / str(step)
        (folder / "one").mkdir(parents=True)
        (folder / "two").mkdir()
        paths = [folder / "one" / "a", folder / "two" / "b", folder / "two" / "c"]

        def act(paths=paths):
            with atomic_writes(paths) as temporaries:
                for temporary in temporaries:
                    temporary.write_bytes(b"new")

        done = runs_through(act, step)
        for path in paths:
            check_output(path, True)
        assert files_in(folder / "one") in ({}, {"a": b"new"})
        assert files_in(folder / "two") in ({}, {"b": b"new", "c": b"new"})
        if done:
            break


def test_a_file_that_appears_is_left_and_the_result_is_kept(tmp_path):
    def write():
        with atomic_write(tmp_path / "m.anchor.safetensors", overwrite=False) as temporary:
            temporary.write_bytes(b"mine")
            (tmp_path / "m.anchor.safetensors").write_bytes(b"theirs")

    with pytest.raises(StorageError, match=r"came into being while this ran.*is .*m\.anchor-2\.safetensors"):
        write()
    with pytest.raises(StorageError, match=r"m\.anchor-3\.safetensors"):
        write()
    assert files_in(tmp_path) == {
        "m.anchor.safetensors": b"theirs", "m.anchor-2.safetensors": b"mine", "m.anchor-3.safetensors": b"mine"
    }  # fmt: skip


@pytest.mark.slow
def test_a_program_killed_at_any_moment(tmp_path):
    """The real thing: `finetune --overwrite` over a finished run, killed at random; then the next command."""
    draw = random.Random(0)
    base = [sys.executable, "-m", "ewc_finetune", "finetune", "--model", "mlp?hidden=8", "--data", "digits?limit=200"]
    base += ["--output", "m.pt", "--batch-size", "10"]
    subprocess.run([*base, "--epochs", "1"], cwd=tmp_path, check=True, capture_output=True)
    began = time.monotonic()
    subprocess.run([*base, "--epochs", "2", "--overwrite"], cwd=tmp_path, check=True, capture_output=True)
    taken = time.monotonic() - began
    for number in times(4, 160):
        before = (tmp_path / "m.pt").read_bytes()
        options = ["--epochs", "2", "--overwrite", "--seed", str(number)]
        process = subprocess.Popen([*base, *options], cwd=tmp_path, stderr=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.5, 1.0) * taken)
        process.send_signal(signal.SIGKILL)
        process.wait()
        again = [sys.executable, "-m", "ewc_finetune", "report", "m.run", "--output", "r.html", "--overwrite"]
        subprocess.run(again, cwd=tmp_path, check=True, capture_output=True)
        run = read_run(tmp_path / "m.run")
        assert run.document["status"] == "finished" or (tmp_path / "m.run" / "last.pt").exists()
        assert (tmp_path / "m.pt").read_bytes() == before or run.document["options"]["seed"] == number
        assert not [name for name in files_in(tmp_path) if name.rpartition("/")[2].startswith(".")]
