"""`transformers.Trainer` with the mixin ends where a plain loop with `Penalty` does, and keeps what it says of it."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import ewc_finetune as ewc

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from support.transformers_models import bert, llama, saved  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from ewc_finetune.errors import AnchorMismatchError, UsageError  # noqa: E402
from ewc_finetune.integrations.arguments import EwcArguments  # noqa: E402
from ewc_finetune.integrations.transformers import EwcCallback, EwcMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


class EwcTrainer(EwcMixin, Trainer):
    pass


def rows(n=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 50, (n, 6), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones(6, dtype=torch.long), "labels": torch.tensor(k % 3)}
        for k, row in enumerate(ids)
    ]


def still(**settings):
    """A classifier without dropout, so that a plain loop can follow it."""
    return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)


@pytest.fixture(scope="module")
def old():
    """A model, its anchor with a probe, and rows of the new domain."""
    model = still()
    batch = {name: torch.stack([row[name] for row in rows(48, 1)]) for name in ("input_ids", "attention_mask")}
    labels = torch.stack([row["labels"] for row in rows(48, 1)])
    anchors = {
        kind: ewc.consolidate(model, [(batch, labels)], curvature=kind, probe=48) for kind in ("diagonal", "kfac")
    }
    return model, anchors


def arguments(folder, **more):
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 10,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 5,
        "weight_decay": 0.0,
        **more,
    }
    return TrainingArguments(str(folder), **settings)


class InOrder(EwcTrainer):
    """Takes the rows as they come, and divides the loss of a BERT by its micro-batches, which the model does not do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def by_hand(model, anchors, lambdas, data, *, steps=10, batch=4, accumulate=1, clip=0.0, lr=1e-3, amp=None):
    """The loop that everybody writes, with the penalty in it."""
    model = model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    penalty = ewc.Penalty(model, anchors, lambdas)
    batches = [data[k : k + batch] for k in range(0, len(data), batch)]
    at = 0
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            chosen = batches[at % len(batches)]
            at += 1
            inputs = {name: torch.stack([row[name] for row in chosen]) for name in chosen[0]}
            with torch.autocast("cpu", torch.bfloat16, enabled=amp is not None):
                loss = model(**inputs).loss
            (loss / accumulate).backward()
        penalty.add_gradient()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model, other, near=1e-5):
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=near, atol=near, msg=name)


@pytest.mark.parametrize("kind", ["diagonal", "kfac"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"max_grad_norm": 0.1}, {"clip": 0.1}),
        ({"gradient_accumulation_steps": 3}, {"accumulate": 3}),
        ({"bf16": True}, {"amp": torch.bfloat16}),
    ],
    ids=lambda settings: next(iter(settings), "plain") if isinstance(settings, dict) else None,
)
def test_it_is_the_plain_loop(kind, theirs, ours, old, tmp_path):
    model, anchors = old
    data = rows(24)
    trainer = InOrder(
        copy.deepcopy(model),
        arguments(tmp_path, **theirs),
        train_dataset=data,
        ewc=EwcArguments(anchors=[anchors[kind]], lambdas=[50.0]),
    )
    trainer.train()
    assert_same(trainer.model, by_hand(copy.deepcopy(model), anchors[kind], 50.0, data, **ours))


def test_a_callback_is_the_same_without_clipping(old, tmp_path):
    model, anchors = old

    class Plain(Trainer):
        _get_train_sampler = InOrder._get_train_sampler

    data, held = rows(24), EwcArguments(anchors=[anchors["diagonal"]], lambdas=[50.0])
    ends = {}
    for clip in (0.0, 0.1):
        trainer = Plain(
            copy.deepcopy(model),
            arguments(tmp_path, max_grad_norm=clip),
            train_dataset=data,
            callbacks=[EwcCallback(held)],
        )
        trainer.train()
        ends[clip] = trainer.model
    assert_same(ends[0.0], by_hand(copy.deepcopy(model), anchors["diagonal"], 50.0, data))
    clipped = by_hand(copy.deepcopy(model), anchors["diagonal"], 50.0, data, clip=0.1)
    with pytest.raises(AssertionError):  # the pull comes after the clipping
        assert_same(ends[0.1], clipped)


def test_what_is_logged_and_chosen_by(old, tmp_path):
    model, anchors = old
    trainer = EwcTrainer(
        copy.deepcopy(model),
        arguments(
            tmp_path,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="steps",
            save_steps=5,
            load_best_model_at_end=True,
            metric_for_best_model="retention",
            greater_is_better=True,
        ),
        train_dataset=rows(24),
        eval_dataset=rows(8, 2),
        ewc=EwcArguments(anchors=[anchors["kfac"]]),
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == 2
    assert all(line["penalty"] > 0 and 0 <= line["retention"] <= 1 for line in logged)
    assert [line["eval_retention"] for line in trainer.state.log_history if "eval_retention" in line]
    assert trainer.state.best_metric == max(
        line["eval_retention"] for line in trainer.state.log_history if "eval_retention" in line
    )


def test_what_is_saved_knows_its_anchors(old, tmp_path):
    model, anchors = old
    saved(model, tmp_path / "bert")
    trainer = EwcTrainer(
        copy.deepcopy(model),
        arguments(tmp_path / "out", max_steps=2),
        train_dataset=rows(24),
        ewc=EwcArguments(anchors=[anchors["diagonal"]]),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "new"))
    saved_lineage = json.loads((tmp_path / "new" / "ewc_finetune.json").read_text())["lineage"]
    assert [entry["name"] for entry in saved_lineage] == [anchors["diagonal"].provenance.name]
    batch = {name: torch.stack([row[name] for row in rows(8)]) for name in ("input_ids", "attention_mask")}
    second = ewc.consolidate(tmp_path / "new", [(batch, torch.zeros(8, dtype=torch.long))])
    assert second.provenance.lineage == saved_lineage


def test_it_goes_on_to_the_same_weights(old, tmp_path):
    model, anchors = old

    def trainer(steps):
        return EwcTrainer(
            copy.deepcopy(model),
            arguments(tmp_path / "out", max_steps=steps, save_strategy="steps", save_steps=6),
            train_dataset=rows(24),
            ewc=EwcArguments(anchors=[anchors["diagonal"]], rehearse=["probes"], rehearse_batch=4),
        )

    whole = trainer(12)
    whole.train()
    again = trainer(12)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    assert_same(again.model, whole.model, 1e-6)


def test_a_language_model_and_lora(tmp_path):
    peft = pytest.importorskip("peft")
    model = llama()
    ids = torch.randint(5, 50, (8, 6), generator=torch.Generator().manual_seed(0))
    anchor = ewc.consolidate(
        model, [({"input_ids": ids}, torch.where(ids > 5, ids, -100))], curvature="kfac", likelihood="per-token"
    )
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = EwcTrainer(
        adapted, arguments(tmp_path), train_dataset=data, ewc=EwcArguments(anchors=[anchor], lambdas=[10.0])
    )
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-2]["penalty"])
    assert trainer.holding.penalty.value() > 0


def far(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def test_what_is_wrong_is_said_before_the_first_step(old, tmp_path):
    model, anchors = old
    held = EwcArguments(anchors=[anchors["diagonal"]])

    def refused(words, kind=EwcTrainer, other=None, ewc_arguments=held, error=UsageError, **more):
        trainer = kind(
            copy.deepcopy(model) if other is None else other,
            arguments(tmp_path),
            train_dataset=rows(8),
            ewc=ewc_arguments,
            **more,
        )
        with pytest.raises(error, match=words):
            trainer.train()
        assert trainer.state.global_step == 0

    class Own(EwcTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.penalty = ewc.Penalty(self.model, anchors["diagonal"], 1.0)

    refused("name anchors", ewc_arguments=EwcArguments())
    refused(r"has a penalty of its own \(penalty\) beside EwcMixin", Own)
    refused("has an EwcCallback beside EwcMixin", callbacks=[EwcCallback(held)])
    refused("the model's weights are not those that", other=far(copy.deepcopy(model)), error=AnchorMismatchError)
    frozen = copy.deepcopy(model)
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("classifier" in name)
    only = ewc.consolidate(
        model, [({"input_ids": torch.ones(2, 3, dtype=torch.long)}, torch.zeros(2).long())], exclude=["classifier*"]
    )
    refused("is trained, so the penalty would do nothing", other=frozen, ewc_arguments=EwcArguments(anchors=[only]))
    attached = copy.deepcopy(model)
    optimizer = torch.optim.SGD(attached.parameters(), lr=0.1)
    ewc.Penalty(attached, anchors["diagonal"], 1.0).attach(optimizer)
    refused("a penalty is attached to this optimizer already", other=attached, optimizers=(optimizer, None))


def test_arguments_are_parsed():
    parser = transformers.HfArgumentParser(EwcArguments)
    (read,) = parser.parse_args_into_dataclasses(
        ["--anchors", "a.safetensors", "b.safetensors", "--lambdas", "10", "20", "--rehearse", "probes"]
    )
    assert read.anchors == ["a.safetensors", "b.safetensors"]
    assert read.lambdas == [10.0, 20.0]
    assert read.rehearse == ["probes"]
