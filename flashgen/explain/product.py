"""The tiled product by itself: the first kernel of standard attention, S = Q K^T, as a run of its own."""

from __future__ import annotations

from dataclasses import replace

from flashgen.codegen.attention import visits
from flashgen.codegen.family import Traffic
from flashgen.codegen.program import Program

from .run import BLOCK, HEAD_DIM, RecordedRun

TILED_PRODUCT, ITS_FAMILY = "tiled_product", "standard_attention"
_S_BYTES = 4  # of an element: S is fp32


def tiled_product(run: RecordedRun) -> RecordedRun:
    """That kernel's part of a recorded run of standard attention.

    By its loops a query tile is read once, with the key tiles that it sees, and each of their tiles of S is written.
    """
    seen = list(visits(run.spec.problem, run.small.workload, BLOCK, BLOCK))
    elements = sum((queries + keys) * HEAD_DIM for queries, _, keys in seen)
    formula = Traffic(elements * run.spec.problem.dtype.bytes, sum(queries * keys for queries, _, keys in seen) * _S_BYTES)
    program = Program(run.program.launches[:1], run.program.buffers)
    return replace(run, name=TILED_PRODUCT, program=program, steps=[step for step in run.steps if step.launch == 0], formula=formula)
