"""What the families of the ladder share: the steps from standard attention to FlashAttention-2, each a kernel of one skeleton.

Their templates are the same line by line but for what the step's idea changes, and so are their generators: this module holds what does not
differ. Each family adds its config, its kernel's parameters and launch, and the work that its model counts.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .attention import ELEMENTS, TENSORS, padded, problem_reasons, reciprocal, scale_values
from .config import Config, range_reasons, tagged
from .devices import DRAM_EFFICIENCY, Device
from .family import Family, Prediction
from .modifier import drops, modifier_values, with_modifiers
from .operands import Call
from .operation import operation_of
from .parameters import Parameter, ParameterBlock
from .problem import Mask, Problem
from .program import BlockResources, KernelText
from .target import Target
from .workload import Workload

MAX_HEAD_DIM = 128  # a wider O leaves a warp too few registers
SHARED_BYTES_PER_CYCLE = 110  # of operands that an SM reads, of 128 at most: a guess
L2_BYTES_PER_CYCLE = 28  # that an SM reads from the L2 while all of them do: a guess
BLOCK_SECONDS = 3e-6  # of a block before its first product and after its last: a guess


class GridOrder(enum.Enum):
    """What the grid of a step is made of where that can be chosen; the first varies fastest from one block to the next."""

    TILE_BATCH_HEAD = "tile_batch_head"
    BATCH_HEAD_TILE = "batch_head_tile"


class WarpSplit(enum.Enum):
    """What the warps of a block divide where that can be chosen: the queries of a tile, or its keys."""

    QUERIES = "queries"
    KEYS = "keys"


@dataclass(frozen=True)
class LadderConfig(Config):
    """What may be chosen of every step of the ladder; see the families' own configs."""

    block_q: int = tagged("bq", 64)
    block_kv: int = tagged("bk", 64)
    warps: int = tagged("w", 4)
    stages: int = tagged("s", 2)
    blocks_per_sm: int = tagged("bps", 1)


@dataclass(frozen=True)
class Work:
    """What a launch has to do, as the model counts it.

    flops, exponentials:  of all blocks
    memory, l2:           bytes that move, beside those of the operands, and bytes that SMs read or write
    blocks, longest:      blocks of the launch, and the share of the work that the longest of them has
    """

    flops: float
    exponentials: float
    memory: float
    l2: float
    blocks: int
    longest: float


class LadderFamily(Family):
    """See the module's docstring."""

    automatic = False
    preference = -1
    config_type: ClassVar[type[Config]]
    parameters = ParameterBlock(
        (
            *(Parameter("const Element*", n) for n in ("q", "k", "v")),
            Parameter("Element*", "out"),
            Parameter("float*", "lse"),
            *(Parameter("i64", f"{tensor}_{dim}") for tensor in TENSORS for dim in ("batch", "head", "row")),
            *(Parameter("u64", f"{n}_reciprocal") for n in ("heads_q", "group", "l2_group_heads", "l2_group_tiles")),
            *(Parameter("int", n) for n in ("heads_q", "len_q", "len_kv", "query_tiles", "l2_group_heads", "l2_group_tiles")),
            *(Parameter("float", n) for n in ("scale_log2", "ln2_hi", "ln2_lo")),
        )
    )
    atoms: ClassVar[tuple[str, ...]] = (
        *("types", "register", "index", "shared_memory", "barrier", "cp_async", "ldmatrix", "mma_sync"),
        *("cvt", "ex2", "mul", "shfl_sync", "vote_sync"),
    )
    tiles: ClassVar[tuple[str, ...]] = (
        *("warp/shared_tile", "common/shared_regions", "common/tile_scheduler", "common/sequences", "common/score_chain"),
        *("warp/load", "warp/load_tile", "warp/tile_pipeline", "warp/gemm", "common/mask", "common/softmax_rows", "common/lse"),
        *("warp/row_softmax", "warp/epilogue"),
    )
    registers_beside = 60  # of a thread, beside its accumulators
    # Of flash2_forward at head dim 64 on an H200: what its products alone reach of mma.sync's rate, and the cycles of a key tile in which a
    # block waits and others of its SM compute.
    mma_efficiency: ClassVar[float] = 0.72
    tile_cycles: ClassVar[int] = 600
    unhidden: ClassVar[float] = 0.1  # part of all other times that does not pass behind the longest: a guess
    usual_keys: ClassVar[tuple[int, ...]] = (64, 32, 16)  # of a tile, the best first

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation, self.modifiers)
        for name, width in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if width > MAX_HEAD_DIM:
                reasons.append(f"{name} must be at most {MAX_HEAD_DIM} in {self.name}; got {width} (nearest: {MAX_HEAD_DIM})")
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: Any, target: Target) -> list[str]:
        """See Family."""
        reasons = self.refusals(problem, target)
        reasons += range_reasons(config, (("warps", 2, 16, 1), ("block_kv", 16, 256, 16), ("stages", 2, 4, 1), ("blocks_per_sm", 1, 8, 1)))
        reasons += self.row_reasons(config) if config.warps >= 1 else []
        return reasons or self.resource_reasons(problem, config, target)

    def row_reasons(self, config: Any) -> list[str]:
        """Why the rows and keys of a warp are illegal."""
        rows = (config.warps * 16, config.warps * 32)
        if config.block_q in rows:
            return []
        given, nearest = f"{rows[0]} or {rows[1]} with warps {config.warps}", min(rows, key=lambda n: abs(n - config.block_q))
        return [f"block_q must give each warp 16 or 32 rows, so {given}; got {config.block_q} (nearest: {nearest})"]

    def resource_reasons(self, problem: Problem, config: Any, target: Target) -> list[str]:
        """Why a block, or `blocks_per_sm` of them, do not fit."""
        reasons = []
        blocks, threads, shared = config.blocks_per_sm, config.warps * 32, self.shared_bytes(problem, config)
        of_block = shared + target.shared_memory_reserved
        per_sm, fit = blocks * of_block, target.shared_memory_per_sm // of_block
        if shared > target.shared_memory_per_block:
            has = f"{target.name} has {target.shared_memory_per_block} B a block"
            reasons.append(f"needs {shared} B of shared memory, {has}: lower block_kv, stages or block_q")
        elif per_sm > target.shared_memory_per_sm:
            has = f"{target.name} has {target.shared_memory_per_sm} B an SM"
            reasons.append(f"blocks_per_sm {blocks} needs {per_sm} B of shared memory, {has}: lower it to {fit}")
        if blocks * threads > target.threads_per_sm:
            has = f"{target.name} has {target.threads_per_sm} an SM"
            reasons.append(f"blocks_per_sm {blocks} needs {blocks * threads} threads, {has}: lower blocks_per_sm or warps")
        needed, cap = self.registers_needed(problem, config), self.registers_cap(config, target)
        if needed > cap:
            has = f"{cap} are available with {threads} threads and blocks_per_sm {blocks}"
            reasons.append(f"needs about {needed} registers a thread, {has}: lower block_kv, blocks_per_sm or the rows of a warp")
        return reasons

    def rows_and_keys(self, config: Any) -> tuple[int, int]:
        """Query rows, and keys of a tile, that a warp has."""
        return config.block_q // config.warps, config.block_kv

    def registers_needed(self, problem: Problem, config: Any) -> int:
        """An estimate of the registers of a thread, for O, for S and for the rest; the compiler has the last word."""
        rows, keys = self.rows_and_keys(config)
        accumulators: int = rows * (padded(problem.head_dim_v) + keys) // 32
        beside: int = rows // 16 * 12 + self.registers_beside
        return accumulators + beside

    def registers_cap(self, config: Any, target: Target) -> int:
        """Registers of a thread that the launch bounds leave."""
        threads = int(config.warps * 32 * config.blocks_per_sm)
        return min(target.registers_per_thread, target.registers_per_sm // threads // 8 * 8)

    def tile_bytes(self, problem: Problem, config: Any) -> tuple[int, int]:
        """Shared memory of a query tile, whose place O takes in the end, and of a tile of keys and values."""
        columns, columns_v = padded(problem.head_dim), padded(problem.head_dim_v)
        return config.block_q * max(columns, columns_v) * problem.dtype.bytes, config.block_kv * (columns + columns_v) * problem.dtype.bytes

    def shared_bytes(self, problem: Problem, config: Any) -> int:
        """Shared memory of a block: a query tile, and stages of keys and values."""
        queries, keys = self.tile_bytes(problem, config)
        return queries + int(config.stages) * keys

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        return (*self.atoms, *["set_f16"] * (drops(problem) and "set_f16" not in self.atoms)), self.tiles

    def kernels(self, problem: Problem, config: Any) -> tuple[KernelText, ...]:
        """See Family."""
        return (KernelText(with_modifiers(self.parameters, problem)),)

    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        """See Family."""
        return {"": BlockResources(config.warps * 32, self.shared_bytes(problem, config))}

    def values(self, config: Any, call: Call, head_tiles: int, l2_heads: int) -> dict[str, int | float]:
        """What the parameters of the skeleton are. `head_tiles`: blocks of a head; `l2_heads`: heads whose blocks alternate."""
        w, group_tiles = call.workload, l2_heads * head_tiles
        divisors = {"heads_q": w.heads_q, "group": w.heads_q // w.heads_kv, "l2_group_heads": l2_heads, "l2_group_tiles": group_tiles}
        values: dict[str, int | float] = {f"{name}_reciprocal": reciprocal(divisor) for name, divisor in divisors.items()}
        for name in TENSORS:
            batch, row, head, _ = call.views[name].strides
            values |= {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row}
        values |= {name: divisors[name] for name in ("heads_q", "l2_group_heads", "l2_group_tiles")}
        values |= {"len_q": w.len_q, "len_kv": w.len_kv, "query_tiles": self.query_tiles(config, w)}
        return {**values, **scale_values(call.scalars["scale"]), **modifier_values(call)}

    def query_tiles(self, config: Any, workload: Workload) -> int:
        """Of a head."""
        return -(-workload.len_q // int(config.block_q))

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        """See Family."""
        return {
            "element": ELEMENTS[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "shared_bytes": self.shared_bytes(problem, config),
        }

    def space(self, problem: Problem, target: Target) -> Iterator[Any]:
        """See Family. Tiles, and as many blocks an SM as are legal."""
        for (block_q, warps), block_kv in itertools.product(((64, 4), (128, 4), (128, 8)), (128, 64, 32)):
            yield self.most_blocks(problem, self.config_of(block_q, block_kv, warps), target)

    def config_of(self, block_q: int, block_kv: int, warps: int) -> Any:
        """The family's config with these tiles, and its usual values beside."""
        return self.config_type(block_q, block_kv, warps)  # type: ignore[call-arg] # a LadderConfig

    def default(self, problem: Problem, target: Target) -> Any:
        """See Family. The first that is legal, from larger to smaller tiles."""
        configs = [self.most_blocks(problem, self.config_of(64, block_kv, 4), target) for block_kv in self.usual_keys]
        legal = [config for config in configs if not self.check(problem, config, target)]
        if not legal:
            self.require_legal(problem, configs[-1], target)
        return legal[0]

    def most_blocks(self, problem: Problem, config: Any, target: Target) -> Any:
        """The config with the most blocks an SM that are legal, up to 4: one computes while another waits for memory."""
        choices = [dataclasses.replace(config, blocks_per_sm=blocks) for blocks in (4, 3, 2, 1)]
        return next((choice for choice in choices if not self.check(problem, choice, target)), choices[-1])

    @abstractmethod
    def work(self, problem: Problem, config: Any, workload: Workload, device: Device, computed: float) -> Work:
        """What a call asks of the GPU; `computed`: the scores of all tiles that it computes."""

    def predict(self, problem: Problem, config: Any, workload: Workload, device: Device, registers: int | None = None) -> Prediction:
        """See Family. A roofline: what takes longest of products, their operands, exponentials, the L2 and memory, or the longest block."""
        if not workload.batch * workload.heads_q * workload.len_q:
            return Prediction(0.0, "nothing")
        computed = self.computed_scores(problem, config, workload)
        work = self.work(problem, config, workload, device, computed)
        cycles, rate = device.sm_count * device.clock_hz, self.mma_efficiency * device.target.mma_flops_per_cycle * device.mma_rate
        memory = max(work.memory, operation_of(problem).io_bytes(problem, workload))
        times = {
            "memory": memory / (DRAM_EFFICIENCY * device.memory_bandwidth),
            "L2": work.l2 / (L2_BYTES_PER_CYCLE * cycles),
            "tensor cores": work.flops / (rate * cycles),
            "shared memory": self.operand_bytes(problem, config, computed, work.flops) / (SHARED_BYTES_PER_CYCLE * cycles),
            "exponentials": work.exponentials / (device.target.exp2_per_cycle * cycles),
            # A block alone on its SM issues no more than a third of what several do.
            "the longest block": work.longest * work.flops / (rate / 3 * device.clock_hz) if work.blocks < device.sm_count else 0.0,
        }
        bound_by = max(times, key=lambda name: times[name])
        others = sum(times.values()) - times[bound_by]
        waiting = computed / (config.block_q * config.block_kv) * self.tile_cycles / (config.blocks_per_sm * cycles)
        return Prediction(times[bound_by] + self.unhidden * others + waiting + BLOCK_SECONDS, bound_by)

    def operand_bytes(self, problem: Problem, config: Any, computed: float, flops: float) -> float:
        """What warps read from shared memory for their products: a key tile once for each 16 or 32 rows, a query tile once for its keys."""
        if not computed:
            return 0.0
        queries, keys = self.tile_bytes(problem, config)
        groups = int(config.block_q) // self.rows_and_keys(config)[0]  # of warps that have the same rows
        of_tile = groups * keys + int(config.warps) // groups * queries
        products = flops / (2 * computed * (padded(problem.head_dim) + padded(problem.head_dim_v)))  # of all that S and O take once
        return computed / (int(config.block_q) * int(config.block_kv)) * of_tile * products

    def computed_scores(self, problem: Problem, config: Any, workload: Workload) -> float:
        """Those of whole tiles of block_q x block_kv, under a causal mask those that some query of the tile sees."""
        w, block_q, block_kv = workload, int(config.block_q), int(config.block_kv)
        rows = self.query_tiles(config, w) * block_q
        whole = w.batch * w.heads_q * rows * math.ceil(w.len_kv / block_kv) * block_kv
        if problem.mask is Mask.FULL:
            return whole
        return min(whole, w.batch * w.heads_q * (w.visible_pairs(problem.mask) + rows * (block_q + block_kv) / 2))
