"""ALiBi's slopes that functions compute from the head, as in exp2(-(head + 1) * 8 / heads): in memory, as kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from flashgen.codegen.expressions.tree import Expression, numbers_of

from ..traced.evaluation import evaluated
from .tracers import may_be_kept, nobody_traces

_MOST = 2**8
_kept: dict[tuple[Any, ...], torch.Tensor] = {}


def slopes_of_heads(slope: Expression, numbers: Sequence[int | float], heads: int, device: torch.device) -> torch.Tensor | None:
    """fp32 [heads] of an expression of the head, constants and numbers, which are those of its function: n0, n1, ...

    Computed once, as long as numbers are the same. None where that cannot be.
    """
    if not nobody_traces():
        return None
    key = (slope, *[numbers[i] for i in _indices(slope)], heads, device)
    found = _kept.get(key)
    if found is None:
        values = {f"n{i}": numbers[i] for i in _indices(slope)}
        if not may_be_kept(device) or 0 in values.values():  # 0 and -0 would be the same key
            return None
        with torch.inference_mode(False), torch.no_grad():
            each = evaluated(slope, {"head": torch.arange(heads, device="cpu")}, numbers=values)
            found = each.expand(heads).contiguous().to(device)  # waits until it is there: another stream may read it next
        if len(_kept) >= _MOST:
            _kept.clear()
        _kept[key] = found
    return found


@lru_cache(maxsize=2**10)
def _indices(slope: Expression) -> tuple[int, ...]:
    return tuple(int(each.value[1:]) for each in numbers_of(slope))
