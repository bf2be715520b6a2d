"""A softcap: a score s becomes cap * tanh(s / cap), which lies between -cap and cap (Gemma 2, section 2; FlashAttention's `softcap`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flashgen.codegen.attention import MAX_SCALE, MIN_SCALE, float32
from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

USUAL_CAP = 50.0  # Gemma 2's
_REACH = 0.18  # of arguments x up to this tanh x is x (1 + x^2 (_CUBIC + x^2 _QUINTIC)), to about 2^-23 of it
_CUBIC, _QUINTIC = -0.3333094, 0.1309334
# Just below kHuge in templates/tile/common/softmax_rows.cuh: where a mapped score may be as high, none is taken for a small one, as rows
# that have become huge shift scores in units of the cap.
_HUGE = 2.0**13 - 1
_STEP = 2 / 0.75  # of z for a tanh's argument: 2 / Softcap::kReach in templates/tile/modifiers/softcap.cuh


class Softcap(Modifier):
    """See the module's docstring. What kernels make of a score is in units of the cap."""

    name = "softcap"
    rank = 0
    link = "Softcap"
    tiles = ("common/small_scores",)
    words = "softcap"
    parameters = tuple(Parameter("float", f"softcap_{name}") for name in ("step", "minus_reach2", "linear", "cubic", "quintic"))
    numbers = ("softcap",)
    maps_scores = True

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Modifier."""
        return {"softcap": USUAL_CAP}

    def unit(self, call: Call) -> float:
        """See Modifier."""
        return call.scalars["softcap"]

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier. The scale is the fp32 number by which plain PyTorch multiplies scores."""
        scale, cap = float32(call.scalars["scale"]), float32(call.scalars["softcap"])
        ratio, scale_log2 = scale / cap, scale * math.log2(math.e)
        # x is ratio * S. Of w = S^2 - (_REACH / ratio)^2, which is to be below 0, tanh x / x is a parabola, too.
        at_reach = 1 + _REACH**2 * (_CUBIC + _REACH**2 * _QUINTIC)
        small = {"minus_reach2": -((_REACH / ratio) ** 2), "linear": scale_log2 * at_reach}
        small |= {"cubic": scale_log2 * (_CUBIC + 2 * _REACH**2 * _QUINTIC) * ratio**2, "quintic": scale_log2 * _QUINTIC * ratio**4}
        if cap * math.log2(math.e) >= _HUGE or not all(MIN_SCALE <= abs(value) <= MAX_SCALE for value in small.values()):
            small = dict.fromkeys(small, 0.0)  # of which no score is small
        return {"softcap_step": float32(ratio * _STEP), **{f"softcap_{name}": float32(value) for name, value in small.items()}}

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier. Scores are multiplied by scale / softcap."""
        ratio = call.scalars["scale"] / call.scalars["softcap"]
        if MIN_SCALE <= ratio <= MAX_SCALE / 4:
            return []
        return [f"scale / softcap must be from {MIN_SCALE:.5g} to {MAX_SCALE / 4:.5g}, which fp32 can multiply by; got {ratio:.5g}"]


def checked_softcap(softcap: object) -> float:
    """The cap as a number. Raises ArgumentError for what is none, or none by which fp32 scores can be divided."""
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise ArgumentError(f"softcap must be a number or None, which stands for no cap; got {shown(softcap)}")
    if not MIN_SCALE <= softcap <= MAX_SCALE:
        given = shown(softcap) if isinstance(softcap, int) else float(softcap)  # not every int has a float
        raise ArgumentError(f"softcap must be from {MIN_SCALE:.5g} to {MAX_SCALE:.5g}, or None for no cap; got {given}")
    return float(softcap)


MODIFIER = Softcap()
