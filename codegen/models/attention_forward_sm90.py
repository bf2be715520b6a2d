"""How long attention_forward_sm90 takes for one config and workload, and what sets that time.

The unit of work is a step: `block_kv` keys against the query tiles of the blocks on an SM. The tensor cores are one bound; the other is
what a warpgroup does one after the other in a step, products of its own aside: the exponentials of all consumers share the pipe, and a
step has latencies that do not depend on its size. A tile costs beside its steps what moves its queries and its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen.device import Device
from flashgen.codegen.family import Prediction
from flashgen.codegen.problem import Dtype, Mask, Problem, Workload

if TYPE_CHECKING:
    from flashgen.codegen.families.attention_forward_sm90 import AttentionForwardSm90Config

PANEL = 64  # columns that are copied together
SECTOR_BYTES = 32  # of the L2
DRAM_EFFICIENCY = 0.85  # of the data sheet's bandwidth that a kernel can reach


@dataclass(frozen=True)
class Weights:
    """What counts do not tell, fitted to 2,340 times of configs in 172 cells of head dims 24 to 256 on an H200.

    clock:           share of the device's clock that it keeps under this load
    tensor:          share of the tensor cores' rate that products reach at most, at that clock
    scores:          cycles of a step for each cycle of its product Q K^T
    exponentials:    cycles of a step for each key of each consumer, with a lazy reference
    maximum:         the same, in addition, where the reference follows the maximum
    latency:         cycles of a step that do not depend on its size
    copies:          cycles of a step for each row of 64 columns of K and V that it copies
    misaligned:      factor on these where rows do not begin at multiples of 32 bytes, the sectors of the L2
    joining:         exponent of the norm that joins tensor cores and the rest
    tile:            cycles of a tile for each column of queries and output, for 128 rows
    begin:           cycles of a tile that do not depend on its size
    claim:           cycles of a tile that is claimed, in addition
    turns_of_two:    factor on a step where two consumers take turns
    turns_of_three:  the same of three, who wait for each other longer than it helps
    neighbours:      the same where two blocks share an SM: each loads keys for itself
    launch:          cycles of a launch beside its tiles
    static_tail:     share of a causal launch for which blocks that take no more than their share wait for others
    """

    clock: float = 0.95
    tensor: float = 1.02
    scores: float = 0.112
    exponentials: float = 2.28
    maximum: float = 1.13
    latency: float = 639.0
    copies: float = 2.08
    misaligned: float = 1.9
    joining: float = 1.9
    tile: float = 3.77
    begin: float = 1482.0
    claim: float = 784.0
    turns_of_two: float = 0.983
    turns_of_three: float = 1.065
    neighbours: float = 0.93
    launch: float = 5381.0
    static_tail: float = 0.096


FITTED = Weights()


def predict(
    problem: Problem, config: AttentionForwardSm90Config, workload: Workload, device: Device, per_sm: int, weights: Weights = FITTED
) -> Prediction:
    """The time of one launch, and the bound that counts most. `per_sm`: how many blocks may share an SM."""
    w = weights
    rows, keys, rate = config.block_q, config.block_kv, device.target.wgmma_flops_per_cycle
    d, dv = (-(-width // 16) * 16 for width in (problem.head_dim, problem.head_dim_v))
    tiles_of_head = -(-workload.len_q // config.queries)
    heads = workload.batch * workload.heads_q // config.packed_heads  # sets of heads that share tiles
    tiles = heads * tiles_of_head
    if not tiles:
        return Prediction(0.0, "nothing")
    blocks = min(tiles, device.sm_count * per_sm)
    beside = math.ceil(blocks / device.sm_count)  # blocks on an SM
    tensor = 2 * rows * beside * keys * (d + dv) / rate / w.tensor
    per_key = w.exponentials + (0.0 if config.lazy else w.maximum)
    serial = w.scores * 2 * rows * keys * d / rate + config.warpgroups * beside * keys * per_key + w.latency
    panels = sum(
        -(-width // PANEL) * (w.misaligned if width * problem.dtype.bytes % SECTOR_BYTES else 1.0)
        for width in (problem.head_dim, problem.head_dim_v)
    )
    copies = w.copies * keys * beside * panels
    step = (tensor**w.joining + serial**w.joining + copies**w.joining) ** (1 / w.joining)
    if config.turns:
        step *= w.turns_of_three if config.warpgroups == 3 else w.turns_of_two
    if beside > 1:
        step *= w.neighbours
    tile = w.begin + w.tile * (d + dv) * rows / 128 + (w.claim if config.dynamic else 0.0)

    steps = [_steps(problem, workload, config.queries, keys, i) for i in range(tiles_of_head)] if tiles_of_head <= 4096 else None
    longest = steps[-1] if steps else -(-workload.len_kv // keys)
    total = heads * (sum(steps) if steps else tiles_of_head * longest * (0.5 if problem.mask is Mask.CAUSAL else 1.0))
    rounds = math.ceil(tiles / blocks)
    if problem.mask is Mask.FULL:
        cycles = rounds * (longest * step + tile)
    else:
        mean = (total * step + tiles * tile) / blocks
        cycles = max(longest * step + tile, mean * (1.0 if config.dynamic else 1.0 + w.static_tail) + 0.25 * step)
    seconds = (cycles + w.launch) / (device.clock_hz * w.clock)
    memory = workload.io_bytes(problem) / (device.memory_bandwidth * DRAM_EFFICIENCY)
    bounds = {"tensor cores": tensor, "exponentials and latency": serial}
    bound_by = "memory" if memory > seconds else max(bounds, key=bounds.__getitem__)
    return Prediction(max(seconds, memory), bound_by)


def _panels(width: int, dtype: Dtype, misaligned: float) -> float:
    """Panels of a row, as many times as long as copying them takes."""
    return -(-width // PANEL) * (misaligned if width * dtype.bytes % SECTOR_BYTES else 1.0)


def _steps(problem: Problem, workload: Workload, queries: int, keys: int, tile: int) -> int:
    """Key blocks that a query tile's rows see, at least one."""
    seen = workload.len_kv
    if problem.mask is Mask.CAUSAL:
        seen = min(seen, max(0, (tile + 1) * queries + workload.len_kv - workload.len_q))
    return max(1, -(-seen // keys))
