"""What a model does with its parameters, seen while it runs.

A `CallRecorder` is a mode of torch: while it is active, every function of torch that the model calls passes through it.
It reports each call that passes parameters to a function with a rule, and notes every other use of a parameter. Unlike
hooks on modules it sees functional calls, a weight that is used twice or read out through another module, and the
projections inside attention; activations that work in place don't disturb it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ewc_finetune.curvature.batch_dims import BatchFirst
from ewc_finetune.curvature.per_sample_gradients import Custom
from ewc_finetune.curvature.rules import FORMS, FUNCTION_RULES, MODULE_RULES, Maker, Rule
from ewc_finetune.errors import ArchitectureError

# Functions made of others that have rules, which would not be seen if these were taken for one call.
_TRANSPARENT = (functional.multi_head_attention_forward,)
_DROPOUT = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
)


# A call's function, and its parameters by name.
Signature = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Call:
    """One call with parameters that a rule knows.

    Attributes:
        function: The function's name, or the class of the module that has a rule.
        makers: For each of the parameters, by name, what makes its use.
        output: What came out.
        first: Whether no gradient flows on to what went in.
    """

    function: str
    makers: dict[str, Maker]
    output: Tensor
    first: bool

    @property
    def signature(self) -> Signature:
        """What the same call has in common from batch to batch."""
        return self.function, tuple(self.makers)


class CallRecorder(TorchFunctionMode):
    """Report what is done with parameters while a model runs.

    Args:
        model: The model that will run.
        parameters: The parameters to look for, by name.
        report: Called with every call that a rule knows, right after it.
        forms: Whether functions may take their cheaper forms, in which no gradient flows to the parameters themselves.
        repeated: Embeddings that are looked up once for all the samples (positions); they are looked up for each of the
            `batch` samples instead, so that each has its own gradient.
        batch: How many samples there are.

    Attributes:
        unknown: Parameters that were used in a way no rule knows, each with the way.
        seen: Parameters that were used at all.
        elements: How many numbers the functions returned.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        report: Callable[[Call], None],
        forms: bool = False,
        repeated: Collection[str] = (),
        batch: int = 1,
    ) -> None:
        super().__init__()
        self._repeated = repeated
        self._batch = batch
        self.unknown: dict[str, str] = {}
        self.seen: set[str] = set()
        self.elements = 0
        self._model = model
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._module_names: dict[int, str] = {}
        self._report = report
        self._forms = FORMS if forms else {}
        self._inside: list[str] = []  # the modules that are running, outermost first
        self._hidden = 0  # how many modules with a rule of their own are running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TRANSPARENT:
            with self:
                return _unguarded(func)(*args, **kwargs)
        if func in _DROPOUT or func is functional.scaled_dot_product_attention:
            self._refuse_randomness(func, args, kwargs)
        elif func is functional.batch_norm:
            self._refuse_batch_statistics(args, kwargs)
        rule = FUNCTION_RULES.get(func)
        if rule is not None and (self._hidden or not self._tracked(args, kwargs)):
            rule = None
        form = func if rule is None else self._forms.get(func, func)
        if self._repeated and rule is not None and func is functional.embedding and self._repeats(args[1:2]):
            args = (_repeat(args[0], self._batch), *args[1:])
        result = form(*args, **kwargs)
        self.elements += sum(tensor.numel() for tensor in _tensors(result))
        if rule is None:
            if not self._hidden:
                self._note(func, result, args, kwargs)
        elif isinstance(result, Tensor) and result.requires_grad:
            self._apply(func, rule, result, args, kwargs)
        return result

    def _apply(self, func: Any, rule: Rule, output: Tensor, args: Any, kwargs: Any) -> None:
        """Ask the rule about a call, and report it."""
        with torch.no_grad():
            try:
                answers = [(self._names.get(id(p)), maker) for p, maker in rule(output, *args, **kwargs)]
            except (TypeError, ValueError):  # a form of the call that the rule doesn't take
                self._note(func, output, args, kwargs)
                return
        makers: dict[str, Maker] = {}
        for name, maker in answers:
            if name is None:
                continue
            self.seen.add(name)
            if maker is None or name in makers:
                self.unknown.setdefault(name, f"is used by {_name(func)}, for which there is no rule")
            else:
                makers[name] = maker
        if makers:
            self._report(Call(_name(func), makers, output, not self._flows_on((args, kwargs))))

    def _repeats(self, args: Any) -> bool:
        return any(self._names.get(id(arg)) in self._repeated for arg in args)

    def _tracked(self, args: Any, kwargs: Any) -> bool:
        return any(id(arg) in self._names for arg in (*args, *kwargs.values()))

    def _flows_on(self, args: Any) -> bool:
        return any(tensor.requires_grad and id(tensor) not in self._names for tensor in _tensors(args))

    @contextmanager
    def running(self, name_modules: bool = False) -> Iterator[None]:
        """Watch the model within this context; errors name the module only if asked to, for that costs time."""
        if not name_modules and not MODULE_RULES:
            with self:
                yield
            return
        self._module_names = {id(module): name for name, module in self._model.named_modules()}
        hooks = []
        try:
            for module in self._model.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    hooks.append(module.register_forward_pre_hook(self._enter))
                    hooks.append(module.register_forward_hook(self._leave, with_kwargs=True))
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._inside.clear()
            self._hidden = 0

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append(self._module_names.get(id(module), type(module).__name__))
        if type(module) in MODULE_RULES:
            self._hidden += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._inside:
            self._inside.pop()
        if type(module) not in MODULE_RULES:
            return
        self._hidden -= 1
        names = {self._names[id(p)]: name for name, p in module.named_parameters(recurse=True) if id(p) in self._names}
        if self._hidden or not names:
            return
        self.seen.update(names)
        if not isinstance(output, Tensor) or kwargs:  # rules know one output, and inputs by their place
            self.unknown |= dict.fromkeys(
                names, f"is used by {type(module).__name__} in a way that its rule doesn't take"
            )
        elif output.requires_grad:
            first = not self._flows_on(args)
            self._report(Call(type(module).__name__, _custom(module, args, names), output, first))

    def _note(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        """Note the parameters among the arguments, if the result can be differentiated by them."""
        names = [name for tensor in _tensors((args, kwargs)) if (name := self._names.get(id(tensor)))]
        if names and any(t.requires_grad and id(t) not in self._names for t in _tensors(result)):
            self.seen.update(names)
            for name in names:
                self.unknown.setdefault(name, f"is used by {_name(func)}, for which there is no rule")

    def _where(self) -> str:
        return f"module {self._inside[-1]}" if self._inside and self._inside[-1] else "the model itself"

    def _refuse_randomness(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in _DROPOUT:
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            training = args[2] if len(args) > 2 else kwargs.get("training", func is not functional.alpha_dropout)
        else:
            p, training = (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)), True
        if training and p > 0:
            raise ArchitectureError(
                f"{self._where()} drops values at random (p = {p}) although the model is in eval mode: a sample has no "
                "gradient of its own then. Pass training=self.training to dropout"
            )

    def _refuse_batch_statistics(self, args: Any, kwargs: Any) -> None:
        if args[5] if len(args) > 5 else kwargs.get("training", False):
            raise ArchitectureError(
                f"{self._where()} normalises with the statistics of the batch although the model is in eval mode: it "
                "has no running statistics, or is kept in training mode. The gradient of a single sample is not "
                "defined then. Give it running statistics (track_running_stats=True), or use group or layer norm"
            )


def _custom(module: nn.Module, args: tuple[Any, ...], names: Mapping[str, str]) -> dict[str, Maker]:
    """Return makers for a module's parameters, `names` from the model's name to the module's."""
    rule = MODULE_RULES[type(module)]
    inputs = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
    latest: list[tuple[Tensor, Mapping[str, Tensor]]] = []

    def by_rule(gradient: Tensor, name: str) -> Tensor:
        # One call serves all the module's parameters.
        if not latest or latest[0][0] is not gradient:
            latest[:] = [(gradient, rule(module, inputs, gradient.flatten(0, 1)))]
        per_row = latest[0][1][name]
        return per_row if gradient.shape[1] == 1 else torch.unflatten(per_row, 0, gradient.shape[:2]).sum(dim=1)

    def maker(own: str) -> Maker:
        shape = dict(module.named_parameters())[own].shape

        def make(batch_first: BatchFirst) -> Custom:
            if batch_first.batch_dim.dim != 0 or batch_first.batch_dim.minor:
                raise ValueError(f"the batch is not the first dimension of what {type(module).__name__} returns")
            return Custom(shape, batch_first.batch, lambda gradient: by_rule(gradient, own))

        return make

    return {name: maker(own) for name, own in names.items()}


@lru_cache
def _unguarded(function: Any) -> Any:
    """Return a copy of a function of torch.nn.functional that doesn't hand itself to the active mode."""
    scope = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _repeat(indices: Tensor, batch: int) -> Tensor:
    """Give what is looked up once for all samples a first dimension that is the batch."""
    return indices.expand(batch, *indices.shape[indices.ndim > 1 and len(indices) == 1 :])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))
