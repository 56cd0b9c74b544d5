"""The Fisher of a model on data, in one pass: its diagonal, or Kronecker-factored blocks for the layers that have them.

The diagonal is the mean over samples of squared per-sample gradients; for the blocks see `curvature.kfac`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ewc_finetune.choices import ESTIMATORS, Estimator, KfacForm, check_choice
from ewc_finetune.curvature import fallback
from ewc_finetune.curvature.backward_pass import Squares
from ewc_finetune.curvature.batching import gathered
from ewc_finetune.curvature.engine import Engine
from ewc_finetune.curvature.kfac_factors import LARGEST, BlockSums, mirrored
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.curvature.kronecker_factors import Full
from ewc_finetune.curvature.standard_error import RunningError, StandardError
from ewc_finetune.errors import ArchitectureError, DataError, DeviceError, NonFiniteError, UsageError
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.output_fisher import Factors
from ewc_finetune.modules.batch import Inputs, count, detached, take
from ewc_finetune.modules.devices import out_of_memory, random_state_kept
from ewc_finetune.modules.modes import evaluating, unchanged, uncompiled
from ewc_finetune.progress import Bar

# With so many outputs, `auto` still takes the exact estimator: one backward pass for each but one.
AUTO_EXACT = 32
# Fewer samples say too little of their own spread to stop by it.
_LEAST_SAMPLES = 200

# No more samples at once, since a chunk is summed in float32: 512 equal terms may lose 1e-5, a million 1e-2.
_CHUNK = 512
# Chunks that are added up in float32 before they go to the float64 totals, for models of so many weights at most.
_BLOCK = 16
_SMALL = 4_000_000
_PIECE = 1 << 18


@dataclass(frozen=True)
class Fisher:
    """What one pass over the data found.

    Attributes:
        values: The diagonal by parameter name, in the parameter's shape; float64 (float32 on mps). Parameters that are
            in a block are not among them.
        blocks: The Kronecker-factored blocks, likewise.
        samples: How many samples were seen (N).
        scores: `loss` (mean negative log-likelihood of the labels, nats), and `accuracy` where the likelihood has it;
            empty unless every batch has labels.
        estimator: The one that was used; `auto` is resolved.
        standard_error: Of the trace, relative to it; None for `batched`, which estimates nothing.
        path: How the gradients were taken, for people.
    """

    values: dict[str, Tensor]
    blocks: list[Block]
    samples: int
    scores: dict[str, float]
    estimator: Estimator
    standard_error: StandardError | None
    path: str


def compute_fisher(
    model: nn.Module,
    batches: Iterable[tuple[Inputs, Tensor | None]],
    likelihood: Likelihood,
    estimator: Estimator = "auto",
    *,
    kfac: KfacForm | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    draws: int = 1,
    rtol: float | None = None,
    rules: bool = True,
    generator: torch.Generator | None = None,
    bar: Bar | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Fisher:
    """Compute the Fisher information, `F = mean_n E_y[g g^T]` with `g = d log p(y | x_n) / d theta`: parts of it.

    What stands for E_y is the estimator's choice (Kirkpatrick et al. 2017, section 2). The model is used in eval mode
    and left exactly as it was: modes, buffers, gradients, flags, hooks, random state.

    Args:
        model: Maps a batch of inputs to outputs, each sample by itself.
        batches: Inputs and labels (or None) on the model's device. `batched` squares the mean of each as it comes.
        likelihood: Turns outputs into log p(y | x).
        estimator: Whose labels are used; `auto` is `exact` for up to 32 outputs and `sampled` beyond.
        kfac: Take Kronecker-factored blocks for the weights of linear maps and convolutions, each with its bias, and
            do this with several positions of a sample (`expand` or `reduce`); the diagonal for all others. None takes
            the diagonal of all.
        parameters: Those to differentiate by; all that require a gradient unless given.
        draws: How many labels `sampled` draws for each sample.
        rtol: Stop when the standard error of the trace, relative to it, is no larger; after 200 samples at least.
        rules: Whether to use layer rules, which are fast; without them each parameter takes the fallback.
        generator: Source of `sampled` labels, on the CPU; seeded with 0 unless given.
        bar: Told of every chunk of samples.
        note: Told what was chosen, and of what went otherwise than asked.

    Raises:
        UsageError: for an unknown estimator, options that don't go with it, or no parameters.
        ArchitectureError: if a single sample's gradient is not defined, or autograd cannot follow the model.
        DataError: if there is no sample, or outputs or labels do not suit the likelihood.
        NonFiniteError: if outputs or gradients hold NaN or infinity; the sample and parameter are named.
        DeviceError: if not even one sample fits into memory.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    if type(draws) is not int or draws < 1:
        raise UsageError(f"draws is {draws}; expected a whole number, at least 1")
    if draws > 1 and estimator not in ("sampled", "auto"):
        raise UsageError(f"draws is {draws}, and the {estimator} estimator draws nothing; use sampled")
    if rtol is not None and estimator == "batched":
        raise UsageError("the batched estimator has no standard error to stop at; give a number of samples")
    if parameters is None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ArchitectureError(f"{name} has type {parameter.dtype}; a Fisher is of real parameters. Exclude it")
    if not parameters:
        raise UsageError("there is no parameter to compute a Fisher for: all are frozen or excluded")
    draw = generator or torch.Generator().manual_seed(0)
    if kfac is not None and (estimator == "batched" or not rules):
        raise UsageError("K-FAC blocks are made by layer rules, of single samples: not with batched, nor without rules")
    run = _Run(model, parameters, likelihood, estimator, draws, rules, kfac, draw, note)
    with evaluating(model), unchanged(model), uncompiled(model), random_state_kept(run.device):
        for inputs, targets in gathered(batches, run.good_size):
            run.add(detached(inputs), targets, bar)
            reached = run.error.relative().trace if rtol is not None else None
            if rtol is not None and reached is not None and reached <= rtol and run.samples >= _LEAST_SAMPLES:
                note(f"stopped after {run.samples:,} samples: the trace's standard error is {reached:.1%}")
                break
        else:
            if rtol is not None:
                note(f"all {run.samples:,} samples are seen before the trace's standard error is {rtol:.1%}")
    return run.result()


class _Run:
    """The state of one pass."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        likelihood: Likelihood,
        estimator: Estimator,
        draws: int,
        rules: bool,
        kfac: KfacForm | None,
        generator: torch.Generator,
        note: Callable[[str], None],
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.likelihood = likelihood
        self.estimator = estimator
        self.draws = draws
        self.kfac = kfac
        self.generator = generator
        self.note = note
        self.engine = Engine(model, parameters, rules)
        self.device = next(iter(parameters.values())).device
        # float64 so that a million samples lose nothing.
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.totals = {n: torch.zeros(p.shape, dtype=dtype, device=self.device) for n, p in parameters.items()}
        # Of each layer with a block, the sums of its two factors.
        self.blocks: dict[str, tuple[Tensor, Tensor]] = {}
        # For a small model, adding to them would take as long as the pass itself: a few chunks are added up before.
        self.block: dict[str, Tensor] = {}
        self.recent_blocks: dict[str, tuple[Tensor, ...]] = {}
        self.block_length = _BLOCK if sum(p.numel() for p in parameters.values()) <= _SMALL else 1
        self.recent = 0
        self.error = RunningError(list(parameters), self.device)
        self.samples, self.loss, self.right, self.labelled = 0, 0.0, 0.0, True
        self.limit = _CHUNK  # less once it is known that so many don't fit into memory

    def good_size(self, inputs: Inputs) -> int:
        """Return how many samples of small batches go into one chunk."""
        if self.estimator == "batched":
            return 1
        try:
            return min(self.limit, self.engine.good_size(detached(inputs)))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return 1

    def add(self, inputs: Inputs, targets: Tensor | None, bar: Bar | None) -> None:
        """Take in one batch, in chunks that fit; none of it counts before all of a chunk is done."""
        size, start = count(inputs), 0
        while start < size:
            stop = size if self.estimator == "batched" else min(size, start + self.limit)
            labels = None if targets is None else targets[start:stop]
            state = self.generator.get_state()
            try:
                outputs, squares, blocks = self._chunk(take(inputs, slice(start, stop)), labels)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self.generator.set_state(state)
                self._halve(stop - start, error)
                continue
            self._commit(outputs, labels, squares, blocks)
            if bar is not None:
                bar.advance(stop - start)
            start = stop

    def _halve(self, size: int, error: BaseException) -> None:
        if self.estimator == "batched":
            raise DeviceError(
                f"a batch of {size} samples does not fit into memory, and batched takes each whole; "
                "lower the batch size"
            ) from error
        if size <= 1:
            raise DeviceError(
                "not even one sample at a time fits into memory; exclude layers, or use another device"
            ) from error
        self.limit = size // 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.note(f"out of memory with {size} samples at once; going on with {self.limit}")

    def _chunk(self, inputs: Inputs, targets: Tensor | None) -> tuple[Tensor, Squares, list[BlockSums]]:
        if self.estimator == "batched":
            outputs, squares = fallback.batch_mean(
                self.model, self.parameters, inputs, lambda outputs: self._factors(outputs, inputs, targets)
            )
            return outputs, squares, []
        if self.kfac is not None and not self.samples and not self.blocks:
            self._choose_layers(inputs, self.kfac)
        if self.estimator == "auto":
            number = math.prod(self.engine.plan(inputs).output_shape)
            self.estimator = "exact" if number <= AUTO_EXACT else "sampled"
            ignored = ", which draws nothing" if self.draws > 1 and self.estimator == "exact" else ""
            self.note(f"estimator: {self.estimator}, for a model with {number:,} outputs{ignored}")
        return self.engine.squares(inputs, lambda outputs: self._factors(outputs, inputs, targets))

    def _choose_layers(self, inputs: Inputs, form: KfacForm) -> None:
        """Decide on the first samples which layers get a block."""
        self.engine.form = form
        for layer in self.engine.plan(inputs).layers:
            if max(layer.inputs - (layer.bias is not None), layer.outputs) > LARGEST:
                self.note(
                    f"{layer.weight}: factors of {layer.inputs:,} and {layer.outputs:,} rows are too large for K-FAC "
                    f"(up to {LARGEST:,}); it gets the diagonal"
                )
                continue
            self.engine.layers[layer.weight] = layer
            for name in (layer.weight, layer.bias):
                if name is not None:
                    del self.totals[name]
            dtype = torch.float32 if self.device.type == "mps" else torch.float64
            self.blocks[layer.weight] = (
                torch.zeros(layer.inputs, layer.inputs, dtype=dtype, device=self.device),
                torch.zeros(layer.outputs, layer.outputs, dtype=dtype, device=self.device),
            )
        if not self.blocks:
            raise ArchitectureError(
                "there is no layer for K-FAC: it is of linear maps and convolutions whose weights are used once. "
                "Use the diagonal"
            )

    def _factors(self, outputs: Tensor, inputs: Inputs, targets: Tensor | None) -> Factors:
        """Return the vectors for these outputs, once outputs and targets are known to suit."""
        size = count(inputs)
        where = f"samples {self.samples} to {self.samples + size - 1}"
        if outputs.ndim == 0 or len(outputs) != size:
            raise DataError(
                f"{where}: {size} samples went in and outputs of shape {tuple(outputs.shape)} came out; "
                "the first dimension must be the batch"
            )
        if not outputs.sum().isfinite() and not outputs.isfinite().all():
            bad = (~outputs.isfinite().reshape(size, -1).all(dim=1)).nonzero()[0].item()
            raise NonFiniteError(
                f"{where}: the model's outputs for sample number {bad} of these hold NaN or infinity. "
                "Check the weights and that sample's input"
            )
        self.likelihood.check_outputs(outputs, where)
        if targets is not None:
            self.likelihood.check_targets(targets, tuple(outputs.shape[1:]), where)
        return self.likelihood.factors(outputs, targets, self.estimator, self.generator, self.draws)

    def _commit(self, outputs: Tensor, targets: Tensor | None, squares: Squares, blocks: Sequence[BlockSums]) -> None:
        """Count a chunk that is done."""
        size = len(outputs)
        parts = {name: part for name, (_, part) in squares.items()}
        parts |= {block.layer.weight: block.by_sample for block in blocks}
        zero = torch.zeros(size, dtype=next(iter(parts.values())).dtype if parts else None, device=self.device)
        by_sample = torch.stack([parts.get(name, zero) for name in self.parameters])
        if not by_sample.sum().isfinite():
            self._refuse(by_sample)
        for block in blocks:
            sums = (block.input, block.output)
            if block.layer.weight in self.recent_blocks:
                for total, part in zip(self.recent_blocks[block.layer.weight], sums, strict=True):
                    total.add_(part)
            else:
                self.recent_blocks[block.layer.weight] = sums
        for name, (value, _) in squares.items():
            if name in self.block:
                self.block[name] += value
            else:
                self.block[name] = value
        self.recent += 1
        if self.recent >= self.block_length:
            self._flush()
        self.error.add(by_sample)
        if targets is None:
            self.labelled = False
        else:
            self.loss += self.likelihood.loss(outputs, targets).item() * size
            self.right += self.likelihood.right(outputs, targets).item()
        self.samples += size

    def _refuse(self, by_sample: Tensor) -> None:
        bad = (~by_sample.isfinite()).nonzero().tolist()
        if not bad:  # each is finite, and only their sum is not: as large as float32 goes
            return
        row, sample = bad[0]
        raise NonFiniteError(
            f"sample {self.samples + sample}: the squared gradient by {list(self.parameters)[row]} holds NaN or "
            "infinity. Check the weights and the scale of that input, or consolidate in float32"
        )

    def _flush(self) -> None:
        """Add the block of recent chunks to the totals, in their wider type."""
        for name, squares in self.block.items():
            flat, total = squares.reshape(-1), self.totals[name].view(-1)
            # In pieces: a whole copy in the wider type costs more than the addition.
            for start in range(0, flat.numel(), _PIECE):
                total[start : start + _PIECE] += flat[start : start + _PIECE]
        for name, sums in self.recent_blocks.items():
            for part, total in zip(sums, self.blocks[name], strict=True):
                total.add_(part)
        self.block, self.recent_blocks, self.recent = {}, {}, 0

    def result(self) -> Fisher:
        """Return what was found.

        Raises:
            DataError: if there was not one sample.
        """
        if self.samples == 0:
            raise DataError("there is not one sample in the data, and no Fisher without one")
        self._flush()
        scores = {}
        if self.labelled:
            scores["loss"] = self.loss / self.samples
            if self.likelihood.metric is not None:
                scores[self.likelihood.metric] = self.right / self.samples
        batched = self.estimator == "batched"
        unreached = [name for name, total in self.totals.items() if not total.any()]
        blocks = [
            Block(
                layer.weight,
                layer.bias,
                layer.transposed,
                *(Full(mirrored(t) / self.samples) for t in self.blocks[name]),
            )
            for name, layer in self.engine.layers.items()
        ]
        return Fisher(
            values={name: total.div_(self.samples) for name, total in self.totals.items()},
            blocks=blocks,
            samples=self.samples,
            scores=scores,
            estimator=self.estimator,
            standard_error=None if batched else self.error.relative(),
            path="gradients: one a batch" if batched else self.engine.describe(unreached),
        )
