"""The backward family for Hopper and head dims above 192: pairs of blocks share the sums of dQ."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
