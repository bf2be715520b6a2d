"""The generic decode family for attention forward, sm_80 and later: keys shared equally by persistent blocks, mma.sync and cp.async."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from functools import cache

from flashgen.codegen.attention import ELEMENTS, TENSORS, padded, problem_reasons, reciprocal, scale_values
from flashgen.codegen.cached import ENTRIES, cached_block, cached_bytes, cached_values, entry_sequences, with_cached_files
from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device
from flashgen.codegen.e4m3 import e4m3_block, e4m3_reasons, e4m3_values, element_words, product_widths, with_e4m3_files
from flashgen.codegen.errors import IllegalConfigError
from flashgen.codegen.family import Family, Prediction, Traffic
from flashgen.codegen.modifier import modifier_refusals, modifier_values, modifiers_of, score_unit, with_modifiers
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Mask, Problem, Sequences
from flashgen.codegen.program import BlockResources, Buffer, BufferKind, KernelLaunch, KernelText, Program
from flashgen.codegen.seen_tiles import scatters
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from ..attention_decode_sm90.boxes import MOST_LOCAL_ROWS, PART_COST
from ..attention_decode_sm90.rows import COUNTED_ROWS, aligned_shares, size_reasons
from ..attention_forward.config import QueryPlace
from . import model
from .config import SHAPES, SHAPES_OF_E4M3, AttentionDecodeConfig
from .shares import MOST_TILES, shares_of, tiles_in_ints

DIVISORS = ("key_tiles", "batch", "row_tiles", "group", "blocks", "aligned_shares")
BLOCK_Q = (16, 32, 64)
MIDDLE, WIDE = 128, 192  # columns of O
MOST_ROWS, LEAST_KEYS_A_QUERY = max(BLOCK_Q), 8  # of a key/value head that the family is preferred for
FILLING_HEADS = 128  # query heads of all sequences, each a work item of a forward kernel where there are few queries
STAGES = (8, 6, 4, 3, 2)
QUERY_PLACES = (QueryPlace.REGISTERS, QueryPlace.SHARED)
RING_BYTES = 192 * 2**10  # of an SM: a third of it keeps the memory busy, the rest while a block ends one item and begins the next
SLICE = 64  # columns of O that the key groups of a block add up at once
FACTOR_BYTES = 4  # of a row: what its scores are multiplied by, where keys are e4m3
STATISTICS = 4  # numbers that a row of partial outputs has beside its columns


class AttentionDecode(Family):
    """See the module's docstring; the algorithm is templates/kernels/attention_decode.cu.j2."""

    name = "attention_decode"
    revision = 5
    modifiers = (
        *("alibi", "bias", "bias_fp32", "boolean_mask", "chunk", "prefix_len", "sinks", "softcap", "traced", "tree_mask", "window"),
    )
    loads_scores_ahead = True
    preference = -1  # but for few queries, see preference_for
    template = "kernels/attention_decode.cu.j2"
    config_type = AttentionDecodeConfig
    parameters = ParameterBlock(
        (
            *(Parameter("const Element*", n) for n in ("q", "k", "v")),
            Parameter("Element*", "out"),
            *(Parameter("float*", n) for n in ("lse", "partials")),
            Parameter("u32*", "part_counters"),
            *(Parameter("i64", f"{tensor}_{dim}") for tensor in TENSORS for dim in ("batch", "head", "row")),
            *(Parameter("u64", f"{n}_reciprocal") for n in DIVISORS),
            *(Parameter("int", n) for n in (*DIVISORS, "share_distance", "head_items", "heads_q", "len_q", "len_kv")),
            *(Parameter("float", n) for n in ("scale_log2", "ln2_hi", "ln2_lo")),
        )
    )
    atoms = (
        *("types", "register", "index", "shared_memory", "barrier", "named_barrier", "atomic", "cp_async", "ldmatrix", "mma_sync"),
        *("cvt", "set_f16", "cvt_f32", "ex2", "rcp", "mul", "shfl_sync", "vote_sync"),
    )
    tiles = (
        *("warp/shared_tile", "common/shared_regions", "common/tile_scheduler", "common/key_shares", "common/sequences"),
        *("common/score_chain", "warp/load", "warp/gemm", "common/softmax_rows", "common/lse", "common/settled_row", "warp/softmax"),
        *("common/partial_outputs", "warp/item_rows", "warp/key_stream", "warp/partial_rows"),
    )

    # Registers a thread needs beside its accumulators and query fragments: addresses, operands on their way, the softmax state.
    registers_beside = 80
    registers_of_row_groups = 8  # more, where a key group has several warps
    registers_of_modifiers = 24  # more, where a problem has some
    registers_of_cache = 16  # more, where keys are in pages of a cache and registers hold Q

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation, self.modifiers, cached=True, invariant=True, e4m3=True)
        reasons += e4m3_reasons(problem, target)
        if scatters(problem) and not problem.is_cached:
            reasons.append("sequences must be cached with a mask_mod in these kernels, as others visit but the tiles it leaves; got dense")
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: AttentionDecodeConfig, target: Target) -> list[str]:
        """See Family."""
        reasons = self.refusals(problem, target)
        for name, low, high in (("warps", 1, 16), ("stages", 2, 8), ("blocks_per_sm", 1, 8)):
            if not low <= (value := getattr(config, name)) <= high:
                reasons.append(f"{name} must be from {low} to {high}; got {value}")
        for name, allowed in (("block_q", BLOCK_Q), ("warp_q", (16, 32))):
            if (value := getattr(config, name)) not in allowed:
                reasons.append(f"{name} must be {' or '.join(map(str, allowed))}; got {value}")
        if reasons:
            return reasons
        if config.block_q % config.warp_q or config.warps * config.warp_q % config.block_q:
            row_groups = max(1, config.block_q // config.warp_q)
            return [f"warps must be a multiple of {row_groups}, with warp_q up to block_q {config.block_q}; got {config.name}"]
        if config.warp_q > 16 and any(one.has_heads for one in modifiers_of(problem)):
            return [f"warp_q must be 16 with {', '.join(problem.modifiers)}: a lane knows the heads of two rows; got {config.warp_q}"]
        unit = 16 * config.key_groups
        if config.block_kv % unit or not unit <= config.block_kv <= 4 * unit:
            groups = f"{config.key_groups} key groups"
            return [f"block_kv must be a multiple of {unit} up to {4 * unit} with {groups}; got {config.block_kv}"]
        if problem.batch_invariant and (only := _of_any_batch(problem, target)) != config:
            return [f"config must be {only.name} with batch_invariant, so that all calls sum up in one order; got {config.name}"]
        return self._resource_reasons(problem, config, target)

    def _resource_reasons(self, problem: Problem, config: AttentionDecodeConfig, target: Target) -> list[str]:
        reasons = []
        blocks, threads = config.blocks_per_sm, config.warps * 32
        shared, available = self.shared_bytes(problem, config), target.shared_memory_per_block
        if shared > available:
            reasons.append(f"needs {shared} B of shared memory, {target.name} has {available} B a block: lower block_kv, stages or warps")
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
            reasons.append(f"needs about {needed} registers a thread, {has}: lower block_kv, blocks_per_sm or warp_q")
        return reasons

    def registers_needed(self, problem: Problem, config: AttentionDecodeConfig) -> int:
        """An estimate of the registers of a thread; the compiler has the last word."""
        row_tiles = config.warp_q // 16
        columns, columns_v = product_widths(problem)
        accumulators = row_tiles * (columns_v // 2 + config.group_kv // 2)
        query = 0
        if config.query is QueryPlace.REGISTERS:
            query = row_tiles * columns // 4 + self.registers_of_cache * problem.is_cached
        further = self.registers_of_row_groups * (config.block_q > config.warp_q) + self.registers_of_modifiers * bool(problem.modifiers)
        return accumulators + query + self.registers_beside + 10 * row_tiles + further

    def registers_cap(self, config: AttentionDecodeConfig, target: Target) -> int:
        """Registers of a thread that the launch bounds leave."""
        return min(target.registers_per_thread, target.registers_per_sm // (config.warps * 32 * config.blocks_per_sm) // 8 * 8)

    def kernels(self, problem: Problem, config: AttentionDecodeConfig) -> tuple[KernelText, ...]:
        """See Family."""
        block = e4m3_block(cached_block(self.parameters), problem) if problem.is_cached else self.parameters
        own = ["unit"] * (problem.is_cached or problem.batch_invariant) + ["slot_rows"] * problem.batch_invariant
        return (KernelText(with_modifiers(block.with_fields(*(Parameter("int", name) for name in own)), problem)),)

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        atoms, tiles = super().files(problem)
        if problem.is_cached:
            tiles = tuple("warp/cached_key_stream" if name == "warp/key_stream" else name for name in with_cached_files(tiles))
            atoms, tiles = with_e4m3_files(atoms, tiles, problem)
        if problem.batch_invariant:
            after = tiles.index("common/key_shares") + 1
            tiles = (*tiles[:after], "common/key_splits", *tiles[after:])
        return atoms, tiles

    def resources(self, problem: Problem, config: AttentionDecodeConfig) -> Mapping[str, BlockResources]:
        """See Family."""
        return {"": BlockResources(config.warps * 32, self.shared_bytes(problem, config))}

    def shared_bytes(self, problem: Problem, config: AttentionDecodeConfig) -> int:
        """Dynamic shared memory of a block, in bytes: Q, the ring of K and V, what each key group has of O, row sums and a flag."""
        columns, columns_v = product_widths(problem)
        rows = config.block_q * (columns * problem.dtype.bytes + FACTOR_BYTES * (problem.dtype_kv is not None))
        out = config.key_groups * config.block_q * (min(columns_v, SLICE) * 4 + 32)
        of_cache = cached_bytes(config.stages, config.key_groups, config.group_kv, config.warps) if problem.is_cached else 0
        return rows + self._ring_bytes(problem, config) + out + config.warp_q // 16 * config.warps * 32 * 16 + 16 + of_cache

    def call_refusals(self, call: Call, config: Config | None = None) -> list[str]:
        """See Family. Key tiles are counted in 32 bits."""
        w, reasons = call.workload, modifier_refusals(call)
        what, count = tiles_in_ints(call.problem, w)
        if count > MOST_TILES:
            reasons.append(f"{what} must be at most {MOST_TILES} in a decode kernel; got {count}")
        if w.len_kv > COUNTED_ROWS or w.len_q * w.heads_q > COUNTED_ROWS:  # in short, because each call of a new length asks
            reasons += size_reasons(w)
        return reasons + super().call_refusals(call, config)

    def program(self, config: AttentionDecodeConfig, call: Call, device: Device) -> Program:
        """See Family."""
        problem, workload = call.problem, call.workload
        shares = shares_of(config, problem, workload, device)
        head_items = workload.heads_kv * shares.row_tiles
        aligned = aligned_shares(head_items, shares.blocks)
        divisors = {
            "key_tiles": shares.units,
            "batch": workload.batch,
            "row_tiles": shares.row_tiles,
            "group": workload.heads_q // max(1, workload.heads_kv),
            "blocks": shares.blocks,
            "aligned_shares": aligned,
        }
        values: dict[str, int | float] = {f"{name}_reciprocal": reciprocal(max(1, divisor)) for name, divisor in divisors.items()}
        for name in TENSORS:
            batch, row, head, _ = call.views[name].strides
            values |= {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row}
        values |= {**divisors, "share_distance": shares.blocks // aligned, "head_items": head_items, "heads_q": workload.heads_q}
        values |= {"len_q": workload.len_q, "len_kv": workload.len_kv}
        values |= {**scale_values(score_unit(call)), **modifier_values(call)}
        if problem.is_cached:
            values = e4m3_values(cached_values(values, call), call)
        # Of these there are two slots each: blocks, or splits, of which a slot then has half the rows.
        parts, rows, counters = shares.blocks, config.block_q, shares.blocks
        if problem.is_cached or problem.batch_invariant:
            values["unit"] = shares.unit
        if problem.batch_invariant:
            parts, counters = shares.items * shares.units, shares.items
            rows = -(-min(config.block_q, workload.len_q * divisors["group"]) // 2)
            values["slot_rows"] = rows
        launch = KernelLaunch(shares.blocks, values)
        # Sequences of a cache may be of different lengths, unless each has a tile.
        alike = not problem.is_cached or shares.are_splits or (shares.units == 1 and entry_sequences(workload) == 1)
        if shares.are_whole and alike:
            return Program((launch,))
        partials = Buffer("partials", 8 * parts * rows * (product_widths(problem)[1] + STATISTICS))
        return Program((launch,), (partials, Buffer("part_counters", 4 * counters, BufferKind.STREAM_COUNTER)))

    def preference_for(self, problem: Problem, workload: Workload) -> int:
        """See Family. For few queries of many keys, as one work item then has all queries that meet a key/value head's keys."""
        w, rows = workload, workload.heads_q // max(1, workload.heads_kv) * workload.len_q
        # A window's keys are soon read: with more rows, dense, the forward kernels are faster once they fill the GPU.
        most = MOST_LOCAL_ROWS if w.has_window and not problem.is_cached and w.batch * w.heads_q >= FILLING_HEADS else MOST_ROWS
        return 2 if rows <= most and w.len_kv >= LEAST_KEYS_A_QUERY * w.len_q else self.preference

    def not_dominated(self, config: AttentionDecodeConfig, workload: Workload) -> bool:
        """See Family. Work items of more rows are for more rows."""
        rows = workload.heads_q // max(1, workload.heads_kv) * workload.len_q
        return config.block_q == min(BLOCK_Q) or rows > config.block_q // 2

    def context(self, problem: Problem, config: AttentionDecodeConfig, target: Target) -> dict[str, object]:
        """See Family."""
        return {
            **element_words(problem),
            "element": ELEMENTS[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "query_in_registers": config.query is QueryPlace.REGISTERS,
            "shared_bytes": self.shared_bytes(problem, config),
            "entries": ENTRIES,
            "part_cost": 0 if problem.batch_invariant else PART_COST,
            **({"shares": "KeySplits", "part": "KeySplit"} if problem.batch_invariant else {"shares": "KeyShares", "part": "KeyPart"}),
        }

    def space(self, problem: Problem, target: Target) -> Iterator[AttentionDecodeConfig]:
        """See Family. Legal ones only: Q in registers if they do, and the deepest ring. One alone for all batches."""
        if problem.batch_invariant:
            yield from () if self.refusals(problem, target) else (_of_any_batch(problem, target),)
            return
        most = 16 if padded(problem.head_dim_v) > WIDE else 32  # keys of a group: with more, wide heads spill
        known = SHAPES if problem.dtype_kv is None else (*SHAPES_OF_E4M3, *SHAPES)
        if problem.dtype_kv is not None and padded(problem.head_dim_v) <= MIDDLE:
            most = 64
        shapes = dict.fromkeys((*rows, warps, min(group_kv, most), blocks) for *rows, warps, group_kv, blocks in known)
        for block_q, warp_q, warps, group_kv, blocks in shapes:
            block_kv = warps * warp_q // block_q * group_kv
            rings = (AttentionDecodeConfig(block_q, warp_q, block_kv, warps, s, query, blocks) for query in QUERY_PLACES for s in STAGES)
            fitting = (c for c in rings if self._ring_bytes(problem, c) * blocks <= RING_BYTES or c.stages == min(STAGES))
            yield from itertools.islice((c for c in fitting if not self.check(problem, c, target)), 1)

    def _ring_bytes(self, problem: Problem, config: AttentionDecodeConfig) -> int:
        return config.stages * config.block_kv * sum(product_widths(problem)) * problem.kv_bytes

    def default(self, problem: Problem, target: Target) -> AttentionDecodeConfig:
        """See Family. 16 rows and 4 warps, which suits a decoding step of a group of up to 16 heads, or what is nearest to it."""
        configs = list(self.space(problem, target))
        if not configs:
            raise IllegalConfigError(self.name, self.refusals(problem, target) or ["nothing fits"])
        return configs[0]

    def predict(
        self, problem: Problem, config: AttentionDecodeConfig, workload: Workload, device: Device, registers: int | None = None
    ) -> Prediction:
        """See Family, and model.py."""
        return model.predict(problem, config, workload, device, shares_of(config, problem, workload, device))

    def traffic(self, problem: Problem, config: AttentionDecodeConfig, workload: Workload, device: Device) -> Traffic:
        """See Family: each work item reads its rows of Q, and the keys and values that some of its rows see."""
        return model.traffic(problem, config, workload)


FAMILY = AttentionDecode()


@cache
def _of_any_batch(problem: Problem, target: Target) -> AttentionDecodeConfig:
    """The config of problems that are batch invariant, whether their keys are dense or in pages."""
    return FAMILY.default(dataclasses.replace(problem, batch_invariant=False, sequences=Sequences.CACHED), target)
