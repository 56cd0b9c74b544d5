"""transformers' Trainer with a model that is held by an anchor: one mixin, and one argument.

A small BERT with random weights learns which of three topics a text is of, and then texts of other words.

    pip install 'ewc-finetune[trainer]';  python examples/trainer.py
"""

from __future__ import annotations

import copy
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ewc_finetune as ewc
from ewc_finetune.integrations.transformers import EwcArguments, EwcMixin

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


class EwcTrainer(EwcMixin, Trainer):
    """A trainer as always, which takes `ewc=EwcArguments(...)` too."""


def texts(marked: bool, seed: int, count: int = 1500) -> list[dict[str, torch.Tensor]]:
    """Texts of eight words, most of them of one topic; those that are marked by a word of their own count otherwise."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randint(0, 3, (count,), generator=generator)
    words = torch.randint(0, 10, (count, 8), generator=generator) * 3
    others = torch.rand(count, 8, generator=generator) < 0.3
    words += torch.where(others, torch.randint(0, 3, (count, 8), generator=generator), topics[:, None])
    if marked:
        words[:, ::2], topics = 30, (topics + 1) % 3
    return [{"input_ids": 5 + row, "labels": topic} for row, topic in zip(words, topics, strict=True)]


def train(kind: type[Trainer], model: torch.nn.Module, data: list[dict[str, torch.Tensor]], **more: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=5, per_device_train_batch_size=32, learning_rate=1e-3, report_to=[], use_cpu=True,
            disable_tqdm=True, logging_strategy="no", save_strategy="no",
        )  # fmt: skip
        kind(model, arguments, train_dataset=data, **more).train()


def accuracy(model: torch.nn.Module, data: list[dict[str, torch.Tensor]]) -> float:
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.stack([row["input_ids"] for row in data])).logits
    return (logits.argmax(dim=1) == torch.stack([row["labels"] for row in data])).float().mean().item()


torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, max_position_embeddings=8, **SIZE))
old, new = texts(False, 0), texts(True, 1)
train(Trainer, model, old)
batches = [({"input_ids": row["input_ids"][None]}, row["labels"][None]) for row in old[:500]]
anchor = ewc.consolidate(model, batches, curvature="kfac", probe=200)
plain, held = copy.deepcopy(model), copy.deepcopy(model)
train(Trainer, plain, new)
train(EwcTrainer, held, new, ewc=EwcArguments(anchors=[anchor], rehearse=["probes"], rehearse_batch=32))
for name, tuned in (("before", model), ("plain", plain), ("held", held)):
    kept, learned = accuracy(tuned, texts(False, 2)), accuracy(tuned, texts(True, 3))
    print(f"{name}: {kept:.1%} of the old texts, {learned:.1%} of the new")
