"""`Cell`: one problem at one workload, what the tuner tunes and the benchmark measures; the usual sizes of both."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

TOKENS = 16384  # of the default workloads: batch * seqlen
MODEL_DIM = 2048  # of the default workloads: heads * head_dim
SEQLENS = (512, 1024, 4096, 16384)
MAX_SEQLEN = 2**24


@dataclass(frozen=True)
class Cell:
    """One problem at one workload: a row of the table."""

    problem: Problem
    workload: Workload
