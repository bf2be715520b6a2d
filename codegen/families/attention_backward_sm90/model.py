"""How long attention_backward_sm90 takes for one config and workload: a roofline of its three kernels, with shares measured on an H200.

A step of the main kernel is one query tile of one block: five products, exponentials and additions to memory that hide behind little else.
"""

from __future__ import annotations

import math
from typing import Any

from flashgen.codegen.attention import local_steps, padded
from flashgen.codegen.devices import DRAM_EFFICIENCY, Device
from flashgen.codegen.family import Prediction
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

from .launch import PANEL, panels

TENSOR_EFFICIENCY = 0.92  # of the rate of wgmma that the products reach alone
# 64 and 80 queries at head dim 128 and 128 queries at 64, length 8192, give these three.
SCORE_CYCLES = 0.038  # an SM takes for what is done for a score beside products, and hides behind nothing
SUM_CYCLES = 0.022  # the same for a number added to dQ
STEP_CYCLES = 726.0  # of a step, that do not depend on its size
SPLIT_SUM_CYCLES = 0.008  # for a number added to dQ beside what is left of dV
WIDE_SUM_CYCLES = 0.095  # the same where 64 keys of a wide head share the additions: the L2 takes no more
PAIR_SUM_CYCLES = 0.046  # the same where pairs of blocks share them
BLOCK_CYCLES = 3000.0  # of a block, before its first and after its last step: a guess
WORK_TILE_CYCLES = 1500.0  # the same of a persistent block's work tile, whose first tiles come meanwhile: a guess
LAST_HEADS = 0.4  # share of the time to round dQ that persistent blocks do not hide: some 20 of 52 us
LAUNCH_SECONDS = 2e-6  # from the end of one kernel to the beginning of the next


def predict(
    problem: Problem, config: Any, workload: Workload, device: Device, block_kv: int, sum_cycles: float, persistent: bool
) -> Prediction:
    """The sum of the kernels' times, and what bounds the main one.

    config: says block_q and transposes_d_q
    sum_cycles: one of the constants above
    persistent: whether blocks take one work tile after the other, and round dQ meanwhile
    """
    w, size = workload, problem.dtype.bytes
    query_tiles, key_tiles = -(-w.len_q // config.block_q), -(-w.len_kv // block_kv)
    blocks = w.batch * w.heads_kv * key_tiles
    if not blocks or not query_tiles:
        return Prediction(0.0, "nothing")
    columns, columns_v = padded(problem.head_dim), padded(problem.head_dim_v)
    columns_dq = panels(columns) * PANEL if config.transposes_d_q else columns
    tile_scores = config.block_q * block_kv
    tensor = 2 * tile_scores * (2 * columns + 2 * columns_v + columns_dq) / (TENSOR_EFFICIENCY * device.target.wgmma_flops_per_cycle)
    step = tensor + SCORE_CYCLES * tile_scores + sum_cycles * config.block_q * columns + STEP_CYCLES
    # Of a head: all steps, and those of the key tile that most queries see.
    if w.is_local:
        of_head, longest = local_steps(problem, w, config.block_q, block_kv)
        longest = min(query_tiles, longest * math.ceil(block_kv / config.block_q) + 1)
    else:
        of_head, longest = _steps_of_head(problem.mask, config.block_q, block_kv, w), query_tiles
    steps, longest = of_head * w.batch * w.heads_q, longest * (w.heads_q // w.heads_kv)
    rounds = math.ceil(blocks / device.sm_count)
    around = WORK_TILE_CYCLES if persistent else BLOCK_CYCLES
    if problem.mask is Mask.FULL and not w.is_local:
        cycles = rounds * (longest * step + around)
    else:
        cycles = max(longest * step + around, (steps * step + blocks * around) / min(blocks, device.sm_count) + step)
    rows = w.batch * w.heads_q * w.len_q
    # Zeros of the sums of dQ, out and d_out; then, in a kernel of its own or for the last heads, the sums and dQ.
    beside = rows * (columns * 4 + 2 * columns_v * size)
    rounding = rows * columns * (4 + size) * (LAST_HEADS if persistent else 1.0)
    launches = 2 if persistent else 3
    seconds = cycles / device.clock_hz + (beside + rounding) / (DRAM_EFFICIENCY * device.memory_bandwidth) + launches * LAUNCH_SECONDS
    return Prediction(seconds, "tensor cores" if tensor > step / 2 else "exponentials and latency")


def _steps_of_head(mask: Mask, block_q: int, block_kv: int, w: Workload) -> float:
    """Query tiles that see each key tile of a query head, added up."""
    query_tiles, key_tiles = -(-w.len_q // block_q), -(-w.len_kv // block_kv)
    if mask is Mask.FULL:
        return float(query_tiles * key_tiles)
    if key_tiles > 4096:
        return 0.5 * query_tiles * key_tiles
    firsts = (max(0, tile * block_kv - (w.len_kv - w.len_q)) // block_q for tile in range(key_tiles))
    return float(sum(max(0, query_tiles - first) for first in firsts))
