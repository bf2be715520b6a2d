"""The backward family for Hopper and head dims above 128."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
