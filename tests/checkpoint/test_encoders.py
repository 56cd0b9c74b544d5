"""An encoder of transformers becomes a classifier under a fresh head, as its own library would make it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.notes import Notes
from support.transformers_models import SMALL, bert, encoder, masked, pictures, reviews, saved
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    ViTMAEConfig,
    ViTMAEModel,
)

import ewc_finetune as ewc
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.errors import ArchitectureError, DataError, StorageError

IDS = {"input_ids": torch.arange(5, 15).view(2, 5)}


def adapt(model, data, output, **options):
    common = {"head": "new", "epochs": 1, "lr": 1e-3, "eval_on": []}
    return ewc.finetune(model, data, output=output, **{**common, **options})


def test_a_classifier_of_texts(tmp_path):
    folder, notes = saved(encoder(), tmp_path / "m"), Notes()
    done = adapt(folder, reviews(tmp_path / "r.jsonl"), tmp_path / "out", progress=notes)
    assert notes.about("a BertForSequenceClassification is made of it; what is fresh in it: classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert isinstance(again, BertForSequenceClassification)
    with torch.no_grad():
        assert torch.equal(again.eval()(**IDS).logits, done.model(**IDS).logits)
    assert list(again.config.id2label.values()) == ["bad", "fine", "good"]
    # From there it is a model folder as any other: held, adapted, and back.
    anchor = ewc.consolidate(tmp_path / "out", reviews(tmp_path / "r.jsonl"), output=tmp_path / "a.safetensors").path
    topics = reviews(tmp_path / "t.jsonl", labels=("sport", "world", "trade"))
    adapt(tmp_path / "out", topics, tmp_path / "topics", anchors=anchor)
    (old,) = ewc.evaluate(tmp_path / "topics", f"{reviews(tmp_path / 'r.jsonl')}", head=anchor)
    (new,) = ewc.evaluate(tmp_path / "topics", topics)
    assert old.samples == new.samples == 12


def test_its_weights_are_the_encoders(tmp_path):
    """Nothing but the head is another one, whatever the folder was before."""
    for kind, model in (("bert", encoder()), ("masked", masked())):
        folder = saved(model, tmp_path / kind)
        opened = open_model(folder, new_head=True).model
        own = {name.removeprefix("bert."): value for name, value in model.state_dict().items()}
        for name, value in opened.state_dict().items():
            part = name.removeprefix("bert.")
            if not part.startswith(("classifier", "pooler")) or part in own:
                assert value.equal(own[part]), name
    remarks = " ".join(open_model(tmp_path / "masked", new_head=True).remarks)
    assert "what is fresh in it: pooler, classifier" in remarks or "what is fresh in it: classifier, pooler" in remarks
    assert "no part of a classifier, left out" in remarks


def test_a_classifier_of_images(tmp_path):
    folder, data = saved(encoder("vit"), tmp_path / "m"), pictures(tmp_path / "p")
    done = adapt(folder, data, tmp_path / "out")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(pixels).logits, done.model(pixels).logits)
    assert ewc.evaluate(tmp_path / "out", data)[0].samples == 9


def test_it_is_written_over_what_it_wrote_alone(tmp_path):
    folder, data = saved(encoder(), tmp_path / "m"), reviews(tmp_path / "r.jsonl")
    adapt(folder, data, tmp_path / "out")
    adapt(folder, data, tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"notes.txt in it is no part of this model"):
        adapt(folder, data, tmp_path / "out", overwrite=True)


def test_a_run_of_the_same_seed_gives_the_same_bytes(tmp_path):
    folder, data = saved(encoder(), tmp_path / "m"), reviews(tmp_path / "r.jsonl")
    for name in ("a", "b"):
        adapt(folder, data, tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_classifiers_stay_what_they_are(tmp_path):
    opened = open_model(saved(bert(), tmp_path / "m"), new_head=True)
    assert not any("fresh" in remark for remark in opened.remarks)


def test_what_is_fresh_depends_on_the_seed_alone(tmp_path):
    folder, data = saved(masked(), tmp_path / "m"), reviews(tmp_path / "r.jsonl")
    found = []
    for outside, seed in ((1, 0), (2, 0), (1, 1)):
        torch.manual_seed(outside)
        model = adapt(folder, data, None, epochs=0, seed=seed).model
        found.append((model.bert.pooler.dense.weight, model.classifier.weight))
    same, other = (zip(found[0], one, strict=True) for one in found[1:])
    assert all(one.equal(again) for one, again in same)
    assert not any(one.equal(another) for one, another in other)


def test_weights_of_another_encoder_are_refused(tmp_path):
    """Those under other names, and a part of them."""
    data = reviews(tmp_path / "r.jsonl")
    for name, change in (("renamed", lambda key: f"0.{key}"), ("part", lambda key: key if "embed" in key else None)):
        folder = saved(encoder(), tmp_path / name)
        state = load_file(folder / "model.safetensors")
        save_file({new: value for key, value in state.items() if (new := change(key))}, folder / "model.safetensors")
        with pytest.raises(ArchitectureError, match="is in the config's model but not in the weights"):
            adapt(folder, data, None)


def test_what_is_no_encoder_is_said(tmp_path):
    folder, data = saved(encoder(), tmp_path / "m"), reviews(tmp_path / "r.jsonl")
    for call in (ewc.consolidate, ewc.evaluate):
        with pytest.raises(DataError, match="is a BertModel, whose outputs are no predictions. .* --head new makes a"):
            call(folder, data)
    name = "transformers:BertForSequenceClassification"
    with pytest.raises(
        ArchitectureError, match=r"has no head for a BertForSequenceClassification: classifier.* is not"
    ):
        ewc.consolidate(folder, data, architecture=name)
    broken = saved(encoder(), tmp_path / "b")
    config = json.loads((broken / "config.json").read_text()) | {"num_hidden_layers": 3}
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ArchitectureError, match=r"bert.encoder.layer.2.* is in the config's model but not in the weights"
    ):
        adapt(broken, data, tmp_path / "out")
    size = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTMAEModel(ViTMAEConfig(**size, intermediate_size=16)).save_pretrained(tmp_path / "mae")
    with pytest.raises(ArchitectureError, match="is a vit_mae, of which transformers has no classifier of texts or"):
        adapt(tmp_path / "mae", data, tmp_path / "out")


OTHERS = {
    "token classification": (BertForTokenClassification, 'likelihood="per-token"'),
    "question answering": (BertForQuestionAnswering, "wrap the model in one"),
    "multiple choice": (BertForMultipleChoice, "wrap the model in one"),
}


@pytest.mark.parametrize(("task", "kind", "way"), [(task, *known) for task, known in OTHERS.items()], ids=OTHERS)
def test_other_tasks_are_named_with_the_way_from_python(task, kind, way, tmp_path):
    torch.manual_seed(0)
    folder = saved(kind(BertConfig(**SMALL)).eval(), tmp_path / "m")
    with pytest.raises(DataError, match=f"goes into no model for {task}, which .* is: .*{way}"):
        ewc.consolidate(folder, reviews(tmp_path / "r.jsonl"))


def test_that_way_goes(tmp_path):
    torch.manual_seed(0)
    model = BertForTokenClassification(BertConfig(**SMALL, num_labels=3)).eval()
    ids = torch.randint(5, 50, (12, 6))
    labels = (ids % 3).where(torch.rand(12, 6) < 0.8, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    data = [{name: value[n : n + 4] for name, value in batch.items()} for n in (0, 4, 8)]
    anchor = ewc.consolidate(model, data, likelihood="per-token")
    before, after = (
        ewc.evaluate(model, data, likelihood="per-token")[0],
        ewc.finetune(model, data, anchors=anchor, lambdas=0.1, epochs=8, lr=1e-2, eval_on={"own": data}).after[0],
    )
    assert after.loss < before.loss
