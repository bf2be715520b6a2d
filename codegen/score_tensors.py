"""Tensors of which each score has an element, as operands of modifiers: templates/tile/common/score_tensors.cuh."""

from __future__ import annotations

import math

from .operands import Axis, Call, Element, Operand, Role, View
from .parameters import Parameter

# Of the tile operations, before the links that have such tensors.
TILE_FILE, SUMS_FILE, ROUNDED_FILE = "common/score_tensors", "common/score_sums", "common/rounded_sums"
_STEPS = ("batch", "head", "query", "key")
_FAR = ("batch", "head")  # steps that may not fit an int
MOST = 2**24  # of the others: what a tile has of them does


def score_operand(name: str, element: Element, role: Role = Role.IN) -> Operand:
    """[batch, heads_q, len_q, len_kv], with any strides. An output may be left out."""
    return Operand(name, (Axis.BATCH, Axis.HEADS_Q, Axis.LEN_Q, Axis.LEN_KV), element, role, optional=role is Role.OUT)


def score_parameters(name: str, c_type: str, is_read: bool = True) -> tuple[Parameter, ...]:
    """What kernels are given of it: where it begins, and its strides in elements."""
    return (
        Parameter(f"{'const ' * is_read}{c_type}*", name),
        *(Parameter("i64" if step in _FAR else "int", f"{name}_{step}") for step in _STEPS),
    )


def score_values(name: str, operand: str, call: Call) -> dict[str, int | float]:
    """The strides, which are those of an operand, or 0 for one that is not there."""
    strides = call.views[operand].strides if operand in call.views else (0,) * len(_STEPS)
    return {f"{name}_{step}": stride for step, stride in zip(_STEPS, strides, strict=True)}


def count_of(view: View) -> int:
    """Elements in memory."""
    return math.prod(size for size, stride in zip(*view, strict=True) if stride)


def score_refusals(name: str, call: Call) -> list[str]:
    """Why kernels cannot take its strides."""
    strides = [abs(stride) for step, stride in zip(_STEPS, call.views[name].strides, strict=True) if step not in _FAR]
    return [f"{name} must have strides below {MOST} along len_q and len_kv; got {max(strides)}"] if max(strides) >= MOST else []
