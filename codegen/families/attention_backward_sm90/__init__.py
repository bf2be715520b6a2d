"""The backward family for Hopper, on wgmma and tensor copies."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
