"""The examples run as the README says."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script, *arguments):
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_demo(tmp_path):
    lines = run("demo.py", "--output", tmp_path).splitlines()
    (plain,) = [line for line in lines if line.startswith("plain")]
    (held,) = [line for line in lines if line.startswith("with the anchor")]
    kept = [float(line.split()[-3].rstrip("%")) for line in (plain, held)]
    assert kept[1] > kept[0] + 40
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_mnist_to_fmnist(tmp_path, data_dir):
    table = run("mnist_to_fmnist.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    assert "| published in the notebook | 0 | 0.281 | 0.862 | 0.572 |" in table
    rows = list(csv.DictReader((tmp_path / "frontier.csv").read_text().splitlines()))
    assert {row["penalty"] for row in rows} == {
        "none",
        "none, statistics updating",
        "exact Fisher",
        "batched",
        "the notebook's, as written",
    }
    assert (tmp_path / "frontier.png").is_file()


@pytest.mark.slow
def test_how_many_samples(tmp_path, data_dir):
    run("how_many_samples.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    rows = (tmp_path / "samples.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| 50", "| 200", "| 500"]
