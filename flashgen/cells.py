"""`Cell`: one problem at one workload, what the tuner tunes and the benchmark measures; the usual sizes of both."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.operation import operation_of
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

    @property
    def flops(self) -> float:
        """Floating-point operations of a call, by the field's convention."""
        return operation_of(self.problem).flops(self.problem, self.workload)

    @property
    def io_bytes(self) -> int:
        """Bytes that a call must move at least."""
        return operation_of(self.problem).io_bytes(self.problem, self.workload)
