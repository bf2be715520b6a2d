"""FlashAttention-2, backward, as its paper writes it down: a block a key tile, query tiles inside, for everything from sm_80 on."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
