"""ALiBi: a score loses slope * |i + len_kv - len_q - j|, where i is its query and j its key (Press et al. 2022).

Each query head has a slope of its own, also in each entry of the batch if that is wanted. Distances are from the diagonal of a causal mask,
aligned bottom-right, as FlashAttention's `alibi_slopes` has them.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.attention import float32
from flashgen.codegen.modifier import Modifier, score_unit
from flashgen.codegen.operands import Axis, Call, Element, Operand
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem

SLOPES = "alibi_slopes"
LEAST_UNIT = 2.0**-60  # of scores: slopes are divided by it, and multiplied by distances


class Alibi(Modifier):
    """See the module's docstring."""

    name = "alibi"
    rank = 10
    link = "Alibi"
    words = "ALiBi"
    parameters = (
        *(Parameter("const float*", SLOPES), Parameter("int", "alibi_batch_step")),
        *(Parameter("float", "alibi_per_unit"), Parameter("float", "alibi_per_unit_low")),
    )
    tensors = (SLOPES,)
    adds_to_scores = True
    linear_in_key = True
    has_heads = True

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. [batch, heads_q], fp32; entries of the batch may share one row."""
        return (Operand(SLOPES, (Axis.BATCH, Axis.HEADS_Q), Element.F32),)

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier."""
        per_unit = 1 / float32(score_unit(call))
        low = per_unit - float32(per_unit)
        return {"alibi_batch_step": call.views[SLOPES].strides[0], "alibi_per_unit": per_unit, "alibi_per_unit_low": low}

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier."""
        reasons, (batch_step, head_step), unit = [], call.views[SLOPES].strides, score_unit(call)
        if head_step != 1 or not 0 <= batch_step < 2**31:
            reasons.append(f"{SLOPES} must have strides of (0 to 2^31 - 1, 1) elements; got ({batch_step}, {head_step})")
        if unit < LEAST_UNIT:
            reasons.append(f"scale, or softcap, must be at least {LEAST_UNIT:.5g} with {SLOPES}; got {unit:.5g}")
        return reasons


MODIFIER = Alibi()
