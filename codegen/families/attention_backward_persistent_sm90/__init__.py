"""The backward family for Hopper whose blocks are persistent, and round dQ beside their other work."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
