"""Functions whose captured tensors have gradients, or that bend scores, by name, and the modifiers of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashgen.codegen.modifier import modifier_named
from flashgen.codegen.modifiers.traced import TracedModifier, name_of_functions
from flashgen.traced.modifier import modifier_in_call

Mod = Callable[..., Any]
# What functions capture is drawn anew for each case: here its dtype and its rank count.
FLOATS, NUMBER = {rank: torch.zeros((1,) * rank) for rank in (1, 2)}, torch.zeros(())
HALVES, BRAINS = {rank: torch.zeros((1,) * rank).half() for rank in (1, 2)}, {rank: torch.zeros((1,) * rank).bfloat16() for rank in (1, 2)}
OTHERS = torch.zeros(1, dtype=torch.int64)
DIVIDES_BY_0_AT = 90  # of `branch`, in whose text it is a constant
FUNCTIONS: dict[str, tuple[Mod, Mod | None]] = {
    "distance": (lambda score, b, h, q, k: score + FLOATS[2][h, q - k + 20], None),
    "slope": (lambda score, b, h, q, k: score - BRAINS[1][h] * 0.125 * (q - k).abs(), None),
    "key": (lambda score, b, h, q, k: score + HALVES[2][b, k], None),
    "query": (lambda score, b, h, q, k: score + FLOATS[2][q, h] * 2, None),
    "of-another": (lambda score, b, h, q, k: score + FLOATS[2][OTHERS[k], h], lambda b, h, q, k: OTHERS[q] != 2),
    "number": (lambda score, b, h, q, k: score + NUMBER * FLOATS[2][k, q], None),
    "twice": (lambda score, b, h, q, k: score + FLOATS[1][q] + FLOATS[1][k], None),
    "cap": (lambda score, b, h, q, k: 2 * torch.tanh(score / 2), None),
    "factor": (lambda score, b, h, q, k: score * FLOATS[1][h], None),
    "gate": (lambda score, b, h, q, k: score * torch.sigmoid(score * FLOATS[2][h, q]), lambda b, h, q, k: OTHERS[k] != 2),
    "branch": (lambda score, b, h, q, k: torch.where(q >= k, score * BRAINS[2][h, q - k], 4 * score / (q - 90)), None),
}
BENDING = ("cap", "factor", "gate", "branch")


def learning_name(functions: str) -> str:
    """What the backward pass calls the modifier of such functions, with gradients of all that may have some."""
    score_mod, mask_mod = FUNCTIONS[functions]
    traced = modifier_named(name_of_functions(modifier_in_call(score_mod, mask_mod).modifier))
    assert isinstance(traced, TracedModifier)
    return traced.learning(traced.tensors).name
