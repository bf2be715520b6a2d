"""The family for attention backward on Hopper whose blocks are persistent: they claim key tiles, and round dQ beside their other work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from flashgen.codegen.attention import padded
from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device
from flashgen.codegen.families.attention_backward_sm90.family import (
    D_SCORES_STAGES,
    NARROW,
    ROW_THREADS,
    STAGE_BYTES,
    THREADS,
    AttentionBackwardSm90,
)
from flashgen.codegen.families.attention_backward_sm90.launch import PANEL, heads_of_l2_group, panels
from flashgen.codegen.families.attention_backward_sm90.parameters import main_parameters
from flashgen.codegen.families.attention_backward_sm90.registers import accumulators, widest_with_tensors
from flashgen.codegen.far_queries import far_query_kernels, far_query_resources
from flashgen.codegen.key_order import with_key_order
from flashgen.codegen.modifier import adds_to_scores, maps_scores, modifiers_of, reads_scores, with_modifiers
from flashgen.codegen.modifiers.traced import TracedModifier
from flashgen.codegen.operands import Call
from flashgen.codegen.packed import packed_resources
from flashgen.codegen.packed_gradients import gradient_block, gradient_sequences
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import BlockResources, Buffer, BufferKind, KernelText, Waits
from flashgen.codegen.seen_tiles import scatters, tile_kernels, tile_resources
from flashgen.codegen.target import Target
from flashgen.codegen.tensor_gradients import gradient_kernels, gradient_resources
from flashgen.codegen.workload import Workload

from .config import AttentionBackwardPersistentSm90Config

MOST_ACCUMULATORS = 200  # with which a consumer leaves registers to the other warps: by experiment, see registers.py
REGISTERS = (40, 232)  # of a thread of these warps, and of a consumer, then
CLAIM_BYTES, PACKED_CLAIM_BYTES = 48, 64  # WorkClaims::kBytes
MOST_SUM_STAGES = 8
PACKED_QUERIES = 64  # of a tile for which other warps have registers enough, at any head dim
PACKED_QUERIES_CHANGED = 80  # the most where one modifier maps scores and another one adds to them, or scores have elements in memory
WIDEST_CHANGED = 96  # head dims with which there may be so many beside elements in memory
PROGRESS = Parameter("u32*", "d_q_progress")
COUNTER_BYTES = 4  # an int
ZERO_BYTES = 4096  # SumZeros::kBytes
_ZEROED = tuple(Parameter("int", n) for n in ("zeroed_heads", "zeroed_share", "zeroed_counters"))


class AttentionBackwardPersistentSm90(AttentionBackwardSm90):
    """See the module's docstring; the algorithm is templates/kernels/attention_backward_persistent_sm90.cu.j2."""

    name = "attention_backward_persistent_sm90"
    revision = 6
    preference = 4
    persistent = True
    modifiers = (
        *("alibi", "bias", "bias_fp32", "boolean_mask", "chunk", "document_ids", "document_ids_int64", "prefix_len", "sinks", "softcap"),
        *("traced", "window"),
    )
    template = "kernels/attention_backward_persistent_sm90.cu.j2"
    config_type: ClassVar[type[Config]] = AttentionBackwardPersistentSm90Config
    row_parameters = AttentionBackwardSm90.row_parameters.with_fields(PROGRESS, Parameter("int", "progress_counters"))
    parameters = AttentionBackwardSm90.parameters.with_fields(
        *(Parameter("TensorMap", "d_q_map"), PROGRESS, Parameter("u32*", "tile_counter")),
        *(Parameter("u64", f"{n}_reciprocal") for n in ("query_tiles", "heads_q", "group")),
        *(Parameter("int", n) for n in ("work_tiles", "launched_blocks", "sum_tiles")),
    )
    atoms: ClassVar[tuple[str, ...]] = (*AttentionBackwardSm90.atoms, "atomic", "elect_sync")
    tiles: ClassVar[tuple[str, ...]] = (
        *(*AttentionBackwardSm90.tiles, "warpgroup/work_claims", "warpgroup/background_rounding", "common/tile_walk"),
    )

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = super().refusals(problem, target)
        if (widest := max(problem.head_dim, problem.head_dim_v)) > NARROW:
            reasons.append(f"head_dim and head_dim_v must be at most {NARROW}; got {widest}")
        if problem.deterministic:
            reasons.append("deterministic must be false: blocks add to dQ in any order")
        reasons += _mask_reasons(problem)
        fewest = AttentionBackwardPersistentSm90Config(PACKED_QUERIES)
        if not reasons and problem.is_packed and (needed := accumulators(problem, fewest)) > MOST_ACCUMULATORS:
            has = f"need {needed} registers a thread with packed sequences and these modifiers, {MOST_ACCUMULATORS} are available"
            reasons.append(f"accumulators of {PACKED_QUERIES} queries {has}: lower head_dim or head_dim_v")
        if not reasons and (most := widest_with_tensors(problem)) < PACKED_QUERIES:
            has = f"registers of packed sequences with these modifiers have room for tiles of {most} queries"
            reasons.append(f"{has}, fewer than {PACKED_QUERIES}: lower head_dim or head_dim_v")
        return reasons

    def check(self, problem: Problem, config: Any, target: Target) -> list[str]:
        """See Family."""
        reasons = []
        if not 2 <= config.sum_stages <= MOST_SUM_STAGES:
            reasons.append(f"sum_stages must be from 2 to {MOST_SUM_STAGES}; got {config.sum_stages}")
        if config.block_q < (least := self._fewest_queries(problem)):
            reasons.append(f"block_q must be at least {least}, for dK and dV to go out by way of dS; got {config.block_q}")
        if _lacks_registers(problem, config):
            taking = "masks that hide keys of no range, which take" if scatters(problem) else "packed sequences, whose rows take"
            reasons.append(f"block_q must be lower with {taking} registers of other warps; got {config.block_q}")
        return super().check(problem, config, target) + reasons

    def adapted(self, problem: Problem, config: Any) -> Any:
        """See Family. Packed sequences, and masks that hide keys of no range, leave no room for the widest tiles."""
        if _lacks_registers(problem, config):
            return replace(config, block_q=PACKED_QUERIES, sum_stages=MOST_SUM_STAGES)
        return config

    def _fewest_queries(self, problem: Problem) -> int:
        """With which the tiles of dS have room for dK or dV of a work tile."""
        return max(panels(problem.head_dim), panels(problem.head_dim_v)) * PANEL // D_SCORES_STAGES

    def shared_bytes(self, problem: Problem, config: Any) -> int:
        """Dynamic shared memory of a block of the main kernel, in bytes."""
        column_tiles = config.block_q // 8 if config.transposes_d_q else padded(problem.head_dim) // 8
        part = 4 * 128 * column_tiles  # QueryGradient: 16 rows of its accumulators
        rounding = config.sum_stages * (part + STAGE_BYTES + (16 if problem.is_packed else 4)) + self.postprocess_bytes(problem, config)
        rounding += PACKED_CLAIM_BYTES if problem.is_packed else CLAIM_BYTES
        return super().shared_bytes(problem, config) + int(rounding) + ZERO_BYTES * zeroes_beside(problem)

    def kernels(self, problem: Problem, config: Any) -> tuple[KernelText, ...]:
        """See Family. In the order of their launches."""
        rows, main = gradient_block(self.row_parameters, problem), gradient_block(self.parameters, problem, main=True)
        if zeroes_beside(problem):
            rows, main = rows.with_fields(Parameter("int", "zeroed_tiles")), main.with_fields(*_ZEROED)
        return (
            *gradient_sequences(problem),
            *tile_kernels(problem),
            *far_query_kernels(problem),
            KernelText(with_modifiers(with_key_order(rows, problem), problem), "_preprocess", "RowParameters"),
            KernelText(main_parameters(main, problem)),
            *gradient_kernels(problem),
        )

    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        """See Family."""
        own = {"_preprocess": BlockResources(ROW_THREADS, 0), "": BlockResources(THREADS, self.shared_bytes(problem, config))}
        others = {**tile_resources(problem), **far_query_resources(problem), **packed_resources(problem)}
        return {**others, **own, **gradient_resources(problem)}

    def waits(self, problem: Problem) -> Waits:
        """See AttentionBackwardSm90. For the sums of heads, before they round dQ."""
        return Waits.BEGUN

    def grids(self, config: Any, w: Workload, device: Device) -> dict[str, int]:
        """See AttentionBackwardSm90. As many blocks as are resident at once, as they stay."""
        grids = super().grids(config, w, device)
        return {"_preprocess": grids["_preprocess"], "": min(grids[""], device.sm_count)}

    def schedule_values(self, config: Any, call: Call, w: Workload, device: Device) -> dict[str, int | float]:
        """See AttentionBackwardSm90."""
        query_tiles, key_tiles = self.tiles_of_head(config, w)
        values: dict[str, int | float] = {
            "work_tiles": key_tiles * w.heads_kv * w.batch,
            "launched_blocks": self.grids(config, w, device)[""],
            "sum_tiles": query_tiles * w.heads_q * w.batch,
            "progress_counters": _progress_counters(call.problem, call.workload),
        }
        if not zeroes_beside(call.problem):
            return values
        tiles = query_tiles * (w.heads_q // w.heads_kv)
        together = heads_of_l2_group(call.problem, w, key_tiles, device)
        heads = -(-device.sm_count // (key_tiles * together)) * together  # whose work tiles are as many as run at once
        of_heads = {"zeroed_heads": heads, "zeroed_tiles": heads * tiles}
        return values | of_heads | {"zeroed_share": -(-tiles // key_tiles), "zeroed_counters": 1 + w.heads_kv * w.batch}

    def buffers(self, config: Any, call: Call, w: Workload) -> tuple[Buffer, ...]:
        """See AttentionBackwardSm90."""
        progress = Buffer(PROGRESS.name, COUNTER_BYTES * _progress_counters(call.problem, call.workload))
        return (*super().buffers(config, call, w), progress, Buffer("tile_counter", COUNTER_BYTES, BufferKind.STREAM_COUNTER))

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        atoms, tiles = super().files(problem)
        if not zeroes_beside(problem):
            return atoms, tiles
        before = tiles.index("warpgroup/background_rounding")
        return (*atoms, "cp_async_bulk_store"), (*tiles[:before], "warpgroup/sum_zeros", *tiles[before:])

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        """See Family.

        The walk over tiles of all heads of a group is for blocks that are at the same tile. Under a window each block begins at a tile of
        its own, and those of all heads do not fit into the L2. But blocks have about as many tiles, so that they stay at the same head.
        """
        context = super().context(problem, config, target)
        context["walk"] = "HeadWalk" if scatters(problem) or any(one.hides_keys for one in modifiers_of(problem)) else "TileWalk"
        context["zeroes"] = zeroes_beside(problem)
        if accumulators(problem, config) <= MOST_ACCUMULATORS:
            context["producer_registers"], context["consumer_registers"] = REGISTERS
        return context

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """See Family. Of the stages of sums, the most that fit."""
        for block_q, stages in itertools.product((64, 80, 96, 128), (2, 3)):
            configs = [AttentionBackwardPersistentSm90Config(block_q, stages, sums) for sums in (8, 4, 2)]
            yield from [config for config in configs if not self.check(problem, config, target)][:1]


def _mask_reasons(problem: Problem) -> list[str]:
    """Why masks that hide keys of no range, or traced functions, cannot be taken: registers do for masks of dense sequences alone."""
    changes = maps_scores(problem) or adds_to_scores(problem) or reads_scores(problem)
    if scatters(problem) and (changes or problem.is_packed):
        return ["document_ids and mask_mods must be of dense sequences, without what changes scores, in blocks that are persistent"]
    traced = [one for one in modifiers_of(problem) if isinstance(one, TracedModifier)]
    if traced and not scatters(problem):
        return ["score_mod must be None in blocks that are persistent; got one"]
    if traced and (len(problem.modifiers) > 1 or not traced[0].loads_in_blocks):
        return ["mask_mods must be alone, and load what is the same in whole blocks, in blocks that are persistent: else these spill"]
    return []


def _lacks_registers(problem: Problem, config: Any) -> bool:
    """Whether tiles are too wide, by experiment, where other warps need registers: for rows of packed sequences, or to find tiles."""
    if scatters(problem):
        return accumulators(problem, config) > MOST_ACCUMULATORS
    changes, reads = maps_scores(problem) and adds_to_scores(problem), reads_scores(problem)
    widest = PACKED_QUERIES_CHANGED if changes or reads else config.block_q
    widest = PACKED_QUERIES if reads and max(problem.head_dim, problem.head_dim_v) > WIDEST_CHANGED else widest
    return problem.is_packed and (accumulators(problem, config) > MOST_ACCUMULATORS or config.block_q > widest)


def zeroes_beside(problem: Problem) -> bool:
    """Whether the main kernel zeroes most sums of dQ."""
    return scatters(problem)


def _progress_counters(problem: Problem, w: Workload) -> int:
    """Query tiles that are claimed to be rounded; for each key/value head work tiles whose dQ is added, and those whose zeros are there."""
    return 1 + w.batch * w.heads_kv * (1 + zeroes_beside(problem))


FAMILY = AttentionBackwardPersistentSm90()
