"""How long attention_decode takes for one config and workload, and what sets that time: nearly always the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen.attention import padded, visits
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Prediction, Traffic
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

if TYPE_CHECKING:
    from .config import AttentionDecodeConfig
    from .shares import Shares


@dataclass(frozen=True)
class SplitWeights:
    """What counts do not tell: from the times of one run on an H200, by eye.

    memory:     share of the memory's bandwidth that copies reach
    latency:    seconds of bytes that an SM must have on their way to reach it
    launch:     seconds of a launch beside its tiles
    item:       seconds of a further work item of a block: its Q, its output
    merge:      seconds that an item of several parts takes longer, beside those of each part
    part:       seconds of each of them
    beside:     share of the faster of memory and arithmetic that the slower does not hide
    step:       cycles of a warp for a tile that do not depend on its size
    column:     cycles for each column of K and V, as its products wait for each other
    score:      cycles for each column of each key of the warp, and for each of its row tiles
    tensor:     share of the rate of mma.sync that warps together reach
    """

    memory: float = 0.94
    latency: float = 1.9e-6
    launch: float = 3.2e-6
    item: float = 0.6e-6
    merge: float = 2.0e-6
    part: float = 0.1e-6
    beside: float = 0.02
    step: float = 150.0
    column: float = 1.2
    score: float = 0.1
    tensor: float = 0.6


@dataclass(frozen=True)
class ConversionWeights:
    """The same where keys are e4m3 numbers, which each warp that multiplies them converts: the schedulers of an SM then are what is busy.

    Fitted to the times of 70 configs on an H200, head dims 64 to 256 and 4 to 64 rows a key/value head.

    convert:    cycles of a scheduler for each column of a warp's key, whatever its rows
    product:    cycles for each column of a key, for each of the warp's row tiles
    softmax:    cycles for each key and row tile
    step:       cycles of a warp for a tile that do not depend on its size
    alone:      cycles that a warp takes where it has a scheduler to itself, for each that it would take beside others
    latency, beside: as in SplitWeights
    """

    convert: float = 0.0187
    product: float = 0.0315
    softmax: float = 12.3
    step: float = 880.0
    alone: float = 1.25
    latency: float = 1.2e-6
    beside: float = 0.29


SCHEDULERS = 4  # of an SM
GUESSED, FITTED_E4M3 = SplitWeights(), ConversionWeights()


def predict(
    problem: Problem,
    config: AttentionDecodeConfig,
    workload: Workload,
    device: Device,
    shares: Shares,
    weights: SplitWeights | None = None,
) -> Prediction:
    """The time of a launch. Each work item reads its keys for itself: others that want the same ones do so at another time."""
    if not shares.items:
        return Prediction(0.0, "nothing")
    weights = weights or GUESSED
    columns = padded(problem.head_dim) + padded(problem.head_dim_v)
    tile_bytes = config.block_kv * (problem.head_dim + problem.head_dim_v) * problem.kv_bytes
    tiles = shares.items * shares.key_tiles
    busy = min(1.0, shares.blocks / device.sm_count)
    on_their_way = (config.stages - 1) * tile_bytes * shares.blocks
    bandwidth = device.memory_bandwidth * weights.memory
    row_tiles, latency, beside = config.warp_q // 16, weights.latency, weights.beside
    if problem.dtype_kv is None:
        step = weights.step + columns * (weights.column + weights.score * config.group_kv * row_tiles)
        tensor = 2 * config.block_q * config.block_kv * columns / (device.target.mma_flops_per_cycle * device.mma_rate * weights.tensor)
    else:
        latency, beside = FITTED_E4M3.latency, FITTED_E4M3.beside
        step, tensor = _converting(config, columns)
    memory = tiles * tile_bytes / (bandwidth * min(1.0, on_their_way / (bandwidth * latency)))
    together = max(1.0, shares.blocks / device.sm_count)  # blocks of an SM
    arithmetic = math.ceil(tiles / shares.blocks) * max(step, tensor * together) / device.clock_hz
    fixed = weights.launch + weights.item * max(0.0, shares.items / shares.blocks - 1)
    if not shares.are_whole:
        fixed += weights.merge + weights.part * math.ceil(shares.blocks / shares.items)
    slower, faster = max(memory, arithmetic), min(memory, arithmetic)
    bound = "memory" if memory >= arithmetic else "tensor cores" if tensor * together > step else "latency"
    return Prediction(slower + beside * faster / busy + fixed, bound)


def _converting(config: AttentionDecodeConfig, columns: int, weights: ConversionWeights = FITTED_E4M3) -> tuple[float, float]:
    """Cycles of a tile of e4m3 keys: of each warp, and of the schedulers for all warps of a block."""
    row_tiles = config.warp_q // 16
    of_key = columns * (weights.convert + weights.product * row_tiles) + weights.softmax * row_tiles
    issued = config.group_kv * of_key
    return weights.step + weights.alone * issued, issued * config.warps / SCHEDULERS


def traffic(problem: Problem, config: AttentionDecodeConfig, workload: Workload) -> Traffic:
    """Of each work item its rows of Q and O, and the keys that some of its rows see."""
    group = workload.heads_q // max(1, workload.heads_kv)
    d, dv, element = problem.head_dim, problem.head_dim_v, problem.dtype.bytes
    sets, rows = workload.batch * workload.heads_kv, workload.len_q * group
    queries = max(1, config.block_q // group)
    keys = sum(keys for _, _, keys in visits(problem, workload, queries, config.block_kv))
    return Traffic(sets * (rows * d * element + keys * (d + dv) * problem.kv_bytes), sets * rows * dv * element)
