"""The package is a house of rooms, in which an import only ever points down."""

import ast
from pathlib import Path

from support import TESTS

import ewc_finetune

PACKAGE = Path(ewc_finetune.__file__).parent
# From the top; rooms in one line know nothing of each other.
HOUSE = [
    {"cli"},
    {"commands"},
    {"sweeps", "model_card", "mending", "integrations"},
    {"finetuning"},
    {"rehearsal"},
    {"reporting"},
    {"evaluation"},
    {"runs"},
    {"checkpoint"},
    {"penalty"},
    {"anchor"},
    {"data"},
    {"curvature"},
    {"likelihood"},
    {"hub"},
    {"modules"},
    {"storage"},
    {"specs"},
    {"choices"},
    {"errors"},
    {"progress"},
]
HEIGHT = {room: -number for number, rooms in enumerate(HOUSE) for room in rooms}
# Where everything begins.
DOORS = {"__init__", "__main__", "_version"}


def modules():
    """Yield every module of the package with what it imports from it, and where."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name, ast.parse(path.read_text())


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ewc_finetune":
            inside = node.module.partition(".")[2]
            yield from (f"{inside}.{alias.name}".strip(".") for alias in node.names)


def test_no_import_points_up():
    wrong = []
    for name, tree in modules():
        room = name.partition(".")[0]
        for imported in imports(tree):
            other = imported.partition(".")[0]
            if room not in DOORS and other not in DOORS | {room} and HEIGHT[other] >= HEIGHT[room]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other():
    names = {name.removesuffix(".__init__"): tree for name, tree in modules()}
    below = {
        name: {found for path in imports(tree) for found in (path, path.rpartition(".")[0]) if found in names} - {name}
        for name, tree in names.items()
        if name not in DOORS
    }
    while free := {name for name, others in below.items() if not others & below.keys()}:
        for name in free:
            del below[name]
    assert not below, f"each of these imports another of them: {', '.join(sorted(below))}"


def test_nothing_else_stands_at_the_door():
    files = {path.stem for path in PACKAGE.glob("*.py")}
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert files | rooms == DOORS | HEIGHT.keys()


def test_the_tests_have_the_same_rooms():
    assert {path.parent.name for path in TESTS.glob("*/test_*.py")} <= {"faults"} | HEIGHT.keys()


def test_no_test_module_imports_another():
    paths = list(TESTS.rglob("test_*.py"))
    names = {path.stem for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [node.module] if isinstance(node, ast.ImportFrom) else []
            imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not names & set(imported), f"{path.relative_to(TESTS)} imports {imported}; share it in tests/support"
