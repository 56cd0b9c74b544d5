"""SIGINT and SIGTERM at any moment end the program with 130 and 143, one line, and nothing left lying about."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killing import files_in
from sizes import times

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="handlers are looked up in /proc")

DATA = "digits?limit=100"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORDS = {signal.SIGINT: "Interrupted.", signal.SIGTERM: "Terminated."}


def start(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "ewc_finetune", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell may have had what it starts in the background ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )


def handles(process, number):
    """Whether the program is past its first line: until then signals are Python's own."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return True
    caught = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")]
    return not caught or bool(caught[0] >> (number - 1) & 1)


def wait_until_it_handles_signals(process):
    while not handles(process, signal.SIGTERM):
        time.sleep(0.001)


def interrupted(process, number, again=False):
    """Send a signal, once or twice, and return the exit code and what was said."""
    ours = handles(process, signal.SIGTERM)
    process.send_signal(number)
    if again:
        time.sleep(0.01)
        process.send_signal(number)
    out, told = process.communicate(timeout=120)
    if ours:
        assert process.returncode in (0, CODES[number]), told
        for word in ("Traceback", "Aborted", "Exception ignored", "not an error that ewc-ft foresaw"):
            assert word not in out + told, told
        if process.returncode:
            assert told.count(WORDS[number]) == 1, told
    return process.returncode, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and its anchor."""
    folder = tmp_path_factory.mktemp("signals")
    for command in (
        ("finetune", "--model", "mlp?hidden=8", "--data", DATA, "--epochs", "1", "--output", "m.pt"),
        ("consolidate", "m.pt", "--data", DATA, "--output", "m.anchor.safetensors"),
    ):
        subprocess.run([sys.executable, "-m", "ewc_finetune", *command], cwd=folder, check=True, capture_output=True)
    return folder


COMMANDS = {
    "consolidate": ("m.pt", "--data", DATA, "--output", "out.safetensors"),
    "finetune": ("--anchors", "m.anchor.safetensors", "--data", DATA, "--epochs", "5", "--output", "out.pt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", CODES)
def test_at_any_moment(folder, command, number):
    before = files_in(folder)
    began = time.monotonic()
    whole = start(folder, command, *COMMANDS[command])
    whole.communicate()
    assert whole.returncode == 0
    taken = time.monotonic() - began
    made = set(files_in(folder)) - set(before)
    draw = random.Random(number)
    for _ in times(4, 160):
        clean(folder, made)
        process = start(folder, command, *COMMANDS[command])
        time.sleep(draw.uniform(0, 1.1) * taken)
        code, told = interrupted(process, number)
        left = set(files_in(folder)) - set(before)
        if code == 0:
            assert left == made
        elif "--resume" in told:
            assert {"out.run/last.pt", "out.run/state.pt"} <= left or "out.run/run.json" in left
        assert not [name for name in left if "/." in f"/{name}"], left
        resumable = {"out.run/last.pt", "out.run/state.pt"}
        assert {name for name in left - resumable if not name.startswith("out.run/best")} <= made
    clean(folder, made)


def clean(folder, made):
    for name in sorted(set(files_in(folder)) & (made | {"out.run/last.pt", "out.run/state.pt"}), reverse=True):
        path = folder / name
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("moment", [0, 0.3])
def test_while_it_begins(folder, number, moment):
    process = start(folder, "consolidate", *COMMANDS["consolidate"])
    wait_until_it_handles_signals(process)
    time.sleep(moment)
    assert interrupted(process, number)[0] == CODES[number]
    assert not (folder / "out.safetensors").exists()


@pytest.mark.slow
def test_a_second_one_leaves_at_once(folder, tmp_path):
    for path in folder.glob("m.*"):
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    process = start(tmp_path, "finetune", "--model", "m.pt", "--data", DATA, "--epochs", "100000", "--output", "out.pt")
    while not (tmp_path / "out.run" / "state.pt").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert interrupted(process, signal.SIGINT, again=True)[0] == 130
    assert process.poll() is not None


def test_functions_leave_signals_alone():
    script = (
        "import signal, ewc_finetune; from ewc_finetune import Penalty, finetune; "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler; "
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL"
    )
    reset = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    subprocess.run([sys.executable, "-c", script], check=True, preexec_fn=reset)


SCRIPT = """
import os, signal
from ewc_finetune.storage import signals
def program():
{body}
signals.run(program)
"""


def ran(body, tmp_path):
    script = SCRIPT.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


KILL = "os.kill(os.getpid(), signal.SIGTERM)\n"


def test_a_signal_waits_for_what_is_half_done(tmp_path):
    code, out, told = ran(
        f"with signals.deferred():\n    {KILL}    print('in order', flush=True)\nprint('never')", tmp_path
    )
    assert (code, out, told) == (143, "in order\n", "Terminated.\n")


def test_a_signal_that_a_library_swallows_is_raised_again(tmp_path):
    body = "with signals.deferred():\n    try:\n        " + KILL
    body += "        signals.safe_point()\n    except BaseException:\n        print('swallowed', flush=True)\n"
    body += "    signals.safe_point()\n    print('never')"
    assert ran(body, tmp_path) == (143, "swallowed\n", "Terminated.\n")


def test_what_a_library_makes_of_a_signal_is_no_error(tmp_path):
    body = f"with signals.deferred():\n    {KILL}    raise ImportError('of a signal, says a library')"
    assert ran(body, tmp_path) == (143, "", "Terminated.\n")


def test_a_second_signal_does_not_wait(tmp_path):
    body = f"with signals.deferred():\n    {KILL}    os.kill(os.getpid(), signal.SIGINT)\n    print('never')"
    assert ran(body, tmp_path) == (130, "", "Interrupted.\n")


def test_what_is_half_written_is_removed_at_once(tmp_path):
    body = "from pathlib import Path\nfrom ewc_finetune.storage.atomic import atomic_write\n"
    body += f"with atomic_write(Path('a')) as temporary:\n    temporary.write_bytes(b'half')\n    {KILL}"
    assert ran(body, tmp_path) == (143, "", "Terminated.\n")
    assert not list(tmp_path.iterdir())


def test_a_forked_process_leaves_it_to_its_parent(tmp_path):
    body = "import time\nif os.fork() == 0:\n    os.kill(os.getpid(), signal.SIGINT)\n    os._exit(7)\n"
    body += "print(os.waitstatus_to_exitcode(os.wait()[1]))"
    assert ran(body, tmp_path) == (0, "7\n", "")


def test_who_ignores_signals_goes_on_ignoring_them(tmp_path):
    body = "os.kill(os.getpid(), signal.SIGINT)\nprint('here')"
    script = SCRIPT.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    ignoring = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, preexec_fn=ignoring)
    assert done.stdout == b"here\n"
