"""The graph of an exported program, built from its document: every operator is one that computes, every name plain.

The document is that of `torch/_export/serde/schema.py`, major version 8. Sizes that are expressions are not evaluated:
they say what torch knew of a tensor when it was exported, and nothing that is computed with.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from ewc_finetune.checkpoint.formats.exported_archive import DTYPES, NotPlainError
from ewc_finetune.checkpoint.formats.operators import is_computation

_SCHEMA = 8
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"[A-Za-z_0-9-]+(\.[A-Za-z_0-9-]+)*")
# The functions of `operator`, `math` and `torch` that compute sizes in graphs.
_OPERATORS = frozenset(
    """
    getitem add sub mul floordiv truediv mod pow neg pos eq ne lt le gt ge and_ or_ xor not_ lshift rshift
    """.split()
)
_MATH = frozenset({"ceil", "floor", "trunc", "sqrt"})
_SYMBOLIC = frozenset(
    """
    sym_int sym_float sym_max sym_min sym_not sym_ite sym_sum sym_fresh_size _sym_sqrt
    """.split()
)
# Operators that call a graph within the graph, under autocast or with gradients off.
_WRAPPERS = ("torch.ops.higher_order.wrap_with_set_grad_enabled", "torch.ops.higher_order.wrap_with_autocast")
_LAYOUTS = {7: torch.strided}
_MEMORY = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}
_STRUCTURES = ("in_spec", "out_spec")
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"builtins.tuple": tuple, "builtins.list": list}
_MAPPINGS: dict[str, type[dict[str, Any]]] = {"builtins.dict": dict, "collections.OrderedDict": OrderedDict}


def build_graph(program: Mapping[str, Any], tensors: Mapping[str, Tensor], state: Collection[str]) -> fx.GraphModule:
    """Return the module that a program's document describes.

    Args:
        program: The document.
        tensors: Its parameters, buffers and constants by name.
        state: Those that the module's state has.

    Raises:
        NotPlainError: if the document names an operator that is not known to compute, or has what is not built here.
        KeyError, TypeError, ValueError, AttributeError: if it is not as torch writes it.
    """
    if program["schema_version"]["major"] != _SCHEMA:
        raise NotPlainError(f"its schema is of version {program['schema_version']['major']!r:.20}, not {_SCHEMA}")
    module = program["graph_module"]
    signature = module["signature"]
    root = nn.Module()
    for name, tensor in tensors.items():
        _register(root, name, tensor, name in state)
    builder = _Builder(root, tensors)
    inputs = builder.lifted(signature["input_specs"])
    builder.add(module["graph"])
    builder.mutate(signature["output_specs"], module["graph"]["outputs"])
    builder.output(module["graph"], signature["output_specs"])
    in_spec, out_spec = _structures(module["module_call_graph"])
    graph = builder.graph
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(_arguments(in_spec, inputs), in_spec, out_spec)))
    graph.lint()
    built = fx.GraphModule(root, graph)
    for name, tensor in tensors.items():  # GraphModule copied only those that the graph uses, all as persistent
        _register(built, name, tensor, name in state)
    return built


def sizes_of_inputs(program: Mapping[str, Any]) -> dict[str, list[int | None]]:
    """Return the shapes that the inputs were exported for, by name; None is any size."""
    module = program["graph_module"]
    shapes: dict[str, list[int | None]] = {}
    for spec in module["signature"]["input_specs"]:
        name = spec.get("user_input", {}).get("arg", {}).get("as_tensor", {}).get("name")
        if name is not None:
            sizes = module["graph"]["tensor_values"][name]["sizes"]
            shapes[name] = [size.get("as_int") for size in sizes]
    return shapes


class _Builder:
    """Builds a graph node by node.

    Args:
        root: Has the tensors.
        tensors: The names of those, which are all that the graph may take them by.
    """

    def __init__(self, root: nn.Module, tensors: Collection[str]) -> None:
        self.graph = fx.Graph()
        self._root = root
        self._tensors = tensors
        self._nodes: dict[str, fx.Node] = {}

    def lifted(self, specs: list[dict[str, Any]]) -> list[str]:
        """Make nodes of all inputs: what is the module's own is taken from there. Return the names of the others."""
        inputs = []
        for spec in specs:
            ((kind, told),) = spec.items()
            name = (
                told["name"] if kind == "constant_input" else _only(told["arg"])["name"] if kind == "user_input" else ""
            )
            if name:
                inputs.append(_plain(name))
                self._nodes[name] = self.graph.placeholder(name)
            elif kind in ("parameter", "buffer", "tensor_constant"):
                self._nodes[told["arg"]["name"]] = self._tensor(told[f"{kind}_name"])
            else:
                raise NotPlainError(f"it has an input that is a {kind!r:.40}")
        return inputs

    def add(self, graph: Mapping[str, Any]) -> None:
        """Make nodes of all that is computed."""
        for node in graph["nodes"]:
            target = _target(node["target"])
            positional, named = self._arguments(node, target)
            made = self.graph.call_function(target, positional, named)
            self._name(made, node)

    def mutate(self, specs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        """Write back what the program changes in its own buffers."""
        for spec, output in zip(specs, outputs, strict=True):
            ((kind, told),) = spec.items()
            if kind == "buffer_mutation":
                buffer = self._tensor(told["buffer_name"])
                self.graph.call_function(torch.ops.aten.copy_.default, (buffer, self._value(output)))
            elif kind not in ("user_output", "loss_output"):
                raise NotPlainError(f"it has an output that is a {kind!r:.40}")

    def _tensor(self, path: object) -> fx.Node:
        """Return a node of one of the module's own tensors, whose names are all plain: fx puts them into code."""
        if path not in self._tensors:
            raise NotPlainError(f"it has no tensor {path!r:.100}")
        return self.graph.get_attr(str(path))

    def output(self, graph: Mapping[str, Any], specs: list[dict[str, Any]] | None = None) -> None:
        """Say what is returned: of a whole program those outputs that are the user's."""
        values = [self._value(output) for output in graph["outputs"]]
        if specs is not None:
            values = [value for value, spec in zip(values, specs, strict=True) if "buffer_mutation" not in spec]
        elif graph["is_single_tensor_return"]:
            self.graph.output(values[0])
            return
        self.graph.output(tuple(values))

    def _arguments(self, node: Mapping[str, Any], target: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call: by position as long as none is left out before, then by name."""
        names = (
            [argument.name for argument in target._schema.arguments if not argument.kwarg_only]
            if (isinstance(target, torch._ops.OpOverload))
            else None
        )
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for told in node["inputs"]:
            value, name = self._value(told["arg"]), told["name"]
            if names is None or (len(positional) < len(names) and names[len(positional)] == name and not named):
                positional.append(value)
            else:
                named[_plain(name)] = value
        return tuple(positional), named

    def _name(self, made: fx.Node, node: Mapping[str, Any]) -> None:
        """Let what comes later find the results of a node by their names."""
        outputs = node["outputs"]
        kinds = [next(iter(output)) for output in outputs]
        if len(outputs) == 1 and kinds[0] != "as_tensors" and node.get("is_hop_single_tensor_return") is not False:
            name = _name_of(outputs[0])
            if name is not None:
                self._nodes[name] = made
            return
        parts = outputs[0]["as_tensors"] if kinds == ["as_tensors"] else outputs
        for index, part in enumerate(parts):
            name = part["name"] if kinds == ["as_tensors"] else _name_of(part)
            if name is not None:
                self._nodes[name] = self.graph.call_function(operator.getitem, (made, index))

    def _value(self, argument: Mapping[str, Any]) -> Any:
        """Return what an argument of the document means."""
        ((kind, told),) = argument.items()
        if kind == "as_tensor":
            return self._nodes[told["name"]]
        if kind in _LISTS:
            return [self._value({_LISTS[kind]: item}) for item in told]
        if kind in ("as_optional_tensor", "as_optional_tensors"):
            return self._value(told) if kind == "as_optional_tensor" else [self._value(item) for item in told]
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            ((form, inner),) = told.items()
            return self._nodes[inner] if form == "as_name" else _PLAIN_VALUES[form](inner)
        if kind not in (*_PLAIN_VALUES, "as_graph"):
            raise NotPlainError(f"it has an argument of the kind {kind!r:.40}")
        return self._graph(told["graph"]) if kind == "as_graph" else _PLAIN_VALUES[kind](told)

    def _graph(self, graph: Mapping[str, Any]) -> fx.Node:
        """Add a graph within the graph as a module of its own."""
        inner = _Builder(self._root, self._tensors)
        for argument in graph["inputs"]:
            name = _plain(_name_of(argument))
            inner._nodes[name] = inner.graph.placeholder(name)
        inner.add(graph)
        inner.output(graph)
        name = f"_graph_{sum(1 for child, _ in self._root.named_children() if child.startswith('_graph_'))}"
        self._root.add_module(name, fx.GraphModule(self._root, inner.graph))
        return self.graph.get_attr(name)


# Kinds of arguments that are lists, with the kind of their items.
_LISTS = {
    "as_tensors": "as_tensor",
    "as_nested_tensors": "as_tensors",
    "as_sym_ints": "as_sym_int",
    "as_sym_floats": "as_sym_float",
    "as_sym_bools": "as_sym_bool",
}


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} should be a whole number")
    return value


def _real(value: object) -> float:
    """Read a number; those that JSON has not are texts."""
    if isinstance(value, str) and value not in ("Infinity", "-Infinity", "NaN"):
        raise TypeError(f"{value!r:.40} should be a number")
    if not isinstance(value, (str, int, float)):
        raise TypeError(f"{value!r:.40} should be a number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} should be a text")
    return value


def _device(told: Mapping[str, Any]) -> torch.device:
    if told["type"] not in ("cpu", "cuda", "mps", "xpu", "meta"):
        raise NotPlainError(f"it has the device {told['type']!r:.40}")
    return torch.device(told["type"]) if told.get("index") is None else torch.device(told["type"], told["index"])


# Kinds of arguments whose values stand in the document itself.
_PLAIN_VALUES: dict[str, Callable[[Any], Any]] = {
    "as_none": lambda told: None,
    "as_int": _whole,
    "as_ints": lambda told: [_whole(item) for item in told],
    "as_int_lists": lambda told: [[_whole(item) for item in items] for items in told],
    "as_float": _real,
    "as_floats": lambda told: [_real(item) for item in told],
    "as_bool": bool,
    "as_bools": lambda told: [bool(item) for item in told],
    "as_string": _text,
    "as_strings": lambda told: [_text(item) for item in told],
    "as_complex": lambda told: complex(_real(told["real"]), _real(told["imag"])),
    "as_scalar_type": lambda told: DTYPES[told],
    "as_layout": lambda told: _LAYOUTS[told],
    "as_memory_format": lambda told: _MEMORY[told],
    "as_device": _device,
}


def _target(name: str) -> Callable[..., Any]:
    """Return the operator of that name.

    Raises:
        NotPlainError: if it is not known to compute.
    """
    parts = name.split(".")
    target: Callable[..., Any] | None = None
    if parts[:2] == ["torch", "ops"] and len(parts) == 5 and is_computation(*parts[2:4]):
        operators = getattr(getattr(torch.ops, parts[2]), parts[3])
        target = getattr(operators, parts[4]) if parts[4] in operators.overloads() else None
    elif name in _WRAPPERS:
        target = getattr(torch.ops.higher_order, parts[-1])
    elif parts[0] == "_operator" and len(parts) == 2 and parts[1] in _OPERATORS:
        target = getattr(operator, parts[1])
    elif parts[0] == "math" and len(parts) == 2 and parts[1] in _MATH:
        target = getattr(math, parts[1])
    elif parts[0] == "torch" and len(parts) == 2 and parts[1] in _SYMBOLIC:
        target = getattr(torch, parts[1], None)
    if target is None:
        raise NotPlainError(f"it calls {name!r:.100}, which is not known to do nothing but compute")
    return target


def _register(root: nn.Module, path: str, tensor: Tensor, persistent: bool) -> None:
    """Give a module a tensor at a path, with modules on the way there."""
    if not _PATH.fullmatch(path):
        raise NotPlainError(f"it has the name {path!r:.100}")
    *folders, name = path.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        root = root.get_submodule(folder)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(name, tensor)
    else:
        root.register_buffer(name, tensor, persistent)


def _plain(name: object) -> str:
    if not isinstance(name, str) or not _PLAIN.fullmatch(name) or keyword.iskeyword(name) or name == "self":
        raise NotPlainError(f"it has the name {name!r:.100}")
    return name


def _only(union: Mapping[str, Any]) -> Any:
    (value,) = union.values()
    return value


def _name_of(argument: Mapping[str, Any]) -> str | None:
    """Return what a result is called; None for one that is nothing."""
    told = _only(argument)
    if not isinstance(told, Mapping):
        return None
    name = told.get("name", told.get("as_name"))
    return None if name is None else _text(name)


def _structures(calls: list[dict[str, Any]]) -> tuple[pytree.TreeSpec, pytree.TreeSpec]:
    """Return the structures of inputs and outputs; those of modules within the program have to be as plain."""
    signatures = [(call["fqn"], call["signature"]) for call in calls if call["signature"] is not None]
    structures = {
        name: [pytree.tree_structure(_example(_spec(signature[key]))) for key in _STRUCTURES]
        for name, signature in signatures
    }
    inputs, outputs = structures[""]
    return inputs, outputs


def _spec(text: str) -> dict[str, Any]:
    protocol, spec = json.loads(text)
    if protocol != 1 or not isinstance(spec, dict):
        raise ValueError("its structure of inputs or outputs is of another kind")
    return spec


def _example(spec: Mapping[str, Any]) -> Any:
    """Return a structure of Python's own that is as a specification says, with 0 for each tensor.

    What torch knows as another kind of mapping, as the outputs of transformers are, is a dictionary here.
    """
    kind, children = spec["type"], [_example(child) for child in spec["children_spec"]]
    if kind is None:
        return 0
    keys = json.loads(spec["context"] or "null")
    if kind in _CONTAINERS and keys is None:
        return _CONTAINERS[kind](children)
    if not isinstance(keys, list) or len(keys) != len(children) or not all(isinstance(key, str) for key in keys):
        raise NotPlainError(f"it takes or returns a {kind!r:.60}")
    return _MAPPINGS.get(kind, dict)(zip(keys, children, strict=True))


def _arguments(spec: pytree.TreeSpec, inputs: list[str]) -> list[str]:
    """Return the names that the arguments have: those of their tensors, where an argument is one."""
    example = pytree.tree_unflatten(inputs, spec)
    positional, named = example
    for name in named:
        _plain(name)
    by_place = [value if isinstance(value, str) else f"argument_{number}" for number, value in enumerate(positional)]
    return [*by_place, *named]
