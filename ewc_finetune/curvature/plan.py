"""Which way each parameter's gradients are taken: found out, and compared with autograd, on two samples.

The model is run for two samples, each alone and both together. That shows which operations use each parameter, where
the batch is in every one of them, and whether the samples leave each other alone. Then the rules are compared with
plain autograd on these samples. A parameter keeps its rules only if they agree. What holds for two samples need not
hold for others: a `RuledPass` notices calls and sizes that are not the expected ones, and `compute_fisher` compares
single samples with autograd again and again as it goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ewc_finetune.curvature.backward_pass import Course, RuledPass, Squares, differentiable
from ewc_finetune.curvature.batch_dims import BatchDim, BatchFirst, CourseChangedError, find_batch_dim
from ewc_finetune.curvature.call_recorder import Signature
from ewc_finetune.curvature.fallback import gradients_of, vectorised
from ewc_finetune.curvature.kfac_factors import KfacLayer
from ewc_finetune.curvature.per_sample_gradients import Factored, Scratch
from ewc_finetune.curvature.trial import Trial, try_two_samples, with_repeated_lookups
from ewc_finetune.errors import ArchitectureError, first_line
from ewc_finetune.likelihood.output_fisher import OutputFisher
from ewc_finetune.modules.batch import Inputs, each, tensors
from ewc_finetune.modules.devices import out_of_memory
from ewc_finetune.modules.precision import wide

# How far rules and autograd may differ, in the norm of a parameter's squares: rounding differs with the batch, and a
# ReLU may fall on its other side.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
# How far they may differ in half precision.
_HALF_TOLERANCE = 0.2

# Each call with a rule, and where its tensors hold the samples, if that can be told.
SeenCourse = Sequence[tuple[Signature, BatchDim | None]]


@dataclass(frozen=True)
class GradientPlan:
    """How the gradients of each parameter are taken.

    Attributes:
        ruled: Parameters with a rule for every use.
        rest: Parameters without, each with the reason.
        unused: Parameters that nothing was done with.
        dead: Parameters that something was done with, but the outputs of these samples don't depend on it.
        course: The calls to expect of the model, for `RuledPass`.
        refusal: Why `vmap` cannot do the rest, or None when it can.
        output_shape: The shape of the outputs for one sample.
        elements: How many numbers the model makes of one sample on its way, the sample's own among them.
        forms: Whether functions may take their cheaper forms on the way.
        layers: Weights among the ruled ones whose Kronecker-factored block can be had.
        mutates: Whether the model changes its own inputs in place, and needs a fresh copy each time.
        repeated: Embeddings that the model looks up once for all samples; see `CallRecorder`.
    """

    ruled: tuple[str, ...]
    rest: dict[str, str]
    unused: tuple[str, ...]
    dead: tuple[str, ...]
    course: Course
    refusal: str | None
    output_shape: tuple[int, ...]
    elements: int
    forms: bool = True
    layers: tuple[KfacLayer, ...] = ()
    mutates: bool = False
    repeated: frozenset[str] = frozenset()


def make_plan(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs, rules: bool = True) -> GradientPlan:
    """Look at the model on the first and the last of these samples.

    Args:
        model: The model, in eval mode.
        parameters: The parameters to differentiate by.
        inputs: Samples.
        rules: Whether rules may be used at all.

    Raises:
        ArchitectureError: if the model leaves dropout on or takes the statistics of the batch, if a sample's outputs
            depend on the others or on no parameter, or if autograd cannot follow it.
    """
    with differentiable(model, parameters):
        trial = try_two_samples(model, parameters, inputs)
        truth = _by_autograd(model, parameters, trial)
        trial = with_repeated_lookups(model, parameters, trial)
    reached, recorder = truth.reached, trial.together.recorder
    if not reached:
        raise ArchitectureError(
            "the model's outputs depend on none of the parameters: it runs under torch.no_grad, or detaches them"
        )
    rest = {**recorder.unknown, **_opaque(model, parameters)}
    unseen = reached - recorder.seen - set(rest)
    rest |= dict.fromkeys(unseen, "is used where torch's functions don't show it")
    course, lost = _course(trial, reached - set(rest))
    rest |= lost if rules else dict.fromkeys(reached, "would have rules, but they are off")
    rest = {name: reason for name, reason in rest.items() if name in reached}
    ruled = {name: p for name, p in parameters.items() if name not in rest and name in reached}
    wrong, forms = _disagreeing(truth, ruled, narrow(course, set(ruled)), trial.repeated)
    rest |= wrong
    ruled = {name: p for name, p in ruled.items() if name not in rest}
    idle = [name for name in parameters if name not in rest and name not in reached]
    return GradientPlan(
        ruled=tuple(ruled),
        rest=rest,
        unused=tuple(name for name in idle if name not in recorder.seen),
        dead=tuple(name for name in idle if name in recorder.seen),
        course=narrow(course, set(ruled)),
        refusal=_refusal(truth, {name: parameters[name] for name in rest}) if rest else None,
        output_shape=tuple(trial.together.outputs.shape[1:]),
        elements=(recorder.elements + sum(tensor.numel() for tensor in tensors(trial.samples))) // 2,
        forms=forms,
        layers=_layers(trial, course, ruled),
        mutates=trial.together.mutates,
        repeated=trial.repeated,
    )


def agree(squares: Tensor, expected: Tensor, dtype: torch.dtype, largest: Tensor, slack: float = 1) -> bool:
    """Whether two ways to a parameter's squares agree, but for rounding.

    Args:
        squares: The squares by one way.
        expected: The squares by the other.
        dtype: What the model computes in.
        largest: The norm of the largest parameter's squares.
        slack: Multiplies the tolerance.
    """
    eps = torch.finfo(dtype).eps
    # A gradient that is nothing but rounding (of a scale before a normalisation, say) cannot be compared.
    noise = (100 * eps) ** 2 * largest if dtype in _TOLERANCE else eps**2 * largest
    expected = expected.double()
    difference = (squares.double() - expected).norm()
    tolerance = min(0.5, slack * _TOLERANCE.get(dtype, _HALF_TOLERANCE))
    return bool(difference <= tolerance * expected.norm() + noise)


@dataclass(frozen=True)
class _Truth:
    """Squared gradients by autograd, one sample after the other, with which every other way is compared.

    Attributes:
        model: The model.
        samples: Two samples.
        vectors: Vectors at their outputs; any would do.
        squares: The sum over the samples of the squared gradients, by parameter.
        reached: The parameters that any gradient reached.
    """

    model: nn.Module
    samples: Inputs
    vectors: Tensor
    squares: dict[str, Tensor]
    reached: set[str]

    def fresh(self) -> Inputs:
        """Return a copy of the samples, which the model may change."""
        return each(torch.clone, self.samples)

    def differing(self, sums: Squares, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the parameters whose squares are others by another way."""
        largest = torch.stack([value.double().norm() for value in self.squares.values()]).max()
        squares = {name: torch.zeros_like(self.squares[name]) for name in parameters}
        squares |= {name: value for name, (value, _) in sums.items()}
        return [n for n, p in parameters.items() if not agree(squares[n], self.squares[n], p.dtype, largest)]


def _by_autograd(model: nn.Module, parameters: Mapping[str, Tensor], trial: Trial) -> _Truth:
    outputs = trial.together.outputs
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
    squares = {name: torch.zeros_like(wide(p.detach())) for name, p in parameters.items()}
    reached: set[str] = set()
    for n, single in enumerate(trial.singles):
        try:
            gradients = gradients_of(single.outputs, parameters, vectors[n : n + 1])
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise ArchitectureError(f"autograd cannot differentiate this model: {first_line(error)}") from error
        for name, gradient in gradients.items():
            reached.add(name)
            squares[name].addcmul_(gradient, gradient)
    return _Truth(model, trial.samples, vectors, squares, reached)


def _opaque(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the parameters of TorchScript modules, which do what they do unseen."""
    inside = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule)
        for parameter in module.parameters()
    }
    return {name: "belongs to a TorchScript module" for name, p in parameters.items() if id(p) in inside}


def _course(trial: Trial, names: set[str]) -> tuple[SeenCourse, dict[str, str]]:
    """Find where each call holds its samples, and the parameters of calls in which that cannot be told."""
    course: list[tuple[Signature, BatchDim | None]] = []
    lost: dict[str, str] = {}
    signatures = [signature for signature, _, _ in trial.together.calls]
    if any([signature for signature, _, _ in single.calls] != signatures for single in trial.singles):
        return [], dict.fromkeys(names, "the model does other things for other samples")
    for n, (signature, output, made) in enumerate(trial.together.calls):
        function, used = signature
        batch_dim = find_batch_dim(output, [single.calls[n][1] for single in trial.singles])
        course.append((signature, batch_dim))
        for name in names.intersection(used):
            if batch_dim is None:
                lost[name] = f"is used by {function} on what does not show which sample is where"
                continue
            try:
                made.makers[name](BatchFirst(batch_dim, 2))
            except (CourseChangedError, RuntimeError, ValueError, IndexError) as error:
                lost[name] = f"{function}: {first_line(error)[:100]}"
    return course, lost


def _layers(trial: Trial, course: SeenCourse, ruled: Mapping[str, Tensor]) -> tuple[KfacLayer, ...]:
    """Find the weights that map vectors linearly, each used once, and the bias that is added right there."""
    times = Counter(name for (_, used), _ in course for name in used)
    layers = []
    for (_, batch_dim), (_, output, made) in zip(course, trial.together.calls, strict=False):
        if batch_dim is None:
            continue
        batch_first = BatchFirst(batch_dim, 2)
        once = [name for name in made.makers if name in ruled and times[name] == 1]
        uses = {name: made.makers[name](batch_first) for name in once}
        for name, use in uses.items():
            if not isinstance(use, Factored):
                continue
            try:
                inputs = use.input_vectors(slice(1))
            except ValueError:
                continue
            outputs = use.output_vectors(batch_first(output)).shape[2]
            biases = [other for other in uses if other != name and ruled[other].shape == (outputs,)]
            bias = biases[0] if len(uses) == 2 and biases else None
            width = inputs.shape[2] + (bias is not None)
            layers.append(KfacLayer(name, bias, use.transposed, width, outputs, inputs.shape[1]))
    return tuple(layers)


def narrow(course: SeenCourse, names: set[str]) -> Course:
    """Keep the calls with any of these parameters, and of those calls these parameters."""
    kept = (((f, tuple(name for name in used if name in names)), batch_dim) for (f, used), batch_dim in course)
    return tuple((signature, batch_dim) for signature, batch_dim in kept if signature[1] and batch_dim is not None)


def _disagreeing(
    truth: _Truth, parameters: Mapping[str, Tensor], course: Course, repeated: frozenset[str], forms: bool = True
) -> tuple[dict[str, str], bool]:
    """Compare the rules with autograd.

    Returns:
        The parameters whose squares differ, each with the reason, and whether functions could take cheaper forms.
    """
    if not parameters:
        return {}, forms
    model, vectors = truth.model, truth.vectors
    try:
        with (
            differentiable(model, parameters),
            RuledPass(model, parameters, course, truth.fresh(), Scratch(), forms, repeated=repeated) as passed,
        ):
            sums = passed.squares(OutputFisher(1, lambda _: vectors, lambda: wide(vectors).square()))
    except Exception as error:
        if out_of_memory(error):
            raise
        if forms:
            return _disagreeing(truth, parameters, course, repeated, forms=False)
        if len(parameters) == 1:
            reason = f"has a rule that fails with {type(error).__name__}: {error}"[:200]
            return dict.fromkeys(parameters, reason), forms
        # One rule has failed; the others may be good.
        wrong: dict[str, str] = {}
        for name, parameter in parameters.items():
            wrong |= _disagreeing(truth, {name: parameter}, narrow(course, {name}), repeated, forms)[0]
        return wrong, forms
    return dict.fromkeys(truth.differing(sums, parameters), "has a rule that differs from autograd"), forms


def _refusal(truth: _Truth, parameters: Mapping[str, Tensor]) -> str | None:
    """Say why `vmap` cannot follow this model (data-dependent control flow, say), or None when it can."""
    try:
        sums = vectorised(truth.model, parameters, truth.fresh(), truth.vectors[None])
    except Exception as error:
        if out_of_memory(error):
            raise
        return first_line(error)
    wrong = truth.differing(sums, parameters)
    return f"it differs from autograd for {', '.join(wrong)}" if wrong else None
