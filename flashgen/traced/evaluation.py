"""Expressions in plain PyTorch, of tensors that broadcast: what oracles compute, in float64 or float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashgen.codegen.expressions.evaluation import evaluate
from flashgen.codegen.expressions.operators import OPERATORS
from flashgen.codegen.expressions.tree import BOOL, FLOAT32, INT32, INT64, Expression, ScalarType

_NAMES = {"floor_div": "floor_divide", "mod": "remainder", "min": "minimum", "max": "maximum", "shift_left": "bitwise_left_shift"}
_NAMES |= {"shift_right": "bitwise_right_shift", **{name: f"bitwise_{name}" for name in ("and", "or", "xor", "not")}}
_CASTS = ("int32", "int64", "float32")
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {name: getattr(torch, _NAMES.get(name, name)) for name in OPERATORS if name not in _CASTS}


def evaluated(
    tree: Expression,
    inputs: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor] | None = None,
    numbers: Mapping[str, int | float] | None = None,
    dtype: torch.dtype = torch.float32,
    nearest: bool = False,
    loaded: Callable[[Expression, Tensor, Sequence[Tensor]], Tensor] | None = None,
) -> Tensor:
    """The value of a tree.

    inputs:  score, batch, head, query and key, as far as the tree has them: tensors of any shapes that broadcast
    tensors: captured tensors by name. numbers: the same
    dtype:   in which it computes with floating-point numbers

    nearest: as a kernel does, an index out of range reads the nearest element. Else it raises IndexError.
    loaded:  given a load of floating-point numbers, these and their indices, from 0 where `nearest`: what it counts as in their place
    """
    types = {FLOAT32: dtype, INT32: torch.int32, INT64: torch.int64, BOOL: torch.bool}
    device = next((each.device for each in (*inputs.values(), *(tensors or {}).values())), torch.device("cpu"))

    def leaf(node: Expression, indices: tuple[Any, ...]) -> Tensor:
        if node.operation == "load":
            captured = (tensors or {})[node.value.tensor]
            given = tuple(index.long() for index in indices)
            if nearest:
                given = tuple(
                    torch.where(index < 0, index + size, index).clamp(0, size - 1)
                    for index, size in zip(given, captured.shape, strict=True)
                )
            elements = (captured[given] if given else captured).to(types[node.type])
            return elements if loaded is None or node.type is not FLOAT32 else loaded(node, elements, given)
        if node.operation == "input":
            return inputs[node.value].to(types[node.type])
        value = node.value if node.operation == "constant" else (numbers or {})[node.value]
        return torch.tensor(value, dtype=types[node.type], device=device)

    def cast_to(type: ScalarType) -> Callable[[Tensor], Tensor]:
        return lambda value: value.to(types[type])

    return evaluate(tree, leaf, {**_FUNCTIONS, **{name: cast_to(ScalarType(name)) for name in _CASTS}})  # type: ignore[no-any-return]
