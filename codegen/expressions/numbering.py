"""Names of numbers and tensors that follow from the trees alone: n0, n1, ..., t0, t1, ... as a reader meets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .build import apply
from .tree import Expression, loads_of, numbers_of, renamed_leaf, rewritten

_TRIES = 8


@dataclass(frozen=True)
class Numbered:
    """Trees with canonical names. `numbers[i]` and `tensors[i]` are the former names of n<i> and t<i>."""

    trees: tuple[Expression, ...]
    numbers: tuple[str, ...]
    tensors: tuple[str, ...]


def numbered(trees: Sequence[Expression]) -> Numbered:
    """The trees with canonical names: functions that differ in the names of what they capture are one text.

    Other names may bring operands into another order, which may change the names: this is repeated a few times.
    """
    trees, former = list(trees), {each.value: each.value for each in numbers_of(*trees)}
    former |= {each.value.tensor: each.value.tensor for each in loads_of(*trees)}
    for _ in range(_TRIES):
        numbers = {node.value: f"n{i}" for i, node in enumerate(dict.fromkeys(numbers_of(*trees)))}
        tensors = dict.fromkeys(node.value.tensor for node in loads_of(*trees))
        names = numbers | {name: f"t{i}" for i, name in enumerate(tensors)}
        if all(name == new for name, new in names.items()):
            break
        trees = with_names(trees, names)
        former = {new: former[name] for name, new in names.items()}
    own = [{each.value for each in numbers_of(*trees)}, {each.value.tensor for each in loads_of(*trees)}]
    return Numbered(tuple(trees), *(tuple(former[f"{kind}{i}"] for i in range(len(used))) for kind, used in zip("nt", own, strict=True)))


def with_names(trees: Sequence[Expression], names: dict[str, str]) -> list[Expression]:
    """The trees with other names of numbers and tensors."""

    def change(node: Expression, operands: tuple[Expression, ...]) -> Expression:
        if node.operation in ("number", "load"):
            return renamed_leaf(node, names, operands)
        return apply(node.operation, *operands) if operands else node

    return rewritten(trees, change)
