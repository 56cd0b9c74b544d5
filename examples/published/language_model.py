"""A language model of Python source code learns English prose: perplexity on both, with and without an anchor.

A causal model of 3.3 million parameters (Llama's architecture, byte-level tokens) is trained from scratch on the
standard library's own source files, then adapted to the prose of the documentation that the standard library ships
(`pydoc_data/topics.py`): plainly; held by plain L2; by the Fisher of source files; by the Fisher of samples that the
model draws itself, for which no text is needed at all; by K-FAC; and with samples of its own rehearsed, alone and
beside their Fisher. Each penalty has its range of lambdas; the table shows the one with the least mean of both
log-perplexities on the validation parts. All that is shown is measured on the test parts. A file, or topic, is in one
part alone. One seed.

    OMP_NUM_THREADS=1 python examples/published/language_model.py     about an hour
    python examples/published/language_model.py --quick               a quarter of a minute, to see that it runs

Writes perplexity.md, frontier.csv and frontier.png to --output (the folder language_model beside this file). Needs the
extra `transformers`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import re
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import datasets
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

import ewc_finetune as ewc

SOURCE, PROSE = "source code", "English prose"
BEFORE, PLAIN, L2 = "before", "plain", "L2"
ON_DATA, ON_OWN, KFAC = "EWC, Fisher of source code", "EWC, Fisher of own samples", "EWC, K-FAC of source code"
REHEARSED, BOTH = "own samples rehearsed", "own samples rehearsed, and their Fisher"
LAMBDAS = {
    L2: (0.3, 1.0, 3.0, 10.0, 100.0),
    ON_DATA: (10.0, 30.0, 100.0, 300.0, 1000.0),
    ON_OWN: (10.0, 30.0, 100.0, 300.0, 1000.0),
    KFAC: (10.0, 30.0, 100.0),
    REHEARSED: (0.0,),
    BOTH: (3.0, 10.0, 30.0, 100.0),
}
CONTEXT = 128
END = "<|endoftext|>"
# Folders that are not of the standard library, or are tables, the other text, tests, or programs of their own.
LEFT_OUT = {"site-packages", "encodings", "pydoc_data", "test", "tests"}
PROGRAMS = {"lib2to3", "idlelib", "turtledemo", "ensurepip"}
LARGE = 40_000  # characters
PARTS = ("train", "validation", "test")


class Size(NamedTuple):
    """How large everything is.

    Attributes:
        characters: Of source code to train on; a thirtieth of it more for each of validation and test.
        vocabulary: Tokens.
        width: Of the model.
        layers: Of the model.
        epochs: On source code, and on prose.
        samples: Of each Fisher.
        lambdas: How many of each range.
    """

    characters: int
    vocabulary: int
    width: int
    layers: int
    epochs: tuple[int, int]
    samples: int
    lambdas: int | None


FULL = Size(3_000_000, 4096, 192, 4, (2, 4), 1000, None)
QUICK = Size(60_000, 300, 16, 1, (1, 1), 10, 1)


class Point(NamedTuple):
    """What a model came to: perplexity by text and part."""

    method: str
    strength: float
    source_validation: float
    prose_validation: float
    source: float
    prose: float

    @property
    def chosen_by(self) -> float:
        """Mean of both log-perplexities on the validation parts."""
        return (math.log(self.source_validation) + math.log(self.prose_validation)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="keep texts, model and results here, and go on from what is there")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that it runs, no result")
    options = parser.parse_args()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        # Nothing of this run is to stay in the user's own cache.
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        points = run(options.work or Path(folder), QUICK if options.quick else FULL)
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output / "frontier.csv", points)
    table = make_table(points)
    (options.output / "perplexity.md").write_text(table)
    draw(points, options.output / "frontier.png")
    print(f"\n{table}\nWritten to {options.output}: perplexity.md, frontier.csv, frontier.png")


def run(work: Path, size: Size) -> list[Point]:
    """Train, consolidate, and adapt in each way."""
    work.mkdir(parents=True, exist_ok=True)
    seconds = Seconds()
    specs = {}
    for name, documents in ((SOURCE, source_files(size)), (PROSE, prose(size))):
        for part, texts in documents.items():
            specs[name, part] = write_texts(work / f"{name.split()[-1]}-{part}.jsonl", texts)
            print(f"{name}, {part}: {len(texts)} documents, {sum(map(len, texts)):,} characters")
    start = work / "model"
    if not start.exists():
        fresh_model(work / "fresh", documents_of(work / "code-train.jsonl"), size)
        train(work / "fresh", specs[SOURCE, "train"], start, size)
        seconds.tell("trained on source code")
    found = read(work / "points.csv")

    def score(model: Path, method: str, strength: float) -> Point:
        asked = [specs[name, part] for part in PARTS[1:] for name in (SOURCE, PROSE)]
        return Point(method, strength, *(s.perplexity for s in ewc.evaluate(model, asked, batch_size=32)))

    def once(method: str, strength: float, make: Callable[[], Path]) -> None:
        if any((p.method, p.strength) == (method, strength) for p in found):
            return
        found.append(score(make(), method, strength))
        write(work / "points.csv", found)
        seconds.tell(f"{method}, lambda {strength:g}: {found[-1].source:.2f} / {found[-1].prose:.2f}")

    def adapt(**held: object) -> Path:
        options = {"epochs": size.epochs[1], "lr": 5e-4, "batch_size": 8, "optimizer": "adamw", "eval_on": []}
        # As a folder, since a module alone has no tokenizer to be scored with.
        ewc.finetune(start, specs[PROSE, "train"], output=work / "adapted", overwrite=True, **options, **held)
        return work / "adapted"

    once(BEFORE, 0, lambda: start)
    once(PLAIN, 0, adapt)
    own = f"generate:{size.samples}?length={CONTEXT}"
    # Others than those of the Fisher, for it is to be seen what one and the other add.
    rehearsed = {"rehearse": [f"{own}&seed=1"]}
    once(REHEARSED, 0, lambda: adapt(**rehearsed))
    for method, asked in {
        L2: {"data": specs[SOURCE, "train"], "curvature": "identity"},
        ON_DATA: {"data": specs[SOURCE, "train"], "samples": size.samples},
        ON_OWN: {"data": own},
        KFAC: {"data": specs[SOURCE, "train"], "samples": size.samples, "curvature": "kfac"},
        BOTH: {"data": own},
    }.items():
        file = work / f"{re.sub('[^a-z0-9]+', '-', (ON_OWN if method == BOTH else method).lower())}.anchor.safetensors"
        if not file.exists():
            ewc.consolidate(start, **asked, batch_size=32, output=file)
            seconds.tell(f"{method}: consolidated")
        for strength in LAMBDAS[method][: size.lambdas]:
            held = {"anchors": file, "lambdas": strength, **(rehearsed if method == BOTH else {})}
            once(method, strength, lambda held=held: adapt(**held))
    order = [BEFORE, PLAIN, *LAMBDAS]
    return sorted(found, key=lambda point: (order.index(point.method), point.strength))


class Seconds:
    """Tells how long each thing took."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def tell(self, what: str) -> None:
        """Print it, with the seconds since the last."""
        now = time.perf_counter()
        print(f"{what} ({now - self.last:.0f} s)", flush=True)
        self.last = now


def source_files(size: Size) -> dict[str, list[str]]:
    """Draw files of the standard library, until each part has enough."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path.relative_to(library) for path in library.rglob("*.py")]
    files = [path for path in files if not (LEFT_OUT | PROGRAMS) & set(path.parts)]
    # This one tells of the machine that Python was built on.
    files = [path for path in files if not path.name.startswith("_sysconfigdata")]
    files.sort()
    random.Random(0).shuffle(files)  # noqa: S311
    read = ((library / path).read_text(encoding="utf-8") for path in files)
    # A single large module would be a part by itself.
    texts = (text for text in read if len(text) < LARGE)
    few = size.characters // 30
    # The small parts are drawn first, so that a larger training part leaves them as they are.
    parts = {part: list(until(few if part != "train" else size.characters, texts)) for part in reversed(PARTS)}
    return {part: parts[part] for part in PARTS}


def prose(size: Size) -> dict[str, list[str]]:
    """Take the paragraphs of prose out of the documentation's topics, each paragraph once.

    Topics contain each other; the shortest has the paragraph.
    """
    seen: set[str] = set()
    found = []
    for _, topic in sorted(topics.items(), key=lambda item: (len(item[1]), item[0])):
        paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", topic)]
        new = [paragraph for paragraph in dict.fromkeys(paragraphs) if is_prose(paragraph) and paragraph not in seen]
        seen.update(new)
        if new:
            found.append("\n\n".join(new))
    random.Random(0).shuffle(found)  # noqa: S311
    total = min(sum(map(len, found)), size.characters)
    texts = iter(found)
    parts = {part: list(until(total // 10, texts)) for part in ("test", "validation")}
    return {"train": list(until(total, texts)), **parts}


def is_prose(paragraph: str) -> bool:
    """Tell sentences from grammar, examples and headings."""
    plain = sum(letter.isalpha() or letter in " ,.;:()'" for letter in paragraph)
    return len(paragraph.split()) >= 8 and paragraph[-1] in ".:" and plain > 0.9 * len(paragraph)


def until(characters: int, texts: Iterator[str]) -> Iterator[str]:
    """Take texts until they have so many characters together, or there are no more."""
    taken = 0
    while taken < characters:
        text = next(texts, None)
        if text is None:
            return
        taken += len(text)
        yield text


def write_texts(path: Path, texts: Iterable[str]) -> str:
    """Write one document to a line of JSON, which keeps its own lines, and return its data spec."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return f"hf:{path}?text=text&pack={CONTEXT}"


def documents_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def fresh_model(folder: Path, texts: list[str], size: Size) -> None:
    """Write a model folder: a tokenizer that is made for the texts, and fresh weights."""
    bytes_ = Tokenizer(models.BPE())
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bytes_.train_from_iterator(texts, trainer)
    # A document begins and ends with the same token, so that the model can begin one of its own.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, bos_token=END, eos_token=END, pad_token=END)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=8 * size.width // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer):,} tokens")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(fresh: Path, data: str, output: Path, size: Size) -> None:
    """Train from scratch: some epochs at a high learning rate, and one more at a low one."""
    options = {"batch_size": 16, "optimizer": "adamw", "eval_on": []}
    warm = fresh.with_name("warm")
    ewc.finetune(fresh, data, epochs=size.epochs[0], lr=2e-3, output=warm, overwrite=True, **options)
    ewc.finetune(warm, data, epochs=1, lr=3e-4, output=output, **options)


def write(path: Path, points: list[Point]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Point._fields, *points])


def read(path: Path) -> list[Point]:
    """Read the points that are there already."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [Point(method, *map(float, numbers)) for method, *numbers in rows]


def make_table(points: list[Point]) -> str:
    """The start, plain training, and each penalty at its chosen lambda, as Markdown."""
    rows = [f"| perplexity | lambda | {SOURCE} | {PROSE} |", "|---|---|---|---|"]
    for method in (BEFORE, PLAIN, *LAMBDAS):
        best = min((p for p in points if p.method == method), key=lambda p: p.chosen_by)
        strength = f"{best.strength:g}" if best.strength else ""
        rows.append(f"| {method} | {strength} | {best.source:.1f} | {best.prose:.1f} |")
    return "\n".join(rows) + "\n"


def draw(points: list[Point], path: Path) -> None:
    """Draw what is kept against what is learned, a line for each penalty."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    # Style and colour, and where the lambdas stand beside their points.
    styles = {
        BEFORE: ("*", "0.2", (0, 0)),
        PLAIN: ("X", "C3", (0, 0)),
        L2: ("v-", "C4", (5, 4)),
        ON_DATA: ("o-", "C0", (-6, -8)),
        ON_OWN: ("s--", "C1", (6, 1)),
        KFAC: ("D-", "C2", (-6, -8)),
        REHEARSED: ("P", "C5", (0, 0)),
        BOTH: ("p-", "C5", (-6, -9)),
    }
    for method, (style, color, offset) in styles.items():
        line = [p for p in points if p.method == method]
        size = 12 if method in (BEFORE, PLAIN, REHEARSED) else 5
        axes.plot([p.source for p in line], [p.prose for p in line], style, color=color, ms=size, label=method)
        for p in line if any(p.strength for p in line) else ():
            side = "right" if offset[0] < 0 else "left"
            place = {"xytext": offset, "textcoords": "offset points", "ha": side}
            axes.annotate(f"{p.strength:g}", (p.source, p.prose), fontsize=8, color=color, **place)
    axes.set(
        title="Source code, then prose: down and left is better (numbers: lambda)",
        xlabel=f"perplexity on {SOURCE}: what is kept",
        ylabel=f"perplexity on {PROSE}: what is learned",
    )
    readable(axes)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def readable(axes: Axes) -> None:
    """Logarithmic axes with plain numbers."""
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 4, 5, 6, 7, 8)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
