"""From raw texts and images to the inputs of a model of transformers, by its own tokenizer or image processor."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from ewc_finetune.data.domain import Domain
from ewc_finetune.data.generation import generate
from ewc_finetune.data.images import ImageFiles
from ewc_finetune.data.texts import Generated, Texts, TextStream
from ewc_finetune.errors import DataError, UsageError, first_line
from ewc_finetune.likelihood.base import IGNORED
from ewc_finetune.modules.task import ModelTask

# The most tokens of a text, where neither the data nor the model says.
_LENGTH = 512
# The share of tokens that a masked language model is to guess, as BERT was trained (Devlin et al. 2019, section 3.1).
_GUESSED = 0.15
# The share of the tokens to be guessed that are masked.
_MASKED = 0.8
# The share of the tokens to be guessed that are replaced by random tokens.
_REPLACED = 0.1


def preprocessed(domain: Domain, task: ModelTask | None, model: nn.Module, label: str) -> Domain:
    """Return a domain whose batches are inputs of the model; one whose samples are tensors of its own is left as it is.

    A causal language model is to predict each next token, a masked one the tokens that were masked, always the same of
    a text; what fills up the shorter texts of a batch is masked and has no label.

    Args:
        domain: A domain of texts, images, or samples to be generated.
        task: The task that the model is for, if it is known.
        model: The model, on its device and in eval mode, which generates samples.
        label: The name to use in messages.

    Raises:
        DataError: if the model has nothing that makes inputs of such samples.
        UsageError: if an option of the data is not for such a model.
    """
    kind = domain.samples
    raw = isinstance(kind, (Texts, TextStream, Generated, ImageFiles))
    if raw and task is not None and task.kind is None and task.other is not None:
        raise DataError(_only_from_python(domain.name, label, task.other))
    if isinstance(kind, (Texts, TextStream, Generated)):
        if task is not None and task.kind is None:
            raise DataError(
                f"{domain.name} has texts, and {label} is a {type(model).__name__}, whose outputs are no predictions. "
                "ewc-ft finetune --head new makes a classifier of it"
            )
        if task is None or task.kind == "image classification":
            raise DataError(
                f"{domain.name} has texts, and {label} is no language model or text classifier of transformers with "
                "its tokenizer. Name its folder, or turn the texts into tensors of token ids first"
            )
        return _of_texts(domain, kind, task, model, label)
    if task is not None and task.kind == "image classification" and _is_image(domain):
        if isinstance(kind, ImageFiles):  # the processor makes them alike
            domain = replace(domain, samples=replace(kind, alike=False))
        processor = _processor(task.folder)
        return replace(domain, collate=lambda samples: _images(processor, samples))
    if task is not None and task.kind not in (None, "image classification") and _is_image(domain):
        raise DataError(f"{domain.name} has images, and {label} is a {task.kind}, which takes texts")
    return domain


# Tasks whose models give logits for each token, of which the likelihood is known.
_OF_TOKENS = ("token classification", "sequence to sequence")


def _only_from_python(name: str, label: str, task: str) -> str:
    """Say how a model is used whose task no data spec has data for."""
    start = f"{name} goes into no model for {task}, which {label} is: no data spec has data for that task. "
    if task in _OF_TOKENS:
        return (
            f"{start}From Python it is adapted with batches of its own arguments, dictionaries of input_ids, "
            'attention_mask and labels (-100 where none counts), and likelihood="per-token"'
        )
    return (
        f"{start}From Python a module is adapted whose forward returns logits, or numbers, for each sample: wrap the "
        "model in one"
    )


def _of_texts(
    domain: Domain, samples: Texts | TextStream | Generated, task: ModelTask, model: nn.Module, label: str
) -> Domain:
    tokenizer = _tokenizer(task.folder)
    length = min(samples.length or task.length or _LENGTH, task.length or 1 << 30)
    if task.kind == "masked language model" and tokenizer.mask_token_id is None:
        raise DataError(f"{domain.name}: the tokenizer of {task.folder} has no mask token; save one into it")
    filler = _filler(tokenizer, model)
    if not isinstance(samples, Generated) and samples.paired:
        _check_pairs(domain.name, task, tokenizer, label)
    if isinstance(samples, Generated):
        if task.kind != "causal language model":
            raise UsageError(f"{domain.name}: a {task.kind} generates nothing; causal language models do")
        generated = generate(model, tokenizer, samples, length, task.length, domain.name)
        return replace(domain, samples=generated, collate=lambda parts: _generated(tokenizer, task, filler, parts))
    if task.kind == "text classification":
        domain = _renumbered(domain, samples, task)
        if task.likelihood == "gaussian" and domain.labels is not None and domain.labels.ndim == 1:
            domain = replace(domain, labels=domain.labels.float()[:, None])

        paired, told = samples.paired, _is_told_types(model)

        def classified(parts: list[tuple[Any, Tensor | None]]) -> Any:
            chosen = [text for text, _ in parts]
            if paired:
                inputs = _encode_pairs(tokenizer, chosen, length, filler, told)
            else:
                inputs = _padded(filler, _encode(tokenizer, chosen, length))
            return inputs, _labels([label for _, label in parts], task)

        return replace(domain, collate=classified)
    # The labels of a language model are the tokens of the text itself.
    domain = replace(domain, classes=None, labels=None)
    if isinstance(samples, Texts) and samples.pack is not None:
        parts = _packed(tokenizer, samples, min(samples.pack, length), domain.name)
        return replace(domain, samples=_Ids(parts), collate=lambda ids: _language(tokenizer, task, filler, ids))
    return replace(
        domain,
        collate=lambda pairs: _language(
            tokenizer, task, filler, _encode(tokenizer, [text for text, _ in pairs], length)
        ),
    )


@dataclass(eq=False)
class _Ids(torch.utils.data.Dataset[list[int]]):
    """Token ids, a list to a sample."""

    ids: Sequence[list[int]]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> list[int]:
        return self.ids[index]


def _encode(tokenizer: Any, texts: Sequence[str], length: int) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    return ids


def _is_told_types(model: Any) -> bool:
    """Whether a model is told of each token which text of a pair it is of."""
    takes = "token_type_ids" in inspect.signature(model.forward).parameters
    return takes and getattr(model.config, "type_vocab_size", 2) > 1


def _encode_pairs(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], length: int, filler: int, told: bool
) -> dict[str, Tensor]:
    """Return each pair as one sequence of tokens, with the text that each is of where the model is told."""
    first, second = (list(texts) for texts in zip(*pairs, strict=True))
    encoded = tokenizer(first, second, truncation="longest_first", max_length=length)
    inputs = _padded(filler, encoded["input_ids"])
    if told and "token_type_ids" in encoded:
        inputs["token_type_ids"] = _padded(0, encoded["token_type_ids"])["input_ids"]
    return inputs


def _check_pairs(name: str, task: ModelTask, tokenizer: Any, label: str) -> None:
    """Refuse pairs of texts for a model that does not tell where one ends."""
    if task.kind != "text classification":
        raise UsageError(
            f"{name}: text= names two columns, which is a pair for a text classifier, and {label} is a {task.kind}. "
            "Name one column"
        )
    if tokenizer.num_special_tokens_to_add(pair=True) <= tokenizer.num_special_tokens_to_add(pair=False):
        raise DataError(
            f"{name} has pairs of texts, and the tokenizer of {label} puts nothing between two. Join them in one "
            "column, with words between them as the model knows them, and name that: text=COLUMN"
        )


def _filler(tokenizer: Any, model: Any) -> int:
    """Return the token that fills up shorter texts; classifiers find the last token of a text by what it is not."""
    known = (getattr(model.config, "pad_token_id", None), tokenizer.pad_token_id, tokenizer.eos_token_id)
    filler = next((int(token) for token in known if token is not None), 0)
    if known[0] is None:
        model.config.pad_token_id = filler
    return filler


def _padded(filler: int, ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Fill up on the right with tokens that are masked; an empty text is one such token."""
    longest = max(1, *(len(sample) for sample in ids))
    inputs = torch.full((len(ids), longest), filler)
    mask = torch.zeros_like(inputs)
    for row, sample in enumerate(ids):
        inputs[row, : len(sample)] = torch.tensor(sample, dtype=torch.long)
        mask[row, : max(1, len(sample))] = 1
    return {"input_ids": inputs, "attention_mask": mask}


def _language(
    tokenizer: Any, task: ModelTask, filler: int, ids: Sequence[Sequence[int]]
) -> tuple[dict[str, Tensor], Tensor]:
    inputs = _padded(filler, ids)
    labels = torch.full_like(inputs["input_ids"], IGNORED)
    for row, sample in enumerate(ids):
        if task.kind == "causal language model":
            labels[row, : max(0, len(sample) - 1)] = torch.tensor(sample[1:], dtype=torch.long)
        else:
            _mask(tokenizer, inputs["input_ids"][row], labels[row], sample)
    return inputs, labels


def _generated(
    tokenizer: Any, task: ModelTask, filler: int, parts: Sequence[tuple[list[int], int]]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch of what was generated; what it began with has no label."""
    inputs, labels = _language(tokenizer, task, filler, [ids for ids, _ in parts])
    for row, (_, given) in enumerate(parts):
        labels[row, : given - 1] = IGNORED
    return inputs, labels


def _mask(tokenizer: Any, inputs: Tensor, labels: Tensor, sample: Sequence[int]) -> None:
    """Mask tokens as BERT was trained: which ones depends on the text alone."""
    whole = torch.tensor(sample, dtype=torch.long)
    draws = torch.Generator().manual_seed(zlib.crc32(whole.numpy().tobytes()))
    special = torch.isin(whole, torch.tensor(tokenizer.all_special_ids, dtype=torch.long))
    guessed = (torch.rand(len(sample), generator=draws) < _GUESSED) & ~special
    labels[: len(sample)][guessed] = whole[guessed]
    way = torch.rand(len(sample), generator=draws)
    others = torch.randint(len(tokenizer), (len(sample),), generator=draws)
    changed = torch.where(way < _MASKED, tokenizer.mask_token_id, whole)
    changed = torch.where(way >= 1 - _REPLACED, others, changed)
    inputs[: len(sample)] = torch.where(guessed, changed, whole)


def _packed(tokenizer: Any, samples: Texts, pack: int, name: str) -> list[list[int]]:
    """Join the texts, an end-of-text token behind each where there is one, and cut them; the last part is dropped."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stream: list[int] = []
    for start in range(0, len(samples), 1000):
        texts = [str(text) for text in samples.texts[start : start + 1000]]
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
            stream += ids + end
    parts = [stream[start : start + pack] for start in range(0, len(stream) - pack + 1, pack)]
    if not parts:
        raise DataError(f"{name}: its texts have {len(stream)} tokens together, fewer than pack={pack}")
    return parts


def _renumbered(domain: Domain, samples: Texts | TextStream | Generated, task: ModelTask) -> Domain:
    """Give labels that are names the numbers that the model has for them."""
    if not isinstance(samples, Texts) or domain.labels is None or not domain.classes or not task.classes:
        return domain
    if domain.classes == task.classes or not set(domain.classes) <= set(task.classes):
        return domain
    numbers = torch.tensor([task.classes.index(name) for name in domain.classes])
    labels = numbers[domain.labels]
    return replace(domain, samples=replace(samples, labels=labels), labels=labels, classes=task.classes)


def _labels(labels: list[Tensor | None], task: ModelTask) -> Tensor | None:
    present = [label for label in labels if label is not None]
    if len(present) < len(labels):
        return None
    targets = torch.stack(present)
    if task.likelihood == "gaussian" and targets.ndim == 1:
        targets = targets.float()[:, None]
    return targets


def _is_image(domain: Domain) -> bool:
    """Whether the samples are images as they come, in bytes; those in other numbers are somebody's inputs already."""
    samples: Any = domain.samples
    if isinstance(samples, TensorDataset):
        return samples.tensors[0].dtype == torch.uint8 and samples.tensors[0].ndim == 4
    if not domain.indexable or not len(samples):
        return False
    first = samples[0]
    first = first[0] if isinstance(first, (tuple, list)) else first
    return isinstance(first, Tensor) and first.dtype == torch.uint8 and first.ndim == 3


def _images(processor: Any, samples: list[Any]) -> Any:
    pairs = [sample if isinstance(sample, (tuple, list)) else (sample,) for sample in samples]
    # Grey ones become colour, which is what processors know.
    images = [pair[0].expand(3, -1, -1) if pair[0].shape[0] == 1 else pair[0] for pair in pairs]
    inputs = processor(images=images, return_tensors="pt", input_data_format="channels_first")["pixel_values"]
    return (inputs, default_collate([pair[1] for pair in pairs])) if len(pairs[0]) > 1 else inputs


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(
            f"{folder} has no tokenizer that can be read ({first_line(error)}); save one into it"
        ) from error


def _processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    if not (folder / "preprocessor_config.json").is_file():
        raise DataError(
            f"{folder} has no image processor (preprocessor_config.json), which would say how images become inputs; "
            "save one into it, or turn the images into tensors first"
        )
    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise DataError(f"{folder}: its image processor cannot be read ({first_line(error)})") from error
