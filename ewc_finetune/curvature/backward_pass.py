"""The fast pass: one forward, one backward for each vector, and no weight's gradient in either."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ewc_finetune.curvature.batch_dims import BatchDim, BatchFirst, CourseChangedError
from ewc_finetune.curvature.call_recorder import Call, CallRecorder, Signature
from ewc_finetune.curvature.kfac_factors import BlockSums
from ewc_finetune.curvature.per_sample_gradients import BySquares, Factored, Scratch, Shared, Use, sum_by_sample
from ewc_finetune.likelihood.output_fisher import OutputFisher
from ewc_finetune.modules.batch import Inputs, call, count
from ewc_finetune.modules.precision import wide

# By parameter, the sum over samples and vectors of squared gradients, and its sum over the parameter for each sample.
Squares = dict[str, tuple[Tensor, Tensor]]
# Each call with a rule, in the order in which the model makes them, and where its tensors hold the samples.
Course = tuple[tuple[Signature, BatchDim], ...]


@contextmanager
def differentiable(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Have exactly these parameters require a gradient, and all the model's flags as they were afterwards."""
    chosen = {id(parameter) for parameter in parameters.values()}
    every = {id(parameter): parameter for parameter in (*model.parameters(), *parameters.values())}
    flags = [(parameter, parameter.requires_grad) for parameter in every.values()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in chosen)
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def fit(vector: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Bring a vector to the dtype of the outputs, and say what each sample's gradients have to be multiplied by.

    Small numbers underflow in float16, and the gradients of a confident model are small: each sample's vector is
    brought to about 1 there.
    """
    if dtype != torch.float16:
        return vector.to(dtype), None
    each = vector.reshape(len(vector), -1).abs().amax(dim=1)
    # A power of two, so that nothing is rounded.
    scale = torch.where(each > 0, torch.exp2(torch.log2(each.clamp(min=1e-38)).ceil()), 1.0)
    return (vector / scale.view(-1, *[1] * (vector.ndim - 1))).to(dtype), scale


@dataclass
class _Watched:
    """One call, while gradients arrive at its output.

    Attributes:
        batch_first: Brings the samples of its tensors to the front.
        uses: The uses of parameters that are used nowhere else, by name.
        shared: The other parameters, each with the number of this one among its uses.
        blocks: The sums for weights whose whole block is wanted, with their biases.
        squares: The squares of the gradients, summed over the vectors, where some use needs no more.
    """

    batch_first: BatchFirst
    uses: dict[str, Use] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    blocks: list[BlockSums] = field(default_factory=list)
    squares: Tensor | None = None

    def receive(self, gradient: Tensor, scratch: Scratch) -> None:
        """Take in the gradient of one vector, batch first."""
        others = [use for use in self.uses.values() if not _takes_squares(use, gradient.shape)]
        if len(others) < len(self.uses):
            g = wide(gradient)
            self.squares = g.square() if self.squares is None else self.squares.addcmul_(g, g)
        for use in others:
            use.add(gradient, scratch)
        for block in self.blocks:
            block.add(gradient)

    def finish(self, shape: tuple[int, ...], scratch: Scratch) -> Squares:
        """Return what the uses have summed, and let go of what they held; `shape` is the gradients', batch first."""
        sums = {}
        by_sample = None if self.squares is None else sum_by_sample(self.squares)
        for name, use in self.uses.items():
            if self.squares is not None and by_sample is not None and _takes_squares(use, shape):
                sums[name] = use.from_squares(self.squares, by_sample, scratch)
            else:
                sums[name] = use.finish()
        self.uses, self.squares = {}, None
        return sums


def _takes_squares(use: Use, shape: Sequence[int]) -> TypeGuard[BySquares]:
    return isinstance(use, BySquares) and use.takes_squares(shape)


class RuledPass:
    """One batch's way through the model, with the uses of its parameters. A context: it ends with its hooks removed.

    Args:
        model: The model, in eval mode; `parameters` alone require a gradient (`differentiable`).
        parameters: The parameters whose every use has a rule, and others that are not expected to be used at all.
        course: The calls that are to be expected.
        inputs: One batch.
        scratch: Memory that is used again from batch to batch.
        forms: Whether functions may take their cheaper forms; not where something else runs the model once more.
        wanted: What collects the blocks of some weights from their uses; no squares are taken of those weights.
        repeated: Embeddings to look up for each sample anew; see `CallRecorder`.

    Attributes:
        outputs: The model's outputs.
        blocks: What was collected, complete after `squares`.

    Raises:
        CourseChangedError: if the model's calls are not the expected ones.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        course: Course,
        inputs: Inputs,
        scratch: Scratch,
        forms: bool = True,
        wanted: Mapping[str, Callable[[Factored], BlockSums]] | None = None,
        repeated: Collection[str] = (),
    ) -> None:
        self.blocks: list[BlockSums] = []
        self._wanted = wanted or {}
        self._course = course
        self._scratch = scratch
        self._batch = count(inputs)
        self._ends: list[GradientEdge] = []  # where backward may stop: nothing that is asked for lies beyond
        self._hooks: list[RemovableHandle] = []
        self._latest: tuple[_Watched, GradientEdge] | None = None
        self._uses: dict[str, list[Use]] = {}
        self._arrived: dict[str, list[Tensor | None]] = {}
        self._results: Squares = {}
        self._last = False
        self._scale: Tensor | None = None
        self._calls = 0
        self._times = {name: sum(name in names for (_, names), _ in course) for name in parameters}
        recorder = CallRecorder(model, parameters, self._watch, forms, repeated, self._batch)
        try:
            with recorder.running():
                self.outputs = call(model, inputs)
            self._readout = self._find_readout(recorder)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RuledPass:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks: with the graph they make a circle that nothing would ever free."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._latest, self._readout = [], None, None
        self._uses, self._arrived = {}, {}

    def _watch(self, made: Call) -> None:
        if self._calls >= len(self._course) or self._course[self._calls][0] != made.signature:
            raise CourseChangedError
        watched = _Watched(BatchFirst(self._course[self._calls][1], self._batch))
        self._calls += 1
        for name, maker in made.makers.items():
            try:
                use = maker(watched.batch_first)
                if name in self._wanted and isinstance(use, Factored):
                    with torch.no_grad():
                        watched.blocks.append(self._wanted[name](use))
                    continue
            except (RuntimeError, ValueError, IndexError) as error:
                raise CourseChangedError from error
            if self._times[name] == 1:
                watched.uses[name] = use
            else:
                uses = self._uses.setdefault(name, [])
                watched.shared[name] = len(uses)
                uses.append(use)
        for block in watched.blocks:
            watched.uses.pop(block.layer.bias or "", None)
        self.blocks += watched.blocks
        watched.batch_first(made.output.detach())  # raises an error if it has another size than expected
        edge = get_gradient_edge(made.output)
        self._hooks.append(made.output.register_hook(self._receiver(watched)))  # type: ignore[no-untyped-call]
        self._latest = (watched, edge)
        if made.first:
            self._ends.append(edge)

    def _find_readout(self, recorder: CallRecorder) -> _Watched | None:
        """Return the call whose output is the model's, if the squares of its gradients are all that it needs."""
        if self._calls != len(self._course) or recorder.unknown:
            raise CourseChangedError
        if self._latest is None:
            return None
        watched, edge = self._latest
        if edge.node is not self.outputs.grad_fn or edge.output_nr != self.outputs.output_nr or watched.shared:
            return None
        shape = watched.batch_first(self.outputs.detach()).shape
        if not all(_takes_squares(use, shape) for use in watched.uses.values()):
            return None
        self._hooks.pop().remove()
        self._ends = [end for end in self._ends if end.node is not edge.node]
        return watched

    def _receiver(self, watched: _Watched) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            by_sample = watched.batch_first(gradient)
            if self._scale is not None:
                by_sample = wide(by_sample) * self._scale.view(-1, *[1] * (by_sample.ndim - 1))
            watched.receive(by_sample, self._scratch)
            if self._last:
                self._results |= watched.finish(by_sample.shape, self._scratch)
            for name, place in watched.shared.items():
                self._arrived[name][place] = by_sample

        return receive

    @torch.no_grad()
    def squares(self, output_fisher: OutputFisher) -> Squares:
        """Run backward from each of the vectors at the outputs, and return the squares by parameter.

        The layer whose output is the model's needs no backward: the sum of the vectors' squares, which the likelihood
        has in closed form, is all it takes. A parameter that no gradient reached is not in the result.
        """
        if self._readout is not None:
            self._readout.squares = self._readout.batch_first(output_fisher.squares())
            self._results |= self._readout.finish(self._readout.squares.shape, self._scratch)
            for block in self._readout.blocks:
                for m in range(output_fisher.count):
                    block.add(self._readout.batch_first(output_fisher[m]))
        shared = {name: Shared(uses) for name, uses in self._uses.items()}
        for m in range(output_fisher.count if self._ends else 0):
            self._last = m == output_fisher.count - 1
            vector, self._scale = fit(output_fisher[m], self.outputs.dtype)
            self._arrived = {name: [None] * len(uses) for name, uses in self._uses.items()}
            torch.autograd.grad(self.outputs, self._ends, vector, retain_graph=not self._last, allow_unused=True)
            for name, use in shared.items():
                use.add_all(self._arrived[name], self._scratch)
        for name, use in shared.items():
            if use.squares is not None:
                self._results[name] = use.finish()
        return self._results
