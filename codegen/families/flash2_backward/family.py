"""FlashAttention-2's backward pass as its paper writes it down (Dao 2023, algorithm 2), for every architecture from sm_80 on.

A block has a key tile (line 5 in parallel), query tiles are inside (line 8). S and P are computed again from lse (lines 10 and 11), dK and
dV stay in registers (lines 12 and 16) and are written in the end (line 18). Many blocks have keys of one query, so dQ is summed up in
memory in fp32, by atomic additions in whatever order they come (line 15). delta = rowsum(dO * O) is computed before (line 4). The family
runs where it is asked for by name; attention_backward is the tuned kernel of the same algorithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from flashgen.codegen.family import Traffic
from flashgen.codegen.ladder import GridOrder
from flashgen.codegen.ladder_backward import LadderBackward
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from .config import Flash2BackwardConfig


class Flash2Backward(LadderBackward):
    """See the module's docstring; the algorithm is templates/kernels/flash2_backward.cu.j2."""

    name = "flash2_backward"
    revision = 3
    template = "kernels/flash2_backward.cu.j2"
    config_type = Flash2BackwardConfig

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = super().refusals(problem, target)
        if problem.deterministic:
            reasons.append(f"deterministic must be false in {self.name}: blocks add to dQ in any order")
        return reasons

    def blocks_of_head(self, config: Flash2BackwardConfig, workload: Workload) -> int:
        """See LadderBackward."""
        return self.key_tiles(config, workload)

    def alternating_heads(self, config: Flash2BackwardConfig, workload: Workload) -> int:
        """See LadderBackward."""
        return max(1, workload.batch * workload.heads_kv) if config.grid_order is GridOrder.BATCH_HEAD_TILE else 1

    def space(self, problem: Problem, target: Target) -> Iterator[Any]:
        """See Family. Each in both orders of the grid."""
        for config in super().space(problem, target):
            for grid_order in GridOrder:
                yield dataclasses.replace(config, grid_order=grid_order)

    def vectors(self, target: Target) -> bool:
        """See LadderBackward. Reductions of 16 bytes came with sm_90."""
        return target.capability >= (9, 0)

    def d_q_traffic(self, added: int) -> Traffic:
        """See LadderBackward. Line 15 reads and writes dQ: here the L2 adds."""
        return Traffic(0, 0, added)


FAMILY = Flash2Backward()
