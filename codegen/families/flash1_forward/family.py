"""FlashAttention's first version (Dao et al. 2022, algorithms 1 and 2), forward, for every architecture from sm_80 on.

Key tiles are in the outer loop, query tiles inside. O, normalised and in fp32, and row_max and row_sum of its rows go to a buffer in memory
and come back at every step; the first step of a query tile does not read them, the last one writes out and lse. A head has one block, as in
the paper, or several, each with some of its query tiles, as in release 1.0. The family runs where it is asked for by name.
"""

from __future__ import annotations

import math
from typing import Any

from flashgen.codegen.attention import padded, visits
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Traffic
from flashgen.codegen.flash1 import paper_block_sizes
from flashgen.codegen.ladder import LadderFamily, Work
from flashgen.codegen.modifier import drops
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import Buffer, KernelLaunch, Program
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from .config import Flash1ForwardConfig, ParallelOver

MAX_SPLITS = 30  # blocks of a head, as in release 1.0
GOOD_ENOUGH = 0.95  # of the best efficiency: the fewest splits that reach it are taken
ROW_BYTES = 16  # of a row's statistics in memory


class Flash1Forward(LadderFamily):
    """See the module's docstring; the algorithm is templates/kernels/flash1_forward.cu.j2."""

    name = "flash1_forward"
    revision = 4
    template = "kernels/flash1_forward.cu.j2"
    modifiers = ("dropout",)
    config_type = Flash1ForwardConfig
    unhidden = 0.3  # a step reads its rows before it computes
    parameters = LadderFamily.parameters.with_fields(Parameter("volatile float*", "running_rows"), Parameter("int", "splits"))
    registers_beside = 88
    registers_of_dropout = 40  # more
    usual_keys = (128, 64, 32, 16)  # O moves once a key tile

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        """See Family. The header tells the paper's block sizes, too."""
        queries, keys = paper_block_sizes(problem, target)
        return super().context(problem, config, target) | {"paper_tiles": f"{queries} queries, {keys} keys"}

    def shared_bytes(self, problem: Problem, config: Flash1ForwardConfig) -> int:
        """See LadderFamily: a tile of keys and values, and stages of queries."""
        queries, keys = self.tile_bytes(problem, config)
        return config.stages * queries + keys

    def registers_needed(self, problem: Problem, config: Flash1ForwardConfig) -> int:
        """See LadderFamily. Addresses of O and of the statistics beside those of two loops; more of them where a warp has 32 rows."""
        of_dropout = self.registers_of_dropout * drops(problem)
        return super().registers_needed(problem, config) + 2 * (self.rows_and_keys(config)[0] - 16) + of_dropout

    def splits(self, problem: Problem, config: Flash1ForwardConfig, workload: Workload, device: Device) -> int:
        """Blocks of a head: the fewest whose waves fill the GPU nearly as well as those of any number up to 30 do.

        The last wave of blocks may leave SMs idle. Efficiency is how full the waves are on average.
        """
        most = min(MAX_SPLITS, self.query_tiles(config, workload))
        heads = workload.batch * workload.heads_q
        if config.parallel_over is ParallelOver.HEADS or most <= 1 or not heads:
            return 1
        cap = self.registers_cap(config, device.target)
        resident = max(1, device.target.blocks_resident(config.warps * 32, cap, self.shared_bytes(problem, config)))

        def efficiency(splits: int) -> float:
            waves = heads * splits / (device.sm_count * resident)
            return waves / math.ceil(waves)

        choices = range(1, most + 1)
        best = max(map(efficiency, choices))
        return next(splits for splits in choices if efficiency(splits) >= GOOD_ENOUGH * best)

    def program(self, config: Flash1ForwardConfig, call: Call, device: Device) -> Program:
        """See Family. The buffer holds whole query tiles."""
        problem, w = call.problem, call.workload
        tiles, splits = self.query_tiles(config, w), self.splits(problem, config, w, device)
        heads = w.heads_q * w.batch
        rows = heads * tiles * config.block_q
        values = self.values(config, call, splits, 1) | {"splits": splits}
        buffer = Buffer("running_rows", rows * (ROW_BYTES + padded(problem.head_dim_v) * 4))
        return Program((KernelLaunch(splits * heads if tiles else 0, values),), (buffer,))

    def traffic(self, problem: Problem, config: Flash1ForwardConfig, workload: Workload, device: Device) -> Traffic:
        """See Family. Each block reads K and V once (algorithm 1, line 6); a query tile is read for each key tile that it meets (line 8).

        O and the statistics of whole tiles come from memory but at the first key tile, and go there but at the last, at which O is written.
        """
        d, dv, element = problem.head_dim, problem.head_dim_v, problem.dtype.bytes
        heads, splits = workload.batch * workload.heads_q, self.splits(problem, config, workload, device)
        tiles = list(visits(problem, workload, config.block_q, config.block_kv))
        met = [max(1, key_tiles) for _, key_tiles, _ in tiles]
        keys = sum(min(met[last] * config.block_kv, workload.len_kv) for last in range(len(tiles) - splits, len(tiles)) if last >= 0)
        queries = sum(steps * queries for steps, (queries, _, _) in zip(met, tiles, strict=True))
        running = sum(steps - 1 for steps in met) * config.block_q * (ROW_BYTES + padded(dv) * 4)
        read = (keys * (d + dv) + queries * d) * element + running
        return Traffic(heads * read, heads * (workload.len_q * dv * element + running))

    def work(self, problem: Problem, config: Flash1ForwardConfig, workload: Workload, device: Device, computed: float) -> Work:
        """See LadderFamily. O and the statistics of a row are written, and read again, for each key tile but the last."""
        columns, columns_v, element = padded(problem.head_dim), padded(problem.head_dim_v), problem.dtype.bytes
        steps = computed / config.block_kv  # of a row and a key tile
        rows = workload.batch * workload.heads_q * self.query_tiles(config, workload) * config.block_q
        moved = 2 * max(0.0, steps - rows) * (columns_v * 4 + ROW_BYTES)
        blocks = workload.batch * workload.heads_q * self.splits(problem, config, workload, device)
        return Work(2 * computed * (columns + columns_v), computed, moved, moved + steps * columns * element, blocks, 1 / blocks)


FAMILY = Flash1Forward()
