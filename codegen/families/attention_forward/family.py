"""The generic family for attention forward, sm_80 and later: FlashAttention-2 on mma.sync, ldmatrix and cp.async."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache

from flashgen.codegen import packed
from flashgen.codegen.attention import ELEMENTS, TENSORS, l2_group_heads, padded, problem_reasons, reciprocal, scale_values, tiled_traffic
from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device, device_of_target
from flashgen.codegen.family import Family, Prediction, Traffic
from flashgen.codegen.modifier import modifier_refusals, modifier_values, reads_scores, score_unit, with_modifiers
from flashgen.codegen.modifiers import TAKEN_BY_MOST
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.program import BlockResources, KernelLaunch, KernelText, Program
from flashgen.codegen.seen_tiles import (
    NO_TILES,
    TileShape,
    block_reasons,
    scatters,
    tile_context,
    tile_kernels,
    tile_launch,
    tile_resources,
    with_seen_tiles,
)
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload, equal_lengths

from . import model
from .config import AttentionForwardConfig, FirstProduct, QueryPlace

L2_GROUP_SHARE = 2  # one part in so many: blocks of neighbouring L2 groups run together
SHORTEST_TILE = 32  # queries
SPARE_REGISTERS = 36  # of a thread, beside those needed: with so many hardly anything spills


class AttentionForward(Family):
    """See the module's docstring; the algorithm is templates/kernels/attention_forward.cu.j2."""

    name = "attention_forward"
    revision = 18
    modifiers = TAKEN_BY_MOST
    template = "kernels/attention_forward.cu.j2"
    config_type = AttentionForwardConfig
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
    atoms = (
        *("types", "register", "index", "shared_memory", "barrier", "cp_async", "ldmatrix", "mma_sync"),
        *("cvt", "set_f16", "cvt_f32", "ex2", "rcp", "mul", "shfl_sync", "vote_sync"),
    )
    tiles = (
        *("warp/shared_tile", "common/shared_regions", "common/tile_scheduler", "common/sequences", "common/score_chain"),
        *("warp/load", "warp/load_tile", "warp/key_value_reader", "warp/seen_key_value_reader", "warp/gemm", "common/mask"),
        *("common/softmax_rows", "common/lse", "common/settled_row", "warp/softmax", "warp/epilogue"),
    )

    # Registers a thread needs beside its accumulators and query fragments: addresses, operands on their way, the softmax state.
    # Less than what never spills: the fastest configs lie at the edge, and one in twelve of those admitted spills on sm_90a.
    registers_beside = 46
    registers_of_modifiers = 16  # more, where a problem has some: its first keys have a loop of their own
    registers_of_tensors = 16  # still more, where each score has an element in memory, beside those of a step

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation, self.modifiers, packed=True) + packed.packed_reasons(problem)
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: AttentionForwardConfig, target: Target) -> list[str]:
        """See Family."""
        reasons = self.refusals(problem, target)
        for name, low, high, step in (("warps", 2, 16, 1), ("step_kv", 16, 256, 16), ("stages", 2, 4, 1), ("blocks_per_sm", 1, 8, 1)):
            value = getattr(config, name)
            if not low <= value <= high or value % step:
                reasons.append(f"{name} must be {'' if step == 1 else f'a multiple of {step} '}from {low} to {high}; got {value}")
        if config.step_kv >= 1 and (config.block_kv % config.step_kv or not config.step_kv <= config.block_kv <= 256):
            reasons.append(f"block_kv must be a multiple of step_kv {config.step_kv}, up to 256; got {config.block_kv}")
        if scatters(problem) and config.block_kv != config.step_kv:
            reasons.append(f"block_kv must be step_kv {config.step_kv} with document_ids or a mask_mod; got {config.block_kv}")
        rows = (config.warps * 16, config.warps * 32)
        if config.warps >= 1 and config.block_q not in rows:
            given = f"{rows[0]} or {rows[1]} with warps {config.warps}"
            reasons.append(f"block_q must give each warp 16 or 32 rows, so {given}; got {config.block_q}")
        return reasons or block_reasons(problem, config) or self._resource_reasons(problem, config, target)

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
        # Scores count twice: while those of one step are used up, those of the next one come.
        accumulators = row_tiles * (padded(problem.head_dim_v) // 2 + config.step_kv)
        query = row_tiles * padded(problem.head_dim) // 4 if config.query is QueryPlace.REGISTERS else 0
        of_modifiers = self.registers_of_modifiers * bool(problem.modifiers) + (
            row_tiles * config.step_kv + self.registers_of_tensors
        ) * reads_scores(problem)
        return accumulators + query + self.registers_beside + of_modifiers

    def registers_cap(self, config: AttentionForwardConfig, target: Target) -> int:
        """Registers of a thread that the launch bounds leave."""
        return min(target.registers_per_thread, target.registers_per_sm // (self.threads(config) * config.blocks_per_sm) // 8 * 8)

    def kernels(self, problem: Problem, config: AttentionForwardConfig) -> tuple[KernelText, ...]:
        """See Family."""
        block = packed.packed_block(with_seen_tiles(self.parameters, problem), problem)
        return (*packed.packed_kernels(problem), *tile_kernels(problem), KernelText(with_modifiers(block, problem)))

    def call_refusals(self, call: Call, config: Config | None = None) -> list[str]:
        """See Family."""
        reasons = packed.packed_call_reasons(call, SHORTEST_TILE) if call.problem.is_packed else []
        return reasons + modifier_refusals(call) + super().call_refusals(call, config)

    def resources(self, problem: Problem, config: AttentionForwardConfig) -> Mapping[str, BlockResources]:
        """See Family."""
        return {
            **tile_resources(problem),
            **packed.packed_resources(problem),
            "": BlockResources(self.threads(config), self.shared_bytes(problem, config)),
        }

    def threads(self, config: AttentionForwardConfig) -> int:
        """Threads of a block."""
        return config.warps * 32

    def shared_bytes(self, problem: Problem, config: AttentionForwardConfig) -> int:
        """Dynamic shared memory of a block, in bytes: Q, whose place the output takes in the end, and the ring of K and V."""
        columns, columns_v = padded(problem.head_dim), padded(problem.head_dim_v)
        rings = config.stages * config.block_kv * (columns + columns_v)
        sums = config.block_q // config.warps // 16 * self.threads(config) * 16
        return (config.block_q * max(columns, columns_v) + rings) * problem.dtype.bytes + sums

    def grid(self, config: AttentionForwardConfig, workload: Workload) -> int:
        """Number of blocks: a query tile each."""
        return -(-workload.len_q // config.block_q) * workload.heads_q * workload.batch

    def program(self, config: AttentionForwardConfig, call: Call, device: Device) -> Program:
        """See Family."""
        problem, workload = call.problem, call.workload
        if problem.is_packed:
            return self._packed_program(config, call, device)
        query_tiles = -(-workload.len_q // config.block_q)
        l2_heads = l2_group_heads(problem, workload, device.l2_bytes // L2_GROUP_SHARE)
        divisors = {
            "heads_q": workload.heads_q,
            "group": workload.heads_q // workload.heads_kv,
            "l2_group_heads": l2_heads,
            "l2_group_tiles": l2_heads * query_tiles,
        }
        values: dict[str, int | float] = {f"{name}_reciprocal": reciprocal(divisor) for name, divisor in divisors.items()}
        for name in TENSORS:
            batch, row, head, _ = call.views[name].strides
            values |= {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row}
        values |= {name: divisors[name] for name in ("heads_q", "l2_group_heads", "l2_group_tiles")}
        values |= {"len_q": workload.len_q, "len_kv": workload.len_kv, "query_tiles": query_tiles, **scale_values(score_unit(call))}
        values |= modifier_values(call)
        tiles = tile_launch(call, TileShape(config.block_q, config.block_kv)) if problem.modifiers else NO_TILES
        return Program((*tiles.launches, KernelLaunch(self.grid(config, workload), values | tiles.values)), tiles.buffers)

    def _packed_program(self, config: AttentionForwardConfig, call: Call, device: Device) -> Program:
        """Of packed sequences: as many blocks as there may be tiles for. Those that get none end at once."""
        w, l2_heads = call.workload, packed.packed_group_heads(call.problem, call.workload, device.l2_bytes // L2_GROUP_SHARE)
        values = {
            "heads_q": w.heads_q,
            "tokens_q": w.tokens_q,
            "heads_q_reciprocal": reciprocal(w.heads_q),
            **packed.group_values(l2_heads),
        }
        values |= {"group_reciprocal": reciprocal(w.heads_q // w.heads_kv), **scale_values(score_unit(call)), **modifier_values(call)}
        for name in TENSORS:
            row, head, _ = call.views[name].strides
            values |= {f"{name}_batch": 0, f"{name}_head": head, f"{name}_row": row}
        first, buffers = packed.packed_launch(call, config.block_q, l2_heads, device, overlap=False)
        grid = max(1, packed.most_tiles(w, config.block_q) * w.heads_q)
        tiles = tile_launch(call, TileShape(config.block_q, config.block_kv)) if call.problem.modifiers else NO_TILES
        return Program((first, *tiles.launches, KernelLaunch(grid, values | tiles.values)), (*buffers, *tiles.buffers))

    def context(self, problem: Problem, config: AttentionForwardConfig, target: Target) -> dict[str, object]:
        """See Family."""
        return {
            "element": ELEMENTS[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "output_over_queries": padded(problem.head_dim_v) <= padded(problem.head_dim),
            "qk_first": config.first_product is FirstProduct.QK,
            "query_in_registers": config.query is QueryPlace.REGISTERS,
            "shared_bytes": self.shared_bytes(problem, config),
            **tile_context(problem, TileShape(config.block_q, config.block_kv)),
            **packed.packed_context(problem, config.block_q, overlap=False),
        }

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        return packed.with_packed_files(self.atoms, self.tiles) if problem.is_packed else (self.atoms, self.tiles)

    def space(self, problem: Problem, target: Target) -> Iterator[AttentionForwardConfig]:
        """See Family."""
        rows = ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8), (256, 8))
        keys = [(16, 16), (32, 16), (32, 32), (48, 48), (64, 16), (64, 32), (64, 64), (80, 80)]
        keys += [(96, 32), (96, 48), (96, 96), (128, 32), (128, 64)]
        # On an H200 a third stage is worth nothing in the median, and costs where it takes a resident block away.
        stages = 2
        for (block_q, warps), (block_kv, step_kv), query, first_product in itertools.product(rows, keys, QueryPlace, FirstProduct):
            caps: set[int] = set()
            for blocks in (1, 2, 3, 4):
                config = AttentionForwardConfig(block_q, block_kv, step_kv, warps, stages, query, first_product, blocks)
                cap = self.registers_cap(config, target)
                if cap not in caps:  # else the machine code would be the same
                    yield config
                caps.add(cap)

    def default(self, problem: Problem, target: Target) -> AttentionForwardConfig:
        """See Family. The model's pick for a long sequence among those that leave the compiler registers to spare."""
        return _default(problem, target)

    def predict(
        self,
        problem: Problem,
        config: AttentionForwardConfig,
        workload: Workload,
        device: Device,
        registers: int | None = None,
        weights: model.GenericWeights = model.FITTED,
    ) -> Prediction:
        """See Family, and model.py."""
        target = device.target
        registers = registers or min(self.registers_cap(config, target), self.registers_needed(problem, config) + self._slack(config))
        resident = max(1, target.blocks_resident(self.threads(config), registers, self.shared_bytes(problem, config)))
        workload = equal_lengths(workload)
        blocks = self.grid(config, workload)
        in_shared, output_first = config.query is QueryPlace.SHARED, config.first_product is FirstProduct.PV
        return model.predict(problem, config, workload, device, blocks, resident, in_shared, output_first, weights)

    def _slack(self, config: AttentionForwardConfig) -> int:
        """Registers that the compiler takes beyond those needed where it has them (the median on sm_90a)."""
        wide = config.block_q == 32 * config.warps
        if config.query is QueryPlace.REGISTERS:
            return 8 if wide else 17
        return 24 if wide else 30

    def traffic(self, problem: Problem, config: AttentionForwardConfig, workload: Workload, device: Device) -> Traffic:
        """See Family: the loops are those of FlashAttention-2, algorithm 1."""
        return tiled_traffic(problem, equal_lengths(workload), config.block_q, config.block_kv)


FAMILY = AttentionForward()


@cache
def _default(problem: Problem, target: Target) -> AttentionForwardConfig:
    device, workload = device_of_target(target), Workload(batch=4, heads_q=16, heads_kv=16, len_q=4096, len_kv=4096)
    space = list(FAMILY.space(problem, target))
    legal = [config for config in space if not FAMILY.check(problem, config, target)]
    if not legal:
        FAMILY.require_legal(problem, space[0], target)

    def spare(config: AttentionForwardConfig) -> int:
        return FAMILY.registers_cap(config, target) - FAMILY.registers_needed(problem, config)

    enough = min(SPARE_REGISTERS, max(map(spare, legal)))  # for plain kernels the smallest leaves 65 registers at least
    comfortable = [config for config in legal if spare(config) >= enough]
    return min(comfortable, key=lambda config: FAMILY.predict(problem, config, workload, device).seconds)
