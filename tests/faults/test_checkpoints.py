"""Checkpoints that were changed at random open, or are refused with an error of ours; no reader crashes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
from sizes import times

CHANGES = times(20, 3000)
_BATCH = 500


@pytest.mark.parametrize("kind", checkpoints.FORMATS)
def test_changed_checkpoints(tmp_path, kind):
    for first in range(0, len(CHANGES), _BATCH):
        count = min(_BATCH, len(CHANGES) - first)
        here = Path(checkpoints.__file__)
        command = [sys.executable, str(here), str(tmp_path), kind, str(first), str(count)]
        path = os.pathsep.join([str(here.parent), str(here.parents[2]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
        )
        seed = (tmp_path / "seed").read_text() if (tmp_path / "seed").exists() else "none"
        assert done.returncode == 0, f"crashed at seed {seed}: {done.stderr[-2000:]}"
        assert json.loads(done.stdout.strip().split("\n")[-1]) == []
