"""Memory-efficient attention: two passes over the keys, for everything from sm_80 on."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
