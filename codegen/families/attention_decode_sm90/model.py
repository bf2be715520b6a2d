"""How long attention_decode_sm90 takes for one config and workload, and what sets that time: nearly always the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.codegen.attention import padded
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Prediction
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from .rows import blocks_for, tiles_of

if TYPE_CHECKING:
    from .config import AttentionDecodeSm90Config


@dataclass(frozen=True)
class DecodeWeights:
    """What counts do not tell: first guesses from a trial kernel's times on an H200.

    memory:   share of the memory's bandwidth that copies reach
    in_flight: bytes of an SM's copies on their way from which on they reach it
    launch:   seconds of a launch beside its tiles
    merge:    seconds that a head of several parts takes longer
    part:     seconds of a part: its Q, its output
    step:     cycles of a key tile that do not depend on its size
    key:      cycles of a key tile for each key of it
    alone:    factor on a step where no other consumer computes meanwhile
    """

    memory: float = 0.945
    in_flight: float = 65536.0
    launch: float = 3.0e-6
    merge: float = 2.0e-6
    part: float = 0.5e-6
    step: float = 600.0
    key: float = 2.0
    alone: float = 1.3


GUESSED = DecodeWeights()


def predict(
    problem: Problem, config: AttentionDecodeSm90Config, workload: Workload, device: Device, weights: DecodeWeights = GUESSED
) -> Prediction:
    """The time of one launch, and the bound that counts most."""
    w, tiles = weights, tiles_of(workload, config.rows)
    heads = workload.batch * workload.heads_kv * tiles.count
    if not heads or not workload.len_q:
        return Prediction(0.0, "nothing")
    key_tiles = max(1, -(-workload.len_kv // config.block_kv))
    blocks = blocks_for(heads, key_tiles, device.sm_count)
    steps, d, dv = heads * key_tiles / blocks, padded(problem.head_dim), padded(problem.head_dim_v)
    tensor = 2 * config.rows * config.block_kv * (d + dv) / device.target.wgmma_flops_per_cycle
    serial = w.step + w.key * config.block_kv + tensor
    step = max(tensor, serial * (w.alone if config.key_groups == 1 else 1 / config.key_groups))
    copied = config.block_kv * (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes
    reach = min(1.0, config.stages * copied / w.in_flight) * blocks / device.sm_count
    memory = heads * key_tiles * copied / (device.memory_bandwidth * w.memory * min(1.0, 0.02 + reach))
    compute = steps * step / device.clock_hz
    parts = 1 + (blocks - 1) * heads // max(1, blocks) // max(1, heads) if heads < blocks else heads / blocks
    fixed = w.launch + w.part * parts + (w.merge if heads % blocks else 0.0)
    return Prediction(max(memory, compute) + 0.02 * min(memory, compute) + fixed, "memory" if memory >= compute else "tensor cores")
