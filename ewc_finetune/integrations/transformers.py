"""`transformers.Trainer`, and TRL's trainers on top of it, with a model that is held by anchors.

>>> class EwcTrainer(EwcMixin, Trainer): ...
>>> trainer = EwcTrainer(model, arguments, train_dataset=new, ewc=EwcArguments(anchors=["old.anchor.safetensors"]))
>>> trainer.train()
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.sidecar import write_sidecar
from ewc_finetune.errors import UsageError
from ewc_finetune.integrations.arguments import EwcArguments
from ewc_finetune.integrations.holding import Holding
from ewc_finetune.penalty.penalty import Penalty

if TYPE_CHECKING:
    from torch import Tensor, nn

# A mixin: to type checkers it is what it is mixed into.
_Base: Any = Trainer if TYPE_CHECKING else object


class EwcMixin(_Base):  # type: ignore[misc]
    """Holds the model of a trainer by anchors: put it before `Trainer`, or a trainer of TRL, in a class of your own.

    The pull is added once for each step of the optimizer, after gradients were summed over micro-batches and processes,
    and before they are clipped. `penalty` and, where anchors have probes, `retention` are logged beside `loss`, and
    `eval_retention` is among the metrics of an evaluation (`metric_for_best_model`). What is saved says which anchors
    had a part in it.

    Args:
        ewc: What the model is held by. The other arguments are the trainer's.

    Raises:
        UsageError: before the first step: if there is nothing to be held by; if the penalty is there already; if the
            trainer uses DeepSpeed or FSDP.
        AnchorMismatchError: likewise, if an anchor is of another model.
    """

    def __init__(self, *args: Any, ewc: EwcArguments, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ewc = ewc
        self._holding: Holding | None = None
        _check_strategy(self)
        self.add_callback(_BeforeTraining(self))

    @property
    def holding(self) -> Holding:
        """What holds the model, made when it is first asked for."""
        if self._holding is None:
            self._holding = Holding(self.model, self.ewc, fresh=self.state.global_step == 0)
        return self._holding

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """See `Trainer`: at the last micro-batch of a step the pull is added."""
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        if self.accelerator.sync_gradients:
            scaler = self.accelerator.scaler
            self.holding.add(1.0 if scaler is None else scaler.get_scale(), self.state.global_step)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See `Trainer`: `penalty` and `retention` stand beside `loss`."""
        super().log(logs | self.holding.readings() if "loss" in logs else logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `Trainer`: `retention` is one of the metrics, once for all data that is evaluated."""
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval")
        kept = self.holding.readings().get("retention") if prefix == "eval" else None
        if kept is not None:
            metrics[f"{prefix}_retention"] = kept
            super().log({f"{prefix}_retention": kept})
        return metrics

    def _save(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        super()._save(output_dir, *args, **kwargs)
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        write_sidecar(folder, ModelMetadata(lineage=self.holding.lineage))


class _BeforeTraining(TrainerCallback):  # type: ignore[misc]
    """Looks at what is to be trained, once all of it is there."""

    def __init__(self, trainer: EwcMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        trainer = self._trainer
        own = next((name for name, value in vars(trainer).items() if isinstance(value, Penalty)), None)
        if own is not None or any(isinstance(one, EwcCallback) for one in trainer.callback_handler.callbacks):
            where = "an EwcCallback" if own is None else f"a penalty of its own ({own})"
            raise UsageError(f"the trainer has {where} beside EwcMixin, and would pull twice; take one of them out")
        trainer.holding.penalty.check_optimizer(kwargs["optimizer"])
        trainer.holding.skip(state.global_step)


class EwcCallback(TrainerCallback):  # type: ignore[misc]
    """Holds the model of a trainer by anchors, for those who cannot subclass it: `Trainer(..., callbacks=[this])`.

    It adds the pull after gradients were clipped, for `Trainer` calls its callbacks then (`max_grad_norm=0` makes it
    the same as `EwcMixin`), and logs nothing.

    Args:
        ewc: What the model is held by.
    """

    def __init__(self, ewc: EwcArguments) -> None:
        self.ewc = ewc
        self._holding: Holding | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        self._holding = Holding(kwargs["model"], self.ewc, fresh=state.global_step == 0)
        self._holding.penalty.check_optimizer(kwargs["optimizer"])
        self._holding.skip(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See `TrainerCallback`."""
        if self._holding is not None:
            # `Trainer` has looked at the gradients' norm by now, so that under fp16 they are unscaled.
            self._holding.add(1.0, state.global_step)


def _check_strategy(trainer: Any) -> None:
    """Refuse ways of training in which a process does not have the whole gradients.

    Raises:
        UsageError: naming it.
    """
    for name, words in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        if getattr(trainer, name, False):
            raise UsageError(
                f"under {words} no process has the whole weights and gradients, which the penalty is of; train with "
                "DDP (torchrun), or on one device"
            )
