"""What a causal language model makes itself: samples of its own distribution, or answers to requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ewc_finetune.data.generated_file import read_generated, write_generated
from ewc_finetune.data.texts import Generated
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.modules.devices import random_state_kept

# How many samples are generated at once.
_AT_ONCE = 64


class GeneratedIds(Dataset[tuple[list[int], int]]):
    """Token ids of what was generated, and how many of each it began with, which the model did not make."""

    def __init__(self, samples: list[tuple[list[int], int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return self.samples[index]


def generate(model: Any, tokenizer: Any, asked: Generated, length: int, longest: int | None, name: str) -> GeneratedIds:
    """Draw samples from the model's own distribution, token after token; or read those that were kept.

    Torch's random state is left as it was.

    Args:
        model: A causal language model of transformers, on its device.
        tokenizer: Its tokenizer; a chat template that it has is put around requests.
        asked: What to generate.
        length: How many tokens at most, a request aside.
        longest: The most tokens that the model takes, where that is known.
        name: The name of the data in messages.

    Raises:
        UsageError: if nothing would be generated.
        DataError: if nothing says what samples begin with, a request is too long, or what was kept is something else.
    """
    if length < 2:
        raise UsageError(f"{name}: samples of one token say nothing; use length=2 or more")
    begin = _begin(model, tokenizer, name)
    begins = _requests(tokenizer, asked, longest, name) or [[begin]]
    if asked.kept is not None and os.path.lexists(asked.kept):
        rows = read_generated(asked.kept, asked, length, begins, model.get_input_embeddings().num_embeddings)
    else:
        with random_state_kept(next(model.parameters()).device, asked.seed):
            rows = list(_drawn(model, tokenizer, asked, begins, length, longest))
        if asked.kept is not None:
            write_generated(asked.kept, rows, asked, length)
    return GeneratedIds([(row, len(begins[n % len(begins)])) for n, row in enumerate(rows)])


def _drawn(
    model: Any, tokenizer: Any, asked: Generated, begins: list[list[int]], length: int, longest: int | None
) -> Iterator[list[int]]:
    """Yield the token ids of each sample, those that it begins with first."""
    device, end, begin = next(model.parameters()).device, tokenizer.eos_token_id, _begin(model, tokenizer, "")
    plain = {
        "do_sample": True,
        "top_k": 0,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": end if end is not None else 0,
        "use_cache": True,
    }
    for start in range(0, asked.count, _AT_ONCE):
        together = [begins[n % len(begins)] for n in range(start, min(asked.count, start + _AT_ONCE))]
        most = max(map(len, together)) + length if asked.prompts else length
        # Where one of them leaves less room, the others would get no more.
        for batch in [together] if longest is None or most <= longest else [[row] for row in together]:
            # Filled up on the left, behind which each goes on.
            widest = max(map(len, batch))
            ids = torch.tensor([[begin] * (widest - len(row)) + row for row in batch], device=device)
            mask = torch.tensor([[0] * (widest - len(row)) + [1] * len(row) for row in batch], device=device)
            most = widest + length if asked.prompts else length
            with _generating(model, {**plain, "max_length": min(most, longest or most)}):
                rows: Tensor = model.generate(ids, attention_mask=mask)
            for first, row in zip(batch, rows.tolist(), strict=True):
                made = row[widest : widest + length]
                yield first + made[: made.index(end) + 1 if end in made else len(made)]


def _begin(model: Any, tokenizer: Any, name: str) -> int:
    known = (tokenizer.bos_token_id, getattr(model.config, "bos_token_id", None), tokenizer.eos_token_id)
    begin = next((token for token in known if token is not None), None)
    if begin is None:
        raise DataError(f"{name}: neither the tokenizer nor the config names a token to begin with (bos_token_id)")
    return int(begin)


def _requests(tokenizer: Any, asked: Generated, longest: int | None, name: str) -> list[list[int]]:
    """Return the tokens of the requests, each with what stands before an answer."""
    requests = []
    for text in asked.prompts:
        if tokenizer.chat_template is None:
            ids = tokenizer(text)["input_ids"]
        else:
            message = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        if longest is not None and len(ids) >= longest:
            raise DataError(f"{name}: the request {text[:40]!r} has {len(ids)} tokens, and the model takes {longest}")
        requests.append(list(ids))
    return requests


@contextmanager
def _generating(model: Any, plain: dict[str, Any]) -> Iterator[None]:
    """Have the model generate by these settings alone: what they leave open would come from its own (temperature)."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig(**plain)
    try:
        yield
    finally:
        model.generation_config = own
