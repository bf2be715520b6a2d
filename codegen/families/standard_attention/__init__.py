"""Standard attention: S = Q K^T, softmax and O = P V as three kernels, with S and P in memory."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
