"""The log of a run as TensorBoard reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ewc_finetune.errors import UsageError


class TensorBoard:
    """Writes the lines of a run's log as events.

    Args:
        folder: The folder to write to.
        step: So many are done already; what another process wrote of later ones is to be forgotten.

    Raises:
        UsageError: if the package is not installed.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise UsageError(
                "--tensorboard takes a package that is not installed: pip install 'ewc-finetune[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, line: dict[str, Any]) -> None:
        """Write one line: losses and rates, the scores of each domain, the retention of each probe."""
        step = line["step"]
        figures = {f"train/{name}": line[name] for name in ("loss", "penalty", "lr") if name in line}
        for domain, score in line.get("scores", {}).items():
            figures |= {f"{name}/{domain}": score[name] for name in ("accuracy", "loss", "perplexity")}
            figures |= {f"{name}/{domain}": value for name, value in score["metrics"].items()}
        for kept in line.get("retention", []):
            figures |= {f"{name}/{kept['anchor']}": kept[name] for name in ("divergence", "unchanged")}
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
