"""Random expressions with a fixed seed: as they are written, and their values as PyTorch has them, before anything is simplified."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.codegen.expressions.build import apply
from flashgen.codegen.expressions.tree import (
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
    number_node,
)
from flashgen.traced.evaluation import evaluated

TENSORS = {"t0": ("fp32", 7), "t1": ("int32", 5), "t2": ("int64", 6), "t3": ("bool", 4), "t4": ("uint8", 3), "t5": ("bf16", 5)}
NUMBERS = {"n0": FLOAT32, "n1": INT32}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.1, 1e30, float("inf"), float("nan"))
_INTEGERS = (0, 1, -1, 2, 5, -8, 31, 1000, 2**31 - 1, -(2**31))
_DIVISORS = (1, -1, 2, 3, -7, 8, 64)
_LOADED = {INT32: ("t1", "t4"), INT64: ("t2",), BOOL: ("t3",), FLOAT32: ("t0", "t5")}


@dataclass(frozen=True)
class Written:
    """A tree, and what it was made of: an operator's name and operands; none for a leaf."""

    tree: Expression
    name: str = ""
    operands: tuple[Written, ...] = ()


class RandomTrees:
    """Trees from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def tree(self, type: ScalarType, depth: int) -> Written:
        """A tree of a type with at most that many levels of operators."""
        if depth == 0 or self._random.random() < 0.1:
            return Written(self._leaf(type))
        below = depth - 1

        def same(kind: ScalarType = type) -> Written:
            return self.tree(kind, below)

        match type:
            case ScalarType.BOOL:
                kind = self._random.choice((BOOL, INT32, INT64, FLOAT32))
                names = ("eq", "ne") if kind is BOOL else ("eq", "ne", "lt", "le")
                forms = [("and", BOOL, BOOL), ("or", BOOL, BOOL), ("xor", BOOL, BOOL), ("not", BOOL), ("where", BOOL, BOOL, BOOL)]
                name, *kinds = self._random.choice([*forms, (self._random.choice(names), kind, kind)])
            case ScalarType.FLOAT32:
                pairs: list[tuple[str, ...]] = [
                    (each, type, type) for each in ("add", "mul", "div", "min", "max", "floor_div", "mod", "add", "mul")
                ]
                single: list[tuple[str, ...]] = [
                    (each, type) for each in ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "neg", "sqrt")
                ]
                casts: list[tuple[str, ...]] = [("float32", each) for each in (BOOL, INT32, INT64)]
                name, *kinds = self._random.choice([*pairs, *single, *casts, ("where", BOOL, type, type)])
            case _:
                if self._random.random() < 0.2:
                    divisor = Written(constant(self._random.choice(_DIVISORS), type))
                    return self._applied(self._random.choice(("floor_div", "mod")), same(), divisor)
                if self._random.random() < 0.1:
                    return self._applied(
                        self._random.choice(("shift_left", "shift_right")), same(), Written(constant(self._random.choice((0, 3, 31)), type))
                    )
                pairs = [(each, type, type) for each in ("add", "mul", "min", "max", "and", "or", "xor", "add", "mul")]
                single = [(each, type) for each in ("neg", "abs", "sign", "not", "neg")]
                casts = [(type.value, each) for each in (BOOL, INT64 if type is INT32 else INT32)]
                name, *kinds = self._random.choice([*pairs, *single, *casts, ("where", BOOL, type, type)])
        return self._applied(str(name), *(same(ScalarType(each)) for each in kinds))

    def _applied(self, name: str, *operands: Written) -> Written:
        return Written(apply(name, *(each.tree for each in operands)), name, operands)

    def _leaf(self, type: ScalarType) -> Expression:
        choice = self._random.random()
        if choice < 0.3:
            value = self._random.choice(_FLOATS) if type is FLOAT32 else self._random.choice(_INTEGERS)
            return constant(bool(value) if type is BOOL else value, type)
        if choice < 0.5 and type in NUMBERS.values():
            return number_node(next(name for name, kind in NUMBERS.items() if kind is type), type)
        if choice < 0.65 or type in (BOOL, INT64):
            name = self._random.choice(_LOADED[type])
            dtype, size = TENSORS[name]
            position = input_node(self._random.choice(("batch", "head", "query", "key")))
            return load_node(name, dtype, (apply("mod", position, constant(size, INT32)),))
        names = [name for name, kind in INPUTS.items() if kind is type]
        return input_node(self._random.choice(names))


def value_as_written(written: Written, *given: Any) -> Tensor:
    """Its value by PyTorch's functions, one operator after the other. `given`: as `evaluated` takes it."""
    known: dict[int, Tensor] = {}

    def value(each: Written) -> Tensor:
        if id(each) not in known:
            if not each.name:
                known[id(each)] = evaluated(each.tree, *given)
            else:
                known[id(each)] = operator_value(each.name, each.tree.type, [value(operand) for operand in each.operands])
        return known[id(each)]

    return value(written)


def operator_value(name: str, type: ScalarType, operands: list[Tensor]) -> Tensor:
    """What PyTorch makes of tensors."""
    plain: Mapping[str, Any] = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64}
    if name in plain:
        return operands[0].to(plain[name])
    other = {"floor_div": "floor_divide", "mod": "remainder", "min": "minimum", "max": "maximum", "shift_left": "bitwise_left_shift"}
    other |= {"shift_right": "bitwise_right_shift", **{each: f"bitwise_{each}" for each in ("and", "or", "xor", "not")}}
    made: Tensor = getattr(torch, other.get(name, name))(*operands)
    return made
