"""What the code in a TorchScript archive may do, found by reading it: it is compiled and run by torch as it stands.

The code is a small part of Python, as torch prints it. Every operator that it names must be one that computes
(`operators`), every method one that it defines itself and that is no other operator's name. What could be read
otherwise by torch's own parser is refused: comments, prefixes of texts, characters beyond ASCII.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Set

from ewc_finetune.checkpoint.formats.operators import is_computation, is_refused

# Functions that are called by their names alone.
_BUILTINS = frozenset(
    """
    annotate uninitialized unchecked_cast isinstance getattr hasattr range len int float bool complex str list dict
    tuple enumerate zip min max abs sum sorted reversed round pow divmod ord Device
    """.split()
)
# Names such as `_0`, which torch gives to functions and classes of the archive within its code.
_ALIAS = re.compile(r"_\d+")
_RUN_AT_LOAD = ("__setstate__", "__getstate__")
# Methods that torch prints though no code of the archive defines them.
_METHODS = frozenset({"tolist"})
# Names that only stand in front of another one (`torch.relu`), and never by themselves.
_ROOTS = ("torch", "ops", "__torch__", "CONSTANTS")
_CUSTOM = "classes"
_NEVER_PRINTED = (ast.Import, ast.ImportFrom, ast.Lambda, ast.Global, ast.Nonlocal, ast.JoinedStr, ast.NamedExpr)
_LARGEST = 50 << 20


def find_refused(sources: Iterable[bytes]) -> str | None:
    """Return what the code does that no computation needs, in words; None if there is nothing.

    Args:
        sources: The files of the archive's code.
    """
    try:
        trees = [_parse(source) for source in sources]
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError) as error:
        return f"its code cannot be read ({error or type(error).__name__})"
    defined = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return next((reason for tree in trees for reason in _refused(tree, _METHODS | defined)), None)


def _parse(source: bytes) -> ast.Module:
    if len(source) > _LARGEST:
        raise ValueError(f"a file of {len(source):,} bytes")
    text = source.decode("ascii")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            raise ValueError("there is a comment in it")
        if token.type == tokenize.STRING and (token.string[0] not in "\"'" or token.string[:3] in ('"""', "'''")):
            raise ValueError(f"there is the text {token.string!r:.40} in it")
    if any(not (" " <= character <= "~" or character == "\n") for character in text) or "\\\n" in text:
        raise ValueError("there are characters in it that torch does not write")
    return ast.parse(text)


def _refused(tree: ast.Module, defined: Set[str]) -> Iterator[str]:
    """Yield every reason to refuse a file."""
    below = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from _calls_of(function, defined)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _ROOTS and id(node) not in below:
            yield f"it uses {node.id} by itself"
        elif isinstance(node, ast.Attribute):
            chain = _chain(node)
            if id(node) not in below and chain is not None and not _is_allowed(chain):
                yield f"it uses {'.'.join(chain)}"
            if chain is None and is_refused(node.attr):
                yield f"it uses {node.attr}"
        elif isinstance(node, _NEVER_PRINTED):
            yield f"it has a {type(node).__name__}, which torch does not write"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_printable(node.value):
            yield f"it has the text {node.value!r:.40}"


def _calls_of(function: ast.FunctionDef, defined: Set[str]) -> Iterator[str]:
    """Yield the reasons that lie in what a function calls."""
    if function.name in _RUN_AT_LOAD:
        yield f"it defines {function.name}, which runs as it is loaded"
    assigned = _assigned(function).items()
    aliases = {name for name, values in assigned if values and _ALIAS.fullmatch(name) and all(map(_is_own, values))}
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            if called.id not in _BUILTINS and called.id not in aliases:
                yield f"it calls {called.id}"
            if called.id in ("getattr", "hasattr") and not _names_an_attribute(node):
                yield f"it calls {called.id} with a name that is not plain"
        elif not isinstance(called, ast.Attribute):
            yield "it calls what it computes"
        elif (_chain(called) or ("",))[0] not in _ROOTS and (called.attr not in defined or is_refused(called.attr)):
            yield f"it calls the method {called.attr}"


def _assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr | None]]:
    """Return what each name in a function is ever made to stand for; None for what is not seen here."""
    values: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            values.setdefault(node.id, [])
        elif isinstance(node, ast.arg):
            values.setdefault(node.arg, []).append(None)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            plain = len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        values.setdefault(name.id, []).append(node.value if plain else None)
        elif isinstance(node, (ast.For, ast.With, ast.AugAssign, ast.AnnAssign)):
            for name in ast.walk(node.items[0] if isinstance(node, ast.With) else node.target):
                if isinstance(name, ast.Name):
                    values.setdefault(name.id, []).append(None)
    return values


def _is_own(value: ast.expr | None) -> bool:
    """Whether a value is a function or class of the archive itself."""
    return value is not None and (_chain(value) or ("",))[0] == "__torch__"


def _names_an_attribute(call: ast.Call) -> bool:
    name = call.args[1] if len(call.args) == 2 else None
    return isinstance(name, ast.Constant) and isinstance(name.value, str) and not is_refused(name.value)


def is_printable(text: str) -> bool:
    """Whether a text that a program may print has no control characters for a terminal."""
    return text.replace("\n", "").replace("\t", "").isprintable()


def _chain(node: ast.expr) -> tuple[str, ...] | None:
    """Return the names of `a.b.c`; None if it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else None


def _is_allowed(chain: tuple[str, ...]) -> bool:
    """Whether what a chain of names stands for may be used; what a variable has is looked at where it is called."""
    if chain[0] == "torch":
        return len(chain) == 2 and is_computation("aten", chain[1])
    if chain[0] == "ops":
        return len(chain) == 3 and is_computation(chain[1], chain[2])
    if chain[0] == "CONSTANTS":  # a third part would be a method of a constant, which is an operator
        return len(chain) == 2
    if chain[0] == "__torch__":
        return chain[1:3] != ("torch", _CUSTOM) and not any(map(is_refused, chain[1:]))
    return True
