"""How long attention_decode_sm90 takes for one config and workload, what sets that time, nearly always the memory, and what it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen.attention import padded
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Prediction, Traffic
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from .rows import blocks_for, most_parts, partial_bytes, seen_key_tiles, tiles_of

if TYPE_CHECKING:
    from .config import AttentionDecodeSm90Config


@dataclass(frozen=True)
class DecodeWeights:
    """What counts do not tell, read off times of head dims 64 to 256 on an H200.

    memory:    share of the memory's bandwidth that copies reach
    shallow:   share of it that they lose with 32 KiB on their way beside the tiles that are worked on; less with more, by the third power
    short:     share of it that they lose where rows of 128 bytes are read one at a time, at a distance
    deep:      share that they lose for each 64 KiB on their way beyond 128
    copy:      seconds of an SM's copies of a key tile that do not depend on its size
    launch:    seconds of a launch beside its tiles
    part:      seconds of each further part of a block
    idle:      share of the memory's bandwidth that is lost for each share of the SMs that is idle
    reach:     how many times its share of that bandwidth an SM can have
    merge:     seconds that a head of several parts takes longer
    batch:     seconds of each 16 further parts of a row, or of 128 columns of it, that a warp adds up
    step:      cycles of a key tile that do not depend on its size
    key:       cycles of a key tile for each key of it, products aside
    in_phase:  factor on a step of two sharers, which begin it together and so want the tensor cores at the same time; P V of the tile
               before then runs beside the softmax
    alone:     factor on a launch where no other consumer computes meanwhile
    """

    memory: float = 0.95
    shallow: float = 0.09
    short: float = 0.014
    copy: float = 4.0e-9
    deep: float = 0.014
    launch: float = 2.2e-6
    part: float = 0.3e-6
    idle: float = 0.12
    reach: float = 1.3
    merge: float = 3.3e-6
    batch: float = 1.6e-6
    step: float = 480.0
    key: float = 6.2
    in_phase: float = 1.2
    alone: float = 1.012


READ_OFF = DecodeWeights()
SHORT_ROW = 128  # bytes


def predict(
    problem: Problem, config: AttentionDecodeSm90Config, workload: Workload, device: Device, weights: DecodeWeights = READ_OFF
) -> Prediction:
    """The time of one launch, and the bound that counts most. Row tiles read all keys from memory, though some are found in the L2."""
    w, tiles = weights, tiles_of(workload, config.rows)
    of_sequence = -(-workload.heads_kv // config.heads) * tiles.count
    heads = workload.batch * of_sequence
    if not heads or not workload.len_q:
        return Prediction(0.0, "nothing")
    key_tiles = seen_key_tiles(problem, workload, tiles.queries, config.block_kv)
    parts = most_parts(problem, key_tiles * config.block_kv, tiles.rows)
    blocks = blocks_for(of_sequence, workload.batch, key_tiles, device.sm_count, parts)
    steps = -(-heads * key_tiles // blocks)  # of the block that has most

    copied = config.heads * config.block_kv * (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes
    ahead = (config.stages - config.sharers) * copied
    slowed = min(0.9, w.shallow * (32768 / ahead) ** 3 + w.deep * max(0.0, config.stages * copied / 65536 - 2)) if ahead else 0.9
    if config.heads * problem.head_dim * problem.dtype.bytes <= SHORT_ROW:
        slowed = min(0.9, slowed + w.short)
    running = blocks / device.sm_count
    share = (1 - slowed) * min(1 - w.idle * (1 - running), w.reach * running)
    memory = heads * key_tiles * copied / (device.memory_bandwidth * w.memory * share) + w.copy * steps

    columns = padded(problem.head_dim) + padded(problem.head_dim_v)
    tensor = 2 * config.heads * config.rows * config.block_kv * columns / device.target.wgmma_flops_per_cycle
    serial = w.step + w.key * config.block_kv + tensor / config.sharers
    together = w.in_phase if config.sharers > 1 else 1.0
    compute = steps * max(tensor, together * serial / config.key_groups) / device.clock_hz

    fixed = w.launch + w.part * -(-heads // blocks)
    if heads % blocks:
        parts, pieces = max(2, -(-blocks // heads)), min(tiles.rows, 64) * -(-problem.head_dim_v // 128)
        fixed += w.merge + w.batch * (-(-parts // 16) * -(-pieces // (4 * config.key_groups)) - 1)
    factor = w.alone if config.consumers == 1 else 1.0
    return Prediction(factor * max(memory, compute) + fixed, "memory" if memory >= compute else "tensor cores")


def decode_traffic(problem: Problem, config: AttentionDecodeSm90Config, workload: Workload, device: Device) -> Traffic:
    """Each part of a head reads its queries; those that are not whole heads are written, and read again by the last one.

    Left out: counters.
    """
    w, tiles, element = workload, tiles_of(workload, config.rows), problem.dtype.bytes
    of_sequence = -(-w.heads_kv // config.heads) * tiles.count
    heads, key_tiles = w.batch * of_sequence, seen_key_tiles(problem, w, tiles.queries, config.block_kv)
    if not heads or not w.len_kv:
        return Traffic(0, 0)
    most = most_parts(problem, key_tiles * config.block_kv, tiles.rows)
    blocks = blocks_for(of_sequence, w.batch, key_tiles, device.sm_count, most)
    borders = {block * heads * key_tiles // blocks for block in range(blocks)} - set(range(0, heads * key_tiles, key_tiles))
    parts, shared = heads + len(borders), len({border // key_tiles for border in borders})
    partial = (len(borders) + shared) * partial_bytes(problem, config.heads * tiles.rows) if borders else 0
    keys = w.batch * w.heads_kv * tiles.count * min(w.len_kv, key_tiles * config.block_kv) * (problem.head_dim + problem.head_dim_v)
    queries = parts * config.heads * tiles.rows * problem.head_dim
    return Traffic((keys + queries) * element + partial, w.batch * w.heads_q * w.len_q * problem.head_dim_v * element + partial)
