"""Attention forward for every architecture from sm_80 on: FlashAttention-2 on mma.sync, ldmatrix and cp.async."""

from __future__ import annotations

import enum
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashgen.codegen.config import Config
from flashgen.codegen.device import Device
from flashgen.codegen.family import Family, Prediction, Strides
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Dtype, Mask, Pass, Problem, Workload
from flashgen.codegen.target import Target


class QueryPlace(enum.Enum):
    """Where a block keeps its query tile while it walks over the keys."""

    SHARED = "shared"
    REGISTERS = "registers"


@dataclass(frozen=True)
class AttentionForwardConfig(Config):
    """What may be chosen freely.

    block_q:        query rows of a block (Br in the paper); a multiple of 16 * warps, 16 or 32 rows a warp
    block_kv:       key rows of a tile (Bc in the paper), a multiple of 16
    warps:          warps of a block; each owns block_q / warps rows
    stages:         tiles of K, and of V, that shared memory holds: stages - 1 tiles are loaded ahead
    query:          query tile in shared memory, or in registers; then K and V take its place
    blocks_per_sm:  blocks that must fit on one SM at once: caps the registers
    """

    block_q: int
    block_kv: int
    warps: int
    stages: int
    query: QueryPlace
    blocks_per_sm: int = 1

    def describe(self) -> str:
        """For the header of the rendered file."""
        return ", ".join(f"{name} {value}" for name, value in self.to_json().items())


def _padded(columns: int) -> int:
    """Columns as the matrix product takes them: a multiple of 16."""
    return -(-columns // 16) * 16


class AttentionForward(Family):
    """See the module's docstring; the algorithm is templates/kernels/attention_forward.cu.j2."""

    name = "attention_forward"
    revision = 2
    template = "kernels/attention_forward.cu.j2"
    config_type = AttentionForwardConfig
    parameters = ParameterBlock(
        (
            *(Parameter("const Element*", n) for n in ("q", "k", "v")),
            Parameter("Element*", "out"),
            Parameter("float*", "lse"),
            *(Parameter("i64", f"{tensor}_{dim}") for tensor in ("q", "k", "v", "out") for dim in ("batch", "head", "row")),
            *(Parameter("int", n) for n in ("heads_q", "group", "len_q", "len_kv")),
            *(Parameter("float", n) for n in ("scale", "scale_low", "scale_log2")),
        )
    )
    atoms = (
        *("types", "index", "shared_memory", "barrier", "cp_async", "ldmatrix", "mma_sync"),
        *("cvt", "ex2", "log", "mul", "shfl_sync"),
    )
    tiles = ("shared_tile", "schedule", "rows", "load", "gemm", "mask", "softmax", "epilogue")

    # Registers a thread needs beside its accumulators and query fragments: addresses and operands on their way, and for each
    # row tile the softmax state and an operand. Fitted to what compiles without spills.
    registers_beside, registers_beside_row_tile = 32, 40

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = []
        if problem.direction is not Pass.FORWARD:
            reasons.append(f"pass must be forward; got {problem.direction.value}")
        for name, width in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if width % 8 or not 8 <= width <= 256:
                nearest = min(max(8, -(-width // 8) * 8), 256)
                reasons.append(f"{name} must be a multiple of 8 from 8 to 256; got {width} (nearest: {nearest})")
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: AttentionForwardConfig, target: Target) -> list[str]:
        """See Family."""
        reasons = self.refusals(problem, target)
        for name, low, high, step in (("warps", 1, 16, 1), ("block_kv", 16, 256, 16), ("stages", 1, 4, 1), ("blocks_per_sm", 1, 8, 1)):
            value = getattr(config, name)
            if not low <= value <= high or value % step:
                reasons.append(f"{name} must be {'' if step == 1 else f'a multiple of {step} '}from {low} to {high}; got {value}")
        rows = (config.warps * 16, config.warps * 32)
        if config.warps >= 1 and config.block_q not in rows:
            given = f"{rows[0]} or {rows[1]} with warps {config.warps}"
            reasons.append(f"block_q must give each warp 16 or 32 rows, so {given}; got {config.block_q}")
        return reasons or self._resource_reasons(problem, config, target)

    def _resource_reasons(self, problem: Problem, config: AttentionForwardConfig, target: Target) -> list[str]:
        reasons = []
        blocks, threads = config.blocks_per_sm, self.threads(config)
        shared, available = self.shared_bytes(problem, config), target.shared_memory_per_block
        if shared > available:
            cure = "lower block_kv, stages or block_q"
            reasons.append(f"needs {shared} B of shared memory, {target.name} has {available} B a block: {cure}")
        per_sm = blocks * (shared + target.shared_memory_reserved)
        if shared <= available and per_sm > target.shared_memory_per_sm:
            has = f"{target.name} has {target.shared_memory_per_sm} B an SM"
            reasons.append(f"blocks_per_sm {blocks} needs {per_sm} B of shared memory, {has}: lower blocks_per_sm, block_kv or stages")
        if blocks * threads > target.threads_per_sm:
            has = f"{target.name} has {target.threads_per_sm} an SM"
            reasons.append(f"blocks_per_sm {blocks} needs {blocks * threads} threads, {has}: lower blocks_per_sm or warps")
        needed, cap = self.registers_needed(problem, config), self.registers_cap(config, target)
        if needed > cap:
            has = f"{cap} are available with {threads} threads and blocks_per_sm {blocks}"
            reasons.append(f"needs about {needed} registers a thread, {has}: lower block_kv, blocks_per_sm or the rows of a warp")
        return reasons

    def registers_needed(self, problem: Problem, config: AttentionForwardConfig) -> int:
        """An estimate of the registers of a thread; the compiler has the last word."""
        row_tiles = config.block_q // config.warps // 16
        accumulators = row_tiles * (config.block_kv + _padded(problem.head_dim_v)) // 2
        query = row_tiles * _padded(problem.head_dim) // 4 if config.query is QueryPlace.REGISTERS else 0
        return accumulators + query + self.registers_beside + row_tiles * self.registers_beside_row_tile

    def registers_cap(self, config: AttentionForwardConfig, target: Target) -> int:
        """Registers of a thread that the launch bounds leave."""
        return min(target.registers_per_thread, target.registers_per_sm // (self.threads(config) * config.blocks_per_sm) // 8 * 8)

    def threads(self, config: AttentionForwardConfig) -> int:
        """See Family."""
        return config.warps * 32

    def shared_bytes(self, problem: Problem, config: AttentionForwardConfig) -> int:
        """See Family. Q, the K ring and the V ring; with Q in registers they share one place. The output passes through it all."""
        columns, columns_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
        query = config.block_q * columns
        rings = config.stages * config.block_kv * (columns + columns_v)
        loop = max(query, rings) if config.query is QueryPlace.REGISTERS else query + rings
        return max(loop, config.block_q * columns_v) * problem.dtype.bytes

    def grid(self, config: AttentionForwardConfig, workload: Workload) -> int:
        """See Family."""
        return -(-workload.len_q // config.block_q) * workload.heads_q * workload.batch

    def values(self, workload: Workload, strides: Sequence[Strides], scale: float) -> tuple[int | float, ...]:
        """See Family. The scale goes in two parts, so that the log-sum-exp does not inherit the rounding of the first."""
        high = struct.unpack("f", struct.pack("f", scale))[0]
        sizes = (workload.heads_q, workload.heads_q // workload.heads_kv, workload.len_q, workload.len_kv)
        return (*itertools.chain(*strides), *sizes, high, scale - high, scale * math.log2(math.e))

    def context(self, problem: Problem, config: AttentionForwardConfig, target: Target) -> dict[str, object]:
        """See Family."""
        return {
            "atoms": [f"atoms/ptx/{name}.cuh" for name in self.atoms],
            "tiles": [f"tile/{name}.cuh" for name in self.tiles],
            "element": {Dtype.BF16: "Bf16", Dtype.FP16: "Fp16"}[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "query_in_registers": config.query is QueryPlace.REGISTERS,
            "shared_bytes": self.shared_bytes(problem, config),
        }

    def space(self, problem: Problem, target: Target) -> Iterator[AttentionForwardConfig]:
        """See Family."""
        shapes = ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8))
        for (block_q, warps), block_kv, stages, query, blocks in itertools.product(
            shapes, (32, 48, 64, 80, 96, 128), (1, 2, 3), QueryPlace, (1, 2, 3)
        ):
            yield AttentionForwardConfig(block_q, block_kv, warps, stages, query, blocks)

    def default(self, problem: Problem, target: Target) -> AttentionForwardConfig:
        """See Family. The first legal one of a short list, from wide tiles to narrow ones."""
        width = max(problem.head_dim, problem.head_dim_v)
        shapes = [(128, 64, 4, QueryPlace.SHARED)] if width <= 64 else []
        shapes += [(128, 96, 8, QueryPlace.REGISTERS), (128, 64, 8, QueryPlace.SHARED)] if width <= 128 else []
        shapes += [(128, 32, 8, QueryPlace.SHARED), (64, 32, 4, QueryPlace.SHARED), (64, 16, 4, QueryPlace.SHARED)]
        for block_q, block_kv, warps, query in shapes:
            config = AttentionForwardConfig(block_q, block_kv, warps, 1, query)
            if not self.check(problem, config, target):
                return config
        self.require_legal(problem, config, target)
        raise AssertionError("unreachable: require_legal raises")

    def predict(
        self, problem: Problem, config: AttentionForwardConfig, workload: Workload, device: Device, registers: int | None = None
    ) -> Prediction:
        """See Family. Cycles of one tile step, times steps, times waves; memory traffic as a floor.

        The constants are fitted to measurements of head dims 64 and 128 on an H200.
        """
        target, tiles = device.target, self.grid(config, workload)
        if not tiles:
            return Prediction(0.0, "nothing")
        units = self._unit_cycles(problem, config, device)
        registers = registers or min(self.registers_cap(config, target), round(1.12 * self.registers_needed(problem, config)))
        resident = max(1, target.blocks_resident(self.threads(config), registers, self.shared_bytes(problem, config)))
        # Blocks on one SM share its units; each alone is also bound by the latency of its chain of steps, which others hide.
        row_tiles = config.block_q // config.warps // 16
        columns = _padded(problem.head_dim) + _padded(problem.head_dim_v)
        latency = 543 + row_tiles * config.block_kv * (0.046 * columns + 0.75)
        waiting = latency / resident + 21.6 * config.warps
        step = math.hypot(sum(units.values()), waiting)
        # Mean over the query tiles of the key tiles that are walked over; then whole waves, softened by blocks that end early.
        per_query = workload.visible_pairs(problem.mask) / max(1, workload.len_q)
        diagonal = (config.block_q + config.block_kv) / 2 if problem.mask is Mask.CAUSAL else 0
        steps = max(1.0, min(workload.len_kv, per_query + diagonal) / config.block_kv)
        share = max(1.0, tiles / device.sm_count)
        rounds = share if problem.mask is Mask.CAUSAL else (share + math.ceil(tiles / device.sm_count / resident) * resident) / 2
        seconds = rounds * (steps * step + 3450 / resident) / device.clock_hz
        traffic = workload.heads_q * workload.len_q + workload.heads_kv * workload.len_kv
        memory = problem.dtype.bytes * (problem.head_dim + problem.head_dim_v) * workload.batch * traffic / (0.85 * device.memory_bandwidth)
        if memory > seconds:
            return Prediction(memory, "memory")
        return Prediction(seconds, "latency" if waiting > sum(units.values()) else max(units, key=lambda unit: units[unit]))

    def _unit_cycles(self, problem: Problem, config: AttentionForwardConfig, device: Device) -> dict[str, float]:
        """Cycles for which a step of one block holds up each unit of an SM. The weights say how much of it nothing else hides."""
        head_dim, head_dim_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
        scores = config.block_q * config.block_kv
        query_reads = 2.39 * config.block_q * head_dim if config.query is QueryPlace.SHARED else 0.0
        return {
            "tensor cores": 2 * scores * (head_dim + head_dim_v) / (device.target.mma_flops_per_cycle * device.mma_rate),
            "exponentials": 0.557 * scores / device.target.exp2_per_cycle,
            "shared memory": 0.278 * 2 / 128 * (config.warps * config.block_kv * (head_dim + head_dim_v) + query_reads),
        }


FAMILY = AttentionForward()
