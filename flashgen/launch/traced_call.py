"""A call's score_mod and mask_mod as operators are told of them: the modifier's name, numbers and tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifiers.traced import name_of_functions, shape_scalars

from ..traced.modifier import CompiledModifier, modifier_in_call

ModFunction = Callable[..., Any]


def traced_call(
    score_mod: ModFunction | CompiledModifier | None, mask_mod: ModFunction | None
) -> tuple[str, list[float], tuple[torch.Tensor, ...]]:
    """Names, numbers and tensors are those of the modifier in codegen/traced.py. Raises ArgumentError for what cannot be traced."""
    functions, tensors, numbers = modifier_in_call(score_mod, mask_mod)
    values: list[float] = list(numbers)
    for name, tensor in zip(functions.tensor_kinds, tensors, strict=True):
        values.extend(shape_scalars(name, tuple(tensor.shape), tensor.stride()).values())
    return _name(functions), values, tensors


_name = lru_cache(maxsize=2**10)(name_of_functions)


def refuse_compiling() -> None:
    """Raises ArgumentError: torch.compile cannot look into a trace."""
    raise ArgumentError("score_mod and mask_mod must be None within torch.compile, which cannot trace them: call attention outside of it")
