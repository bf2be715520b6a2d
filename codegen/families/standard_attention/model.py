"""How long standard_attention takes: a roofline of its three kernels, each bound by memory, the L2, the tensor cores or the ex2 units."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashgen.codegen.attention import padded
from flashgen.codegen.devices import DRAM_EFFICIENCY, Device
from flashgen.codegen.family import Prediction
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

if TYPE_CHECKING:
    from .config import StandardAttentionConfig

MMA_EFFICIENCY = 0.7  # of the rate of mma.sync that a product of this size reaches: a guess
L2_BYTES_PER_CYCLE = 28  # that an SM reads from the L2 while all of them do: a guess
LAUNCH_SECONDS = 2e-6  # from the end of one kernel to the beginning of the next
SCORE_BYTES = 4  # of S


def predict(problem: Problem, config: StandardAttentionConfig, workload: Workload, device: Device) -> Prediction:
    """The sum of the three kernels' times; what bounds the one that takes longest is named."""
    w = workload
    if not w.batch * w.heads_q * w.len_q:
        return Prediction(0.0, "nothing")
    computed, element = _computed_scores(problem, config, w), problem.dtype.bytes
    rows, keys = w.batch * w.heads_q * w.len_q, w.batch * w.heads_kv * w.len_kv
    # A row that does not fit into the registers of its warps is read three times, and its exponentials are computed twice.
    fits = w.len_kv <= config.softmax_warps * 32 * config.row_scores

    def product(width: int, score_bytes: int, scores_from_l2: int) -> Prediction:
        """S = Q K^T or O = P V: each block reads the keys or values of its tiles from the L2 anew."""
        memory = (rows + keys) * width * element + computed * score_bytes
        l2 = computed * (padded(width) * element / config.block_q + scores_from_l2)
        return _slowest(device, memory, l2=l2, flops=2 * computed * padded(width))

    kernels = (
        product(problem.head_dim, SCORE_BYTES, 0),
        _slowest(device, computed * ((SCORE_BYTES if fits else 3 * SCORE_BYTES) + element), exponentials=computed * (1 if fits else 2)),
        product(problem.head_dim_v, element, element),
    )
    return Prediction(sum(k.seconds for k in kernels) + len(kernels) * LAUNCH_SECONDS, max(kernels, key=lambda k: k.seconds).bound_by)


def _slowest(device: Device, memory: float, l2: float = 0.0, flops: float = 0.0, exponentials: float = 0.0) -> Prediction:
    """The time of one kernel: that of the resource that takes longest for these bytes and operations."""
    cycles = device.sm_count * device.clock_hz  # of all SMs, in a second
    times = {
        "memory": memory / (DRAM_EFFICIENCY * device.memory_bandwidth),
        "L2": l2 / (L2_BYTES_PER_CYCLE * cycles),
        "tensor cores": flops / (MMA_EFFICIENCY * device.target.mma_flops_per_cycle * device.mma_rate * cycles),
        "exponentials": exponentials / (device.target.exp2_per_cycle * cycles),
    }
    bound_by = max(times, key=lambda name: times[name])
    return Prediction(times[bound_by], bound_by)


def _computed_scores(problem: Problem, config: StandardAttentionConfig, workload: Workload) -> float:
    """Those of whole tiles of block_q x block_kv, under a causal mask those that some query of the tile sees."""
    w = workload
    rows = math.ceil(w.len_q / config.block_q) * config.block_q
    whole = w.batch * w.heads_q * rows * math.ceil(w.len_kv / config.block_kv) * config.block_kv
    if problem.mask is Mask.FULL:
        return whole
    seen = w.visible_pairs(problem.mask) + rows * (config.block_q + config.block_kv) / 2
    return min(whole, w.batch * w.heads_q * seen)
