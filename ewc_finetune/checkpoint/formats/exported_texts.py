"""The texts of an exported program that torch evaluates: sizes as expressions, and guards.

They are not evaluated here. Whoever loads with torch what is written back evaluates them, so that a program is refused
that has others than numbers, names and arithmetic.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from ewc_finetune.checkpoint.formats.exported_archive import NotPlainError

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FUNCTIONS = frozenset(
    """
    Abs Add And BitwiseFn_bitwise_and BitwiseFn_bitwise_or CeilDiv CeilToInt CleanDiv Eq Equality ExprCondPair
    Float FloatPow FloatTrueDiv FloorDiv FloorToInt Ge GreaterThan Gt Identity IntTrueDiv Integer
    IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod ModularIndexing Mul Ne Not Or
    Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt StrictGreaterThan
    StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Tuple Unequality Where ceiling floor
    """.split()
)
# The methods of an input that guards call.
_METHODS = frozenset({"size", "stride", "dim", "storage_offset"})
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.keyword, ast.Tuple, ast.Subscript, ast.Attribute),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def check_texts(program: dict[str, Any]) -> None:
    """Look at every expression and guard of a program's document.

    Raises:
        NotPlainError: naming the first that is more than numbers, names and arithmetic.
    """
    guards = program.get("guards_code") or []
    for text in [*_expressions(program), *(guards if isinstance(guards, list) else [guards])]:
        if not _is_arithmetic(text):
            raise NotPlainError(f"it has the expression {text!r:.100}, which is more than arithmetic")


def _expressions(value: object) -> Iterator[object]:
    """Yield what stands as an expression anywhere in a document."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += [item for key, item in part.items() if key != "expr_str"]
            if "expr_str" in part:
                yield part["expr_str"]
        elif isinstance(part, list):
            left += part


def _is_arithmetic(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _NODES) and _is_plain(node) for node in ast.walk(tree))


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        by_name = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        return by_name or (isinstance(node.func, ast.Attribute) and not node.args and not node.keywords)
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _PLAIN.fullmatch(node.value) is not None
    return not isinstance(node, ast.Name) or "__" not in node.id
