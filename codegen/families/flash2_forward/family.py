"""FlashAttention-2's forward pass as its paper writes it down (Dao 2023, algorithm 1), for every architecture from sm_80 on.

Query tiles are outside, key tiles inside. O stays in registers, unnormalised: each step rescales it by exp(old row_max - row_max), and the
end divides it by row_sum. The family is the last step of the ladder, in the plain copy pipeline of the others, and runs where it is asked
for by name; attention_forward is the tuned kernel of the same algorithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from flashgen.codegen.attention import padded, tiled_traffic
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Traffic
from flashgen.codegen.ladder import GridOrder, LadderFamily, WarpSplit, Work
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import KernelLaunch, Program
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from .config import Flash2ForwardConfig

KEY_SPLITS = ((16, 64, 4), (16, 128, 4), (32, 64, 4), (32, 128, 4), (16, 128, 8))  # block_q, block_kv, warps


class Flash2Forward(LadderFamily):
    """See the module's docstring; the algorithm is templates/kernels/flash2_forward.cu.j2."""

    name = "flash2_forward"
    revision = 4
    template = "kernels/flash2_forward.cu.j2"
    config_type = Flash2ForwardConfig

    def row_reasons(self, config: Flash2ForwardConfig) -> list[str]:
        """See LadderFamily. Warps that divide the keys have 16 of a tile at least, and all its rows."""
        if config.warp_split is WarpSplit.QUERIES:
            return super().row_reasons(config)
        reasons = []
        if config.block_q not in (16, 32):
            nearest = 16 if config.block_q < 24 else 32
            reasons.append(f"block_q must be 16 or 32 where warps divide the keys; got {config.block_q} (nearest: {nearest})")
        if unit := config.block_kv % (config.warps * 16) and config.warps * 16:
            nearest = max(unit, round(config.block_kv / unit) * unit)
            rule = f"a multiple of {unit}, 16 keys for each of the warps that divide them"
            reasons.append(f"block_kv must be {rule}; got {config.block_kv} (nearest: {nearest})")
        return reasons

    def rows_and_keys(self, config: Flash2ForwardConfig) -> tuple[int, int]:
        """See LadderFamily."""
        if config.warp_split is WarpSplit.QUERIES:
            return super().rows_and_keys(config)
        return config.block_q, config.block_kv // config.warps

    def registers_needed(self, problem: Problem, config: Flash2ForwardConfig) -> int:
        """See LadderFamily. Adding up the warps' rows takes some more."""
        return super().registers_needed(problem, config) + (config.block_q if config.warp_split is WarpSplit.KEYS else 0)

    def resource_reasons(self, problem: Problem, config: Flash2ForwardConfig, target: Target) -> list[str]:
        """See LadderFamily. The warps' O must fit where the stages were."""
        reasons = super().resource_reasons(problem, config, target)
        ring = config.stages * self.tile_bytes(problem, config)[1]
        needed = config.warps * config.block_q * (4 + padded(problem.head_dim_v)) * 4
        if config.warp_split is WarpSplit.KEYS and needed > ring:
            reasons.append(f"O of {config.warps} warps needs {needed} B of the stages, which have {ring} B: raise block_kv or stages")
        return reasons

    def program(self, config: Flash2ForwardConfig, call: Call, device: Device) -> Program:
        """See Family. In the order (batch, head, tile) all heads have their last tiles first."""
        w, tiles = call.workload, self.query_tiles(config, call.workload)
        heads = w.heads_q * w.batch
        alternating = heads if config.grid_order is GridOrder.BATCH_HEAD_TILE else 1
        return Program((KernelLaunch(tiles * heads, self.values(config, call, tiles, max(1, alternating))),))

    def context(self, problem: Problem, config: Flash2ForwardConfig, target: Target) -> dict[str, object]:
        """See Family."""
        split_keys = config.warp_split is WarpSplit.KEYS
        rows, keys = self.rows_and_keys(config)
        own_part = f"Each warp has all of them, and {keys} keys of each tile." if split_keys else f"Each warp has {rows} of them."
        own = {"split_keys": split_keys, "own_part": own_part, "plus_own_key": " + own_key" if split_keys else ""}
        return super().context(problem, config, target) | own

    def space(self, problem: Problem, target: Target) -> Iterator[Any]:
        """See Family. Both orders of the grid of what version 2 does, and warps that divide the keys."""
        for config in super().space(problem, target):
            for grid_order in GridOrder:
                yield dataclasses.replace(config, grid_order=grid_order)
        for block_q, block_kv, warps in KEY_SPLITS:
            yield self.most_blocks(problem, Flash2ForwardConfig(block_q, block_kv, warps, warp_split=WarpSplit.KEYS), target)

    def traffic(self, problem: Problem, config: Flash2ForwardConfig, workload: Workload, device: Device) -> Traffic:
        """See Family. Each query tile reads K and V of the keys that it sees (algorithm 1, lines 4 and 7), and writes its O (line 14)."""
        return tiled_traffic(problem, workload, config.block_q, config.block_kv)

    def work(self, problem: Problem, config: Flash2ForwardConfig, workload: Workload, device: Device, computed: float) -> Work:
        """See LadderFamily. Where the heads alternate, the L2 holds no tile until its head's next block, if all of them do not fit."""
        columns = padded(problem.head_dim) + padded(problem.head_dim_v)
        blocks = self.query_tiles(config, workload) * workload.heads_q * workload.batch
        l2 = computed / config.block_q * columns * problem.dtype.bytes
        all_keys = workload.batch * workload.heads_kv * workload.len_kv * columns * problem.dtype.bytes
        missed = l2 if config.grid_order is GridOrder.BATCH_HEAD_TILE and all_keys > device.l2_bytes else 0.0
        return Work(2 * computed * columns, computed, missed, l2, blocks, 1 / blocks)


FAMILY = Flash2Forward()
