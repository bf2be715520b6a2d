"""A sliding window: query i sees keys j from i + len_kv - len_q - left to i + len_kv - len_q + right, both included.

The ends are aligned bottom-right, as the causal mask is (Beltagy et al. 2020, section 3; FlashAttention's `window_size`). They may be
negative, which may leave rows that see no key, and either may be open. With a causal mask the right end is at most 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashgen.codegen.modifier import Modifier
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.sizes import whole
from flashgen.codegen.workload import OPEN, Workload

LONGEST = 2**29  # len_q + len_kv below this: sums of three such numbers fit an int


class Window(Modifier):
    """See the module's docstring. The ends are sizes of a workload."""

    name = "window"
    rank = 20
    link = "Window"
    words = "window"
    parameters = (Parameter("int", "window_left"), Parameter("int", "window_right"))
    sizes = ("window_left", "window_right")

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Modifier. Those of the workload."""
        return {"window_left": workload.window_left, "window_right": workload.window_right}

    def sizes_to_verify(self, workload: Workload, number: int | None) -> Mapping[str, int]:
        """See Modifier. As wide as a causal mask where keys must stay, and where the window of that number would hide all."""
        wide, own = (workload.len_kv, 1), self._VERIFIED[(number or 0) % len(self._VERIFIED)]
        left, right = (
            wide if number is None or not replace(workload, window_left=own[0], window_right=own[1]).visible_pairs(Mask.FULL) else own
        )
        return {"window_left": left, "window_right": right}

    # In the order of the shapes that kernels are verified on: short, rows without keys at either side, either side open, one key a row;
    # at last long ones, with whole tiles between their ends.
    _VERIFIED = (
        *((0, 0), (20, 30), (-20, 60), (OPEN, 5), (7, OPEN), (300, 0), (3, 3), (2, 2), (90, -40)),
        *((300, 0), (300, 200), (700, 100), (1024, 0)),
    )

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier. An end farther away than any key says no more than one that is just as far: so none overflows.

        A window without keys ends before all of them, as kernels skip what lies behind an end.
        """
        most = call.workload.longest
        left, right = call.scalars["window_left"], call.scalars["window_right"]
        if left + right < 0:
            left = right = -most
        return {"window_left": whole(min(max(left, -most), most)), "window_right": whole(min(max(right, -most), most))}

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier."""
        if (longest := call.workload.longest) < LONGEST:
            return []
        return [f"len_q + len_kv must be below {LONGEST} with a window; got {longest}"]


MODIFIER = Window()
