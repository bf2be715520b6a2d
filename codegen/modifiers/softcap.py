"""A softcap: a score s becomes cap * tanh(s / cap), which lies between -cap and cap (Gemma 2, section 2; FlashAttention's `softcap`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from flashgen.codegen.attention import MAX_SCALE, MIN_SCALE, float32
from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.workload import Workload

USUAL_CAP = 50.0  # Gemma 2's
# For arguments x up to _REACH tanh x is x (_LINEAR + x^2 (_CUBIC + x^2 _QUINTIC)), of all such with the least relative error, 2^-24.
_REACH = 0.18
_LINEAR, _CUBIC, _QUINTIC = 0.999999943817, -0.333302077336, 0.13074920079
# How far small scores may reach in base 2, so that P fits its element type without a row max; and from where on it is guessed that all are
# small: one look at a sum of tens of P, which must not reach 2^that, has to do for all of them.
_MOST_LOG2 = {Dtype.BF16: 60.0, Dtype.FP16: 14.0}
_LEAST_LOG2 = 7.0
_MOST_OF_LANE = 64  # scores at most that a lane has of a row of a K block, of up to 256 keys
# Just below kHuge in templates/tile/common/softmax_rows.cuh: where a mapped score may be as high, none is taken for a small one, as rows
# that have become huge shift scores in units of the cap.
_HUGE = 2.0**13 - 1
_NAMES = ("step", "unit", "minus_reach2", "inner", "outer", "step_of_unit", "least_sum", "most_sum")
_STEP = 2 / 0.75  # of z for a tanh's argument: 2 / Softcap::kReach in templates/tile/modifiers/softcap.cuh


class Softcap(Modifier):
    """See the module's docstring. What kernels make of a score is in units of the cap."""

    name = "softcap"
    rank = 0
    link = "Softcap"
    tiles = ("common/small_scores",)
    words = "softcap"
    parameters = tuple(Parameter("float", f"softcap_{name}") for name in _NAMES)
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
        found = {"step": scale / cap * _STEP, **_of_small(scale, cap, call.problem.dtype)}
        found["step_of_unit"] = found["step"] / found["unit"]
        return {f"softcap_{name}": float32(value) for name, value in found.items()}

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier. Scores are multiplied by scale / softcap."""
        ratio = call.scalars["scale"] / call.scalars["softcap"]
        if MIN_SCALE <= ratio <= MAX_SCALE / 4:
            return []
        return [f"scale / softcap must be from {MIN_SCALE:.5g} to {MAX_SCALE / 4:.5g}, which fp32 can multiply by; got {ratio:.5g}"]


@lru_cache(maxsize=256)
def _of_small(scale: float, cap: float, dtype: Dtype) -> Mapping[str, float]:
    """What kernels know of small scores, by the name of the parameter: see templates/tile/modifiers/softcap.cuh."""
    ratio, scale_log2, cap_log2 = scale / cap, scale * math.log2(math.e), cap * math.log2(math.e)
    reach_log2 = min(math.tanh(_REACH) * cap_log2, _MOST_LOG2[dtype])
    reach = math.atanh(reach_log2 / cap_log2)
    # With x = ratio * S and y = unit * S, tanh x * cap_log2 = y * ((y^2 + inner)^2 + outer): by this unit y^5 stands alone.
    unit = float32((scale_log2 * _QUINTIC * ratio**4) ** 0.2)
    inner = float32(_CUBIC / (2 * _QUINTIC) * (unit / ratio) ** 2)
    reach_of_unit = reach / ratio * unit
    small = {"unit": unit, "minus_reach2": -(reach_of_unit**2), "inner": inner, "outer": scale_log2 * _LINEAR / unit - inner**2}
    if cap_log2 >= _HUGE or not all(MIN_SCALE <= abs(value) <= MAX_SCALE for value in small.values()):
        return {**dict.fromkeys((*small, "least_sum", "most_sum"), 0.0), "unit": 1.0}  # of which no score is small
    most = 2**reach_log2 if reach_log2 >= _LEAST_LOG2 else 0.0
    return {**small, "least_sum": 1 + _MOST_OF_LANE * 2.0**22 * _too_low(cap_log2, reach), "most_sum": most}


def _too_low(cap_log2: float, reach: float) -> float:
    """By how much the polynomial makes P = 2^(cap_log2 * tanh x) too low at most where x is below -reach."""
    found = 0.0
    for i in range(101):
        x = reach * (1 + i / 10)
        polynomial = x * (_LINEAR + x**2 * (_CUBIC + x**2 * _QUINTIC))
        found = max(found, 2 ** (-cap_log2 * math.tanh(x)) - 2 ** (-cap_log2 * polynomial))
    return found


def checked_softcap(softcap: object) -> float:
    """The cap as a number. Raises ArgumentError for what is none, or none by which fp32 scores can be divided."""
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise ArgumentError(f"softcap must be a number or None, which stands for no cap; got {shown(softcap)}")
    if not MIN_SCALE <= softcap <= MAX_SCALE:
        given = shown(softcap) if isinstance(softcap, int) else float(softcap)  # not every int has a float
        raise ArgumentError(f"softcap must be from {MIN_SCALE:.5g} to {MAX_SCALE:.5g}, or None for no cap; got {given}")
    return float(softcap)


MODIFIER = Softcap()
