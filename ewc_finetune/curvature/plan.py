"""Which way each parameter's gradients are taken: found out, and compared with autograd, on two samples.

The model is run for two samples, each alone and both together. That shows which operations use each parameter, where
the batch is in every one of them, and whether the samples leave each other alone. Then the rules are compared with
plain autograd on these samples. A parameter keeps its rules only if they agree. What holds for two samples need not
hold for others: a `RuledPass` notices calls and sizes that are not the expected ones, and `compute_fisher` compares
single samples with autograd again and again as it goes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ewc_finetune.curvature.backward_pass import Course, RuledPass, differentiable
from ewc_finetune.curvature.batch_dims import CourseChangedError, Stack, Stacking, find_stacking
from ewc_finetune.curvature.call_recorder import Call, Capture
from ewc_finetune.curvature.fallback import gradients_of, vectorised
from ewc_finetune.curvature.kfac_factors import Layer
from ewc_finetune.curvature.per_sample_gradients import Factored, Workspace
from ewc_finetune.errors import ArchitectureError, DataError
from ewc_finetune.likelihood.output_fisher import OutputFisher
from ewc_finetune.modules.batch import Inputs, call, count, each, take, tensors
from ewc_finetune.modules.devices import out_of_memory
from ewc_finetune.modules.precision import wide

Signature = tuple[str, tuple[str, ...]]

# How far rules and autograd may differ, in the norm of a parameter's squares: rounding differs with the batch, and a
# ReLU may fall on its other side.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_HALF_TOLERANCE = 0.2


@dataclass(frozen=True)
class Plan:
    """How the gradients of each parameter are taken.

    Attributes:
        ruled: Parameters with a rule for every use.
        rest: Parameters without, each with the reason.
        unused: Parameters that nothing was done with.
        dead: Parameters that something was done with, but the outputs of these samples don't depend on it.
        course: The calls to expect of the model, for `RuledPass`.
        refusal: Why `vmap` cannot do the rest, or None when it can.
        output_shape: Of the outputs for one sample.
        elements: How many numbers the model makes of one sample on its way, the sample's own among them.
        forms: Whether functions may take their cheaper forms on the way.
        layers: Weights among the ruled ones whose Kronecker-factored block can be had.
        mutates: Whether the model changes its own inputs in place, and needs a fresh copy each time.
        repeated: Embeddings that the model looks up once for all samples; see `Capture`.
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
    layers: tuple[Layer, ...] = ()
    mutates: bool = False
    repeated: frozenset[str] = frozenset()


@dataclass
class _Run:
    """What one run of the model showed."""

    outputs: Tensor
    calls: list[tuple[Signature, Tensor, Call]]
    capture: Capture
    mutates: bool


def make_plan(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs, rules: bool = True) -> Plan:
    """Look at the model on the first and the last of these samples.

    Args:
        model: In eval mode.
        parameters: Those that gradients are wanted by.
        inputs: Samples.
        rules: Whether rules may be used at all.

    Raises:
        ArchitectureError: if the model leaves dropout on or takes the statistics of the batch, if a sample's outputs
            depend on the others or on no parameter, or if autograd cannot follow it.
    """
    two = _two_samples(inputs)
    state = _random_state(two)
    with differentiable(model, parameters):
        singles = [_run(model, parameters, take(two, slice(n, n + 1))) for n in range(2)]
        together = _run(model, parameters, two)
        if not torch.equal(state, _random_state(two)):
            raise ArchitectureError(
                "the model draws random numbers in eval mode: a sample has no gradient of its own then. Let what is "
                "random depend on self.training"
            )
        _check_independence(model, together.outputs, [single.outputs for single in singles])
        # Any vectors would do; these are the same each time.
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(together.outputs.shape, generator=generator, dtype=torch.float64).to(together.outputs)
        truth, reached = _by_autograd(parameters, singles, vectors)
        repeated = _looked_up_once(singles, together)
        if repeated:
            together, singles, repeated = _repeating(model, parameters, two, together, singles, repeated)
    if not reached:
        raise ArchitectureError(
            "the model's outputs depend on none of the parameters: it runs under torch.no_grad, or detaches them"
        )
    rest = {**together.capture.unknown, **_opaque(model, parameters)}
    unseen = reached - together.capture.seen - set(rest)
    rest |= dict.fromkeys(unseen, "is used where torch's functions don't show it")
    course, lost = _course(singles, together, reached - set(rest))
    rest |= lost if rules else dict.fromkeys(reached, "would have rules, but they are off")
    rest = {name: reason for name, reason in rest.items() if name in reached}
    ruled = {name: p for name, p in parameters.items() if name not in rest and name in reached}
    wrong, forms = _disagreeing(model, ruled, _narrow(course, set(ruled)), two, vectors, truth, repeated)
    rest |= wrong
    ruled = {name: p for name, p in ruled.items() if name not in rest}
    idle = [name for name in parameters if name not in rest and name not in reached]
    return Plan(
        ruled=tuple(ruled),
        rest=rest,
        unused=tuple(name for name in idle if name not in together.capture.seen),
        dead=tuple(name for name in idle if name in together.capture.seen),
        course=_narrow(course, set(ruled)),
        refusal=_refusal(model, {name: parameters[name] for name in rest}, two, vectors, truth) if rest else None,
        output_shape=tuple(together.outputs.shape[1:]),
        elements=(together.capture.elements + sum(tensor.numel() for tensor in tensors(two))) // 2,
        forms=forms,
        layers=_layers(together, course, ruled),
        mutates=together.mutates,
        repeated=repeated,
    )


def agree(found: Tensor, expected: Tensor, dtype: torch.dtype, largest: Tensor, slack: float = 1) -> bool:
    """Whether two ways to a parameter's squares agree, but for rounding.

    Args:
        found: By one way.
        expected: By the other.
        dtype: What the model computes in.
        largest: The norm of the largest parameter's squares.
        slack: Multiplies the tolerance.
    """
    eps = torch.finfo(dtype).eps
    # A gradient that is nothing but rounding (of a scale before a normalisation, say) cannot be compared.
    noise = (100 * eps) ** 2 * largest if dtype in _TOLERANCE else eps**2 * largest
    expected = expected.double()
    difference = (found.double() - expected).norm()
    tolerance = min(0.5, slack * _TOLERANCE.get(dtype, _HALF_TOLERANCE))
    return bool(difference <= tolerance * expected.norm() + noise)


def _two_samples(inputs: Inputs) -> Inputs:
    """Return two samples that differ: the first and the last, else the first and itself turned round."""

    def turned(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:1], tensor[:1].flip(-1) if tensor.ndim > 1 else tensor[:1]])

    if count(inputs) > 1:
        two = take(inputs, [0, count(inputs) - 1])
        if any(not torch.equal(tensor[0], tensor[1]) for tensor in tensors(two)):
            return two
    return each(turned, inputs)


def _looked_up_once(singles: list[_Run], together: _Run) -> frozenset[str]:
    """Find the embeddings whose rows are the same for all samples, and looked up once for all of them."""
    found: set[str] = set()
    for n, (signature, output, _) in enumerate(together.calls):
        if signature[0] == "embedding" and all(
            n < len(single.calls) and single.calls[n][1].shape == output.shape for single in singles
        ):
            found.update(signature[1])
    return frozenset(found)


def _repeating(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    two: Inputs,
    together: _Run,
    singles: list[_Run],
    repeated: frozenset[str],
) -> tuple[_Run, list[_Run], frozenset[str]]:
    """Run the model once more with these embeddings looked up for each sample, if it comes to the same."""
    try:
        again = [_run(model, parameters, take(two, slice(n, n + 1)), repeated) for n in range(2)]
        both = _run(model, parameters, two, repeated)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if out_of_memory(error):
            raise
        return together, singles, frozenset()
    rounding = torch.finfo(both.outputs.dtype).eps ** 0.5
    if both.outputs.shape != together.outputs.shape or not torch.allclose(
        both.outputs, together.outputs, rtol=rounding, atol=rounding
    ):
        return together, singles, frozenset()
    return both, again, repeated


def _run(
    model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs, repeated: frozenset[str] = frozenset()
) -> _Run:
    calls: list[tuple[Signature, Tensor, Call]] = []
    # The output is copied, for what comes next may change it in place.
    capture = Capture(
        model,
        parameters,
        lambda made: calls.append((made.signature, made.output.detach().clone(), made)),
        repeated=repeated,
        batch=count(inputs),
    )
    copy = each(torch.clone, inputs)
    with capture.running(name_modules=True), warnings.catch_warnings():
        warnings.filterwarnings("error", "None of the inputs have requires_grad=True")
        try:
            outputs = call(model, copy)
        except UserWarning as error:
            raise ArchitectureError(
                "the model recomputes its activations with a checkpoint that autograd does not see through; use "
                "torch.utils.checkpoint(..., use_reentrant=False), or none"
            ) from error
    changed = {tensor._version for tensor in tensors(copy)} != {0}
    return _Run(outputs, calls, capture, changed)


def _random_state(inputs: Inputs) -> Tensor:
    """Return the state of the random number generators that the model would draw from."""
    device = tensors(inputs)[0].device
    states = [torch.get_rng_state()]
    if device.type in ("cuda", "mps"):
        states.append(getattr(torch, device.type).get_rng_state())
    return torch.cat(states)


def _check_independence(model: nn.Module, together: Tensor, singles: list[Tensor]) -> None:
    """Refuse a model for which a sample's gradient is not defined, since the rest of its batch has a say."""
    if together.ndim == 0 or len(together) != 2 or any(single.ndim == 0 or len(single) != 1 for single in singles):
        raise DataError(
            f"2 samples went in and outputs of shape {tuple(together.shape)} came out; the first dimension must be "
            "the batch"
        )
    if any(single.shape[1:] != together.shape[1:] for single in singles):
        seen = f"shape {tuple(singles[0].shape[1:])} alone and {tuple(together.shape[1:])} with another"
    else:
        alone = torch.cat([single.detach() for single in singles])
        rounding = 1e-4 if together.dtype in (torch.float32, torch.float64) else 5e-2
        difference = wide(together.detach() - alone).abs().max().item()
        scale = wide(together.detach()).abs().max().clamp(min=1e-6).item()
        if not difference > rounding * scale:  # NaN is somebody else's to report
            return
        seen = f"they differ by {difference:.2g}, where the largest is {scale:.2g}"
    layers = [name for name, m in model.named_modules() if getattr(m, "track_running_stats", True) is False]
    hint = f"it has normalisation without running statistics: {', '.join(layers)}; " if layers else ""
    raise ArchitectureError(
        f"the model's outputs for a sample change with the other samples of its batch ({hint}{seen}); the Fisher is "
        "made of single samples' gradients, which such a model does not have"
    )


def _by_autograd(
    parameters: Mapping[str, Tensor], singles: list[_Run], vectors: Tensor
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the sum of squared gradients of the single samples, and the parameters that any gradient reached."""
    truth = {name: torch.zeros_like(wide(p.detach())) for name, p in parameters.items()}
    reached: set[str] = set()
    for n, single in enumerate(singles):
        try:
            gradients = gradients_of(single.outputs, parameters, vectors[n : n + 1])
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            reason = str(error).strip().partition("\n")[0]
            raise ArchitectureError(f"autograd cannot differentiate this model: {reason}") from error
        for name, gradient in gradients.items():
            reached.add(name)
            truth[name].addcmul_(gradient, gradient)
    return truth, reached


def _opaque(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the parameters of TorchScript modules, which do what they do unseen."""
    inside = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule)
        for parameter in module.parameters()
    }
    return {name: "belongs to a TorchScript module" for name, p in parameters.items() if id(p) in inside}


def _course(
    singles: list[_Run], together: _Run, names: set[str]
) -> tuple[list[tuple[Signature, Stacking | None]], dict[str, str]]:
    """Find how each call holds its samples, and the parameters of calls in which that cannot be told."""
    course: list[tuple[Signature, Stacking | None]] = []
    lost: dict[str, str] = {}
    signatures = [signature for signature, _, _ in together.calls]
    if any([signature for signature, _, _ in single.calls] != signatures for single in singles):
        return [], dict.fromkeys(names, "the model does other things for other samples")
    for n, (signature, output, made) in enumerate(together.calls):
        function, used = signature
        stacking = find_stacking(output, [single.calls[n][1] for single in singles])
        course.append((signature, stacking))
        for name in names.intersection(used):
            if stacking is None:
                lost[name] = f"is used by {function} on what does not show which sample is where"
                continue
            try:
                made.makers[name](Stack(stacking, len(singles)))
            except (CourseChangedError, RuntimeError, ValueError, IndexError) as error:
                lost[name] = f"{function}: {str(error).partition(chr(10))[0][:100]}"
    return course, lost


def _layers(
    together: _Run, course: Sequence[tuple[Signature, Stacking | None]], ruled: Mapping[str, Tensor]
) -> tuple[Layer, ...]:
    """Find the weights that map vectors linearly, each used once, and the bias that is added right there."""
    times = Counter(name for (_, used), _ in course for name in used)
    found = []
    for (_, stacking), (_, output, made) in zip(course, together.calls, strict=False):
        once = [name for name in made.makers if name in ruled and times[name] == 1]
        if stacking is None:
            continue
        stack = Stack(stacking, 2)
        uses = {name: made.makers[name](stack) for name in once}
        for name, use in uses.items():
            if not isinstance(use, Factored):
                continue
            try:
                inputs = use.input_vectors(slice(1))
            except ValueError:
                continue
            outputs = use.output_vectors(stack(output)).shape[2]
            biases = [other for other in uses if other != name and ruled[other].shape == (outputs,)]
            bias = biases[0] if len(uses) == 2 and biases else None
            width = inputs.shape[2] + (bias is not None)
            found.append(Layer(name, bias, use.transposed, width, outputs, inputs.shape[1]))
    return tuple(found)


def _narrow(course: Sequence[tuple[Signature, Stacking | None]], names: set[str]) -> Course:
    """Keep the calls with any of these parameters, and of those calls these parameters."""
    kept = (((f, tuple(name for name in used if name in names)), stacking) for (f, used), stacking in course)
    return tuple((signature, stacking) for signature, stacking in kept if signature[1] and stacking is not None)


def _disagreeing(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    course: Course,
    inputs: Inputs,
    vectors: Tensor,
    truth: Mapping[str, Tensor],
    repeated: frozenset[str],
    forms: bool = True,
) -> tuple[dict[str, str], bool]:
    """Compare the rules with autograd.

    Returns:
        The parameters whose squares differ, each with the reason, and whether functions could take cheaper forms.
    """
    if not parameters:
        return {}, forms
    try:
        with (
            differentiable(model, parameters),
            RuledPass(
                model, parameters, course, each(torch.clone, inputs), Workspace(), forms, repeated=repeated
            ) as passed,
        ):
            found = passed.squares(OutputFisher(1, lambda _: vectors, lambda: wide(vectors).square()))
    except Exception as error:
        if out_of_memory(error):
            raise
        if forms:
            return _disagreeing(model, parameters, course, inputs, vectors, truth, repeated, forms=False)
        if len(parameters) == 1:
            reason = f"has a rule that fails with {type(error).__name__}: {error}"[:200]
            return dict.fromkeys(parameters, reason), forms
        # One rule has failed; the others may be good.
        alone = [({name: p}, _narrow(course, {name})) for name, p in parameters.items()]
        wrong: dict[str, str] = {}
        for one, part in alone:
            wrong |= _disagreeing(model, one, part, inputs, vectors, truth, repeated, forms)[0]
        return wrong, forms
    differing = _differing({name: squares for name, (squares, _) in found.items()}, parameters, truth)
    return dict.fromkeys(differing, "has a rule that differs from autograd"), forms


def _differing(found: Mapping[str, Tensor], parameters: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> list[str]:
    largest = torch.stack([value.double().norm() for value in truth.values()]).max()
    return [
        name
        for name, parameter in parameters.items()
        if not agree(found.get(name, torch.zeros_like(truth[name])), truth[name], parameter.dtype, largest)
    ]


def _refusal(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    inputs: Inputs,
    vectors: Tensor,
    truth: Mapping[str, Tensor],
) -> str | None:
    """Say why `vmap` cannot follow this model (data-dependent control flow, say), or None when it can."""
    try:
        found = vectorised(model, parameters, each(torch.clone, inputs), vectors[None])
    except Exception as error:
        if out_of_memory(error):
            raise
        return str(error).strip().partition("\n")[0][:200]
    wrong = _differing({name: squares for name, (squares, _) in found.items()}, parameters, truth)
    return f"it differs from autograd for {', '.join(wrong)}" if wrong else None
