"""FlashAttention-2 forward as its paper writes it down, for everything from sm_80 on."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
