"""Chunks: query i sees the keys of its own chunk, those j with j // chunk == (i + len_kv - len_q) // chunk (Llama 4's layers with RoPE).

Positions are aligned bottom-right, as under the causal mask, which usually goes with them. A query before the first key, at a position
below 0, is in a chunk without keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.modifier import Modifier
from flashgen.codegen.modifiers.window import LONGEST
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem
from flashgen.codegen.sizes import whole
from flashgen.codegen.workload import Workload


class Chunk(Modifier):
    """See the module's docstring. The number of keys is a size of a workload."""

    name = "chunk"
    rank = 20
    link = "Chunk"
    words = "chunks"
    parameters = tuple(Parameter("int", name) for name in ("chunk", "chunk_multiplier", "chunk_shift"))
    sizes = ("chunk",)
    masks_by_key = True

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Modifier. That of the workload."""
        return {"chunk": workload.chunk}

    def sizes_to_verify(self, workload: Workload, number: int | None) -> Mapping[str, int]:
        """See Modifier. All keys where they must stay. Queries before the first key see none, whatever the chunk."""
        return {"chunk": max(1, workload.len_kv) if number is None else self._VERIFIED[number % len(self._VERIFIED)]}

    # In the order of the shapes that kernels are verified on: one key, multiples of tiles and others, a chunk that all keys are in; at last
    # long ones, with whole tiles between their ends.
    _VERIFIED = (1, 50, 20, 64, 100, 300, 5, 3, 37, 128, 1000, 500, 1024)

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier. A chunk longer than all positions says no more than one that is just as long: so nothing overflows."""
        chunk = max(1, whole(min(call.scalars["chunk"], call.workload.longest)))
        shift = (chunk - 1).bit_length()
        return {"chunk": chunk, "chunk_multiplier": -(-(1 << (30 + shift)) // chunk), "chunk_shift": shift}

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier."""
        if (longest := call.workload.longest) < LONGEST:
            return []
        return [f"len_q + len_kv must be below {LONGEST} with chunks; got {longest}"]


MODIFIER = Chunk()
