"""Nodes of expressions: immutable, typed, and one object for each value, so that equal trees are the same object.

A tree shares what occurs in it twice, so walk it with `nodes_of`, which visits each node once. `build.apply` makes the inner nodes.
"""

from __future__ import annotations

import enum
import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from flashgen.codegen.errors import ArgumentError, choice_error


class ScalarType(enum.StrEnum):
    """What a node's value is. Halves are float32 once they are loaded, and integers of less than 32 bits int32."""

    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float32"

    @property
    def is_integer(self) -> bool:
        """Whether it is int32 or int64."""
        return self in (ScalarType.INT32, ScalarType.INT64)


BOOL, INT32, INT64, FLOAT32 = ScalarType
LOADED_AS = {
    **dict.fromkeys(("bf16", "fp16", "fp32"), FLOAT32),
    **dict.fromkeys(("int8", "uint8", "int16", "int32"), INT32),
    **{"int64": INT64, "bool": BOOL},
}
"""The dtypes of tensors that can be captured, and the type of their elements in an expression."""
MAX_RANK = 4  # of captured tensors
INPUTS = {"score": FLOAT32, **dict.fromkeys(("batch", "head", "query", "key"), INT32)}
"""What each expression is a function of: the scaled score of a query and a key, and where it is."""


@dataclass(frozen=True)
class CapturedElement:
    """The value of a load: which tensor, and the dtype of its elements."""

    tensor: str
    dtype: str


class Expression:
    """A node.

    operation: "input", "constant", "number" (known when a kernel is launched), "load" (of a captured tensor's element), or an operator
    type:      of its value
    operands:  of an operator; of a load the indices, one a dimension
    value:     of an input and a number its name, of a constant what it is, of a load a CapturedElement; None of an operator
    sort_key:  the order of operands of what is commutative. Names of numbers and tensors count last
    """

    __slots__ = ("__weakref__", "operands", "operation", "sort_key", "type", "value")

    operation: str
    type: ScalarType
    operands: tuple[Expression, ...]
    value: Any
    sort_key: tuple[int, bytes, bytes]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an Expression does not change: {name} cannot be set")

    def __reduce__(self) -> tuple[Any, ...]:
        return node, (self.operation, self.type, self.operands, self.value)

    def __repr__(self) -> str:
        own = "" if self.value is None else repr(self.value)
        return f"<{self.operation} {own or [operand.operation for operand in self.operands]} of type {self.type}>"


_nodes: WeakValueDictionary[tuple[Any, ...], Expression] = WeakValueDictionary()
_lock = Lock()


def node(operation: str, type: ScalarType, operands: tuple[Expression, ...] = (), value: Any = None) -> Expression:
    """The node as it is given. Use `build.apply` for operators: it checks types and simplifies."""
    distinct = struct.pack("d", value) if isinstance(value, float) else value  # -0.0 == 0.0, but they are two constants
    key = (operation, type, operands, distinct, value.__class__)
    with _lock:
        made = _nodes.get(key)
        if made is None:
            made = Expression.__new__(Expression)
            fields = {"operation": operation, "type": type, "operands": operands, "value": value}
            for name, given in {**fields, "sort_key": _sort_key(operation, type, operands, value)}.items():
                object.__setattr__(made, name, given)
            _nodes[key] = made
        return made


_RANKS = {"load": 5, "neg": 7, "number": 8, "constant": 9}  # inputs: 0 to 4; other operators: 6


def _sort_key(operation: str, type: ScalarType, operands: tuple[Expression, ...], value: Any) -> tuple[int, bytes, bytes]:
    rank = list(INPUTS).index(value) if operation == "input" else _RANKS.get(operation, 6)
    nameless = value.dtype if operation == "load" else None if operation == "number" else value

    def digest(own: object, below: list[bytes]) -> bytes:
        return hashlib.blake2b(b"".join((repr((operation, type.value, own)).encode(), *below)), digest_size=8).digest()

    keys = [operand.sort_key for operand in operands]
    return rank, digest(nameless, [key[1] for key in keys]), digest(value, [key[2] for key in keys])


def input_node(name: str) -> Expression:
    """One of INPUTS."""
    if name not in INPUTS:
        raise choice_error("input", name, INPUTS)
    return node("input", INPUTS[name], (), name)


SCORE, BATCH, HEAD, QUERY, KEY = map(input_node, INPUTS)


_FP32 = struct.Struct("f")


def to_float32(value: float) -> float:
    """Rounded to fp32: what is too large becomes infinite, as in PyTorch."""
    try:
        return _FP32.unpack(_FP32.pack(value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.inf if value > 0 else -math.inf


BITS = {INT32: 32, INT64: 64}


def constant(value: bool | int | float, type: ScalarType) -> Expression:
    """A constant. A float is rounded to fp32. Raises ArgumentError for an integer that the type does not hold."""
    if type is BOOL:
        return node("constant", type, (), bool(value))
    if type is FLOAT32:
        return node("constant", type, (), math.nan if value != value else to_float32(value))
    if not -(2 ** (BITS[type] - 1)) <= value < 2 ** (BITS[type] - 1):
        raise ArgumentError(f"constant must fit {type}; got {value}")
    return node("constant", type, (), int(value))


def number_node(name: str, type: ScalarType) -> Expression:
    """A number that is known when a kernel is launched: fp32, or int32 from -NUMBER_LIMIT to NUMBER_LIMIT."""
    if type not in (INT32, FLOAT32):
        raise choice_error("type of a number", type, (INT32, FLOAT32))
    return node("number", type, (), name)


def load_node(tensor: str, dtype: str, indices: tuple[Expression, ...]) -> Expression:
    """An element of a captured tensor of a dtype of LOADED_AS. A negative index counts from the end, as in PyTorch.

    Raises ArgumentError for more than MAX_RANK indices, or one that is no integer.
    """
    if dtype not in LOADED_AS:
        raise choice_error("dtype", dtype, LOADED_AS)
    if len(indices) > MAX_RANK:
        raise ArgumentError(f"indices must be at most {MAX_RANK}; got {len(indices)}")
    for index in indices:
        if not index.type.is_integer:
            raise ArgumentError(f"indices must be int32 or int64; got {index.type}")
    return node("load", LOADED_AS[dtype], indices, CapturedElement(tensor, dtype))


def nodes_of(*trees: Expression) -> list[Expression]:
    """Each node of the trees once, operands before what has them, in the order in which a reader meets them."""
    found: dict[Expression, None] = {}
    stack = [(tree, False) for tree in reversed(trees)]
    while stack:
        each, entered = stack.pop()
        if entered:
            found[each] = None
        elif each not in found:
            stack.append((each, True))
            stack.extend((operand, False) for operand in reversed(each.operands) if operand not in found)
    return list(found)


def loads_of(*trees: Expression) -> list[Expression]:
    """The loads in trees."""
    return [each for each in nodes_of(*trees) if each.operation == "load"]


def numbers_of(*trees: Expression) -> list[Expression]:
    """The numbers in trees."""
    return [each for each in nodes_of(*trees) if each.operation == "number"]


def dependences(*trees: Expression) -> dict[Expression, frozenset[str]]:
    """Of each node of the trees: on which of INPUTS its value depends."""
    found: dict[Expression, frozenset[str]] = {}
    for each in nodes_of(*trees):
        own = frozenset((each.value,)) if each.operation == "input" else frozenset()
        found[each] = own.union(*(found[operand] for operand in each.operands))
    return found


def depends_on(tree: Expression) -> frozenset[str]:
    """On which of INPUTS the value of a tree depends."""
    return dependences(tree)[tree]


def rewritten(trees: Iterable[Expression], change: Callable[[Expression, tuple[Expression, ...]], Expression]) -> list[Expression]:
    """The trees after `change(node, operands)` of each node, bottom up; `operands` are those that came of the node's."""
    trees = list(trees)
    done: dict[Expression, Expression] = {}
    for each in nodes_of(*trees):
        done[each] = change(each, tuple(done[operand] for operand in each.operands))
    return [done[tree] for tree in trees]


def renamed_leaf(leaf: Expression, names: Mapping[str, str], operands: tuple[Expression, ...]) -> Expression:
    """A number or a load with another name, and with other indices."""
    if leaf.operation == "number":
        return number_node(names.get(leaf.value, leaf.value), leaf.type)
    return load_node(names.get(leaf.value.tensor, leaf.value.tensor), leaf.value.dtype, operands)
