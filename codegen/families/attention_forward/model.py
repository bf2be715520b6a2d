"""How long attention_forward takes for one config and workload, and what sets that time: counts of work, and fitted weights.

The unit of work is a step of one block: `step_kv` keys against `block_q` queries. Its demands on an SM are counted in cycles:

- issue: tensor-core products hold the issue port of a scheduler while they are under way, so every other instruction adds to them
- shared memory: operands read by every warp, tiles written by the copies
- L2: tiles read by every block, however many of a head run at once
- latency: what one block needs for a step if it has the SM to itself; other resident blocks fill the gaps

Launches of many blocks take as long as their work; small ones as long as the blocks that share an SM, or the longest block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen.attention import local_steps, padded
from flashgen.codegen.devices import DRAM_EFFICIENCY, Device
from flashgen.codegen.family import Prediction
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

if TYPE_CHECKING:
    from .config import AttentionForwardConfig

SCHEDULERS = 4  # of an SM, on every architecture from sm_80 on
SHARED_BYTES_PER_CYCLE = 128


@dataclass(frozen=True)
class GenericWeights:
    """What counts do not tell: fitted by `tools/model.py fit` to times of head dims 80, 112, 160 and 224 on an H200.

    arithmetic:        issue cycles of an fp32 instruction (scaling, sums, maxima, conversions) of one warp
    exponential:       issue cycles of an ex2 instruction of one warp
    copying:           issue cycles of a copy from global to shared memory, with its addresses, where it is of whole lines
    bookkeeping:       share of the counted instructions of a step that is neither
    barrier:           issue cycles of a warp at each tile's barrier, where other blocks of the SM fill the wait
    lone_barrier:      the same where an SM has one block only
    walking:           issue cycles of a warp at each step of a tile that has several
    operand_reads:     shared-memory cycles for each counted one of reading operands
    tile_writes:       the same for writing tiles, line by line
    tile_reads:        cycles for each byte of a tile that an SM gets from the L2 while all SMs want theirs
    overlap:           exponent of the norm that joins issue and shared memory: infinite if they overlapped without loss, 1 if not at all
    streaming:         the same for these two and the L2
    alone:             factor on issue where an SM has one block only
    step_latency:      cycles of a step of one block that do not depend on its size
    waiting:           cycles for which a block waits at each tile's barrier
    product_latency:   cycles for each product of a warp's chain
    score_latency:     cycles for each score of a lane's chain
    hiding:            exponent of the norm that joins throughput and latency
    ends_hiding:       exponent by which blocks that share an SM hide each other's beginnings and ends: 1 if these only overlap
    start:             cycles of a block before its first load, and after its last
    load_bytes:        cycles for each byte that a block waits for before its first step
    store_elements:    cycles for each element of the output
    output_first:      factor on the time of a step that issues its output first: the scores that the next exponentials wait for come later
    tail:              share of a mean block's time for which an SM's places stand empty in the end, where blocks are of different length
    """

    arithmetic: float
    exponential: float
    copying: float
    bookkeeping: float
    barrier: float
    lone_barrier: float
    walking: float
    operand_reads: float
    tile_writes: float
    tile_reads: float
    overlap: float
    streaming: float
    alone: float
    step_latency: float
    waiting: float
    product_latency: float
    score_latency: float
    hiding: float
    ends_hiding: float
    start: float
    load_bytes: float
    store_elements: float
    output_first: float
    tail: float


FITTED = GenericWeights(
    arithmetic=1.447,
    exponential=1.264,
    copying=3.647,
    bookkeeping=0.08217,
    barrier=52.27,
    lone_barrier=118.9,
    walking=8.229,
    operand_reads=0.9742,
    tile_writes=0.4375,
    tile_reads=0.01039,
    overlap=3.926,
    streaming=5.285,
    alone=0.9984,
    step_latency=194.9,
    waiting=157.9,
    product_latency=3.292,
    score_latency=10.31,
    hiding=2.138,
    ends_hiding=0.7627,
    start=3401,
    load_bytes=0.04826,
    store_elements=0.009339,
    output_first=1.017,
    tail=0.3165,
)


@dataclass(frozen=True)
class Step:
    """Cycles that a step of one block demands of an SM.

    barrier, lone_barrier:  its share of what a tile's barrier takes, where other blocks fill the wait, and where none does
    latency:                what it takes alone
    masking:                what a masked step takes beside
    """

    tensor: float
    exponentials: float
    arithmetic: float
    barrier: float
    lone_barrier: float
    shared_memory: float
    l2: float
    latency: float
    masking: float

    def throughput(self, weights: GenericWeights, together: int, warps: int) -> float:
        """Cycles for which a step of one of `together` blocks, each of `warps` warps, occupies the SM."""
        # Warps of one block wait for each other at every tile, so its busiest scheduler sets the pace; those of several make up for it.
        pace = weights.alone * math.ceil(warps / SCHEDULERS) * SCHEDULERS / warps if together == 1 else 1.0
        barrier = self.lone_barrier if together == 1 else self.barrier
        issue = (self.tensor + self.exponentials + self.arithmetic + barrier) * pace
        inside = (issue**weights.overlap + self.shared_memory**weights.overlap) ** (1 / weights.overlap)
        return float((inside**weights.streaming + self.l2**weights.streaming) ** (1 / weights.streaming))

    def cycles(self, weights: GenericWeights, together: int, warps: int) -> float:
        """Cycles for a step of each of `together` blocks: what they demand, and what of the latency nobody fills."""
        busy = together * self.throughput(weights, together, warps)
        return float((busy**weights.hiding + self.latency**weights.hiding) ** (1 / weights.hiding))

    def limiter(self) -> str:
        """What demands most."""
        arithmetic = self.arithmetic + self.barrier
        issue = self.tensor + self.exponentials + arithmetic
        if max(self.shared_memory, self.l2) > issue:
            return "shared memory" if self.shared_memory > self.l2 else "L2"
        demands = {"tensor cores": self.tensor, "exponentials": self.exponentials, "arithmetic": arithmetic}
        return max(demands, key=lambda name: demands[name])


def neighbours(columns: int) -> int:
    """How many lanes copy neighbouring chunks of a row: see kSwizzle in tile/warp/shared_tile.cuh."""
    return math.gcd(columns // 8, 8)


def step_of(problem: Problem, config: AttentionForwardConfig, device: Device, query_in_shared: bool, weights: GenericWeights) -> Step:
    """The demands of one step of one block."""
    columns, columns_v = padded(problem.head_dim), padded(problem.head_dim_v)
    keys, warps = config.step_kv, config.warps
    row_tiles = config.block_q // warps // 16
    per_scheduler = warps / SCHEDULERS
    lane_scores = row_tiles * keys / 2  # of a lane
    products = row_tiles * (keys / 8 * (columns / 16) + keys / 16 * (columns_v / 8))  # of a warp
    reads = keys / 16 * (columns + columns_v) / 16 + (row_tiles * columns / 16 if query_in_shared else 0)  # ldmatrix.x4 of a warp
    tile_bytes = keys * (columns + columns_v) * problem.dtype.bytes  # loaded for a step
    # A copy instruction takes as long as it touches lines of 128 bytes, however little of each.
    written = keys * problem.dtype.bytes * sum(n * 8 / neighbours(n) for n in (columns, columns_v))
    copies = written / 16 / (warps * 32)  # of a lane
    flops = 2 * config.block_q * keys * (columns + columns_v)
    # For each score a scaling and a sum, a maximum at less, and half a conversion.
    arithmetic = weights.arithmetic * 3.1 * lane_scores + weights.copying * copies
    other = weights.bookkeeping * (24 + 6 * row_tiles)
    other += weights.walking if keys < config.block_kv else 0.0
    return Step(
        tensor=flops / (device.target.mma_flops_per_cycle * device.mma_rate),
        # The weight is for 16 exponentials a cycle.
        exponentials=per_scheduler * lane_scores * weights.exponential * 16 / device.target.exp2_per_cycle,
        arithmetic=per_scheduler * (arithmetic + other),
        barrier=per_scheduler * weights.barrier * keys / config.block_kv,
        lone_barrier=per_scheduler * weights.lone_barrier * keys / config.block_kv,
        shared_memory=(weights.operand_reads * warps * reads * 512 + weights.tile_writes * written) / SHARED_BYTES_PER_CYCLE,
        l2=weights.tile_reads * tile_bytes,
        masking=per_scheduler * 2 * lane_scores * weights.arithmetic,
        latency=weights.step_latency
        + weights.waiting * keys / config.block_kv
        + weights.product_latency * products
        + weights.score_latency * lane_scores,
    )


def predict(
    problem: Problem,
    config: AttentionForwardConfig,
    workload: Workload,
    device: Device,
    blocks: int,
    resident: int,
    query_in_shared: bool,
    output_first: bool,
    weights: GenericWeights = FITTED,
) -> Prediction:
    """The time of a launch of `blocks` blocks, of which `resident` fit on one SM at once."""
    if not blocks:
        return Prediction(0.0, "nothing")
    step = step_of(problem, config, device, query_in_shared, weights)
    steps, longest = _steps(problem, config, workload)
    columns, columns_v = padded(problem.head_dim), padded(problem.head_dim_v)
    first_bytes = (config.block_q + config.step_kv) * columns * problem.dtype.bytes
    ends = weights.start + weights.load_bytes * first_bytes + weights.store_elements * config.block_q * columns_v
    even = problem.mask is Mask.FULL and not workload.is_local  # blocks walk equally far
    masked = 0.0 if even else (config.block_q / config.step_kv + 0.5) * (2 if workload.is_local else 1)

    def block_cycles(together: int) -> float:
        """What one block takes of an SM that it shares with others."""
        cycles = step.cycles(weights, together, config.warps) / together
        return float(steps * cycles + masked * step.masking + ends / together**weights.ends_hiding)

    share = blocks / device.sm_count  # blocks that one SM gets
    together = max(1, min(resident, math.ceil(share)))
    if not even and share > together:  # the long ones come first, the short ones fill up
        total = (share + weights.tail * together) * block_cycles(together)
    else:
        rounds, rest = divmod(math.ceil(share), together)
        total = rounds * together * block_cycles(together) + (rest * block_cycles(rest) if rest else 0.0)
    seconds = total / device.clock_hz * (weights.output_first if output_first else 1.0)
    alone = (longest * step.latency + ends) / device.clock_hz
    memory = operation_of(problem).io_bytes(problem, workload) / (DRAM_EFFICIENCY * device.memory_bandwidth)
    if memory >= max(seconds, alone):
        return Prediction(memory, "memory")
    if alone > seconds:
        return Prediction(alone, "the longest block")
    if step.latency > together * step.throughput(weights, together, config.warps):
        return Prediction(seconds, "latency")
    return Prediction(seconds, step.limiter())


def _steps(problem: Problem, config: AttentionForwardConfig, workload: Workload) -> tuple[float, float]:
    """Steps of a block: on average, and at most."""
    if workload.is_local:
        total, most = local_steps(problem, workload, config.block_q, config.step_kv)
        return total / max(1, math.ceil(workload.len_q / config.block_q)), most
    longest = max(1.0, workload.len_kv / config.step_kv)
    if problem.mask is Mask.FULL:
        return math.ceil(longest), math.ceil(longest)
    per_query = workload.visible_pairs(problem.mask) / max(1, workload.len_q)
    # A block walks as far as its last query sees, and in whole steps: by so much farther as multiples of block_q fall short of those.
    rounding = (1 - math.gcd(config.block_q, config.step_kv) / config.step_kv) / 2
    return min(longest, (per_query + (config.block_q - 1) / 2) / config.step_kv + rounding), longest
