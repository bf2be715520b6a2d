"""A bias in memory whose elements are fp32: see bias.py."""

from __future__ import annotations

from flashgen.codegen.operands import Element
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.score_tensors import score_parameters

from .bias import BIAS, Bias, rounding_kernel


class BiasFp32(Bias):
    """See the module's docstring."""

    name = "bias_fp32"
    link = "Bias<float>"
    words = "fp32 bias"
    element = Element.F32
    fetched = False  # only 16 bits
    parameters = (*score_parameters(BIAS, "float"), Parameter("float", "bias_per_unit"))
    gradient = rounding_kernel("float")


MODIFIER = BiasFp32()
