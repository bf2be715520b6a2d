"""The family for attention forward on Hopper where few queries meet many keys: flash decoding on tensor copies, mbarriers and wgmma."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from flashgen.codegen import wgmma
from flashgen.codegen.attention import ELEMENTS, TENSORS, padded, problem_reasons, reciprocal, scale_values
from flashgen.codegen.cached import ENTRIES, box_keys, page_reasons, with_cached_files
from flashgen.codegen.config import range_reasons
from flashgen.codegen.devices import Device, device_of_target
from flashgen.codegen.family import Family, Prediction, Traffic
from flashgen.codegen.modifier import modifier_refusals, modifier_values, modifiers_of, score_unit, with_modifiers
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.program import BlockResources, Buffer, BufferKind, KernelLaunch, KernelText, Program
from flashgen.codegen.target import Target, targets
from flashgen.codegen.tensor_map import STRIDE_END, TensorMapShape, tensor_map_shape
from flashgen.codegen.workload import Workload

from . import model, storage
from .boxes import MOST_LOCAL_ROWS, PART_COST, box_block, box_values
from .config import AttentionDecodeSm90Config
from .registers import ahead_reasons, needed_registers, registers
from .rows import COUNTED_ROWS, RowTiles, aligned_shares, blocks_for, most_parts, partial_bytes, seen_key_tiles, size_reasons, tiles_of
from .space import LEAST_KEYS, LEAST_TILE, SHALLOWEST, bytes_of_key, configs

L2_PROMOTION = 128  # bytes: by more, the L2 would fetch the next panel's half of a row before that is asked for, and again when it is
MOST_ROWS = 128  # of a key/value head that the family is preferred for: one row tile
LEAST_KEYS_A_QUERY = 8
# Of all key/value heads: with fewer, tiles of 64 rows, as the forward family has, leave some of 132 SMs idle, and equal shares none.
FILLING_ROWS = 8192
_INDICES = 2**31  # of key tiles


class AttentionDecodeSm90(Family):
    """See the module's docstring; the algorithm is templates/kernels/attention_decode_sm90.cu.j2."""

    name = "attention_decode_sm90"
    revision = 10
    modifiers = ("alibi", "bias", "bias_fp32", "boolean_mask", "chunk", "sinks", "softcap", "tree_mask", "window")
    loads_scores_ahead = changes_at_once = True
    preference = -1  # but for few queries, see preference_for
    template = "kernels/attention_decode_sm90.cu.j2"
    config_type = AttentionDecodeSm90Config
    parameters = ParameterBlock(
        (
            *(Parameter("TensorMap", f"{tensor}_map") for tensor in ("q", "k", "v")),
            Parameter("Element*", "out"),
            Parameter("float*", "lse"),
            Parameter("float*", "partials"),
            Parameter("u32*", "part_counters"),
            *(Parameter("i64", f"out_{axis}") for axis in ("batch", "head", "row")),
            *(Parameter("u64", f"{n}_reciprocal") for n in ("key_tiles", "batch", "row_tiles", "head_sets", "tile_heads")),
            *(Parameter("u64", f"{n}_reciprocal") for n in ("blocks", "aligned_shares")),
            *(Parameter("int", n) for n in ("batch", "heads_q", "len_q", "len_kv", "group", "heads", "key_tiles")),
            *(Parameter("int", n) for n in ("row_tiles", "head_sets", "tile_heads", "tile_queries")),
            *(Parameter("int", n) for n in ("blocks", "aligned_shares", "share_distance")),
            *(Parameter("float", n) for n in ("scale_log2", "ln2_hi", "ln2_lo")),
        )
    )
    atoms = (
        *("types", "register", "index", "shared_memory", "barrier", "named_barrier", "mbarrier", "cp_async_bulk_tensor"),
        *("setmaxnreg", "griddepcontrol", "wgmma", "atomic", "cvt", "set_f16", "cvt_f32", "ex2", "rcp", "mul", "shfl_sync", "vote_sync"),
    )
    tiles = (
        *("common/shared_regions", "common/tile_scheduler", "common/score_chain", "common/packed_rows", "common/key_shares"),
        *("warpgroup/pipeline", "warpgroup/panel_tile", "warpgroup/gemm", "common/softmax_rows", "common/lse"),
        *("common/partial_outputs", "warpgroup/row_sums", "warpgroup/stale_softmax", "warpgroup/decode_storage"),
        *("warpgroup/decode_producer", "warpgroup/decode_exchange", "warpgroup/decode_epilogue", "warpgroup/decode_consumer"),
    )

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation, self.modifiers, cached=True)
        if target.name != "sm_90a":
            reasons.append(f"target must be sm_90a; got {target.name}")
        return reasons + ahead_reasons(problem)

    def check(self, problem: Problem, config: AttentionDecodeSm90Config, target: Target) -> list[str]:
        """See Family."""
        one_or_two = ((name, 1, 2, 1) for name in ("row_groups", "key_groups", "heads"))
        limits = (*one_or_two, ("block_kv", LEAST_KEYS, 128, 16), ("stages", 2, 16, 1))
        reasons = self.refusals(problem, target) + (out_of_range := range_reasons(config, limits))
        if config.consumers > 2 and not out_of_range:
            reasons.append(f"row_groups * key_groups * heads must be at most 2: registers do for two consumers; got {config.consumers}")
        if config.key_groups == 2 and config.stages % 2:
            reasons.append(f"stages must be a multiple of key_groups 2; got {config.stages} (nearest: {config.stages - 1})")
        return reasons or self._resource_reasons(problem, config, target)

    def _resource_reasons(self, problem: Problem, config: AttentionDecodeSm90Config, target: Target) -> list[str]:
        reasons = []
        shared, available = self.shared_bytes(problem, config), target.shared_memory_per_block
        if shared > available:
            cure = "lower block_kv, stages or row_groups"
            reasons.append(f"needs {shared} B of shared memory, {target.name} has {available} B a block: {cure}")
        needed, cap = needed_registers(problem, config), registers(config)[1]
        if needed > cap:
            reasons.append(f"needs about {needed} registers a thread, {cap} are available: lower block_kv")
        return reasons

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        tiles: tuple[str, ...] = self.tiles
        if any(one.link for one in modifiers_of(problem)):
            tiles = _before(tiles, "warpgroup/decode_consumer", "warpgroup/decode_scores")
        if problem.is_cached:
            tiles = with_cached_files(_before(tiles, "warpgroup/decode_producer", "warpgroup/decode_boxes", "warpgroup/first_keys"))
        of_l2 = ("prefetch", "ld_relaxed") if problem.is_cached else ("cp_async_bulk_prefetch_tensor", "cp_async_bulk_tensor_evict_first")
        return _before(self.atoms, "setmaxnreg", *of_l2), tiles

    def kernels(self, problem: Problem, config: AttentionDecodeSm90Config) -> tuple[KernelText, ...]:
        """See Family."""
        return (KernelText(with_modifiers(box_block(self.parameters) if problem.is_cached else self.parameters, problem)),)

    def resources(self, problem: Problem, config: AttentionDecodeSm90Config) -> Mapping[str, BlockResources]:
        """See Family."""
        return {"": BlockResources(128 * (config.consumers + 1), self.shared_bytes(problem, config))}

    def shared_bytes(self, problem: Problem, config: AttentionDecodeSm90Config) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return storage.storage_bytes(problem, config)

    def program(self, config: AttentionDecodeSm90Config, call: Call, device: Device) -> Program:
        """See Family. Partial outputs and their counters are there where a head is in several blocks."""
        problem, w = call.problem, call.workload
        tiles = tiles_of(w, config.rows)
        heads = -(-w.heads_kv // config.heads) * tiles.count
        key_tiles = seen_key_tiles(problem, w, tiles.queries, config.block_kv)
        blocks = blocks_for(heads, w.batch, key_tiles, device.sm_count, most_parts(problem, key_tiles * config.block_kv, tiles.rows))
        batch, row, head, _ = call.views["out"].strides
        aligned = aligned_shares(heads, blocks)
        numbers = {"key_tiles": key_tiles, "batch": w.batch, "row_tiles": tiles.count, "head_sets": tiles.head_sets}
        numbers |= {"tile_heads": tiles.heads, "blocks": blocks, "aligned_shares": aligned}
        values = {
            **numbers,
            **{f"{name}_reciprocal": reciprocal(number) for name, number in numbers.items()},
            **{"out_batch": batch, "out_head": head, "out_row": row},
            **{"heads": heads, "heads_q": w.heads_q, "len_q": w.len_q, "len_kv": w.len_kv, "group": w.heads_q // w.heads_kv},
            **{"tile_queries": tiles.queries, "share_distance": blocks // aligned},
            **scale_values(score_unit(call)),
            **modifier_values(call),
        }
        if problem.is_cached:
            values = box_values(values, call, config.block_kv, tiles.queries)
        launch = KernelLaunch(blocks, values, self._tensor_maps(config, call, tiles), overlaps=True)
        if not problem.is_cached and heads * w.batch % blocks == 0:  # whose sequences may be of different lengths
            return Program((launch,))
        partials = Buffer("partials", blocks * 2 * partial_bytes(problem, config.heads * tiles.rows))
        return Program((launch,), (partials, Buffer("part_counters", blocks * config.sharers * 4, BufferKind.STREAM_COUNTER)))

    def _tensor_maps(self, config: AttentionDecodeSm90Config, call: Call, tiles: RowTiles) -> dict[str, TensorMapShape]:
        """Of k and v as (column, row, head, batch), of q as (column, head, row, batch): heads of a query next to each other.

        Keys of a cache have its pages in place of the batch.
        """
        problem, w, size = call.problem, call.workload, call.problem.dtype.bytes
        maps = {}
        for name, width in (("q", problem.head_dim), ("k", problem.head_dim), ("v", problem.head_dim_v)):
            batch, row, head, _ = call.views[name].strides
            if name == "q":
                sizes, steps, box = (w.heads_q, w.len_q, w.batch), (head, row), (tiles.heads, tiles.queries)
            elif problem.is_cached:
                sizes, steps, box = (w.page_size, w.heads_kv, w.pages), (row, head), (box_keys(w, config.block_kv), 1)
            else:
                sizes, steps, box = (w.len_kv, w.heads_kv, w.batch), (row, head), (config.block_kv, 1)
            strides = (steps[0] * size, steps[1] * size, batch * size)
            maps[name] = tensor_map_shape(problem.dtype, (width, *sizes), strides, (storage.PANEL, *box, 1), L2_PROMOTION)
        return maps

    def call_refusals(self, call: Call, config: AttentionDecodeSm90Config | None = None) -> list[str]:
        """See Family. What cuTensorMapEncodeTiled would refuse, and more key tiles than an int counts."""
        reasons, end, w = modifier_refusals(call), STRIDE_END // call.problem.dtype.bytes, call.workload
        if not w.len_kv:
            reasons.append("len_kv must be at least 1 for tensor copies; got 0")
        if call.problem.is_cached:
            reasons += page_reasons(w)
        for name in TENSORS:
            if (longest := max(call.views[name].strides)) >= end:
                reasons.append(f"strides of {name} must be below {end} elements; got {longest}")
        key_tiles = -(-w.len_kv // LEAST_KEYS) + (1 + PART_COST if call.problem.is_cached else 0)
        # Each call of a new length asks: first whether there would be too many with a row in each tile.
        if (
            w.batch * w.heads_q * w.len_q * key_tiles >= _INDICES
            and (tiles := w.batch * w.heads_kv * tiles_of(w, 64).count * key_tiles) >= _INDICES
        ):
            reasons.append(f"batch, heads and lengths must make fewer than {_INDICES} tiles of {LEAST_KEYS} keys; got {tiles}")
        if w.len_kv > COUNTED_ROWS or w.len_q * w.heads_q > COUNTED_ROWS:
            reasons += size_reasons(w)
        return reasons + super().call_refusals(call, config)

    def preference_for(self, problem: Problem, workload: Workload) -> int:
        """See Family. Before all others for few queries of many keys: what K and V take to read is then all of the time.

        128 rows need 128 FLOP for a byte of K and V, while a GPU has twice as many in the time that a byte takes. With fewer keys for each
        query, whose rows then are most of what is read, or with row tiles that fill the GPU, the ordinary forward pass has better ones; and
        with a window or chunks for more rows, whose parts cost as much as these keys.
        """
        w, rows = workload, workload.heads_q // max(1, workload.heads_kv) * workload.len_q
        few = rows <= MOST_ROWS or w.batch * w.heads_q * w.len_q < FILLING_ROWS
        if w.is_local:
            few = rows <= MOST_LOCAL_ROWS
        return 3 if few and w.len_kv >= LEAST_KEYS_A_QUERY * w.len_q else self.preference

    def not_dominated(self, config: AttentionDecodeSm90Config, workload: Workload) -> bool:
        """See Family. A second row group is for more than 64 rows, and of an odd number of heads one would have no neighbour."""
        return workload.heads_kv % config.heads == 0 and (config.row_groups == 1 or tiles_of(workload, config.rows).rows > 64)

    def context(self, problem: Problem, config: AttentionDecodeSm90Config, target: Target) -> dict[str, object]:
        """See Family."""
        producer, consumer = registers(config)
        return {
            "element": ELEMENTS[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "producer_registers": producer,
            "consumer_registers": consumer,
            "shared_bytes": self.shared_bytes(problem, config),
            "entries": ENTRIES,
            "part_cost": PART_COST,
            "query_stages": storage.query_stages(problem, config),
        }

    def instructions(self, problem: Problem, config: AttentionDecodeSm90Config) -> str:
        """See Family. The shapes of wgmma for scores and output."""
        element = ELEMENTS[problem.dtype]
        return "\n".join((wgmma.wgmma_ss(element, config.block_kv), wgmma.wgmma_rs(element, padded(problem.head_dim_v))))

    def space(self, problem: Problem, target: Target) -> Iterator[AttentionDecodeSm90Config]:
        """See Family, and space.py."""
        return configs(problem)

    def adapted(self, problem: Problem, config: AttentionDecodeSm90Config) -> AttentionDecodeSm90Config:
        """See Family. With a cache small tiles, with which a block starts sooner, and fewer stages where not all fit beside it."""
        if not problem.is_cached:
            return config
        least, available = LEAST_KEYS * bytes_of_key(problem), targets()["sm_90a"].shared_memory_per_block
        if config.row_groups == 1 and config.block_kv > LEAST_KEYS and least >= LEAST_TILE:
            fewest = -(-SHALLOWEST * 3 // (2 * least))
            config = replace(config, block_kv=LEAST_KEYS, stages=-(-fewest // config.key_groups) * config.key_groups)
        while config.stages > config.key_groups * 2 and self.shared_bytes(problem, config) > available:
            config = replace(config, stages=config.stages - config.key_groups)
        return config

    def default(self, problem: Problem, target: Target) -> AttentionDecodeSm90Config:
        """See Family. The model's pick for one query and a long sequence."""
        return _default(problem, target)

    def predict(
        self,
        problem: Problem,
        config: AttentionDecodeSm90Config,
        workload: Workload,
        device: Device,
        registers: int | None = None,
        weights: model.DecodeWeights = model.READ_OFF,
    ) -> Prediction:
        """See Family, and model.py."""
        return model.predict(problem, config, workload, device, weights)

    def traffic(self, problem: Problem, config: AttentionDecodeSm90Config, workload: Workload, device: Device) -> Traffic:
        """See Family, and model.py."""
        return model.decode_traffic(problem, config, workload, device)


FAMILY = AttentionDecodeSm90()


def _before(files: tuple[str, ...], file: str, *added: str) -> tuple[str, ...]:
    at = files.index(file)
    return (*files[:at], *added, *files[at:])


@cache
def _default(problem: Problem, target: Target) -> AttentionDecodeSm90Config:
    device, workload = device_of_target(target), Workload(batch=8, heads_q=32, heads_kv=8, len_q=1, len_kv=8192)
    legal = [config for config in FAMILY.space(problem, target) if not FAMILY.check(problem, config, target)]
    if not legal:
        FAMILY.require_legal(problem, AttentionDecodeSm90Config(), target)
    return min(legal, key=lambda config: (FAMILY.predict(problem, config, workload, device).seconds, config.name))
