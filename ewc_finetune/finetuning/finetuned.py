"""What a fine-tune gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure
from torch import nn

from ewc_finetune.choices import NormStats
from ewc_finetune.errors import counted
from ewc_finetune.evaluation.evaluation import Evaluation, change_table
from ewc_finetune.evaluation.probe import Retention
from ewc_finetune.finetuning.lambda_search import Search
from ewc_finetune.finetuning.training_loss import TrainingLoss
from ewc_finetune.reporting.figure import run_charts
from ewc_finetune.reporting.plots import figure_of
from ewc_finetune.specs.html import html_table


@dataclass(frozen=True)
class Finetuned:
    """What a fine-tune gave.

    Attributes:
        model: The adapted model; the caller's own where a module was passed.
        before: Score on every evaluated domain before the first step, by place or name.
        after: The scores of the state that the run ended with.
        history: The lines of `metrics.jsonl`.
        search: How lambda was found, if it was looked for.
        steps: Optimizer steps taken.
        step: The one whose state this is: the last, or the best; 0 is the start.
        training_loss: How the loss of its own batches went; None if no step was taken.
        retention: What the state has kept of the answers to the anchors' probes.
        norm_stats: Whether normalisation statistics were `frozen` or followed the new data (`update`).
        lineage: The anchors that have pulled on the model, for `consolidate`; a checkpoint file carries them itself.
        head: What is known of its last layer, if it was given a new one; `consolidate` takes it too.
        output: The checkpoint file, where one was written.
        run: The run folder, where one was written.
    """

    model: nn.Module
    before: Evaluation
    after: Evaluation
    history: list[dict[str, Any]]
    search: Search | None
    steps: int
    step: int
    training_loss: TrainingLoss | None
    retention: list[Retention]
    norm_stats: NormStats
    lineage: list[dict[str, Any]]
    head: dict[str, Any] | None
    output: Path | None
    run: Path | None

    def __repr__(self) -> str:
        scores = [f"{b.domain} {b.main} to {a.main}" for b, a in zip(self.before, self.after, strict=True)]
        parts = [counted(self.steps, "step"), *scores, *([] if self.output is None else [str(self.output)])]
        return f"<Finetuned {type(self.model).__name__}: {', '.join(parts)}>"

    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Return heads and rows of tables for people: scores before and after, and what is kept of probes."""
        kept = [
            [
                f"{kept.data} in {kept.anchor}",
                f"{kept.samples:,}",
                "-" if kept.unchanged is None else f"{kept.unchanged:.1%}",
                f"{kept.divergence:.4g} nats",
            ]
            for kept in self.retention
        ]
        return [
            change_table(self.before, self.after),
            (["what is kept of the probes", "inputs", "unchanged", "divergence"], kept),
        ]

    def plot(self) -> Figure:
        """Draw loss and penalty over the steps, and the score on every domain, as `figure.png` has them."""
        return figure_of(run_charts(self.history), "Fine-tuning")

    def _repr_html_(self) -> str:
        where = "" if self.output is None else f"; {self.output}"
        caption = f"{type(self.model).__name__}: {counted(self.steps, 'step')}{where}"
        first, *others = self.tables()
        shown = html_table(*first, caption) or html_table(("",), [(caption,)])
        return shown + Markup("").join(html_table(*table) for table in others)
