"""Two texts to a sample go into a model as its own tokenizer puts a pair together."""

import json

import pytest
import torch
import transformers
from support.transformers_models import SMALL, bert, llama, masked, saved, texts, tokenizer

import ewc_finetune as ewc
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.data.domain import Fingerprint
from ewc_finetune.data.preprocessing import preprocessed
from ewc_finetune.data.sources import load_domain
from ewc_finetune.errors import DataError, UsageError

PREMISES, HYPOTHESES = texts(seed=1, longest=12), texts(seed=2, longest=6)


def of_pairs(model, folder):
    saved(model, folder)
    tokenizer(of_pairs=True).save_pretrained(folder)
    return folder


def distilbert():
    names = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 24, "vocab_size": 50}
    config = transformers.DistilBertConfig(**names, num_labels=3)
    return transformers.DistilBertForSequenceClassification(config).eval()


def roberta():
    config = transformers.RobertaConfig(
        **SMALL | {"max_position_embeddings": 30}, type_vocab_size=1, pad_token_id=0, num_labels=3
    )
    return transformers.RobertaForSequenceClassification(config).eval()


@pytest.fixture
def spec(tmp_path):
    """Pairs of texts with classes, whose columns have names of their own."""
    rows = [
        {"premise": one, "hypothesis, said": other, "label": n % 3}
        for n, (one, other) in enumerate(zip(PREMISES, HYPOTHESES, strict=True))
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return f'hf:{tmp_path / "p.jsonl"}?text=premise,"hypothesis, said"'


def batches_of(spec, folder, size):
    loaded = open_model(folder)
    return list(preprocessed(load_domain(spec, "train"), loaded.task, loaded.model, loaded.label).batches(size))


def batch_of(spec, folder):
    return batches_of(spec, folder, 12)[0]


def fingerprint_of(spec, folder, size=12):
    taken = Fingerprint()
    for inputs, labels in batches_of(spec, folder, size):
        taken.update(inputs, labels)
    return taken.hexdigest()


@pytest.mark.parametrize(("length", "build"), [("", bert), ("&length=10", bert), ("", distilbert), ("", roberta)])
def test_as_the_tokenizer_does(length, build, spec, tmp_path):
    inputs, labels = batch_of(spec + length, of_pairs(build(), tmp_path / "m"))
    expected = tokenizer(of_pairs=True)(
        *(PREMISES, HYPOTHESES), padding=True, truncation="longest_first", max_length=10 if length else 24,
        return_tensors="pt",
    )  # fmt: skip
    if build is not bert:  # which takes no types, or knows one alone
        del expected["token_type_ids"]
    assert inputs.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(inputs[name], tensor), name
    assert labels.tolist() == [n % 3 for n in range(12)]


def test_a_table_a_stream_and_a_draw_have_the_same_pairs(spec, tmp_path):
    folder = of_pairs(bert(), tmp_path / "m")
    rows = zip(PREMISES, HYPOTHESES, strict=True)
    (tmp_path / "p.tsv").write_text("".join(f"{n % 3}\t{one}\t{other}\n" for n, (one, other) in enumerate(rows)))
    table = f"table:{tmp_path / 'p.tsv'}?header=0&target=1&text=2,3"
    everyone = [(spec, 12), (spec, 5), (table, 1), (f"{spec}&stream=1", 4)]
    assert len({fingerprint_of(data, folder, size) for data, size in everyone}) == 1
    swapped = table.replace("2,3", "3,2")  # the order counts
    assert fingerprint_of(swapped, folder) != fingerprint_of(spec, folder)
    assert load_domain(f"{table}&classes=1-2&limit=4", "train").samples[0][0] == (PREMISES[1], HYPOTHESES[1])


def test_an_anchor_of_pairs(spec, tmp_path):
    folder = of_pairs(bert(), tmp_path / "m")
    together, alone = (ewc.consolidate(folder, spec, batch_size=size, probe=12) for size in (12, 1))
    assert together.provenance.data["fingerprint"] == fingerprint_of(spec, folder)
    assert set(together.provenance.input["names"]) == {"input_ids", "attention_mask", "token_type_ids"}
    for name, value in alone.fisher.items():  # whatever a pair shares its batch with
        torch.testing.assert_close(together.fisher[name], value, rtol=1e-3, atol=1e-3 * float(value.max()) + 1e-12)
    types = together.probes[0].inputs["token_type_ids"]
    assert torch.equal(types, batch_of(spec, folder)[0]["token_type_ids"])


@pytest.mark.parametrize(("build", "task"), [(llama, "causal language model"), (masked, "masked language model")])
def test_a_language_model_takes_no_pairs(build, task, spec, tmp_path):
    with pytest.raises(UsageError, match=f"text= names two columns, .* and .*/m is a {task}. Name one column"):
        batch_of(spec, of_pairs(build(), tmp_path / "m"))


def test_a_tokenizer_that_does_not_tell_where_a_text_ends_takes_no_pairs(spec, tmp_path):
    with pytest.raises(DataError, match="the tokenizer of .*/m puts nothing between two. Join them in one column"):
        batch_of(spec, saved(bert(), tmp_path / "m"))


def test_columns_of_pairs_are_there_and_have_texts(spec, tmp_path):
    place = spec.partition("?")[0]
    for asked, message in (
        ("premise,label,hypothesis", "text=premise,label,hypothesis is not understood; expected .* of two whose texts"),
        ("premise,premise", "text=premise,premise is not understood"),
        ("premise,said", "there is no column 'said' for the text"),
    ):
        with pytest.raises(UsageError, match=message):
            load_domain(f"{place}?text={asked}", "train")
    for stream in ("", "&stream=1"):
        with pytest.raises(DataError, match="sample 0 is a int where a text should be"):
            batch_of(f"{place}?text=premise,label{stream}", of_pairs(bert(), tmp_path / f"m{stream}"))
    (tmp_path / "n.jsonl").write_text('{"a": "w1", "b": "w2"}')
    with pytest.raises(UsageError, match="which column has the texts.* or text=A,B for pairs. It has a, b"):
        load_domain(f"hf:{tmp_path / 'n.jsonl'}", "train")
