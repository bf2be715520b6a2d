"""Sinks: a learnable score of each query head that joins the softmax of its rows, with a value of 0 (Xiao et al. 2023; GPT-OSS).

Nothing scales, changes or hides it. With the sink s of a row, P = exp(S - lse) with lse = log(exp(s) + sum(exp(S))): so lse includes it,
and P of a row has a sum below 1. A row that sees no key has an lse of s. With delta of the backward pass, d_s is the sum of
-exp(s - lse) * delta over all rows of the head.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.attention import float32
from flashgen.codegen.gradient_kernel import GradientKernel
from flashgen.codegen.modifier import Modifier, score_unit
from flashgen.codegen.operands import Axis, Call, Element, Operand, Role
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Problem

SINKS = "sinks"
D_SINKS = "d_sinks"


class Sinks(Modifier):
    """See the module's docstring."""

    name = "sinks"
    rank = 30
    words = "sinks"
    parameters = (Parameter("const float*", SINKS), Parameter("float", "sinks_unit"))
    tensors = learned = (SINKS,)
    joins_sums = True
    gradient = GradientKernel(
        ParameterBlock(
            (
                *(Parameter("const float*", name) for name in (SINKS, "lse", "row_delta")),
                Parameter("float*", D_SINKS),
                *(Parameter("int", name) for name in ("batch", "heads_q", "len_q", "rows")),
            )
        ),
        suffix="_sinks",
        struct="SinkParameters",
        function="sum_sink_gradients",
        title="d_sinks",
        threads=1024,
    )

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. [heads_q], fp32."""
        return (Operand(SINKS, (Axis.HEADS_Q,), Element.F32),)

    def gradients(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier."""
        return (Operand(D_SINKS, (Axis.HEADS_Q,), Element.F32, Role.OUT, optional=True),)

    def gradient_values(self, call: Call, rows: int) -> tuple[int, Mapping[str, int | float]]:
        """See Modifier. A block for each head."""
        w = call.workload
        return w.heads_q, {"batch": w.batch, "heads_q": w.heads_q, "len_q": w.len_q, "rows": rows}

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier. What scores must be multiplied by to be in the sinks' units."""
        return {"sinks_unit": float32(score_unit(call))}


MODIFIER = Sinks()
