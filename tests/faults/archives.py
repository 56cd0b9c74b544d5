"""Archives of torch that were made to do harm, each from one that torch wrote."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

Members = dict[str, bytes]


class Bomb:
    """What makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def bomb(mark: Path) -> bytes:
    """A file of torch.save that explodes when it is loaded."""
    buffer = io.BytesIO()
    torch.save(Bomb(mark), buffer)
    return buffer.getvalue()


def members_of(path: Path) -> Members:
    """The members of an archive, by their names with the folder."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_members(path: Path, members: Members) -> Path:
    """Write an archive whose checksums are right."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((2,), 2.0), persistent=False)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3))) * self.scale + torch.tensor([1.0, 2.0])


def export(path: Path, model: nn.Module | None = None) -> Path:
    """An archive as torch.export.save writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        batch = torch.export.Dim("batch", min=1, max=64)
        program = torch.export.export((model or Net()).eval(), (torch.randn(2, 1, 6, 6),), dynamic_shapes=({0: batch},))
        torch.export.save(program, path)
    return path


def script(path: Path, model: nn.Module) -> Path:
    """An archive as torch.jit.save writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model).save(str(path))
    return path


def _document(members: Members, name: str, change: Callable[[dict], None]) -> Members:
    (key,) = (key for key in members if key.endswith(name))
    document = json.loads(members[key])
    change(document)
    return {**members, key: json.dumps(document).encode()}


def _root(members: Members) -> str:
    return next(iter(members)).partition("/")[0]


def _pickled_weight(members: Members, mark: Path) -> Members:
    def change(document: dict) -> None:
        document["config"]["last.weight"]["use_pickle"] = True

    found = _document(members, "model_weights_config.json", change)
    return {**found, f"{_root(members)}/data/weights/weight_4": bomb(mark)}


def _pickled_constant(members: Members, mark: Path) -> Members:
    def change(document: dict) -> None:
        document["config"]["scale"] |= {"path_name": "opaque_obj_0"}

    found = _document(members, "model_constants_config.json", change)
    return {**found, f"{_root(members)}/data/constants/opaque_obj_0": pickle.dumps(Bomb(mark))}


def _old_layout(members: Members, mark: Path) -> Members:
    (program,) = (content for name, content in members.items() if name.endswith("models/model.json"))
    return {
        "version": b"8.8",
        "serialized_exported_program.json": program,
        **{f"serialized_{what}.pt": bomb(mark) for what in ("state_dict", "constants", "example_inputs")},
    }


def _expression(members: Members, mark: Path) -> Members:
    def change(document: dict) -> None:
        sizes = document["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = f"__import__('os').mkdir({str(mark)!r})"

    return _document(members, "model.json", change)


def _hidden_expression(members: Members, mark: Path) -> Members:
    def change(document: dict) -> None:
        sizes = document["graph_module"]["graph"]["tensor_values"]["x"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = f"Symbol('s0').__class__.__base__.__subclasses__()[0]({str(mark)!r})"

    return _document(members, "model.json", change)


def _guards(members: Members, mark: Path) -> Members:
    return _document(
        members, "model.json", lambda document: document.update(guards_code=[f"__import__('os').mkdir({str(mark)!r})"])
    )


def _target(target: str) -> Callable[[Members, Path], Members]:
    def make(members: Members, mark: Path) -> Members:
        def change(document: dict) -> None:
            document["graph_module"]["graph"]["nodes"].append(
                {
                    "target": target,
                    "inputs": [{"name": "filename", "arg": {"as_string": str(mark)}, "kind": 1}],
                    "outputs": [{"as_none": True}],
                    "metadata": {},
                    "is_hop_single_tensor_return": None,
                }
            )

        return _document(members, "model.json", change)

    return make


def _name(members: Members, mark: Path) -> Members:
    hostile = f"x=__import__('os').mkdir({str(mark)!r})"
    return {
        key: content.replace(b'"x"', json.dumps(hostile).encode()) if key.endswith("model.json") else content
        for key, content in members.items()
    }


def _structure(members: Members, mark: Path) -> Members:
    def change(document: dict) -> None:
        context = json.dumps({"__enum__": True, "fqn": "antigravity:X", "name": "x"})
        spec = [1, {"type": "builtins.dict", "context": f"[{context}]", "children_spec": [_LEAF]}]
        document["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps(spec)

    return _document(members, "model.json", change)


_LEAF = {"type": None, "context": None, "children_spec": []}


def _buffer(members: Members, mark: Path) -> Members:
    """A name that fx would put into code as it stands, of a buffer that need not be there."""
    name = f"dump_patches.x\")\rexec(\"__import__('os')\\x2emkdir('{mark}')\")\rdef q(self):\r    getattr(0, \"real"

    def change(document: dict) -> None:
        module = document["graph_module"]
        outputs = module["graph"]["outputs"]
        module["signature"]["output_specs"].insert(
            0, {"buffer_mutation": {"arg": {"name": "add"}, "buffer_name": name}}
        )
        outputs.insert(0, outputs[0])

    return _document(members, "model.json", change)


def _samples(members: Members, mark: Path) -> Members:
    """Tuples within tuples, whose parts are counted by the billion where one is a key."""
    value: object = (0,)
    for _ in range(40):
        value = (value, value)
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return {**members, f"{_root(members)}/data/sample_inputs/model.pt": buffer.getvalue()}


def _stretched(members: Members, mark: Path) -> Members:
    def change(document: dict) -> None:
        meta = document["config"]["last.weight"]["tensor_meta"]
        meta |= {"sizes": [{"as_int": 2**30}, {"as_int": 3}], "strides": [{"as_int": 0}, {"as_int": 1}]}

    return _document(members, "model_weights_config.json", change)


def _with(name: str) -> Callable[[Members, Path], Members]:
    return lambda members, mark: {**members, f"{_root(members)}/{name}": bomb(mark)}


# Exported programs that would run what they bring, by what brings it.
HOSTILE_EXPORTS: dict[str, Callable[[Members, Path], Members]] = {
    "sample inputs": _with("data/sample_inputs/model.pt"),
    "a pickled weight": _pickled_weight,
    "a pickled constant": _pickled_constant,
    "legacy weights": _with("data/weights/model.pt"),
    "legacy constants": _with("data/constants/model.pt"),
    "the old layout": _old_layout,
    "an expression": _expression,
    "a hidden expression": _hidden_expression,
    "guards": _guards,
    "a shared object": _with("data/aotinductor/model/model.so"),
    "a custom object": _with("data/constants/custom_obj_0"),
    "a second program": _with("models/other.json"),
    "a file operator": _target("torch.ops.aten.from_file.default"),
    "a function of torch": _target("torch.load"),
    "a module behind torch": _target("torch.os.mkdir"),
    "an extension": _target("#os:mkdir"),
    "a name": _name,
    "a structure": _structure,
    "a buffer's name": _buffer,
    "sample inputs without end": _samples,
    "a stretched weight": _stretched,
    "an attribute of an operator": _target("torch.ops.aten.relu.__getattr__"),
    "memory without bounds": _target("torch.ops.aten._reshape_alias.default"),
    "everybody's generator": _target("torch.ops.aten.manual_seed.default"),
}


class Last(nn.Linear):
    """A Linear that nothing else scripts: what torch calls the type of one depends on those scripted before it."""


class SavesOnLoad(nn.Module):
    """Writes a file when it is loaded."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark
        self.last = Last(4, 3)

    def forward(self, x):
        return self.last(x)

    @torch.jit.export
    def __getstate__(self):
        return self.mark, self.last, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, Last, bool]):
        torch.save(torch.ones(1), state[0])
        self.mark = state[0]
        self.last = state[1]
        self.training = state[2]


class SavesWhenRun(nn.Module):
    """Writes a file in its forward pass."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        torch.save(x, self.mark)
        return self.last(x)


class ReadsAFile(SavesWhenRun):
    """Maps a file, which is made where there is none."""

    def forward(self, x):
        return self.last(x) + torch.from_file(self.mark, True, 3)


class Prints(SavesWhenRun):
    """Writes to the screen."""

    def forward(self, x):
        print("\x1b[2J")
        return self.last(x)


class Plain(SavesWhenRun):
    """Does nothing but compute."""

    def forward(self, x):
        return self.last(x)


# TorchScript whose code does more than compute.
HOSTILE_SCRIPTS: dict[str, Callable[[str], nn.Module]] = {
    "saves when run": SavesWhenRun,
    "reads a file": ReadsAFile,
    "prints": Prints,
}
# Statements that torch does not print, put in front of the result of `Plain`: for what it compiles or reads otherwise.
HOSTILE_STATEMENTS = (
    '_9 = torch.save\n    _8 = _9(x, "MARK", )',
    '_8 = (x).save("MARK", )',
    '_9 = torch\n    _8 = (_9).save(x, "MARK", )',
    '_8 = getattr(torch, "save")(x, "MARK", )',
    '_8 = ops.aten.save(x, "MARK", )',
    '_8 = ops.image.write_file("MARK", x, )',
    '_8 = __torch__.torch.classes.dist_c10d.FileStore("MARK", 1, )',
    "_8 = fork(self, x, )",
    'print("x")  # "',
    "_8 = 1 # comment",
    "_8 = f'{torch.save}'",
    '_8 = """\n"""',
    "_8 = u'x'",
    "_8 = torch.manual_seed(0)",
    "import os",
    "_8 = open(x)",
    "_8 = 'é'",
    "_8 = (lambda: 1)()",
    'print("x")\n    print = __torch__.archives.Plain',
    "_8 = fork(self, x, )\n    fork = __torch__.archives.Plain",
    "_8 = torch._reshape_alias(x, [4000000000, 4], [4, 1])",
    "_8 = torch.set_grad_enabled(False)",
    'torch.warn("\\033[31mHELLO", 2)',
    "_8 = torch.chr(27)",
    '_8 = CONSTANTS.c0.save("MARK", )',
    '_8 = (CONSTANTS.c0).save("MARK", )',
    '_8 = __torch__.archives.Plain.save("MARK", )',
    "_8 = [_9(x, ) for _9 in [x]]",
    "_8 = (x).resize_([4, 4], )",
    "_8 = torch.set_(x, x)",
    '_8 = torch.percentFormat("%c", 27)',
)
