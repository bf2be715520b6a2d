"""The probability of dropout as other libraries take it."""

from __future__ import annotations

from typing import Any


def probability(p: Any) -> Any:
    """A bool as the number that it counts as in PyTorch, xformers and flash_attn; `flashgen.attention` takes it for a mistake."""
    return float(p) if isinstance(p, bool) else p
