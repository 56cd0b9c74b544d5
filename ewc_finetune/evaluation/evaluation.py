"""The scores of a model on several domains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex, overload

from ewc_finetune.errors import suggest
from ewc_finetune.evaluation.score import Score
from ewc_finetune.specs.html import html_table


class Evaluation(list[Score]):
    """A list of scores in the order of the domains, of which each can also be had by its domain's name.

    >>> scores = ewc_finetune.evaluate(model, {"old": old_data, "new": new_data})
    >>> scores["old"].accuracy

    Raises:
        KeyError: if no domain has that name, listing those that there are.
    """

    @overload
    def __getitem__(self, key: str | SupportsIndex) -> Score: ...
    @overload
    def __getitem__(self, key: slice) -> list[Score]: ...
    def __getitem__(self, key: str | SupportsIndex | slice) -> Score | list[Score]:
        if not isinstance(key, str):
            return super().__getitem__(key)
        found = next((score for score in self if score.domain == key), None)
        if found is None:
            raise KeyError(f"no domain is called {key!r}. {suggest(key, [score.domain for score in self])}")
        return found

    @property
    def metrics(self) -> list[str]:
        """What was measured beside loss and accuracy, by name."""
        return list(dict.fromkeys(name for score in self for name in score.metrics))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows of a table for people, a row for each domain."""
        perplexity = any(score.perplexity is not None for score in self)
        headers = ["domain", "samples", "loss", "accuracy", *(["perplexity"] if perplexity else []), *self.metrics]
        rows = [
            [
                score.domain,
                f"{score.samples:,}",
                f"{score.loss:.4f}",
                *("-" if v is None else f"{v:.4f}" for v in (score.accuracy, score.perplexity)[: 1 + perplexity]),
                *(figure(score, name) for name in self.metrics),
            ]
            for score in self
        ]
        return headers, rows

    def _repr_html_(self) -> str:
        return html_table(*self.table())


def figure(score: Score, metric: str) -> str:
    """Return what a metric is, for people."""
    value = score.metrics.get(metric)
    return "-" if value is None else f"{value:.4g}"


def change_table(before: Sequence[Score], after: Sequence[Score]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of scores before and after, a row for each domain."""
    loss = "loss (perplexity)" if any(score.perplexity is not None for score in before) else "loss"
    metrics = Evaluation(before).metrics
    headers = ["domain", "accuracy before", "after", "change", f"{loss} before", "after"]
    headers += [text for name in metrics for text in (f"{name} before", "after")]
    rows = [
        [
            b.domain,
            *(("-",) * 3 if b.accuracy is None or a.accuracy is None else _change(b.accuracy, a.accuracy)),
            *(f"{s.loss:.4f}" if s.perplexity is None else f"{s.loss:.4f} ({s.perplexity:.2f})" for s in (b, a)),
            *(figure(score, name) for name in metrics for score in (b, a)),
        ]
        for b, a in zip(before, after, strict=True)
    ]
    return headers, rows


def _change(before: float, after: float) -> tuple[str, str, str]:
    return f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"
