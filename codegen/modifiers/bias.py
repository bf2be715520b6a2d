"""A bias in memory: each score gains an element of it, after the softcap and ALiBi; in the problem's dtype.

For each head and each entry of the batch, or the same for some. Its gradient is the sum of dS over all scores that an element is added
to, in fp32 until all of them are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from flashgen.codegen.attention import float32
from flashgen.codegen.gradient_kernel import GradientKernel
from flashgen.codegen.modifier import Modifier, collects_gradients, score_unit
from flashgen.codegen.operands import Call, Element, Operand, Role
from flashgen.codegen.operation import dense
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import Buffer, BufferKind
from flashgen.codegen.score_tensors import (
    FETCHED_FILE,
    ROUNDED_FILE,
    SUMS_FILE,
    TILE_FILE,
    count_of,
    has_units,
    heads_of,
    length_parameters,
    length_values,
    query_units,
    score_operand,
    score_parameters,
    score_refusals,
    score_values,
    sum_count,
    sum_values,
)

BIAS = "bias"
D_BIAS = "d_bias"
D_BIAS_SUM = "d_bias_sum"
THREADS, EACH = 256, 8  # of the kernel that rounds the gradient, and numbers of a thread


def rounding_kernel(c_type: str) -> GradientKernel:
    """Of sums in fp32 it makes the gradient, whose elements have that type."""
    fields = (
        *(Parameter("const float*", D_BIAS_SUM), Parameter(f"{c_type}*", D_BIAS), Parameter("i64", "d_bias_count")),
        *(Parameter("int", "d_bias_len_q"), Parameter("int", "d_bias_len_kv")),  # of sums in units; else 0
    )
    return GradientKernel(ParameterBlock(fields), "_bias", "BiasParameters", "round_bias_gradient", "d_bias", THREADS)


class Bias(Modifier):
    """See the module's docstring."""

    name = "bias"
    rank = 12
    link = "Bias<Element>"
    words = "bias"
    element: ClassVar[Element] = Element.INPUT
    parameters = (*score_parameters(BIAS, "u16"), Parameter("float", "bias_per_unit"))
    packed_parameters = length_parameters(BIAS)
    sum_parameters = score_parameters(D_BIAS_SUM, "float", is_read=False)
    tensors = learned = (BIAS,)
    tiles, sum_tiles = (TILE_FILE, FETCHED_FILE), (SUMS_FILE, ROUNDED_FILE)
    gradient = rounding_kernel("Element")
    adds_to_scores = True
    has_heads = reads_scores = True
    fetched = True

    @property
    def tile_file(self) -> str:
        """See Modifier. The same for all types of elements."""
        return "modifiers/bias"

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier."""
        return (score_operand(BIAS, self.element),)

    def gradients(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. Where the bias is the same along an axis, the stride of its gradient there is 0."""
        return (score_operand(D_BIAS, self.element, Role.OUT),)

    def gradient_buffers(self, call: Call) -> tuple[Buffer, ...]:
        """See Modifier."""
        return (Buffer(D_BIAS_SUM, 4 * sum_count(call.views[D_BIAS]), BufferKind.CALL_ZEROED),)

    def gradient_values(self, call: Call, rows: int) -> tuple[int, Mapping[str, int | float]]:
        """See Modifier."""
        view = call.views[D_BIAS]
        count = count_of(view)
        blocks, lengths = -(-count // (THREADS * EACH)), (0, 0)
        if count and has_units(view):
            blocks, lengths = heads_of(view) * query_units(view), (view.sizes[2], view.sizes[3])
        return blocks, {"d_bias_count": count, "d_bias_len_q": lengths[0], "d_bias_len_kv": lengths[1]}

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier."""
        of_sums = sum_values(D_BIAS_SUM, D_BIAS, call) if collects_gradients(call.problem) else {}
        return {
            **score_values(BIAS, BIAS, call),
            **length_values(BIAS, call, D_BIAS),
            **of_sums,
            "bias_per_unit": float32(1 / float32(score_unit(call))),
        }

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier."""
        reasons = score_refusals(BIAS, call)
        if D_BIAS not in call.views:
            return reasons
        sizes, steps = call.views[D_BIAS]
        own = tuple(size if step else 1 for size, step in zip(sizes, steps, strict=True))  # 1 where it is the same along an axis
        if any(step and step != packed for step, packed in zip(steps, dense(own), strict=True)):
            reasons.append(f"{D_BIAS} must be dense; got strides {steps}")
        if call.problem.deterministic and own != tuple(sizes):
            reasons.append("deterministic must be False for the gradient of a bias that is the same for many scores; got True")
        return reasons


MODIFIER = Bias()
