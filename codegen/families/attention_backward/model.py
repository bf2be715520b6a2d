"""How long attention_backward takes: a roofline of its main kernel, and the time that memory takes for what is around it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashgen.codegen.attention import local_steps, padded
from flashgen.codegen.devices import DRAM_EFFICIENCY, Device
from flashgen.codegen.family import Prediction
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

if TYPE_CHECKING:
    from .config import AttentionBackwardConfig

MMA_EFFICIENCY = 0.75  # of the rate of mma.sync that these products reach: a guess
SHARED_BYTES_PER_CYCLE = 128
JOINING = 3.0  # exponent of the norm that joins bounds which overlap, but not without loss: a guess
REDUCED_BYTES_PER_CYCLE = 24  # that the L2 adds up for an SM while all of them ask for it: a guess
BARRIER_CYCLES = 120.0  # of a block at each barrier, halved where another block fills the wait: a guess
LAUNCH_SECONDS = 2e-6  # from the end of one kernel to the beginning of the next


def predict(problem: Problem, config: AttentionBackwardConfig, workload: Workload, device: Device) -> Prediction:
    """The sum of the three kernels' times; what bounds the main one is named."""
    w, c = workload, config
    rows, keys = w.batch * w.heads_q * w.len_q, w.batch * w.heads_kv * w.len_kv
    if not rows and not keys:
        return Prediction(0.0, "nothing")
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    tiles = _tiles(problem, config, w)
    tensor = 2 * c.block_q * c.block_kv * (3 * d + 2 * dv) / (device.target.mma_flops_per_cycle * device.mma_rate * MMA_EFFICIENCY)
    demands = {
        "tensor cores": tensor,
        "shared memory": shared_bytes_of_tile(config, d, dv) / SHARED_BYTES_PER_CYCLE,
        "exponentials": c.block_q * c.block_kv / device.target.exp2_per_cycle,
        "reductions": c.block_q * d * 4 / REDUCED_BYTES_PER_CYCLE,
    }
    cycles = sum(demand**JOINING for demand in demands.values()) ** (1 / JOINING)
    cycles += BARRIER_CYCLES * (2 + (c.stages == 1) + (c.column_groups - 1)) / c.blocks_per_sm
    busy = math.ceil(tiles / max(1, device.sm_count)) if tiles < device.sm_count else tiles / device.sm_count
    seconds = busy * cycles / device.clock_hz
    sums = 3 * rows * d * 4 + operation_of(problem).io_bytes(problem, workload)  # zeroed, added to and read
    around = sums / (DRAM_EFFICIENCY * device.memory_bandwidth)
    bound_by = max(demands, key=lambda name: demands[name]) if seconds > around else "memory"
    return Prediction(seconds + around + 3 * LAUNCH_SECONDS, bound_by)


def shared_bytes_of_tile(config: AttentionBackwardConfig, d: int, dv: int) -> float:
    """Bytes of shared memory that the warps of a block read and write for one query tile."""
    c = config
    rows, columns = c.key_rows, c.block_q // c.column_groups
    hoisted = {"none": (1, 1), "v": (1, 0), "kv": (0, 0)}[c.hoisted.value]
    steps = columns / c.step_q
    of_scores = (columns * (d + dv) + steps * rows * (d * hoisted[0] + dv * hoisted[1])) * 2
    sums = c.block_q * (d + dv) / c.column_groups * 2 + rows * columns * 2
    if c.column_groups > 1:
        sums += rows * columns * 2 + 2 * rows * c.block_q * 2
    of_query = c.block_kv * (c.rows_dq + d * c.block_q / c.rows_dq / c.warps) * 2
    return c.warps * (of_scores + sums + of_query) + c.block_q * (d + dv) * 2


def _tiles(problem: Problem, config: AttentionBackwardConfig, workload: Workload) -> float:
    """Pairs of a query tile and a key tile that are computed: under a causal mask those of which some pair is seen."""
    w = workload
    heads = w.batch * w.heads_q
    whole = math.ceil(w.len_q / config.block_q) * math.ceil(w.len_kv / config.block_kv)
    if w.is_local:
        return heads * local_steps(problem, w, config.block_q, config.block_kv)[0]
    if problem.mask is Mask.FULL:
        return heads * whole
    seen = w.visible_pairs(problem.mask) + min(w.len_q, w.len_kv) * (config.block_q + config.block_kv) / 2
    return heads * min(whole, seen / (config.block_q * config.block_kv))
