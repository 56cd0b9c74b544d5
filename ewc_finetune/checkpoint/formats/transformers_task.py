"""What a model of transformers is for, told from its class and its config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ewc_finetune.choices import LikelihoodName
from ewc_finetune.modules.task import ModelTask, Task

T = TypeVar("T", bound=str)
# The tables of transformers (`models/auto/modeling_auto.py`) that name the classes of models for a task.
_TABLES: dict[Task, str] = {
    "text classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "masked language model": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal language model": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
}
# Tables of tasks that no data spec has data for.
_OTHERS: dict[str, str] = {
    "token classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "question answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "multiple choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "object detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "image segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "audio classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech recognition": "MODEL_FOR_CTC_MAPPING_NAMES",
}
# The tasks that have a class for each sample.
CLASSIFIERS: tuple[Task, ...] = ("text classification", "image classification")


def task_of(model: nn.Module) -> ModelTask | None:
    """Return what a module is for that somebody loaded with transformers, from a folder or the cache of the Hub."""
    config: Any = getattr(model, "config", None)
    name = getattr(config, "name_or_path", None)
    if not isinstance(name, str) or not name or not hasattr(config, "model_type"):
        return None
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, "config.json")
        except HFValidationError:  # the path of a folder that was removed
            return None
        if not isinstance(cached, str):
            return None
        folder = Path(cached).parent
    return task_of_class(type(model).__name__, config, folder)


def task_of_class(name: str, config: Any, folder: Path) -> ModelTask:
    """Return what a model is for by the name of its class, its config, and the folder with its tokenizer."""
    kind = kind_of(name)
    labels = dict(getattr(config, "id2label", None) or {})
    names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    told = any(label != f"LABEL_{number}" for number, label in enumerate(names))
    likelihood: LikelihoodName = "categorical"
    if kind in ("causal language model", "masked language model"):
        likelihood, told = "per-token", False
    elif getattr(config, "problem_type", None) == "multi_label_classification":
        likelihood = "bernoulli"
    elif getattr(config, "problem_type", None) == "regression" or len(names) == 1:
        likelihood, told = "gaussian", False
    length = getattr(config, "max_position_embeddings", None)
    # Models of the RoBERTa family number positions from 2 on, behind the padding index.
    kept = 2 if getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert") else 0
    longest = length - kept if isinstance(length, int) else None
    return ModelTask(folder, kind, likelihood, names if told else None, longest, _task_in(_OTHERS, name))


def classifier_of(model_type: str) -> str | None:
    """Return the class of the classifier of texts, else of images, for a type of models; None where there is none."""
    from transformers.models.auto import modeling_auto

    names = [getattr(modeling_auto, _TABLES[task]).get(model_type) for task in CLASSIFIERS]
    return next((name if isinstance(name, str) else name[0] for name in names if name), None)


def kind_of(name: str) -> Task | None:
    """Return the task of a class of models; None where it is none of those known here."""
    return _task_in(_TABLES, name)


def _task_in(tables: Mapping[T, str], name: str) -> T | None:
    from transformers.models.auto import modeling_auto

    for task, table in tables.items():
        entries = getattr(modeling_auto, table, {}).values()
        if any(name in ([entry] if isinstance(entry, str) else entry) for entry in entries):
            return task
    return None
