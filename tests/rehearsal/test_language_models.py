"""Rehearsing what a language model says itself: with no old data at all."""

import json
import math

import pytest
import torch
from support.transformers_models import corpus, llama, saved, tokenizer

import ewc_finetune as ewc
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.data import generation
from ewc_finetune.data.preprocessing import preprocessed
from ewc_finetune.data.sources import load_domain
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.finetuning.observer import RunObserver
from ewc_finetune.likelihood.base import IGNORED


def generated(folder, spec):
    loaded = open_model(folder)
    return preprocessed(load_domain(spec, "train"), loaded.task, loaded.model, loaded.label)


@pytest.fixture
def folder(tmp_path):
    return saved(llama(), tmp_path / "m")


@pytest.fixture
def requests(tmp_path):
    (tmp_path / "requests.txt").write_text("w1 w2 w3\n\nw4\n")
    return tmp_path / "requests.txt"


def test_requests_are_answered_in_turn_and_only_answers_count(folder, requests):
    domain = generated(folder, f"generate:5?prompts={requests}&length=4")
    samples = [domain.samples[n] for n in range(5)]
    words = {text: tokenizer()(text)["input_ids"] for text in ("w1 w2 w3", "w4")}
    for n, (ids, given) in enumerate(samples):
        first = words["w1 w2 w3" if n % 2 == 0 else "w4"]
        assert ids[:given] == first
        assert 1 <= len(ids) - given <= 4
    inputs, labels = next(domain.batches(5))
    for row, (ids, given) in enumerate(samples):
        assert labels[row, given - 1 : len(ids) - 1].tolist() == ids[given:]
        assert (labels[row, : given - 1] == IGNORED).all()
        assert (labels[row, len(ids) - 1 :] == IGNORED).all()
        assert inputs["attention_mask"][row].sum() == len(ids)


def test_what_follows_a_request_does_not_depend_on_what_fills_it_up(folder, requests):
    """The likeliest answer to the short request is the same beside a longer one as alone."""
    loaded = open_model(folder)
    ids = torch.tensor([tokenizer()("w4")["input_ids"]])
    mask = torch.tensor([[0, 0] + [1] * ids.shape[1]])
    filled = torch.cat([torch.full((1, 2), 3), ids], dim=1)
    plain = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    alone = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **plain)
    beside = loaded.model.generate(filled, attention_mask=mask, **plain)
    assert alone[0].tolist() == beside[0, 2:].tolist()


def test_a_chat_template_is_put_around_requests(folder, requests):
    chat = tokenizer()
    chat.chat_template = (
        "{% for m in messages %}w9 {{ m['content'] }} w8{% endfor %}{% if add_generation_prompt %} w7{% endif %}"
    )
    chat.save_pretrained(folder)
    ids, given = generated(folder, f"generate:2?prompts={requests}&length=3").samples[1]
    assert ids[:given] == chat("w9 w4 w8 w7")["input_ids"]


def test_requests_that_cannot_be(folder, tmp_path):
    (tmp_path / "long.txt").write_text(" ".join(["w1"] * 30))
    with pytest.raises(DataError, match="the request 'w1 w1 .*' has 30 tokens, and the model takes 24"):
        generated(folder, f"generate:2?prompts={tmp_path / 'long.txt'}")
    with pytest.raises(DataError, match=r"none\.txt, which generate:2\?prompts=.* names, cannot be read"):
        generated(folder, f"generate:2?prompts={tmp_path / 'none.txt'}")


def test_its_own_samples_keep_a_model_near_itself(folder, tmp_path):
    data = corpus(tmp_path / "corpus.txt")
    anchor = ewc.consolidate(folder, "generate:64?length=8&seed=5", probe=64, output=tmp_path / "a.safetensors").path
    options = {"anchors": anchor, "lambdas": 0.0, "epochs": 8, "batch_size": 6, "lr": 3e-3, "eval_on": []}
    plain = ewc.finetune(folder, data, **options)
    rehearsed = ewc.finetune(folder, data, rehearse=["generate:100?length=8"], **options)
    assert rehearsed.retention[0].divergence < 0.7 * plain.retention[0].divergence
    probes = ewc.finetune(folder, data, rehearse=["probes"], **options)
    assert probes.retention[0].samples == 16
    assert probes.retention[0].divergence < 0.9 * plain.retention[0].divergence


def test_what_generates_nothing_is_refused(tmp_path):
    with pytest.raises((UsageError, DataError), match="is no language model"):
        ewc.finetune(
            torch.nn.Linear(4, 3),
            torch.utils.data.TensorDataset(torch.randn(20, 4), torch.arange(20) % 3),
            rehearse=["generate:20"],
        )


# What was generated is kept


class Stopped(BaseException):
    """Stands for a process that ends."""


def stopped_at(monkeypatch, line):
    """Have the next run end at a line of its log, and keep its folder as it is then."""
    log, lines = RunObserver.log, [0]

    def counting(self, values):
        log(self, values)
        lines[0] += 1
        if lines[0] == line:
            folder = self.checkpoints.folder
            folder.stop = lambda _: folder._metrics.close()
            raise Stopped

    monkeypatch.setattr(RunObserver, "log", counting)
    return lambda: monkeypatch.setattr(RunObserver, "log", log)


@pytest.fixture
def going(tmp_path, requests, monkeypatch):
    """Make a run in a folder, with dropout, that rehearses the model's own answers; return how often it generated."""
    start = saved(llama(attention_dropout=0.2), tmp_path / "start")
    data, drawn, made = corpus(tmp_path / "corpus.txt"), generation._drawn, []

    def counted(*arguments):
        made.append(arguments)
        return drawn(*arguments)

    monkeypatch.setattr(generation, "_drawn", counted)

    def run(where, **options):
        made.clear()
        where.mkdir(exist_ok=True)
        monkeypatch.chdir(where)
        sources = [f"generate:6?prompts={requests}&length=4", "generate:5?length=6"]
        common = {"rehearse": sources, "epochs": 3, "batch_size": 4, "eval_on": [], "eval_every": 2, "output": "m"}
        ewc.finetune(start, data, **{**common, **options})
        return len(made)

    return run


@pytest.mark.parametrize("line", [1, 3, 5])
def test_what_was_generated_is_not_generated_again(line, going, tmp_path, monkeypatch):
    assert going(tmp_path / "whole") == 2
    undo = stopped_at(monkeypatch, line)
    with pytest.raises(Stopped):
        going(tmp_path / "part")
    undo()
    assert (tmp_path / "part" / "m.run" / "generated-1.json").exists()
    assert going(tmp_path / "part", resume="m.run") == 0
    for name in ("m/model.safetensors", "m.run/metrics.jsonl"):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "part" / "m.run").glob("generated*"))


def test_short_runs_read_what_was_generated(folder, tmp_path, monkeypatch):
    (tmp_path / "many.txt").write_text("\n".join(["w1 w2 w3 w4", "w5 w6"] * 10))
    anchor = ewc.consolidate(folder, "generate:20?length=6", output=tmp_path / "a.safetensors").path
    drawn, made = generation._drawn, []
    monkeypatch.setattr(generation, "_drawn", lambda *given: made.append(given) or drawn(*given))
    ewc.finetune(
        folder, f"text:{tmp_path / 'many.txt'}", anchors=anchor, lambdas="auto", rehearse=["generate:5?length=6"],
        epochs=1, eval_on=[], output=tmp_path / "out",
    )  # fmt: skip
    assert len(made) == 1
    ewc.finetune(
        folder, f"text:{tmp_path / 'many.txt'}", anchors=anchor, lambdas="auto", epochs=1, eval_on=[],
        rehearse="generate:5?length=6",
    )  # fmt: skip
    assert len(made) == 2


def test_a_short_request_is_answered_in_full_beside_a_long_one(folder, tmp_path, monkeypatch):
    """Where the model takes no more, the long one's answer alone is cut."""
    short, long = tmp_path / "short.txt", tmp_path / "both.txt"
    short.write_text("w4\n")
    long.write_text("w4\n" + " ".join(["w1"] * 20) + "\n")
    loaded = open_model(folder)
    longest = len(tokenizer()(" ".join(["w1"] * 20))["input_ids"]) + 4
    asked = load_domain(f"generate:12?prompts={long}&length=12", "train").samples
    made = generation.generate(loaded.model, tokenizer(), asked, 12, longest, "both")
    lengths = [len(ids) - given for ids, given in made.samples]
    assert max(lengths[1::2]) <= 4
    assert max(lengths[::2]) > 4


def test_a_dry_run_generates_a_few(folder, tmp_path, monkeypatch):
    (tmp_path / "many.txt").write_text("\n".join(["w1 w2 w3 w4", "w5 w6"] * 10))
    drawn, made = generation._drawn, []
    monkeypatch.setattr(generation, "_drawn", lambda *given: made.append(given[2].count) or drawn(*given))
    options = {"rehearse": "generate:5000?length=6", "epochs": 1, "eval_on": []}
    ewc.dry_run(ewc.finetune, folder, f"text:{tmp_path / 'many.txt'}", **options)
    assert made == [3]


DAMAGE = {
    "cut": (lambda d: None, r"it cannot be read \(JSONDecodeError\)"),
    "deep": (lambda d: "[" * 2000, r"it cannot be read|larger than they can be"),
    "large": (lambda d: " " * (1 << 20), "it is larger than they can be"),
    "list": (lambda d: [], "it is no JSON object"),
    "other": (lambda d: {**d, "format": "x"}, "it is no ewc-generated file of version 1"),
    "asked": (lambda d: {**d, "asked": 3}, "it does not say what they are"),
    "count": (lambda d: {**d, "asked": {**d["asked"], "count": 7}}, r"with another count \(7, and asked for is 6\)"),
    "prompts": (lambda d: {**d, "asked": {**d["asked"], "prompts": "0"}}, "with another prompts"),
    "fewer": (lambda d: {**d, "samples": d["samples"][:-1]}, "5 are in it, and it should be 6"),
    "none": (lambda d: {**d, "samples": None}, "nothing is in it, and it should be 6"),
    "nan": (lambda d: {**d, "samples": [[math.nan], *d["samples"][1:]]}, "sample 0 is no list of tokens from 0 to 49"),
    "unknown": (lambda d: {**d, "samples": [[*d["samples"][0], 50], *d["samples"][1:]]}, "sample 0 is no list of"),
    "begin": (lambda d: {**d, "samples": [[9, 9, 9, 9], *d["samples"][1:]]}, "sample 0 does not begin as it should"),
    "long": (
        lambda d: {**d, "samples": [d["samples"][0] + [9] * 4, *d["samples"][1:]]},
        "or has [5-8] tokens|or has 1",
    ),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_holds_something_else(change, message, going, tmp_path, monkeypatch):
    undo = stopped_at(monkeypatch, 3)
    with pytest.raises(Stopped):
        going(tmp_path / "part")
    undo()
    path = tmp_path / "part" / "m.run" / "generated-1.json"
    changed = change(json.loads(path.read_text()))
    text = path.read_text()[:-9] if changed is None else changed if isinstance(changed, str) else json.dumps(changed)
    path.write_text(text)
    with pytest.raises(
        DataError, match=f"generated-1.json does not hold the samples .*{message}.*Put it back, or remove"
    ):
        going(tmp_path / "part", resume="m.run")
    path.unlink()
    assert going(tmp_path / "part", resume="m.run") == 1


def test_requests_that_changed_since(going, requests, tmp_path, monkeypatch):
    undo = stopped_at(monkeypatch, 3)
    with pytest.raises(Stopped):
        going(tmp_path / "part")
    undo()
    requests.write_text("w7 w8\nw9\n")
    with pytest.raises(DataError, match="generated with another prompts"):
        going(tmp_path / "part", resume="m.run")
