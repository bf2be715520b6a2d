"""FlashAttention's first version (Dao et al. 2022, algorithm 4), backward, for every architecture from sm_80 on.

A block has a key/value head. Key tiles are in its outer loop (line 6), query tiles inside (line 9). S and P are computed again from lse,
which stands for the row maxima and sums that the paper keeps (lines 11 to 13); dK and dV stay in registers for a key tile (lines 16 and 22)
and are written once (line 24). dQ lies in memory in fp32, and each step reads it, adds to it and writes it back (line 21): a head has one
block, so nobody else adds to it, and gradients are the same to the bit in every run. delta = rowsum(dO * O) is computed once before the
loops, not at every step (line 19). The family runs where it is asked for by name.
"""

from __future__ import annotations

from typing import Any

from flashgen.codegen.family import Traffic
from flashgen.codegen.flash1 import paper_block_sizes
from flashgen.codegen.ladder_backward import LadderBackward
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from .config import Flash1BackwardConfig


class Flash1Backward(LadderBackward):
    """See the module's docstring; the algorithm is templates/kernels/flash1_backward.cu.j2."""

    name = "flash1_backward"
    revision = 2
    template = "kernels/flash1_backward.cu.j2"
    modifiers = ("dropout",)
    config_type = Flash1BackwardConfig

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        """See Family. The header tells the paper's block sizes, too."""
        queries, keys = paper_block_sizes(problem, target)
        return super().context(problem, config, target) | {"paper_tiles": f"{queries} queries, {keys} keys"}

    def blocks_of_head(self, config: Flash1BackwardConfig, workload: Workload) -> int:
        """See LadderBackward."""
        return 1

    def spare_registers(self, config: Flash1BackwardConfig) -> int:
        """See LadderBackward. The loop over key tiles takes more, most of them where steps are long."""
        return 32 + self.queries_at_once(config)

    def vectors(self, target: Target) -> bool:
        """See LadderBackward. Any lane reads and writes 16 bytes."""
        return True

    def d_q_traffic(self, added: int) -> Traffic:
        """See LadderBackward. Line 10 reads dQ, line 21 writes it."""
        return Traffic(added, added)


FAMILY = Flash1Backward()
