"""Tensors of which each score has an element, as operands of modifiers: templates/tile/common/score_tensors.cuh."""

from __future__ import annotations

import math
from functools import cache

from .attention import reciprocal
from .modifier import modifiers_of
from .operands import Axis, Call, Element, Operand, Role, View
from .parameters import Parameter
from .problem import Problem

# Of the tile operations, before the links that have such tensors.
TILE_FILE, FETCHED_FILE = "common/score_tensors", "common/fetched_tensor"
SUMS_FILE, ROUNDED_FILE = "common/score_sums", "common/rounded_sums"
_STEPS = ("batch", "head", "query", "key")
_FAR = ("batch", "head")  # steps that may not fit an int
UNIT_KEYS, UNIT_QUERIES = 16, 8  # of a unit of sums: ScoreSums in templates/tile/common/score_sums.cuh
UNIT = UNIT_KEYS * UNIT_QUERIES
WIDEST_FETCHED, MOST_BESIDE_FETCHED = 128, 2  # head dim of v beside others, and how many these may be
# By which work tiles are found where entries of the batch that share a head's elements come one after the other.
OF_BATCHES = (Parameter("int", "batches"), Parameter("u64", "batches_reciprocal"))
_ENDLESS = 2**31 - 1
MOST = 2**24  # of the others: what a tile has of them does


def score_operand(name: str, element: Element, role: Role = Role.IN) -> Operand:
    """[batch, heads_q, len_q, len_kv], with any strides. An output may be left out."""
    return Operand(name, (Axis.BATCH, Axis.HEADS_Q, Axis.LEN_Q, Axis.LEN_KV), element, role, optional=role is Role.OUT)


@cache
def fetches(problem: Problem) -> bool:
    """Whether kernels that can bring elements of scores to shared memory before they need them.

    Not beside a softcap or masks that scatter, nor beside many others, or any where heads are wide: registers would not do for both.
    """
    others = [one for one in modifiers_of(problem) if not one.fetched]
    if len(others) == len(problem.modifiers) or any(one.maps_scores or one.scattered_by is not None for one in others):
        return False
    return not others or (problem.head_dim_v <= WIDEST_FETCHED and len(others) <= MOST_BESIDE_FETCHED)


@cache
def score_tensors(problem: Problem) -> tuple[str, ...]:
    """Names of the modifiers that have an element of each score. A tree mask has but those of the last keys."""
    return tuple(one.name for one in modifiers_of(problem) if TILE_FILE in one.tiles and not one.for_inference)


@cache
def loads_ahead(problem: Problem) -> bool:
    """Whether kernels that can load elements of scores a fragment ahead. Wide heads have no registers for it, nor have many modifiers."""
    return bool(score_tensors(problem)) and problem.head_dim_v <= WIDEST_FETCHED and len(problem.modifiers) <= MOST_BESIDE_FETCHED + 1


def batch_values(call: Call) -> dict[str, int]:
    """The values of these fields."""
    return {"batches": call.workload.batch, "batches_reciprocal": reciprocal(call.workload.batch)}


def score_parameters(name: str, c_type: str, is_read: bool = True) -> tuple[Parameter, ...]:
    """What kernels are given of it: where it begins, and its strides in elements."""
    return (
        Parameter(f"{'const ' * is_read}{c_type}*", name),
        *(Parameter("i64" if step in _FAR else "int", f"{name}_{step}") for step in _STEPS),
    )


def length_parameters(name: str) -> tuple[Parameter, ...]:
    """What kernels are told beside that of packed sequences, which may be longer: queries and keys of an entry that are in memory."""
    return Parameter("int", f"{name}_len_q"), Parameter("int", f"{name}_len_kv")


def length_values(name: str, call: Call, gradient: str = "") -> dict[str, int | float]:
    """These numbers, of packed sequences; of an axis along which all elements are the same there is no end.

    gradient: of the tensor, which ends where it has elements of its own
    """
    if not call.problem.is_packed:
        return {}
    views = [call.views[one] for one in (name, gradient) if one in call.views]
    ends = {side: [view.sizes[dim] for view in views if view.strides[dim]] for dim, side in ((2, "q"), (3, "kv"))}
    return {f"{name}_len_{side}": sizes[0] if sizes else _ENDLESS for side, sizes in ends.items()}


def score_values(name: str, operand: str, call: Call) -> dict[str, int | float]:
    """The strides, which are those of an operand, or 0 for one that is not there."""
    strides = call.views[operand].strides if operand in call.views else (0,) * len(_STEPS)
    return {f"{name}_{step}": stride for step, stride in zip(_STEPS, strides, strict=True)}


def has_units(view: View) -> bool:
    """Whether each query and key has an element of its own, whose gradients are summed up in units: see ScoreSums."""
    return all(view.strides[-2:])


def sum_values(name: str, operand: str, call: Call) -> dict[str, int | float]:
    """The steps of the sums of its gradient: those of the tensor, or of units of them."""
    if operand not in call.views or not has_units(view := call.views[operand]):
        return score_values(name, operand, call)
    keys, queries = _units(view)
    heads = view.sizes[1] if view.strides[1] else 1
    of_head = keys * queries * UNIT
    steps = (of_head * heads * bool(view.strides[0]), of_head * bool(view.strides[1]), keys * UNIT, UNIT)
    return {f"{name}_{step}": number for step, number in zip(_STEPS, steps, strict=True)}


def sum_count(view: View) -> int:
    """Numbers in memory of the sums of a gradient."""
    if not has_units(view):
        return count_of(view)
    keys, queries = _units(view)
    return heads_of(view) * keys * queries * UNIT


def heads_of(view: View) -> int:
    """Heads in memory, of the whole batch."""
    return math.prod(size for size, stride in zip(view.sizes[:2], view.strides[:2], strict=True) if stride)


def query_units(view: View) -> int:
    """Units of a head for a key."""
    return _units(view)[1]


def _units(view: View) -> tuple[int, int]:
    return -(-view.sizes[3] // UNIT_KEYS), -(-view.sizes[2] // UNIT_QUERIES)


def count_of(view: View) -> int:
    """Elements in memory."""
    return math.prod(size for size, stride in zip(*view, strict=True) if stride)


def score_refusals(name: str, call: Call) -> list[str]:
    """Why kernels cannot take its strides."""
    strides = [abs(stride) for step, stride in zip(_STEPS, call.views[name].strides, strict=True) if step not in _FAR]
    return [f"{name} must have strides below {MOST} along len_q and len_kv; got {max(strides)}"] if max(strides) >= MOST else []
