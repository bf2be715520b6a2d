"""How long attention_forward_sm90 takes for one config and workload, and what sets that time.

The unit of work is a step: `block_kv` keys against the query tiles of the blocks on an SM. The tensor cores are one bound; the other is
what a warpgroup does one after the other in a step, products of its own aside: the exponentials of all consumers share the pipe, and a
step has latencies that do not depend on its size. A tile costs beside its steps what moves its queries and its output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from flashgen.codegen.attention import local_steps
from flashgen.codegen.devices import DRAM_EFFICIENCY, Device
from flashgen.codegen.family import Prediction
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload

if TYPE_CHECKING:
    from .config import AttentionForwardSm90Config

PANEL = 64  # columns that are copied together
SECTOR_BYTES = 32  # of the L2
# Cycles of each copy of a box of keys, where keys are in pages, and the exponent of the norm that joins them and the rest: read off
# pages of 16 keys, head dims 64 and 128.
BOX_CYCLES, BOX_JOINING = 85, 8
MEMORY_JOINING = (
    8  # exponent of the norm that joins memory and the rest: of two that memory bounds, the one with less of the rest is faster
)


@dataclass(frozen=True)
class HopperWeights:
    """What counts do not tell, fitted by `tools/model.py fit` to times of head dims 24 to 128 and lengths 128 to 16384 on an H200.

    clock:           share of the device's clock that it keeps under this load
    tensor:          share of the tensor cores' rate that products reach at most, at that clock
    qk:              cycles of a step for each cycle of its product Q K^T
    exponentials:    cycles of a step for each key of each consumer, with a stale row max
    maximum:         the same, in addition, where the row max is exact
    latency:         cycles of a step that do not depend on its size
    copies:          cycles of a step for each row of 64 columns of K and V that it copies
    unaligned:       factor on these where rows do not begin at multiples of 32 bytes, the sectors of the L2
    joining:         exponent of the norm that joins tensor cores and the rest
    tile:            cycles of a tile for each column of queries and output, for 128 rows
    begin:           cycles of a tile that do not depend on its size
    first_step:      share of a step by which a tile takes longer: nothing overlaps with its first scores, nor with its last product
    claim:           cycles of a tile that is claimed, in addition
    turns_of_two:    factor on a step where two consumers take turns
    turns_of_three:  the same of three, who wait for each other longer than it helps
    neighbours:      the same where two blocks share an SM: each loads keys for itself
    launch:          cycles of a launch beside its tiles
    static_tail:     share of a causal launch for which blocks that take no more than their share wait for others
    """

    clock: float = 0.95
    tensor: float = 1.041
    qk: float = 0.1323
    exponentials: float = 1.727
    maximum: float = 1.213
    latency: float = 665.9
    copies: float = 1.998
    unaligned: float = 1.945
    joining: float = 1.783
    tile: float = 2.623
    begin: float = 767.3
    first_step: float = 0.4391
    claim: float = 1109.0
    turns_of_two: float = 0.9711
    turns_of_three: float = 1.116
    neighbours: float = 0.95
    launch: float = 6721.0
    static_tail: float = 0.0996


FITTED = HopperWeights()


def predict(
    problem: Problem,
    config: AttentionForwardSm90Config,
    workload: Workload,
    device: Device,
    per_sm: int,
    weights: HopperWeights = FITTED,
    boxes: int = 0,
) -> Prediction:
    """The time of one launch, and the bound that counts most.

    per_sm: how many blocks may share an SM; boxes: of a key tile, where keys are in pages
    """
    w = weights
    rows, keys, rate = config.block_q, config.block_kv, device.target.wgmma_flops_per_cycle
    d, dv = (-(-width // 16) * 16 for width in (problem.head_dim, problem.head_dim_v))
    tiles_of_head = -(-workload.len_q // config.queries)
    heads = workload.batch * workload.heads_q // config.pack_gqa  # sets of heads that share tiles
    tiles = heads * tiles_of_head
    if not tiles:
        return Prediction(0.0, "nothing")
    blocks = min(tiles, device.sm_count * per_sm)
    beside = math.ceil(blocks / device.sm_count)  # blocks on an SM
    tensor = 2 * rows * beside * keys * (d + dv) / rate / w.tensor
    per_key = w.exponentials + (0.0 if config.stale_row_max else w.maximum)
    serial = w.qk * 2 * rows * keys * d / rate + config.warpgroups * beside * keys * per_key + w.latency
    panels = sum(_panels(width, problem.dtype, w.unaligned) for width in (problem.head_dim, problem.head_dim_v))
    copies = w.copies * keys * beside * panels
    step = (tensor**w.joining + serial**w.joining + copies**w.joining) ** (1 / w.joining)
    if boxes:
        copied = BOX_CYCLES * beside * boxes * (-(-d // PANEL) + -(-dv // PANEL))
        step = (step**BOX_JOINING + copied**BOX_JOINING) ** (1 / BOX_JOINING)
    if config.ping_pong:
        step *= w.turns_of_three if config.warpgroups == 3 else w.turns_of_two
    if beside > 1:
        step *= w.neighbours
    tile = w.begin + w.tile * (d + dv) * rows / 128 + w.first_step * step + (w.claim if config.dynamic else 0.0)

    if workload.is_local:
        steps_of_head, longest = local_steps(problem, workload, config.queries, keys)
    else:
        steps_of_head, longest = _steps(problem.mask, workload.len_q, workload.len_kv, config.queries, keys)
    total = heads * steps_of_head
    rounds = math.ceil(tiles / blocks)
    if problem.mask is Mask.FULL and not workload.is_local:
        cycles = rounds * (longest * step + tile)
    else:
        mean = (total * step + tiles * tile) / blocks
        cycles = max(longest * step + tile, mean * (1.0 if config.dynamic else 1.0 + w.static_tail) + 0.25 * step)
    seconds = (cycles + w.launch) / (device.clock_hz * w.clock)
    memory = operation_of(problem).io_bytes(problem, workload) / (device.memory_bandwidth * DRAM_EFFICIENCY)
    bounds = {"tensor cores": tensor, "exponentials and latency": serial}
    bound_by = "memory" if memory > seconds else max(bounds, key=bounds.__getitem__)
    return Prediction((seconds**MEMORY_JOINING + memory**MEMORY_JOINING) ** (1 / MEMORY_JOINING), bound_by)


def _panels(width: int, dtype: Dtype, unaligned: float) -> float:
    """Panels of a row, as many times as long as copying them takes."""
    return -(-width // PANEL) * (unaligned if width * dtype.bytes % SECTOR_BYTES else 1.0)


@lru_cache(maxsize=2**12)
def _steps(mask: Mask, len_q: int, len_kv: int, queries: int, keys: int) -> tuple[float, int]:
    """Steps of all query tiles of a head, and of its last: key blocks that its rows see, at least one. Beyond 4096 tiles an estimate."""
    tiles, most = -(-len_q // queries), -(-len_kv // keys)
    if mask is not Mask.CAUSAL:
        return tiles * max(1, most), max(1, most)
    if tiles > 4096:
        return tiles * most * 0.5, most
    steps = [max(1, -(-min(len_kv, max(0, (i + 1) * queries + len_kv - len_q)) // keys)) for i in range(tiles)]
    return sum(steps), steps[-1]
