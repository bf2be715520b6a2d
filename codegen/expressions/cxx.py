"""C++ of expressions: statements that name what is used twice, and an expression for each result.

    const float x0 = static_cast<float>(query - key);
    score - t0.at(head) * x0

Inputs and numbers have their own names, a captured tensor is an object with a function `at`, which is given the indices. What is not an
operator of C++ is in templates/tile/common/expressions.cuh. The text is the same for the GPU and for the emulator.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .bounds import Range, exact_range, range_of_type, ranges_of
from .canonical_text import names_of_shared, shortest_float32
from .tree import BOOL, FLOAT32, INT32, INT64, Expression, ScalarType, nodes_of

CXX_TYPES: dict[ScalarType, str] = {BOOL: "bool", INT32: "int", INT64: "i64", FLOAT32: "float"}
_DEEPEST = 12  # levels of an expression that is written without a name
_PRIMARY, _UNARY, _PRODUCT, _SUM, _COMPARISON, _EQUALITY, _AND, _XOR, _OR, _BOTH, _EITHER, _CHOICE = range(12, 0, -1)
_BINARY = {"le": ("<=", _COMPARISON), "lt": ("<", _COMPARISON), "eq": ("==", _EQUALITY), "ne": ("!=", _EQUALITY)}
_LOGIC = {"and": ("&&", _BOTH), "or": ("||", _EITHER), "xor": ("!=", _EQUALITY)}
_BITS = {"and": ("&", _AND), "or": ("|", _OR), "xor": ("^", _XOR)}
_FUNCTIONS = {
    **{name: f"{name}f" for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh", "sin", "cos", "erf", "pow")},
    **{"floor": "floorf", "ceil": "ceilf", "round": "rintf", "trunc": "truncf", "rsqrt": "reciprocal_sqrt", "sigmoid": "sigmoid"},
    **{"floor_div": "floor_div", "mod": "floor_mod", "min": "smaller", "max": "larger", "sign": "sign_of"},
    **{"shift_left": "shifted_left", "shift_right": "shifted_right"},
}


@dataclass(frozen=True)
class PrintedExpressions:
    """C++: `statements`, each a constant definition, and `results`, an expression for each tree."""

    statements: tuple[str, ...]
    results: tuple[str, ...]


def printed(
    trees: Sequence[Expression], inputs: Mapping[Expression, str] | None = None, prefix: str = "x", branches: bool = True
) -> PrintedExpressions:
    """The C++ of trees, which share their statements.

    inputs: nodes that are known by a name already, such as those of `block_parts`; nothing below them is written
    prefix: of the names of statements
    branches: whether conditions behind `and` and `or` may be left out where the first one decides
    """
    known = dict(inputs or {})
    ranges = ranges_of(*trees)
    trees_below = nodes_down_to(trees, known)
    texts: dict[Expression, tuple[str, int]] = {node: (name, _PRIMARY) for node, name in known.items()}
    shared = [node for node in names_of_shared(*trees, deepest=_DEEPEST) if node in trees_below and node not in known]
    named = {node: f"{prefix}{i}" for i, node in enumerate(each for each in shared if not (each in trees and _is_used_once(each, trees)))}
    statements = []
    for node in trees_below:
        if node in texts:
            continue
        text = _written(node, texts, ranges, _LOGIC if branches else _BITS)
        if node in named:
            statements.append(f"const {CXX_TYPES[node.type]} {named[node]} = {text[0]};")
            text = named[node], _PRIMARY
        texts[node] = text
    return PrintedExpressions(tuple(statements), tuple(texts[tree][0] for tree in trees))


def nodes_down_to(trees: Sequence[Expression], known: Collection[Expression]) -> list[Expression]:
    """The nodes of trees, operands first, with those that are known, but not what is below these."""
    needed, stack = set(), list(trees)
    while stack:
        each = stack.pop()
        if each not in needed:
            needed.add(each)
            stack.extend(() if each in known else each.operands)
    return [node for node in nodes_of(*trees) if node in needed]


def _is_used_once(tree: Expression, trees: Sequence[Expression]) -> bool:
    """Whether a tree is a result alone, and no part of another one."""
    return trees.count(tree) == 1 and not any(tree in node.operands for node in nodes_of(*trees))


def _written(
    node: Expression, texts: Mapping[Expression, tuple[str, int]], ranges: dict[Expression, Range], logic: Mapping[str, tuple[str, int]]
) -> tuple[str, int]:
    def text(operand: Expression, least: int) -> str:
        own, precedence = texts[operand]
        return own if precedence >= least else f"({own})"

    def call(function: str) -> tuple[str, int]:
        return f"{function}({', '.join(text(operand, 0) for operand in node.operands)})", _PRIMARY

    operands = node.operands
    difference = _difference(node)
    if difference is not None:
        (low, high), (of_a, of_b) = range_of_type(node.type), (ranges[each] for each in difference)
        if low <= of_a[0] - of_b[1] and of_a[1] - of_b[0] <= high:
            return f"{text(difference[0], _SUM)} - {text(difference[1], _SUM + 1)}", _SUM
        return f"wrapped_sub({text(difference[0], 0)}, {text(difference[1], 0)})", _PRIMARY
    match node.operation:
        case "input" | "number":
            return str(node.value), _PRIMARY
        case "constant":
            return _constant(node)
        case "load":
            return call(f"{node.value.tensor}.at")
        case "add" | "mul" | "neg" if node.type is not FLOAT32 and not _is_exact(node, ranges):
            return call({"add": "wrapped_add", "mul": "wrapped_mul", "neg": "wrapped_neg"}[node.operation])
        case "add":
            first, second = operands
            added = texts[second][0]
            if added.startswith("-"):  # a negative constant, or -x
                return f"{text(first, _SUM)} - {added[1:]}", _SUM
            return f"{text(first, _SUM)} + {text(second, _SUM + 1)}", _SUM
        case "neg":
            if node.type is FLOAT32 and operands[0].operation in ("mul", "div"):  # (-a) * b is -(a * b)
                return f"-{text(operands[0], _PRODUCT)}", _PRODUCT
            return f"-{text(operands[0], _PRIMARY)}", _UNARY
        case "mul" | "div":
            sign = "*" if node.operation == "mul" else "/"
            return f"{text(operands[0], _PRODUCT)} {sign} {text(operands[1], _PRODUCT + 1)}", _PRODUCT
        case "floor_div" | "mod" if node.type is not FLOAT32 and ranges[operands[0]][0] >= 0 and ranges[operands[1]][0] > 0:
            sign = "/" if node.operation == "floor_div" else "%"
            return f"{text(operands[0], _PRODUCT)} {sign} {text(operands[1], _PRODUCT + 1)}", _PRODUCT
        case "abs":
            return call("fabsf" if node.type is FLOAT32 else "absolute")
        case "le" | "lt" | "eq" | "ne":
            sign, own = _BINARY[node.operation]
            return f"{text(operands[0], own + 1)} {sign} {text(operands[1], own + 1)}", own
        case "and" | "or" | "xor":
            sign, own = (logic if node.type is BOOL else _BITS)[node.operation]
            return f"{text(operands[0], own)} {sign} {text(operands[1], own + 1)}", own
        case "not":
            return f"{'!' if node.type is BOOL else '~'}{text(operands[0], _UNARY)}", _UNARY
        case "where":
            return f"{text(operands[0], _CHOICE + 1)} ? {text(operands[1], _CHOICE + 1)} : {text(operands[2], _CHOICE)}", _CHOICE
        case "int32" | "int64" | "float32":
            return call(f"static_cast<{CXX_TYPES[node.type]}>")
    return call(_FUNCTIONS[node.operation])


def _difference(node: Expression) -> tuple[Expression, Expression] | None:
    """(a, b), if the node is the integer a - b, or the opposite of b - a."""
    if node.operation == "neg" and node.type is not FLOAT32:
        opposite = _difference(node.operands[0])
        return opposite and (opposite[1], opposite[0])
    if node.operation == "add" and node.type is not FLOAT32 and node.operands[1].operation == "neg":
        return node.operands[0], node.operands[1].operands[0]
    return None


def _is_exact(node: Expression, ranges: dict[Expression, Range]) -> bool:
    """Whether integer arithmetic stays in its type, as C++ wants it."""
    (low, high), (least, most) = range_of_type(node.type), exact_range(node, ranges)
    return low <= least and most <= high


def _constant(node: Expression) -> tuple[str, int]:
    value = node.value
    if node.type is BOOL:
        return ("true" if value else "false"), _PRIMARY
    if node.type is FLOAT32:
        if value != value:
            return "__uint_as_float(0x7fc00000u)", _PRIMARY
        text = shortest_float32(value).replace("inf", "infinity()")
        text = text if text.endswith(")") else f"{text}f"
    else:
        suffix = "ll" if node.type is INT64 else ""
        if value == range_of_type(node.type)[0]:  # -2147483648 is the opposite of what no int holds
            return f"(-{-value - 1}{suffix} - 1)", _PRIMARY
        text = f"{value}{suffix}"
    return text, _UNARY if text.startswith("-") else _PRIMARY
