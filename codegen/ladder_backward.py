"""What the ladder's backward families share: the gradients of FlashAttention's first and second version, kernels of one skeleton.

Three kernels, of which the first and the last are those of attention_backward: what each query row needs (row_lse, row_delta) and dQ = 0,
the gradients, and dQ from its fp32 sums. A block of the second one has keys of a key/value head and walks over the queries of all query
heads that share it, so dK and dV stay in registers. Each family says which blocks there are, and how they add to dQ.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from .attention import STATISTICS_BYTES, gradient_traffic, padded
from .devices import DRAM_EFFICIENCY, Device
from .families.attention_backward.family import FAMILY as GENERIC
from .families.attention_backward.family import ROW_THREADS
from .families.attention_backward.launches import gradient_program
from .families.attention_backward.model import LAUNCH_SECONDS
from .family import Prediction, Traffic
from .ladder import LadderFamily, Work
from .modifier import with_modifiers
from .operands import Call
from .operation import operation_of
from .problem import Problem
from .program import BlockResources, KernelText, Program
from .target import Target
from .workload import Workload

KEYS_AND_WARPS = ((32, 2), (64, 4), (128, 4), (128, 8), (256, 8))  # of a tile, and warps that have them
TILE_QUERIES = (32, 64, 128)  # of a tile
BLOCKS_TRIED = (2, 1)  # of an SM: one computes while another waits for memory
DEFAULT_TILES = ((64, 128, 8), (32, 128, 8), (64, 64, 4), (32, 64, 4), (32, 32, 2))  # block_q, block_kv, warps: the best first


class LadderBackward(LadderFamily):
    """See the module's docstring."""

    operation = "backward"
    parameters = GENERIC.parameters
    row_parameters, sum_parameters = GENERIC.row_parameters, GENERIC.sum_parameters
    atoms = GENERIC.atoms
    tiles: ClassVar[tuple[str, ...]] = (*GENERIC.tiles, "warp/tile_pipeline", "warp/gradient_access")

    # Registers that a thread needs beside what it accumulates, while it has S^T and dP^T, and while it has dQ.
    mma_efficiency, tile_cycles = 0.6, 850  # guesses
    registers_beside_scores, registers_beside_dq = 60, 44

    @abstractmethod
    def blocks_of_head(self, config: Any, workload: Workload) -> int:
        """Blocks of a key/value head."""

    def alternating_heads(self, config: Any, workload: Workload) -> int:
        """How many key/value heads take turns in the grid; of one the blocks follow each other."""
        return 1

    def spare_registers(self, config: Any) -> int:
        """That a default config leaves: the assembler takes a few more on some targets."""
        return 20

    def queries_at_once(self, config: Any) -> int:
        """Queries of a tile whose S and dP a warp has at once."""
        return 16 if config.block_q < 64 else 32

    @abstractmethod
    def vectors(self, target: Target) -> bool:
        """Whether the four numbers of a lane lie side by side in the sums of dQ."""

    def row_reasons(self, config: Any) -> list[str]:
        """See LadderFamily. Here a warp has keys, and 16 rows of dQ, or a part of their columns."""
        reasons = []
        if config.warps & (config.warps - 1):
            reasons.append(f"warps must be a power of two; got {config.warps} (nearest: {1 << config.warps.bit_length() - 1})")
        keys = (config.warps * 16, config.warps * 32)
        if config.block_kv not in keys:
            given, nearest = f"{keys[0]} or {keys[1]} with warps {config.warps}", min(keys, key=lambda n: abs(n - config.block_kv))
            reasons.append(f"block_kv must give each warp 16 or 32 keys, so {given}; got {config.block_kv} (nearest: {nearest})")
        queries = [n for n in TILE_QUERIES if n <= max(32, config.warps * 16)]
        if config.block_q not in queries:
            nearest = min(queries, key=lambda n: abs(n - config.block_q))
            given = f"{' or '.join(map(str, queries))} with warps {config.warps}, 16 rows of dQ a warp"
            reasons.append(f"block_q must be {given}; got {config.block_q} (nearest: {nearest})")
        return reasons

    def rows_and_keys(self, config: Any) -> tuple[int, int]:
        """Query rows of a tile, and keys of it, that a warp has."""
        return config.block_q, config.block_kv // config.warps

    def registers_needed(self, problem: Problem, config: Any) -> int:
        """See LadderFamily: dK and dV, S^T and dP^T or dQ, and the rest."""
        d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
        _, keys = self.rows_and_keys(config)
        with_scores = 2 * keys * self.queries_at_once(config) // 32 + self.registers_beside_scores
        with_d_q = -(-d // 16 // max(1, config.warps * 16 // config.block_q)) * 8 + self.registers_beside_dq
        return keys * (d + dv) // 32 + int(max(with_scores, with_d_q))

    def shared_bytes(self, problem: Problem, config: Any) -> int:
        """Shared memory of a block: K and V, dS, and stages of Q and dO with their rows' statistics."""
        columns = padded(problem.head_dim) + padded(problem.head_dim_v)
        return int(config.block_kv * (columns + config.block_q) * problem.dtype.bytes) + self.ring_bytes(problem, config)

    def ring_bytes(self, problem: Problem, config: Any) -> int:
        """Shared memory of the stages."""
        columns = padded(problem.head_dim) + padded(problem.head_dim_v)
        return int(config.stages * config.block_q * (columns * problem.dtype.bytes + STATISTICS_BYTES))

    def sum_bytes(self, problem: Problem, config: Any) -> int:
        """Of the last kernel: dQ, rounded."""
        return int(config.block_q) * padded(problem.head_dim) * problem.dtype.bytes

    def kernels(self, problem: Problem, config: Any) -> tuple[KernelText, ...]:
        """See Family. In the order in which they are launched."""
        return (
            KernelText(with_modifiers(self.row_parameters, problem), "_preprocess", "RowParameters"),
            KernelText(with_modifiers(self.parameters, problem)),
            KernelText(self.sum_parameters, "_postprocess", "SumParameters"),
        )

    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        """See Family."""
        return {
            "_preprocess": BlockResources(ROW_THREADS, 0),
            **super().resources(problem, config),
            "_postprocess": BlockResources(config.block_q * 2, self.sum_bytes(problem, config)),
        }

    def query_tiles(self, config: Any, workload: Workload) -> int:
        """Of a head, at least one: without queries there are zeros to write."""
        return max(1, super().query_tiles(config, workload))

    def key_tiles(self, config: Any, workload: Workload) -> int:
        """Of a head, at least one."""
        return max(1, -(-workload.len_kv // int(config.block_kv)))

    def program(self, config: Any, call: Call, device: Device) -> Program:
        """See Family."""
        w, blocks = call.workload, self.blocks_of_head(config, call.workload)
        counts = {"query_tiles": self.query_tiles(config, w), "key_tiles": self.key_tiles(config, w)}
        alternating = self.alternating_heads(config, w)
        counts |= {"l2_group_heads": alternating, "l2_group_tiles": alternating * blocks}
        return gradient_program(self.kernels(call.problem, config), call, counts, blocks * w.batch * w.heads_kv, config.block_q)

    def call_refusals(self, call: Call, config: Any = None) -> list[str]:
        """See Family. Blocks are counted in an int."""
        return GENERIC.call_refusals(call)

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        """See Family."""
        own = {"row_threads": ROW_THREADS, "sum_bytes": self.sum_bytes(problem, config), "vectors": self.vectors(target)}
        return super().context(problem, config, target) | own

    def space(self, problem: Problem, target: Target) -> Iterator[Any]:
        """See Family."""
        for (block_kv, warps), block_q, blocks in itertools.product(KEYS_AND_WARPS, TILE_QUERIES, BLOCKS_TRIED):
            yield replace(self.config_of(block_q, block_kv, warps), blocks_per_sm=blocks)

    def default(self, problem: Problem, target: Target) -> Any:
        """See Family. The first one of a list that leaves registers to spare, with the most blocks an SM that do."""
        choices = itertools.product(DEFAULT_TILES, BLOCKS_TRIED)
        configs = [replace(self.config_of(*tiles), blocks_per_sm=blocks) for tiles, blocks in choices]
        legal = [config for config in configs if not self.check(problem, config, target)]
        if not legal:
            self.require_legal(problem, configs[-1], target)

        def leaves_some(config: Any) -> bool:
            return self.registers_needed(problem, config) + self.spare_registers(config) <= self.registers_cap(config, target)

        return next(filter(leaves_some, legal), legal[-1])

    def traffic(self, problem: Problem, config: Any, workload: Workload, device: Device) -> Traffic:
        """See Family and `gradient_traffic`; dQ as each version adds it up."""
        moved = gradient_traffic(problem, workload, config.block_q, config.block_kv)
        added = self.d_q_traffic(moved.reduced)
        return Traffic(moved.read + added.read, moved.written + added.written, added.reduced)

    @abstractmethod
    def d_q_traffic(self, added: int) -> Traffic:
        """What adding so many bytes to the sums of dQ moves."""

    def operand_bytes(self, problem: Problem, config: Any, computed: float, flops: float) -> float:
        """See LadderFamily. Not counted: the rate that is assumed of the five products is that of products with their operands."""
        return 0.0

    def work(self, problem: Problem, config: Any, workload: Workload, device: Device, computed: float) -> Work:
        """See LadderFamily. Of the second kernel."""
        d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
        steps = computed / config.block_kv  # of a row and a key tile
        d_q = self.d_q_traffic(int(steps * d * 4))
        l2 = steps * (d + dv) * problem.dtype.bytes + d_q.read + d_q.written + d_q.reduced
        blocks = self.blocks_of_head(config, workload) * workload.heads_kv * workload.batch
        return Work(2 * computed * (3 * d + 2 * dv), computed, 0.0, l2, blocks, 1 / blocks)

    def predict(self, problem: Problem, config: Any, workload: Workload, device: Device, registers: int | None = None) -> Prediction:
        """See Family. A roofline of the second kernel, and the time that memory takes for the other two."""
        of_main = super().predict(problem, config, workload, device, registers)
        rows, keys = workload.batch * workload.heads_q * workload.len_q, workload.batch * workload.heads_kv * workload.len_kv
        if not rows and not keys:
            return of_main
        sums = 3 * rows * padded(problem.head_dim) * 4  # zeroed, added to and read
        around = (sums + operation_of(problem).io_bytes(problem, workload)) / (DRAM_EFFICIENCY * device.memory_bandwidth)
        return Prediction(of_main.seconds + around + 3 * LAUNCH_SECONDS, of_main.bound_by if of_main.seconds > around else "memory")
