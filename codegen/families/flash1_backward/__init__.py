"""FlashAttention's first version, backward: a block a head, key tiles outside, query tiles inside, for everything from sm_80 on."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
