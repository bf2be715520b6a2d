"""A bias in memory whose elements are fp32: see flashgen/codegen/modifiers/bias_fp32.py."""

from __future__ import annotations

from .bias import BiasLink

LINK = BiasLink
