"""The diagonal Fisher of a model on data: one pass, the mean over samples of squared per-sample gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ewc_finetune.choices import ESTIMATORS, Estimator, check_choice
from ewc_finetune.curvature import fallback
from ewc_finetune.curvature.plan import Plan, make_plan
from ewc_finetune.curvature.ruled import CourseChangedError, RuledPass, Squares, differentiable
from ewc_finetune.curvature.standard_error import RunningError, StandardError
from ewc_finetune.curvature.uses import Workspace
from ewc_finetune.devices import random_state_kept
from ewc_finetune.errors import DataError, DeviceError, NonFiniteError, UsageError
from ewc_finetune.inputs import Inputs, call, count, detached, each, take
from ewc_finetune.likelihood import Factors, Likelihood
from ewc_finetune.modes import evaluating
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
class DiagonalFisher:
    """What one pass over the data found.

    Attributes:
        values: The diagonal by parameter name, in the parameter's shape; float64 (float32 on mps).
        samples: How many samples were seen (N).
        scores: `loss` (mean negative log-likelihood of the labels, nats), and `accuracy` where the likelihood has it;
            empty without labels.
        estimator: The one that was used; `auto` is resolved.
        standard_error: Of the trace, relative to it; None for `batched`, which estimates nothing.
        path: How the gradients were taken, for people.
    """

    values: dict[str, Tensor]
    samples: int
    scores: dict[str, float]
    estimator: Estimator
    standard_error: StandardError | None
    path: str


def diagonal_fisher(
    model: nn.Module,
    batches: Iterable[tuple[Inputs, Tensor | None]],
    likelihood: Likelihood,
    estimator: Estimator = "auto",
    *,
    parameters: Mapping[str, Tensor] | None = None,
    draws: int = 1,
    rtol: float | None = None,
    generator: torch.Generator | None = None,
    bar: Bar | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> DiagonalFisher:
    """Compute the diagonal Fisher information, `F_i = mean_n E_y[(d log p(y | x_n) / d theta_i)^2]`.

    What stands for E_y is the estimator's choice (Kirkpatrick et al. 2017, section 2). The model is used in eval mode
    and left exactly as it was: modes, statistics, gradients, flags, random state.

    Args:
        model: Maps a batch of inputs to outputs, each sample by itself.
        batches: Inputs and labels (or None) on the model's device. `batched` squares the mean of each as it comes.
        likelihood: Turns outputs into log p(y | x).
        estimator: Whose labels are used; `auto` is `exact` for up to 32 outputs and `sampled` beyond.
        parameters: Those to differentiate by; all that require a gradient unless given.
        draws: How many labels `sampled` draws for each sample.
        rtol: Stop when the standard error of the trace, relative to it, is no larger; after 200 samples at least.
        generator: Source of `sampled` labels, on the CPU; seeded with 0 unless given.
        bar: Told of every chunk of samples.
        note: Told what was chosen, and of what went otherwise than asked.

    Raises:
        UsageError: for an unknown estimator, or options that don't go with it.
        ArchitectureError: if a single sample's gradient is not defined, or autograd cannot follow the model.
        DataError: if there is no sample, or outputs or labels do not suit the likelihood.
        NonFiniteError: if outputs or gradients hold NaN or infinity; the sample and parameter are named.
        DeviceError: if not even one sample fits into memory.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    if draws < 1:
        raise UsageError(f"draws is {draws}; expected at least 1")
    if draws > 1 and estimator not in ("sampled", "auto"):
        raise UsageError(f"draws is {draws}, and the {estimator} estimator draws nothing; use sampled")
    if rtol is not None and estimator == "batched":
        raise UsageError("the batched estimator has no standard error to stop at; give a number of samples")
    if parameters is None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    run = _Run(model, parameters, likelihood, estimator, draws, generator or torch.Generator().manual_seed(0), note)
    with evaluating(model), random_state_kept(run.device):
        for inputs, targets in batches:
            run.add(detached(inputs), targets, bar)
            if rtol is not None and run.samples >= _LEAST_SAMPLES:
                reached = run.error.relative().trace
                if reached is not None and reached <= rtol:
                    note(f"stopped after {run.samples:,} samples: the trace's standard error is {reached:.1%}")
                    break
    return run.result()


@dataclass(frozen=True)
class _Chunk:
    """What one chunk of samples gave."""

    outputs: Tensor
    targets: Tensor | None
    squares: Squares


class _Run:
    """The state of one pass."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        likelihood: Likelihood,
        estimator: Estimator,
        draws: int,
        generator: torch.Generator,
        note: Callable[[str], None],
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.likelihood = likelihood
        self.estimator = estimator
        self.draws = draws
        self.generator = generator
        self.note = note
        self.device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        # float64 so that a million samples lose nothing.
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.totals = {n: torch.zeros(p.shape, dtype=self.dtype, device=self.device) for n, p in parameters.items()}
        # For a small model, adding to them would take as long as the pass itself: a few chunks are added up before.
        self.block: dict[str, Tensor] = {}
        self.block_length = _BLOCK if sum(p.numel() for p in parameters.values()) <= _SMALL else 1
        self.recent = 0
        self.error = RunningError(list(parameters), self.device)
        self.samples, self.loss, self.right, self.labelled = 0, 0.0, 0.0, True
        self.workspace = Workspace()
        self.plan: Plan | None = None
        self.limit = _CHUNK  # less once it is known that so many don't fit into memory
        self.changed = 0  # samples for which the model did something else than for the first ones
        self.fallback: fallback.Fallback | None = None
        self.refusal: str | None = None

    def add(self, inputs: Inputs, targets: Tensor | None, bar: Bar | None) -> None:
        """Take in one batch, in chunks that fit; none of it counts before all of a chunk is done."""
        size = count(inputs)
        if size and self.plan is None:
            self._prepare(inputs)
        start = 0
        while start < size:
            stop = size if self.estimator == "batched" else min(size, start + self.limit)
            chunk = take(inputs, slice(start, stop))
            labels = None if targets is None else targets[start:stop]
            state = self.generator.get_state()
            try:
                found = self._chunk(chunk, labels)
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                self.generator.set_state(state)
                self._halve(stop - start)
                continue
            self._commit(found, stop - start)
            if bar is not None:
                bar.advance(stop - start)
            start = stop

    def _prepare(self, inputs: Inputs) -> None:
        if self.estimator == "batched":
            with torch.no_grad():
                outputs = call(self.model, take(inputs, slice(1)))
            self.plan = Plan((), {}, (), (), tuple(outputs.shape[1:]))
            return
        self.plan = make_plan(self.model, self.parameters, inputs)
        if self.estimator == "auto":
            few = math.prod(self.plan.output_shape) <= AUTO_EXACT
            self.estimator = "exact" if few else "sampled"
            size = f"{math.prod(self.plan.output_shape):,} outputs"
            self.note(f"estimator: {self.estimator}, for a model with {size}")

    def _halve(self, size: int) -> None:
        if self.estimator == "batched":
            raise DeviceError(
                f"a batch of {size} samples does not fit into memory, and batched takes each whole; "
                "lower the batch size"
            )
        if size <= 1:
            raise DeviceError("not even one sample at a time fits into memory; exclude layers, or use another device")
        self.limit = size // 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.note(f"out of memory with {size} samples at once; going on with {self.limit}")

    def _chunk(self, inputs: Inputs, targets: Tensor | None) -> _Chunk:
        plan = self.plan
        if plan is None or self.estimator == "batched":
            outputs = self._checked(self._forward(inputs), inputs, targets)
            factors = self._factors(outputs, targets)
            means = fallback.batch_mean(self.model, self.parameters, inputs, factors.stack(slice(None)))
            return _Chunk(outputs, targets, means)
        rest = {name: self.parameters[name] for name in plan.rest}
        try:
            outputs, factors, squares = self._ruled(plan, inputs, targets)
        except CourseChangedError:
            self.changed += count(inputs)
            rest = {name: p for name, p in self.parameters.items() if name not in plan.unused}
            outputs, factors, squares = self._ruled(None, inputs, targets)
        if rest:
            squares |= self._fall_back(rest, inputs, factors)
        return _Chunk(outputs.detach(), targets, squares)

    def _ruled(self, plan: Plan | None, inputs: Inputs, targets: Tensor | None) -> tuple[Tensor, Factors, Squares]:
        """Run the model once; return its outputs, their factors, and the squares of the parameters with rules."""
        ruled = {name: self.parameters[name] for name in plan.ruled} if plan is not None else {}
        if plan is None or not ruled:
            outputs = self._checked(self._forward(inputs), inputs, targets)
            return outputs, self._factors(outputs, targets), {}
        with differentiable(self.model, ruled):
            passed = RuledPass(self.model, ruled, plan.course, self._fresh(inputs), self.workspace)
            with passed:
                outputs = self._checked(passed.outputs, inputs, targets)
                factors = self._factors(outputs, targets)
                return outputs, factors, passed.squares(factors)

    @torch.no_grad()
    def _forward(self, inputs: Inputs) -> Tensor:
        return call(self.model, self._fresh(inputs))

    def _fresh(self, inputs: Inputs) -> Inputs:
        """Return a copy, if the model would change it."""
        return each(torch.clone, inputs) if self.plan is not None and self.plan.mutates else inputs

    def _factors(self, outputs: Tensor, targets: Tensor | None) -> Factors:
        return self.likelihood.factors(outputs, targets, self.estimator, self.generator, self.draws)

    def _checked(self, outputs: Tensor, inputs: Inputs, targets: Tensor | None) -> Tensor:
        """Return the outputs, once outputs and targets are known to suit."""
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
        return outputs

    def _fall_back(self, parameters: Mapping[str, Tensor], inputs: Inputs, factors: Factors) -> Squares:
        if self.fallback is None:
            self.refusal = fallback.refusal(self.model, parameters, self._fresh(inputs), factors.stack(slice(1)))
            self.fallback = fallback.one_at_a_time if self.refusal else fallback.vectorised
        total: Squares = {}
        step = fallback.chunk_size(parameters)
        for start in range(0, count(inputs), step):
            samples = slice(start, start + step)
            found = self.fallback(self.model, parameters, self._fresh(take(inputs, samples)), factors.stack(samples))
            for name, (squares, by_sample) in found.items():
                before = total.get(name)
                total[name] = (
                    (squares, by_sample)
                    if before is None
                    else (before[0].add_(squares), torch.cat([before[1], by_sample]))
                )
        return total

    def _commit(self, chunk: _Chunk, size: int) -> None:
        """Count a chunk that is done."""
        parts = {name: part for name, (_, part) in chunk.squares.items()}
        zero = torch.zeros_like(next(iter(parts.values()))) if parts else torch.zeros(size, device=self.device)
        by_sample = torch.stack([parts.get(name, zero) for name in self.parameters])
        if not by_sample.sum().isfinite():
            self._refuse(by_sample)
        self.recent += 1
        for name, (squares, _) in chunk.squares.items():
            if name in self.block:
                self.block[name] += squares
            else:
                self.block[name] = squares
        if self.recent >= self.block_length:
            self._flush()
        self.error.add(by_sample)
        if chunk.targets is None:
            self.labelled = False
        else:
            self.loss += self.likelihood.loss(chunk.outputs, chunk.targets).item() * size
            self.right += self.likelihood.right(chunk.outputs, chunk.targets).item()
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
        self.block, self.recent = {}, 0

    def result(self) -> DiagonalFisher:
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
        return DiagonalFisher(
            values={name: total.div_(self.samples) for name, total in self.totals.items()},
            samples=self.samples,
            scores=scores,
            estimator=self.estimator,
            standard_error=None if self.estimator == "batched" else self.error.relative(),
            path=self._describe(),
        )

    def _describe(self) -> str:
        if self.plan is None or self.estimator == "batched":
            return "one gradient a batch"
        parts = []
        if self.plan.ruled:
            parts.append(f"layer rules for {_count(self.plan.ruled)}")
        if self.plan.rest:
            way = "one sample at a time" if self.refusal else "vectorised (torch.func)"
            reasons = "; ".join(f"{name} {reason}" for name, reason in list(self.plan.rest.items())[:3])
            more = "; ..." if len(self.plan.rest) > 3 else ""
            refused = f"; torch.func refused: {self.refusal}" if self.refusal else ""
            parts.append(f"per-sample gradients, {way}, for {_count(self.plan.rest)} ({reasons}{more}{refused})")
        if self.plan.unused:
            parts.append(f"zero for {_count(self.plan.unused)} that the outputs don't depend on")
        if self.changed:
            parts.append(f"the fallback for {self.changed:,} samples, for which the model took another course")
        return "gradients: " + ", ".join(parts)


def _count(names: Iterable[str]) -> str:
    names = list(names)
    return f"{len(names)} parameters" if len(names) != 1 else names[0]


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
