"""LoRA through PEFT with a model that is held by an anchor of its whole weights.

A small causal language model with random weights learns a rule of counting, and then another one through LoRA alone.

    pip install 'ewc-finetune[peft]';  python examples/lora.py
"""

from __future__ import annotations

import copy

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import ewc_finetune as ewc

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def sequences(step: int, marker: int, seed: int, count: int = 600) -> torch.Tensor:
    """Sequences that count on by a step among twenty words, and begin with a marker."""
    start = torch.randint(0, 20, (count, 1), generator=torch.Generator().manual_seed(seed))
    words = (start + step * torch.arange(10)) % 20
    return torch.cat([torch.full((count, 1), marker), words], dim=1)


def train(model: torch.nn.Module, data: torch.Tensor, lr: float, anchor: ewc.Anchor | None = None) -> torch.nn.Module:
    """An ordinary loop, in which the penalty needs no line of its own."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr, weight_decay=0.0)
    if anchor is not None:
        ewc.Penalty(model, anchor, 10.0).attach(optimizer)
    for epoch in range(12):
        for batch in data[torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))].split(20):
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
    return model


def accuracy(model: torch.nn.Module, data: torch.Tensor) -> float:
    """The share of words that are foretold, from the third on."""
    with torch.no_grad():
        foretold = model(input_ids=data).logits[:, 2:-1].argmax(dim=2)
    return (foretold == data[:, 3:]).float().mean().item()


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=24, num_key_value_heads=4, max_position_embeddings=16, **SIZE))
old, new = sequences(1, 20, 0), sequences(3, 21, 1)
train(model, old, 3e-3)
anchor = ewc.consolidate(model, [({"input_ids": old}, old)], curvature="kfac", likelihood="per-token")
adapters = LoraConfig(r=8, target_modules="all-linear")
plain = train(get_peft_model(copy.deepcopy(model), adapters), new, 3e-3)
held = train(get_peft_model(copy.deepcopy(model), adapters), new, 3e-3, anchor)
for name, tuned in (("before", model), ("plain", plain), ("held", held)):
    kept, learned = accuracy(tuned, sequences(1, 20, 2)), accuracy(tuned, sequences(3, 21, 3))
    print(f"{name}: {kept:.1%} by ones, {learned:.1%} by threes")
