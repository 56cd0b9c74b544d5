"""Rehearsing what a language model says itself: with no old data at all."""

import pytest
import torch
from support.transformers_models import corpus, llama, saved, tokenizer

import ewc_finetune as ewc
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.data.preprocessing import preprocessed
from ewc_finetune.data.sources import load_domain
from ewc_finetune.errors import DataError, UsageError
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
