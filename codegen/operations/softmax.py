"""Softmax of rows: y = exp(x - m) / l with m = max(x) and l = sum(exp(x - m)) of each row. It is what attention does to a row of S."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.codegen.operands import Axis, Operand, Role
from flashgen.codegen.operation import Operation
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.workload import Workload


class Softmax(Operation):
    """See the module's docstring. x and y are [batch, head, query, key], as S is: a row for each query, any number of columns.

    Arithmetic is fp32 for every dtype. A row of -inf gives 0, where plain PyTorch gives NaN; a row with NaN or +inf gives NaN, as there.
    """

    name = "softmax"
    is_attention = False

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """See Operation."""
        return _OPERANDS

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Operation. There are none."""
        return {}

    def flops(self, problem: Problem, workload: Workload) -> float:
        """See Operation: of each element a comparison, a subtraction, an exponential, an addition and a division, each counted as one."""
        return 5.0 * workload.batch * workload.heads_q * workload.len_q * workload.len_kv

    def examples(self) -> tuple[tuple[Problem, Workload], ...]:
        """See Operation."""
        return tuple((Problem(dtype, operation=self.name), Workload(2, 3, 3, 40, 300)) for dtype in Dtype)


_ROWS = (Axis.BATCH, Axis.HEADS_Q, Axis.LEN_Q, Axis.LEN_KV)
_OPERANDS = (Operand("x", _ROWS), Operand("y", _ROWS, role=Role.OUT))

OPERATION = Softmax()
