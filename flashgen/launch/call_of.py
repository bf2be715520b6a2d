"""`call_of`: what functions, and a mask of keys, ask about a call before anybody has checked its tensors."""

from __future__ import annotations

import torch

from .arguments import LAYOUTS
from .built_in import CallOf


def call_of(q: torch.Tensor, k: torch.Tensor, layout: str, scale: float | None) -> CallOf | None:
    """None for tensors that `check_types` will speak of."""
    try:
        (row, head), of_q = LAYOUTS[layout], q.shape
        return (of_q[0], of_q[head], of_q[row], k.shape[row]), q, scale
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
        return None
