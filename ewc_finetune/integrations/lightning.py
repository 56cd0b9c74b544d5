"""Lightning's Trainer, with a module that is held by anchors.

>>> Trainer(callbacks=[EwcCallback(EwcArguments(anchors=["old.anchor.safetensors"]))]).fit(module, new)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.optim import Optimizer

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.state_dict import noted
from ewc_finetune.errors import UsageError
from ewc_finetune.integrations.arguments import EwcArguments
from ewc_finetune.integrations.holding import Holding


class EwcCallback(Callback):  # type: ignore[misc]
    """Holds the module of a trainer by anchors, under automatic and manual optimization.

    The pull is added once for each step of an optimizer, to the parameters that this one has, after gradients are
    unscaled and before they are clipped. `penalty` is logged beside the module's own values, and where anchors have
    probes `retention` after each validation (monitor="retention"). Checkpoints say which anchors had a part in them.

    Args:
        ewc: What the module is held by.

    Raises:
        UsageError: before the first step: if there is nothing to be held by; if a penalty is there already; if the
            strategy is DeepSpeed or FSDP; or if an optimizer steps without Lightning's knowledge.
        AnchorMismatchError: likewise, if an anchor is of another model.
    """

    def __init__(self, ewc: EwcArguments) -> None:
        self.ewc = ewc
        self._holding: Holding | None = None
        self._steps = 0
        self._told: set[int] = set()  # optimizers of which a step is about to come

    @property
    def holding(self) -> Holding:
        """What holds the module, from the beginning of training on."""
        if self._holding is None:
            raise UsageError("the module is held once training begins")
        return self._holding

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `Callback`."""
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            raise UsageError(
                f"under {type(trainer.strategy).__name__} no process has the whole weights and gradients, which the "
                "penalty is of; train with DDP, or on one device"
            )
        self._holding = Holding(pl_module, self.ewc, fresh=self._steps == 0)
        for optimizer in trainer.optimizers:
            self._holding.penalty.check_optimizer(optimizer, alone=len(trainer.optimizers) == 1)
            optimizer.register_step_pre_hook(self._check_told)
        self._holding.skip(self._steps)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """See `Callback`."""
        self.holding.add_for(optimizer, step=self._steps)
        self._told.add(id(optimizer))
        self._steps += 1

    def _check_told(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure", *args[1:2] or (None,)) is None and id(optimizer) not in self._told:
            raise UsageError(
                "an optimizer steps without Lightning's knowledge, and so without the penalty; under manual "
                "optimization take it from self.optimizers(), and call its step()"
            )
        self._told.discard(id(optimizer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """See `Callback`."""
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log("penalty", self.holding.penalty.value())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See `Callback`."""
        kept = None if self._holding is None else self._holding.retention()
        if kept is not None:
            pl_module.log("retention", kept)

    def state_dict(self) -> dict[str, Any]:
        """See `Callback`."""
        return {"steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback`."""
        self._steps = int(state_dict["steps"])

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """See `Callback`: what is known of the weights goes with their state dict."""
        if self._holding is not None:
            metadata = ModelMetadata(lineage=self._holding.lineage)
            checkpoint["state_dict"] = noted(checkpoint["state_dict"], metadata)
