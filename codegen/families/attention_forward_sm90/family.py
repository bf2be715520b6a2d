"""The family for attention forward on Hopper: warp-specialised, on tensor copies, mbarriers and wgmma, as in FlashAttention-3."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from functools import cache

from flashgen.codegen import far_keys, packed, seen_tiles, wgmma
from flashgen.codegen.attention import ELEMENTS, TENSORS, padded, problem_reasons, reciprocal, scale_values, tiled_traffic
from flashgen.codegen.devices import Device, device_of_target
from flashgen.codegen.family import Family, Prediction, Traffic
from flashgen.codegen.linear_terms import MOST_PACKED, has_linear_terms, with_linear_terms
from flashgen.codegen.modifier import (
    maps_scores,
    modifier_refusals,
    modifier_values,
    modifiers_of,
    reads_scores,
    score_unit,
    widest_tile,
    with_modifiers,
)
from flashgen.codegen.modifiers import TAKEN_BY_MOST
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.program import BlockResources, Buffer, BufferKind, KernelLaunch, KernelText, Program
from flashgen.codegen.score_tensors import OF_BATCHES
from flashgen.codegen.target import Target, targets
from flashgen.codegen.tensor_map import STRIDE_END
from flashgen.codegen.workload import Workload, equal_lengths

from . import model
from .config import PACK_GQA, AttentionForwardSm90Config, RowMax, Scheduler
from .front import dense_front, front_kernels, front_resources, packed_front
from .launch import forward_maps, most_work_tiles, packed_tile_values, tile_values, work_tiles
from .pages import cache_reasons, cached_modifier_reasons, page_block, page_values, paged_config, tile_boxes, with_page_files
from .registers import registers_given, registers_needed
from .storage import shared_bytes, width_in_panels

WIDEST_BESIDE_ANOTHER = 192  # head_dim_v of a block that shares its SM: 96 registers of a product's 128; 256 does not compile (C7602)


class AttentionForwardSm90(Family):
    """See the module's docstring; the algorithm is templates/kernels/attention_forward_sm90.cu.j2."""

    name = "attention_forward_sm90"
    revision = 14
    preference = 1
    modifiers, fetches_scores = TAKEN_BY_MOST, True
    template = "kernels/attention_forward_sm90.cu.j2"
    config_type = AttentionForwardSm90Config
    parameters = ParameterBlock(
        (
            *(Parameter("TensorMap", f"{tensor}_map") for tensor in TENSORS),
            Parameter("float*", "lse"),
            Parameter("u32*", "tile_counter"),
            *(Parameter("u64", f"{n}_reciprocal") for n in ("head_sets", "group", "l2_group_heads", "l2_group_tiles")),
            *(Parameter("int", n) for n in ("head_sets", "len_q", "len_kv", "query_tiles", "l2_group_heads", "l2_group_tiles")),
            *(Parameter("int", n) for n in ("tiles", "launched_blocks")),
            *(Parameter("float", n) for n in ("scale_log2", "ln2_hi", "ln2_lo")),
        )
    )
    atoms = (
        *("types", "register", "index", "shared_memory", "barrier", "named_barrier", "mbarrier", "cp_async_bulk_tensor"),
        *("setmaxnreg", "wgmma", "stmatrix", "atomic", "cvt", "set_f16", "cvt_f32", "ex2", "rcp", "mul", "shfl_sync", "vote_sync"),
    )
    tiles = (
        *("common/shared_regions", "common/tile_scheduler", "common/sequences", "common/score_chain"),
        *("warpgroup/pipeline", "warpgroup/panel_tile", "warpgroup/gemm", "common/mask"),
        *("common/softmax_rows", "common/lse", "common/settled_row", "warpgroup/row_sums", "warpgroup/stale_softmax", "warpgroup/epilogue"),
        *("warpgroup/forward_storage", "warpgroup/forward_producer", "warpgroup/forward_lse", "warpgroup/forward_consumer"),
    )

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        tiles = with_linear_terms(self.tiles, problem)
        if problem.is_cached:
            return self.atoms, with_page_files(tiles)
        if far_keys.leaves_out_far_keys(problem):  # texts with PackGQA do not use these files, and so have nothing of them
            return far_keys.with_far_files((self.atoms, tiles))
        if any(modifier.hides_keys for modifier in modifiers_of(problem)) and not maps_scores(problem):  # beside a map it would spill
            tiles = tuple("warpgroup/column_mask" if tile == "common/mask" else tile for tile in tiles)
        return packed.with_packed_files((*self.atoms, "griddepcontrol", "cp_async"), tiles) if problem.is_packed else (self.atoms, tiles)

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation, self.modifiers, packed=True, cached=True)
        reasons += packed.packed_reasons(problem) + cached_modifier_reasons(problem)
        if target.name != "sm_90a":
            reasons.append(f"target must be sm_90a; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: AttentionForwardSm90Config, target: Target) -> list[str]:
        """See Family."""
        reasons, widest, most_warpgroups = self.refusals(problem, target), min(256, widest_tile(problem)), 3
        if widest < 256:  # three warpgroups have fewer registers each, and so has one where ALiBi's offsets take some
            widest, most_warpgroups = widest - 16 * ("alibi" in problem.modifiers), 2
        limits = (("warpgroups", 1, most_warpgroups, 1), ("block_kv", 32, widest, 16), ("stages", 2, 4, 1))
        for name, low, high, step in (*limits, ("query_stages", 1, 2, 1), ("out_panels", 1, width_in_panels(problem.head_dim_v), 1)):
            if not low <= (value := getattr(config, name)) <= high or value % step:
                reasons.append(f"{name} must be {'' if step == 1 else f'a multiple of {step} '}from {low} to {high}; got {value}")
        if config.pack_gqa not in PACK_GQA:
            reasons.append(f"pack_gqa must be one of {', '.join(map(str, PACK_GQA))}; got {config.pack_gqa}")
        if config.ping_pong and config.warpgroups == 1:
            reasons.append("ping_pong must be false with warpgroups 1: it takes two consumers; got true")
        if seen_tiles.scatters(problem) and (config.pack_gqa > 1 or not config.dynamic):
            given = f"{config.scheduler.value} and {config.pack_gqa}"
            reasons.append(f"scheduler must be dynamic and pack_gqa 1 with document_ids or a mask_mod; got {given}")
        if problem.is_packed and (config.pack_gqa > 1 or not config.dynamic):
            given = f"{config.scheduler.value} and {config.pack_gqa}"
            reasons.append(f"scheduler must be dynamic and pack_gqa 1 with packed sequences; got {given}")
        if problem.is_cached and not config.dynamic:
            reasons.append(f"scheduler must be dynamic with sequences in a cache; got {config.scheduler.value}")
        if problem.is_cached and config.warpgroups == 3:
            reasons.append("warpgroups must be at most 2 with sequences in a cache: two warps of the other four load; got 3")
        if config.warpgroups == 3 and not config.dynamic:
            reasons.append("scheduler must be dynamic with warpgroups 3: the static one does not fit 160 registers; got static")
        return reasons or seen_tiles.block_reasons(problem, config) or self._resource_reasons(problem, config, target)

    def _resource_reasons(self, problem: Problem, config: AttentionForwardSm90Config, target: Target) -> list[str]:
        reasons = []
        shared, available = self.shared_bytes(problem, config), target.shared_memory_per_block
        if shared > available:
            cure = "lower block_kv, stages, query_stages, out_panels or warpgroups"
            reasons.append(f"needs {shared} B of shared memory, {target.name} has {available} B a block: {cure}")
        needed, cap = registers_needed(problem, config), self.registers(problem, config)[1]
        if needed > cap:
            has = f"{cap} are available with warpgroups {config.warpgroups}"
            reasons.append(f"needs about {needed} registers a thread, {has}: lower block_kv")
        return reasons

    def blocks_per_sm(self, problem: Problem, config: AttentionForwardSm90Config) -> int:
        """How many blocks share an SM. With one consumer two, if they fit: each computes while the other waits.

        128 registers a thread are then what a product's operands must fit, whatever the consumer is given later.
        """
        if config.warpgroups > 1 or problem.head_dim_v > WIDEST_BESIDE_ANOTHER:
            return 1
        target = targets()["sm_90a"]
        shared = self.shared_bytes(problem, config) + target.shared_memory_reserved
        return 2 if 2 * shared <= target.shared_memory_per_sm else 1

    def registers(self, problem: Problem, config: AttentionForwardSm90Config) -> tuple[int, int]:
        """Of a thread of the producer, and of a consumer."""
        return registers_given(config, targets()["sm_90a"].registers_per_sm // self.blocks_per_sm(problem, config))

    def kernels(self, problem: Problem, config: AttentionForwardSm90Config) -> tuple[KernelText, ...]:
        """See Family."""
        block = self.parameters.with_fields(*OF_BATCHES) if reads_scores(problem) and not problem.is_packed else self.parameters
        block = seen_tiles.with_seen_tiles(block, problem, orders=True)
        block = far_keys.with_first_keys(block) if far_keys.leaves_out_far_keys(problem, config.pack_gqa) else block
        block = with_modifiers(page_block(packed.packed_block(block, problem), problem), problem)
        return (*front_kernels(problem, config), KernelText(block))

    def resources(self, problem: Problem, config: AttentionForwardSm90Config) -> Mapping[str, BlockResources]:
        """See Family."""
        return {**front_resources(problem, config), "": BlockResources(self.threads(config), self.shared_bytes(problem, config))}

    def threads(self, config: AttentionForwardSm90Config) -> int:
        """Threads of a block: the producer's warpgroup, and the consumers'."""
        return 128 * (config.warpgroups + 1)

    def shared_bytes(self, problem: Problem, config: AttentionForwardSm90Config) -> int:
        """Dynamic shared memory of a block, in bytes: queries, the stages of K and V, panels of the output, sums, barriers."""
        return shared_bytes(problem, config)

    def program(self, config: AttentionForwardSm90Config, call: Call, device: Device) -> Program:
        """See Family. As many blocks as are resident at once, as they stay. Only tiles that are claimed need a counter."""
        problem, batch = call.problem, call.workload.batch
        if problem.is_packed:
            return self._packed_program(config, call, device)
        values = tile_values(problem, config, call.workload)
        grid = min(work_tiles(config, call.workload), self.blocks_per_sm(problem, config) * device.sm_count)
        values |= {"launched_blocks": grid, **scale_values(score_unit(call)), **modifier_values(call)}
        values |= page_values(call, config.block_kv) if problem.is_cached else {}
        values |= {"batches": batch, "batches_reciprocal": reciprocal(batch)} if reads_scores(problem) else {}
        front = dense_front(config, call)
        launch = KernelLaunch(grid, values | front.values, forward_maps(config, call), overlaps=front.overlaps)
        return Program((*front.launches, launch), (*front.buffers, *(_TILE_COUNTER if config.dynamic else ())))

    def _packed_program(self, config: AttentionForwardSm90Config, call: Call, device: Device) -> Program:
        """Of packed sequences: as many blocks as there may be tiles for. Those that get none end at once."""
        values = packed_tile_values(call.problem, call.workload)
        grid = max(1, min(most_work_tiles(config, call.workload), self.blocks_per_sm(call.problem, config) * device.sm_count))
        values |= {"launched_blocks": grid, **scale_values(score_unit(call)), **modifier_values(call)}
        front = packed_front(config, call, device, int(values["l2_group_heads"]))
        launch = KernelLaunch(grid, values | front.values, forward_maps(config, call), overlaps=front.overlaps)
        return Program((*front.launches, launch), front.buffers)

    def not_dominated(self, config: AttentionForwardSm90Config, workload: Workload) -> bool:
        """See Family. Packing more heads is for fewer tiles, by a tenth at least: their work is the same, and copies become smaller."""
        if config.pack_gqa == 1:
            return True
        half = dataclasses.replace(config, pack_gqa=config.pack_gqa // 2)
        return work_tiles(config, workload) <= 0.9 * work_tiles(half, workload)

    def config_refusals(self, config: AttentionForwardSm90Config, workload: Workload) -> list[str]:
        """See Family."""
        group = workload.heads_q // max(1, workload.heads_kv)
        if group % config.pack_gqa:
            return [f"pack_gqa must divide the {group} query heads of a key/value head; got {config.pack_gqa}"]
        return []

    def group_unit(self, config: AttentionForwardSm90Config) -> int:
        """See Family. Heads that share a tile are of one group."""
        return config.pack_gqa

    def call_refusals(self, call: Call, config: AttentionForwardSm90Config | None = None) -> list[str]:
        """See Family. What cuTensorMapEncodeTiled would refuse: tensors without elements, strides of 2^40 bytes."""
        if call.problem.is_packed:
            return packed.map_reasons(call, 64) + modifier_refusals(call) + super().call_refusals(call, config)
        reasons, end = [], STRIDE_END // call.problem.dtype.bytes
        if not call.workload.len_kv:
            reasons.append("len_kv must be at least 1 for tensor copies; got 0")
        if call.problem.is_cached:
            reasons += cache_reasons(call.workload)
        for name in TENSORS:
            if (longest := max(call.views[name].strides)) >= end:
                reasons.append(f"strides of {name} must be below {end} elements; got {longest}")
        return reasons + modifier_refusals(call) + super().call_refusals(call, config)

    def context(self, problem: Problem, config: AttentionForwardSm90Config, target: Target) -> dict[str, object]:
        """See Family."""
        producer, consumer = self.registers(problem, config)
        return {
            "element": ELEMENTS[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "linear": has_linear_terms(problem) and config.pack_gqa <= MOST_PACKED,
            "far": far_keys.leaves_out_far_keys(problem, config.pack_gqa),
            "producer_registers": producer,
            "consumer_registers": consumer,
            "shared_bytes": self.shared_bytes(problem, config),
            "blocks_per_sm": self.blocks_per_sm(problem, config),
            **seen_tiles.tile_context(problem, seen_tiles.TileShape(config.queries, config.block_kv)),
            **packed.packed_context(problem, config.queries, overlap=True),
        }

    def instructions(self, problem: Problem, config: AttentionForwardSm90Config) -> str:
        """See Family. The shapes of wgmma for scores and output."""
        element = ELEMENTS[problem.dtype]
        return f"{wgmma.wgmma_ss(element, config.block_kv)}\n{wgmma.wgmma_rs(element, padded(problem.head_dim_v))}"

    def space(self, problem: Problem, target: Target) -> Iterator[AttentionForwardSm90Config]:
        """See Family. Legal ones only: of buffers, the most that fit."""
        keys = (48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
        for warpgroups, block_kv, row_max, scheduler in itertools.product((1, 2, 3), keys, RowMax, Scheduler):
            for ping_pong in (False, True) if warpgroups > 1 else (False,):
                buffers = ((2, 2), (2, 1), (1, 2), (1, 1))
                configs = [AttentionForwardSm90Config(warpgroups, block_kv, 2, *b, row_max, ping_pong, scheduler) for b in buffers]
                legal = [config for config in configs if not self.check(problem, config, target)]
                for config in sorted(legal, key=lambda config: -self.blocks_per_sm(problem, config))[:1]:  # fewer buffers are never faster
                    yield from (dataclasses.replace(config, pack_gqa=heads) for heads in ((1,) if problem.is_packed else PACK_GQA))

    def adapted(self, problem: Problem, config: AttentionForwardSm90Config) -> AttentionForwardSm90Config:
        """See Family."""
        if problem.is_cached:
            return paged_config(config)
        return dataclasses.replace(config, scheduler=Scheduler.DYNAMIC, pack_gqa=1) if problem.is_packed else config

    def default(self, problem: Problem, target: Target) -> AttentionForwardSm90Config:
        """See Family. The model's pick for a long sequence."""
        return _default(problem, target)

    def predict(
        self,
        problem: Problem,
        config: AttentionForwardSm90Config,
        workload: Workload,
        device: Device,
        registers: int | None = None,
        weights: model.HopperWeights = model.FITTED,
    ) -> Prediction:
        """See Family, and model.py. The compiler reports registers at entry, which say nothing here."""
        per_sm, boxes = self.blocks_per_sm(problem, config), tile_boxes(problem, workload, config.block_kv)
        return model.predict(problem, config, equal_lengths(workload), device, per_sm, weights, boxes)

    def traffic(self, problem: Problem, config: AttentionForwardSm90Config, workload: Workload, device: Device) -> Traffic:
        """See Family. A tile's queries are those of the heads that it packs; it reads a block of keys even if it sees none."""
        return tiled_traffic(problem, equal_lengths(workload), config.queries, config.block_kv, config.pack_gqa, least=1)


_TILE_COUNTER = (Buffer("tile_counter", 4, BufferKind.STREAM_COUNTER),)
FAMILY = AttentionForwardSm90()


@cache
def _default(problem: Problem, target: Target) -> AttentionForwardSm90Config:
    device, workload = device_of_target(target), Workload(batch=4, heads_q=16, heads_kv=16, len_q=4096, len_kv=4096)
    legal = [config for config in FAMILY.space(problem, target) if config.pack_gqa == 1]  # all of it is legal
    if not legal:
        FAMILY.require_legal(problem, AttentionForwardSm90Config(2, 64), target)
    if seen_tiles.scatters(problem):
        legal = [config for config in legal if config.divides_blocks] or legal
    return min(legal, key=lambda config: FAMILY.predict(problem, config, workload, device).seconds)
