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

from flashgen.codegen.attention import padded
from flashgen.codegen.family import Traffic
from flashgen.codegen.ladder import GridOrder, WarpSplit
from flashgen.codegen.ladder_backward import LadderBackward
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from .config import Flash2BackwardConfig

QUERY_SPLITS = ((64, 32, 4), (128, 32, 8), (64, 16, 4), (128, 16, 8))  # block_q, block_kv, warps
SPLIT_WARPS = (2, 4, 8)  # that may divide a tile's queries, 16 for each


class Flash2Backward(LadderBackward):
    """See the module's docstring; the algorithm is templates/kernels/flash2_backward.cu.j2."""

    name = "flash2_backward"
    revision = 3
    template = "kernels/flash2_backward.cu.j2"
    config_type = Flash2BackwardConfig
    tiles = (*LadderBackward.tiles, "warp/gradient_parts")

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = super().refusals(problem, target)
        if problem.deterministic:
            reasons.append(f"deterministic must be false in {self.name}: blocks add to dQ in any order")
        return reasons

    def row_reasons(self, config: Flash2BackwardConfig) -> list[str]:
        """See LadderFamily. Warps that divide the queries have 16 of a tile, and all its keys."""
        if config.warp_split is WarpSplit.KEYS:
            return super().row_reasons(config)
        if config.warps not in SPLIT_WARPS:
            nearest = min(SPLIT_WARPS, key=lambda n: abs(n - config.warps))
            return [f"warps must be 2, 4 or 8 where they divide the queries; got {config.warps} (nearest: {nearest})"]
        if config.block_q != config.warps * 16:
            given = f"{config.warps * 16} where {config.warps} warps divide the queries, 16 for each"
            return [f"block_q must be {given}; got {config.block_q} (nearest: {config.warps * 16})"]
        return []

    def rows_and_keys(self, config: Flash2BackwardConfig) -> tuple[int, int]:
        """See LadderBackward."""
        if config.warp_split is WarpSplit.KEYS:
            return super().rows_and_keys(config)
        return config.block_q // config.warps, config.block_kv

    def queries_at_once(self, config: Flash2BackwardConfig) -> int:
        """See LadderBackward."""
        return super().queries_at_once(config) if config.warp_split is WarpSplit.KEYS else config.block_q // config.warps

    def registers_needed(self, problem: Problem, config: Flash2BackwardConfig) -> int:
        """See LadderFamily. A few more where warps divide the queries: 32 keys of head dim 72 spill, and must not pass."""
        return super().registers_needed(problem, config) + (0 if config.warp_split is WarpSplit.KEYS else 4)

    def resource_reasons(self, problem: Problem, config: Flash2BackwardConfig, target: Target) -> list[str]:
        """See LadderFamily. The warps' parts of dK, and then those of dV, must fit where the stages were."""
        reasons = super().resource_reasons(problem, config, target)
        d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
        ring = self.ring_bytes(problem, config)
        needed = config.warps * config.block_kv * max(d, dv) * 4
        if config.warp_split is WarpSplit.QUERIES and needed > ring:
            parts = f"{config.warps} warps' parts of {'dK' if d >= dv else 'dV'}"
            reasons.append(f"{parts} need {needed} B of the stages, which have {ring} B: lower block_kv or raise stages")
        return reasons

    def context(self, problem: Problem, config: Flash2BackwardConfig, target: Target) -> dict[str, object]:
        """See Family."""
        split_queries = config.warp_split is WarpSplit.QUERIES
        own_part = f" Each warp has {config.block_q // config.warps} queries of each tile." if split_queries else ""
        return super().context(problem, config, target) | {"split_queries": split_queries, "own_part": own_part}

    def blocks_of_head(self, config: Flash2BackwardConfig, workload: Workload) -> int:
        """See LadderBackward."""
        return self.key_tiles(config, workload)

    def alternating_heads(self, config: Flash2BackwardConfig, workload: Workload) -> int:
        """See LadderBackward."""
        return max(1, workload.batch * workload.heads_kv) if config.grid_order is GridOrder.BATCH_HEAD_TILE else 1

    def space(self, problem: Problem, target: Target) -> Iterator[Any]:
        """See Family. Both orders of the grid where warps divide the keys, and warps that divide the queries."""
        for config in super().space(problem, target):
            for grid_order in GridOrder:
                yield dataclasses.replace(config, grid_order=grid_order)
        for block_q, block_kv, warps in QUERY_SPLITS:
            yield self.most_blocks(problem, Flash2BackwardConfig(block_q, block_kv, warps, warp_split=WarpSplit.QUERIES), target)

    def vectors(self, target: Target) -> bool:
        """See LadderBackward. Reductions of 16 bytes came with sm_90."""
        return target.capability >= (9, 0)

    def d_q_traffic(self, added: int) -> Traffic:
        """See LadderBackward. Line 15 reads and writes dQ: here the L2 adds."""
        return Traffic(0, 0, added)


FAMILY = Flash2Backward()
