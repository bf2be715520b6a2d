"""The generic decode family: few queries against many keys, split over persistent blocks, for everything from sm_80 on."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
