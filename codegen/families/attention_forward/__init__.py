"""The generic forward family: FlashAttention-2 on mma.sync, for everything from sm_80 on."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
