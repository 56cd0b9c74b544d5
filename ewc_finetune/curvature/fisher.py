"""The Fisher of a model on data, in one pass: its diagonal, or Kronecker-factored blocks for the layers that have them.

The diagonal is the mean over samples of squared per-sample gradients; for the blocks see `curvature.kfac`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from ewc_finetune.choices import ESTIMATORS, KFAC_FORMS, Estimator, KfacForm
from ewc_finetune.curvature import fallback
from ewc_finetune.curvature.backward_pass import Squares
from ewc_finetune.curvature.batching import gathered
from ewc_finetune.curvature.engine import Engine
from ewc_finetune.curvature.kfac_factors import LARGEST, BlockSums, mirrored
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.curvature.kronecker_factors import DenseFactor
from ewc_finetune.curvature.options import check_sampling
from ewc_finetune.curvature.standard_error import RunningError, StandardError
from ewc_finetune.errors import ArchitectureError, DataError, DeviceError, NonFiniteError, UsageError
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.output_fisher import OutputFisher
from ewc_finetune.modules.batch import Batch, Inputs, count, detached, take
from ewc_finetune.modules.devices import out_of_memory, random_state_kept
from ewc_finetune.modules.modes import evaluating, unchanged, uncompiled
from ewc_finetune.modules.precision import sum_dtype
from ewc_finetune.progress import Bar
from ewc_finetune.specs.options import check_declared, option, takes

# The most outputs for which `auto` takes the exact estimator, with one backward pass for each but one.
AUTO_EXACT = 32
# The fewest samples to stop by the standard error of: fewer say too little of their own spread.
_LEAST_SAMPLES = 200
# The most samples of a chunk, which is summed in float32: 512 equal terms may lose 1e-5, a million 1e-2.
_LARGEST_CHUNK = 512
# For a small model, adding to the totals would take as long as the pass: so many chunks are added up in float32 before.
_CHUNKS_TOGETHER = 16
# The most weights of a small model.
_SMALL = 4_000_000
# Numbers that are added to a total at a time: a whole copy in the wider type costs more than the addition.
_PIECE = 1 << 18


@dataclass(frozen=True)
class Fisher:
    """The Fisher of one pass over the data.

    Attributes:
        values: The diagonal by parameter name, in the parameter's shape; float64 (float32 on mps). Parameters that are
            in a block are not among them.
        blocks: The Kronecker-factored blocks, in the same precision.
        samples: How many samples were seen (N).
        scores: `loss` (mean negative log-likelihood of the labels, nats), and `accuracy` where the likelihood has it;
            empty unless every batch has labels.
        estimator: Whose labels were used; never `auto`, of which it is what was chosen.
        standard_error: The standard error of the trace, relative to it; None for `batched`, which estimates nothing.
        path: How the gradients were taken, for people.
    """

    values: dict[str, Tensor]
    blocks: list[Block]
    samples: int
    scores: dict[str, float]
    estimator: Estimator
    standard_error: StandardError | None
    path: str


@dataclass(frozen=True)
class FisherOptions:
    """What `compute_fisher` is asked for."""

    model: nn.Module = option(help="Maps a batch of inputs to outputs, each sample by itself.")
    batches: Iterable[Batch] = option(
        help="Inputs and labels (or None) on the model's device. `batched` squares the mean of each as it comes."
    )
    likelihood: Likelihood = option(help="Turns outputs into log p(y | x).")
    estimator: Estimator = option(
        "auto",
        "Whose labels are used; `auto` is `exact` for up to 32 outputs and `sampled` beyond.",
        choices=ESTIMATORS,
    )
    _: KW_ONLY
    kfac: KfacForm | None = option(
        None,
        "Take Kronecker-factored blocks for the weights of linear maps and convolutions, each with its bias, and do "
        "this with several positions of a sample (`expand` or `reduce`); the diagonal for all others. None takes the "
        "diagonal of all.",
        choices=KFAC_FORMS,
    )
    parameters: Mapping[str, Tensor] | None = option(
        None, "Those to differentiate by; all that require a gradient unless given."
    )
    draws: int = option(1, "How many labels `sampled` draws for each sample.", least=1)
    rtol: float | None = option(
        None, "Stop when the standard error of the trace, relative to it, is no larger; after 200 samples at least."
    )
    rules: bool = option(
        True, "Whether to use layer rules, which are fast; without them each parameter takes the fallback."
    )
    generator: torch.Generator | None = option(
        None, "Source of `sampled` labels, on the CPU; seeded with 0 unless given."
    )
    bar: Bar | None = option(None, "Told of every chunk of samples.")
    note: Callable[[str], None] = option(lambda _: None, "Told what was chosen, and of what went otherwise than asked.")

    def check(self) -> None:
        """Refuse values that can never be right, and options that do not go together.

        Raises:
            UsageError: naming the option, its value and what is expected.
        """
        check_declared(self)
        check_sampling(self.estimator, self.draws, self.rtol is not None)
        if self.kfac is not None and (self.estimator == "batched" or not self.rules):
            raise UsageError(
                "K-FAC blocks are made by layer rules, of single samples: not with batched, nor without rules"
            )

    def chosen_parameters(self) -> Mapping[str, Tensor]:
        """Return the parameters to differentiate by.

        Raises:
            ArchitectureError: if one is not of real numbers.
            UsageError: if there are none.
        """
        parameters = self.parameters
        if parameters is None:
            parameters = {
                name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
            }
        for name, parameter in parameters.items():
            if not parameter.is_floating_point():
                raise ArchitectureError(
                    f"{name} has type {parameter.dtype}; a Fisher is of real parameters. Exclude it"
                )
        if not parameters:
            raise UsageError("there is no parameter to compute a Fisher for: all are frozen or excluded")
        return parameters


@takes(FisherOptions)
def compute_fisher(options: FisherOptions) -> Fisher:
    """Compute the Fisher information, `F = mean_n E_y[g g^T]` with `g = d log p(y | x_n) / d theta`: parts of it.

    What stands for E_y is the estimator's choice (Kirkpatrick et al. 2017, section 2). The model is used in eval mode
    and left exactly as it was: modes, buffers, gradients, flags, hooks, random state.

    Raises:
        UsageError: for an unknown estimator, options that don't go with it, or no parameters.
        ArchitectureError: if a single sample's gradient is not defined, or autograd cannot follow the model.
        DataError: if there is no sample, or outputs or labels do not suit the likelihood.
        NonFiniteError: if outputs or gradients hold NaN or infinity; the sample and parameter are named.
        DeviceError: if not even one sample fits into memory.
    """
    options.check()
    run = _Pass(options)
    model, rtol = options.model, options.rtol
    with evaluating(model), unchanged(model), uncompiled(model), random_state_kept(run.device):
        for inputs, targets in gathered(options.batches, run.good_size):
            run.add(detached(inputs), targets)
            if rtol is None or run.samples < _LEAST_SAMPLES:
                continue
            reached = run.error.relative().trace
            if reached is not None and reached <= rtol:
                options.note(f"stopped after {run.samples:,} samples: the trace's standard error is {reached:.1%}")
                break
        else:
            if rtol is not None:
                options.note(f"all {run.samples:,} samples are seen before the trace's standard error is {rtol:.1%}")
    return run.result()


class _Pass:
    """The state of one pass."""

    def __init__(self, options: FisherOptions) -> None:
        self.options = options
        self.parameters = options.chosen_parameters()
        self.estimator: Estimator = options.estimator  # `auto` until the outputs are known
        self.generator = options.generator or torch.Generator().manual_seed(0)
        self.engine = Engine(options.model, self.parameters, options.rules)
        self.device = next(iter(self.parameters.values())).device
        # float64 so that a million samples lose nothing.
        self.wide = sum_dtype(self.device)
        # By parameter the sum of squares, or by weight of a layer with a block the sums of its two factors.
        self.totals: dict[str, tuple[Tensor, ...]] = {n: (self._zeros(*p.shape),) for n, p in self.parameters.items()}
        # The same of the latest chunks, which are not in the totals yet.
        self.recent: dict[str, tuple[Tensor, ...]] = {}
        self.recent_chunks = 0
        small = sum(p.numel() for p in self.parameters.values()) <= _SMALL
        self.chunks_together = _CHUNKS_TOGETHER if small else 1
        self.error = RunningError(list(self.parameters), self.device)
        self.samples, self.loss, self.right, self.labelled = 0, 0.0, 0.0, True
        self.limit = _LARGEST_CHUNK  # less once it is known that so many don't fit into memory

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.wide, device=self.device)

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

    def add(self, inputs: Inputs, targets: Tensor | None) -> None:
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
            if self.options.bar is not None:
                self.options.bar.advance(stop - start)
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
        self.options.note(f"out of memory with {size} samples at once; going on with {self.limit}")

    def _chunk(self, inputs: Inputs, targets: Tensor | None) -> tuple[Tensor, Squares, list[BlockSums]]:
        if self.estimator == "batched":
            outputs, squares = fallback.batch_mean(
                self.options.model,
                self.parameters,
                inputs,
                lambda outputs: self._output_fisher(outputs, inputs, targets),
            )
            return outputs, squares, []
        if self.options.kfac is not None and not self.samples and not self.engine.layers:
            self._choose_layers(inputs, self.options.kfac)
        if self.estimator == "auto":
            number = math.prod(self.engine.plan(inputs).output_shape)
            self.estimator = "exact" if number <= AUTO_EXACT else "sampled"
            ignored = ", which draws nothing" if self.options.draws > 1 and self.estimator == "exact" else ""
            self.options.note(f"estimator: {self.estimator}, for a model with {number:,} outputs{ignored}")
        return self.engine.squares(inputs, lambda outputs: self._output_fisher(outputs, inputs, targets))

    def _choose_layers(self, inputs: Inputs, form: KfacForm) -> None:
        """Decide on the first samples which layers get a block."""
        self.engine.form = form
        for layer in self.engine.plan(inputs).layers:
            if max(layer.inputs - (layer.bias is not None), layer.outputs) > LARGEST:
                self.options.note(
                    f"{layer.weight}: factors of {layer.inputs:,} and {layer.outputs:,} rows are too large for K-FAC "
                    f"(up to {LARGEST:,}); it gets the diagonal"
                )
                continue
            self.engine.layers[layer.weight] = layer
            if layer.bias is not None:
                del self.totals[layer.bias]
            self.totals[layer.weight] = tuple(self._zeros(rows, rows) for rows in (layer.inputs, layer.outputs))
        if not self.engine.layers:
            raise ArchitectureError(
                "there is no layer for K-FAC: it is of linear maps and convolutions whose weights are used once. "
                "Use the diagonal"
            )

    def _output_fisher(self, outputs: Tensor, inputs: Inputs, targets: Tensor | None) -> OutputFisher:
        """Return the Fisher at these outputs, once outputs and targets are known to suit."""
        size, likelihood = count(inputs), self.options.likelihood
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
        likelihood.check_outputs(outputs, where)
        if targets is not None:
            likelihood.check_targets(targets, tuple(outputs.shape[1:]), where)
        return likelihood.output_fisher(outputs, targets, self.estimator, self.generator, self.options.draws)

    def _commit(self, outputs: Tensor, targets: Tensor | None, squares: Squares, blocks: Sequence[BlockSums]) -> None:
        """Count a chunk that is done."""
        size = len(outputs)
        traces = {name: part for name, (_, part) in squares.items()}
        traces |= {block.layer.weight: block.by_sample for block in blocks}
        zero = torch.zeros(size, dtype=next(iter(traces.values())).dtype if traces else None, device=self.device)
        by_sample = torch.stack([traces.get(name, zero) for name in self.parameters])
        if not by_sample.sum().isfinite():
            self._refuse(by_sample)
        sums: dict[str, tuple[Tensor, ...]] = {name: (value,) for name, (value, _) in squares.items()}
        sums |= {block.layer.weight: (block.input, block.output) for block in blocks}
        for name, parts in sums.items():
            if name in self.recent:
                for total, part in zip(self.recent[name], parts, strict=True):
                    total.add_(part)
            else:
                self.recent[name] = parts
        self.recent_chunks += 1
        if self.recent_chunks >= self.chunks_together:
            self._flush()
        self.error.add(by_sample)
        if targets is None:
            self.labelled = False
        else:
            self.loss += self.options.likelihood.loss(outputs, targets).item() * size
            self.right += self.options.likelihood.right(outputs, targets).item()
        self.samples += size

    def _refuse(self, by_sample: Tensor) -> None:
        bad = (~by_sample.isfinite()).nonzero().tolist()
        if not bad:  # only their sum is too large for float32
            return
        row, sample = bad[0]
        raise NonFiniteError(
            f"sample {self.samples + sample}: the squared gradient by {list(self.parameters)[row]} holds NaN or "
            "infinity. Check the weights and the scale of that input, or consolidate in float32"
        )

    def _flush(self) -> None:
        """Add the sums of the latest chunks to the totals, in their wider type."""
        for name, parts in self.recent.items():
            for part, total in zip(parts, self.totals[name], strict=True):
                narrow, flat = part.reshape(-1), total.view(-1)
                for start in range(0, flat.numel(), _PIECE):
                    flat[start : start + _PIECE] += narrow[start : start + _PIECE]
        self.recent, self.recent_chunks = {}, 0

    def result(self) -> Fisher:
        """Return the Fisher of all that was added.

        Raises:
            DataError: if there was not one sample.
        """
        if self.samples == 0:
            raise DataError("there is not one sample in the data, and no Fisher without one")
        self._flush()
        metric, layers, scores = self.options.likelihood.metric, self.engine.layers, {}
        if self.labelled:
            scores["loss"] = self.loss / self.samples
            if metric is not None:
                scores[metric] = self.right / self.samples
        batched = self.estimator == "batched"
        squares = {name: total for name, (total, *_) in self.totals.items() if name not in layers}
        unreached = [name for name, total in squares.items() if not total.any()]
        blocks = []
        for name, layer in layers.items():
            factors = (DenseFactor(mirrored(total) / self.samples) for total in self.totals[name])
            blocks.append(Block(name, layer.bias, layer.transposed, *factors))
        return Fisher(
            values={name: total.div_(self.samples) for name, total in squares.items()},
            blocks=blocks,
            samples=self.samples,
            scores=scores,
            estimator=self.estimator,
            standard_error=None if batched else self.error.relative(),
            path="gradients: one a batch" if batched else self.engine.describe(unreached),
        )
