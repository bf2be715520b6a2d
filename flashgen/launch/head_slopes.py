"""ALiBi's slopes that functions compute from the head, as in exp2(-(head + 1) * 8 / heads): in memory, as kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from flashgen.codegen.expressions.tree import Expression, numbers_of

from ..traced.evaluation import evaluated

_MOST = 2**8
_kept: dict[tuple[Any, ...], torch.Tensor] = {}


def _tracers() -> Callable[[], bool]:
    """What tells that nobody makes another graph of what PyTorch computes now: no mode, transform or tracer.

    PyTorch tells by private names, which may go. Without one of them there may be somebody.
    """
    try:
        modes, transforms, tracer = (
            torch._C._len_torch_dispatch_stack,
            torch._C._functorch.peek_interpreter_stack,
            torch._C._get_tracing_state,
        )

        def nobody() -> bool:
            return not modes() and transforms() is None and tracer() is None

        nobody()
    except (AttributeError, TypeError):
        return lambda: False
    return nobody


_nobody_traces = _tracers()


def may_compute(device: torch.device) -> bool:
    """Whether slopes can be computed now that stay what they are: not where somebody traces or a CUDA graph is captured."""
    return _nobody_traces() and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def slopes_of_heads(slope: Expression, numbers: Sequence[int | float], heads: int, device: torch.device) -> torch.Tensor | None:
    """fp32 [heads] of an expression of the head, constants and numbers, which are those of its function: n0, n1, ...

    Computed once, as long as numbers are the same. None where that cannot be.
    """
    if not _nobody_traces():
        return None
    key = (slope, *[numbers[i] for i in _indices(slope)], heads, device)
    found = _kept.get(key)
    if found is None:
        values = {f"n{i}": numbers[i] for i in _indices(slope)}
        if not may_compute(device) or 0 in values.values():  # 0 and -0 would be the same key
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
