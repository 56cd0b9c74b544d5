"""Two processes with half a batch each end where one does with all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ewc_finetune as ewc

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

PROGRAM = Path(__file__).with_name("two_processes.py")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by_trainer", "by_accelerate"])
def test_they_end_with_the_same_weights(way, tmp_path):
    if way == "by_trainer":
        from integrations.test_trainer import rows, still

        model, batch = still(), {"input_ids": torch.stack([row["input_ids"] for row in rows(16, 1)])}
        data = [(batch, torch.zeros(16, dtype=torch.long))]
    else:
        from integrations.test_lightning import net
        from support.domains import blobs

        model, data = net(), blobs()
    ewc.consolidate(model, data, curvature="kfac", output=tmp_path / "a.safetensors")
    ends = []
    for start, batch in ((TWO, 4), ((), 8)):
        output = tmp_path / f"{batch}.pt"
        words = [sys.executable, *start, PROGRAM, way, tmp_path / "a.safetensors", batch, output]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        ends.append(torch.load(output, weights_only=True))
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-5, msg=name)
