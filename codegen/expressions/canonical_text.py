"""The canonical text of a tree, which decides its C++: `parse_tree(text_of(tree)) is tree`. It may stand in names, records and caches.

    x0 = float32(add(query, neg(key))); add(score, neg(mul(t0:fp32[head], x0)))

An operator stands before its operands, a load is a tensor with its dtype and indices, a number has its type (`n0:int32`). Constants are
fp32 where they have a point or an exponent, int32 else, or int64 (`3:int64`). What is used twice, and what is nested deeply, has a name.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NoReturn

from flashgen.codegen.errors import ArgumentError, shown

from .build import apply
from .tree import (
    BOOL,
    FLOAT32,
    INPUTS,
    INT32,
    INT64,
    Expression,
    ScalarType,
    constant,
    input_node,
    load_node,
    nodes_of,
    number_node,
    to_float32,
)

_DEEPEST = 40  # levels of parentheses


def names_of_shared(*trees: Expression, deepest: int = _DEEPEST) -> list[Expression]:
    """What has a name in a text: inner nodes that are used more than once, and one on each way of `deepest` levels; operands first."""
    uses, depth = Counter(trees), dict[Expression, int]()
    nodes = nodes_of(*trees)
    for node in nodes:
        uses.update(node.operands)
    named = []
    for node in nodes:
        depth[node] = 1 + max((depth[operand] for operand in node.operands), default=0)
        is_inner = node.operation == "load" or (bool(node.operands) and node.operation != "constant")
        if is_inner and (uses[node] > 1 or depth[node] >= deepest):
            named.append(node)
            depth[node] = 0
    return named


def text_of(tree: Expression) -> str:
    """See the module's docstring."""
    texts: dict[Expression, str] = {}
    named = {node: f"x{i}" for i, node in enumerate(names_of_shared(tree)) if node is not tree}
    statements = []
    for node in nodes_of(tree):
        text = _written(node, [texts[operand] for operand in node.operands])
        if node in named:
            statements.append(f"{named[node]} = {text}")
            text = named[node]
        texts[node] = text
    return "; ".join((*statements, texts[tree]))


def _written(node: Expression, operands: list[str]) -> str:
    match node.operation:
        case "input":
            return str(node.value)
        case "number":
            return f"{node.value}:{node.type}"
        case "load":
            return f"{node.value.tensor}:{node.value.dtype}[{', '.join(operands)}]"
        case "constant":
            return _written_constant(node)
    return f"{node.operation}({', '.join(operands)})"


def _written_constant(node: Expression) -> str:
    if node.type is BOOL:
        return "true" if node.value else "false"
    if node.type is FLOAT32:
        return shortest_float32(node.value)
    return f"{node.value}:int64" if node.type is INT64 else str(node.value)


def shortest_float32(value: float) -> str:
    """The fewest digits that are this fp32 number, with a point or an exponent: 0.1, not 0.10000000149011612. Else inf, -inf or nan."""
    if not math.isfinite(value):
        return repr(value)
    digits = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return repr(next(number for number in digits if to_float32(number) == value))


_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|-?(?:inf\b|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)|[()\[\],;:=])")


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._named: dict[str, Expression] = {}

    def parse(self) -> Expression:
        while re.match(r"\s*x\d+ =", self._text[self._at :]):
            name = self._next()
            self._expect("=")
            self._named[name] = self._expression()
            self._expect(";")
        tree = self._expression()
        if self._text[self._at :].strip():
            self._refuse()
        return tree

    def _refuse(self) -> NoReturn:
        raise ArgumentError(f"text must be that of an expression; got {shown(self._text)}, which is none from character {self._at} on")

    def _next(self) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            self._refuse()
        self._at = match.end()
        return match[1]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _expect(self, token: str) -> None:
        if self._next() != token:
            self._refuse()

    def _list(self, end: str) -> tuple[Expression, ...]:
        found: list[Expression] = []
        if self._peek() == end:
            self._next()
            return ()
        while True:
            found.append(self._expression())
            token = self._next()
            if token == end:
                return tuple(found)
            if token != ",":
                self._refuse()

    def _expression(self) -> Expression:
        word = self._next()
        if word in INPUTS:
            return input_node(word)
        if word in self._named:
            return self._named[word]
        if word in ("true", "false"):
            return constant(word == "true", BOOL)
        if re.fullmatch(r"-?\d+", word):
            return constant(int(word), ScalarType(self._suffix()) if self._peek() == ":" else INT32)
        if re.match(r"-?[\d.]|-?inf$|nan$", word):
            return constant(float(word), FLOAT32)
        if self._peek() == ":":
            kind = self._suffix()
            if self._peek() != "[":
                return number_node(word, ScalarType(kind))
            self._next()
            return load_node(word, kind, self._list("]"))
        self._expect("(")
        return apply(word, *self._list(")"))

    def _suffix(self) -> str:
        self._expect(":")
        return self._next()


def parse_tree(text: str) -> Expression:
    """The tree of a text of `text_of`. Raises ArgumentError for a text that is none."""
    parser = _Parser(text)
    try:
        return parser.parse()
    except ArgumentError:
        raise
    except ValueError:
        parser._refuse()
