"""The generic backward kernels, on `mma.sync`, `ldmatrix` and `cp.async`."""

from __future__ import annotations

from .family import FAMILY

__all__ = ["FAMILY"]
