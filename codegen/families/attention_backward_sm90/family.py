"""The family for attention backward on Hopper: warp-specialised, on tensor copies, mbarriers and wgmma, by recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

from flashgen.codegen import far_keys, far_queries, packed_gradients, seen_tiles, wgmma
from flashgen.codegen.attention import ELEMENTS, gradient_traffic, padded, problem_reasons
from flashgen.codegen.config import Config, range_reasons
from flashgen.codegen.devices import Device, device_of_target
from flashgen.codegen.family import Family, Prediction, Traffic
from flashgen.codegen.key_order import order_buffers, order_values, with_key_order
from flashgen.codegen.modifier import maps_scores, modifier_refusals, modifier_values, reads_scores, widest_tile, with_modifiers
from flashgen.codegen.modifiers import TAKEN_BY_MOST
from flashgen.codegen.operands import Call
from flashgen.codegen.packed import packed_reasons, packed_resources
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.program import BlockResources, Buffer, KernelLaunch, KernelText, Program, Waits
from flashgen.codegen.score_tensors import batch_values, fetches
from flashgen.codegen.semaphores import files_with_keeper, semaphores, with_semaphores
from flashgen.codegen.target import Target
from flashgen.codegen.tensor_gradients import gradient_buffers, gradient_kernels, gradient_launches, gradient_resources
from flashgen.codegen.workload import Workload, equal_lengths

from . import model
from .config import AttentionBackwardSm90Config
from .launch import PANEL, heads_of_l2_group, map_refusals, panels, size_values, tensor_maps
from .parameters import PARAMETERS, ROW_PARAMETERS, SUM_PARAMETERS, main_parameters
from .registers import ACCUMULATORS, accumulators, is_crowded, modifier_reasons, widest_with_tensors

CONSUMERS, BLOCK_KV = 2, 128  # warpgroups, of 64 keys each
THREADS = 128 * (CONSUMERS + 1)
D_SCORES_STAGES = 2  # tiles of dS: with one, the consumers would have to wait for each other twice a tile
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of a thread
NARROW = 128  # head dims up to here have registers for tiles of 64 queries and more
FEWEST_QUERIES = 32  # of a tile that is worth trying
SEMAPHORE_BYTES = 8  # of shared memory for each stage: SemaphoreKeeper<1>::kBytes
STAGE_BYTES = 16  # of shared memory for each stage of a pipeline: Pipeline<1>::kBytes
FLAG = 4  # fp32 numbers behind row_lse of a tile: RowLse in templates/tile/warpgroup/backward_beside.cuh
ROW_THREADS = 128  # of a block of the preprocess
ROW_THREADS_PER_SM = 1024  # half as many where it reads elements of scores, or looks at each and maps them, or finds its sequence
PACKED_ROW_THREADS_PER_SM = 768  # else it spills


def row_bytes(block_q: int) -> int:
    """Of shared memory for each stage: row_lse with its flag, row_delta, barriers of two pipelines."""
    return 4 * (block_q + FLAG) + 4 * block_q + 2 * STAGE_BYTES


class AttentionBackwardSm90(Family):
    """See the module's docstring; the algorithm is templates/kernels/attention_backward_sm90.cu.j2."""

    name = "attention_backward_sm90"
    revision = 11
    block_kv: ClassVar[int] = BLOCK_KV
    cluster: ClassVar[int] = 1  # blocks that run together, on neighbouring key tiles
    fetches_scores: ClassVar[bool] = True
    persistent: ClassVar[bool] = False  # blocks take one work tile after the other, and round dQ meanwhile
    operation = "backward"
    preference = 3
    modifiers: ClassVar[tuple[str, ...]] = TAKEN_BY_MOST
    template = "kernels/attention_backward_sm90.cu.j2"
    config_type: ClassVar[type[Config]] = AttentionBackwardSm90Config
    parameters, row_parameters, sum_parameters = PARAMETERS, ROW_PARAMETERS, SUM_PARAMETERS
    packs: ClassVar[bool] = True  # computes packed sequences
    atoms: ClassVar[tuple[str, ...]] = (
        *("types", "register", "index", "shared_memory", "shared_pair", "barrier", "named_barrier", "mbarrier", "cp_async_bulk_tensor"),
        *("cp_async_bulk", "setmaxnreg", "wgmma", "wgmma_transposed", "stmatrix", "stmatrix_trans", "red", "cvt", "set_f16", "cvt_f32"),
        *("ex2", "rcp", "mul", "shfl_sync", "vote_sync", "mma_sync", "griddepcontrol"),
    )
    tiles: ClassVar[tuple[str, ...]] = (
        *("common/shared_regions", "common/tile_scheduler", "common/sequences", "common/score_chain", "common/softmax_rows"),
        *("common/lse", "common/row_statistics", "warp/exact_rows"),
        *("warpgroup/pipeline", "warpgroup/panel_tile", "warpgroup/gemm", "warp/score_gradients", "warpgroup/transposed_operand"),
        *("warpgroup/query_gradient", "warpgroup/backward_beside", "common/key_order", "common/key_work"),
        *("warpgroup/backward_inputs", "warpgroup/store_columns", "warpgroup/narrow_consumer"),
    )

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation, self.modifiers, self.packs) + modifier_reasons(problem)
        reasons += packed_reasons(problem)
        if (needed := accumulators(problem, AttentionBackwardSm90Config(FEWEST_QUERIES))) > ACCUMULATORS:
            tile = f"dK, dV and the accumulators of {FEWEST_QUERIES} queries"
            reasons.append(f"{tile} need {needed} registers a thread, {ACCUMULATORS} are available: lower head_dim or head_dim_v")
        if target.name != "sm_90a":
            reasons.append(f"target must be sm_90a; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: Any, target: Target) -> list[str]:
        """See Family."""
        limits = (("block_q", 16, min(128, widest_tile(problem), widest_with_tensors(problem)), 16), ("stages", 2, 4, 1))
        reasons = self.refusals(problem, target) + range_reasons(config, limits)
        return reasons or seen_tiles.block_reasons(problem, config, BLOCK_KV) or self._resource_reasons(problem, config, target)

    def _resource_reasons(self, problem: Problem, config: Any, target: Target) -> list[str]:
        reasons = []
        shared, available = self.shared_bytes(problem, config), target.shared_memory_per_block
        if shared > available:
            has = f"{target.name} has {available} B a block"
            reasons.append(f"needs {shared} B of shared memory, {has}: lower block_q or stages")
        if (needed := accumulators(problem, config)) > ACCUMULATORS:
            lower = "block_q, or do without split" if config.split else "block_q"
            reasons.append(f"needs {needed} registers a thread for accumulators, {ACCUMULATORS} are available: lower {lower}")
        return reasons

    def shared_bytes(self, problem: Problem, config: Any) -> int:
        """Dynamic shared memory of a block of the main kernel, in bytes."""
        of_row = panels(problem.head_dim) + panels(problem.head_dim_v)
        rows = (BLOCK_KV + config.stages * config.block_q) * of_row + D_SCORES_STAGES * config.block_q * panels(BLOCK_KV)
        rows += bool(problem.modifiers and fetches(problem)) * config.block_q * BLOCK_KV // PANEL
        of_stages = config.stages * (row_bytes(config.block_q) + SEMAPHORE_BYTES * problem.deterministic)
        words = padded(seen_tiles.word_bytes(problem, config.stages, 2)) if problem.modifiers else 0
        return int(rows * PANEL * problem.dtype.bytes + of_stages + words)

    def postprocess_bytes(self, problem: Problem, config: Any) -> int:
        """Of the last kernel: a tile of dQ."""
        return panels(problem.head_dim) * PANEL * problem.dtype.bytes * int(config.block_q)

    def kernels(self, problem: Problem, config: Any) -> tuple[KernelText, ...]:
        """See Family. In the order of their launches."""
        rows, sums = (packed_gradients.gradient_block(block, problem) for block in (self.row_parameters, self.sum_parameters))
        return (
            *packed_gradients.gradient_sequences(problem),
            *seen_tiles.tile_kernels(problem),
            *far_queries.far_query_kernels(problem),
            KernelText(with_modifiers(with_key_order(with_semaphores(rows, problem), problem), problem), "_preprocess", "RowParameters"),
            KernelText(main_parameters(packed_gradients.gradient_block(self.parameters, problem, main=True, sums=False), problem)),
            KernelText(sums, "_postprocess", "SumParameters"),
            *gradient_kernels(problem),
        )

    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        """See Family."""
        return {
            **{**seen_tiles.tile_resources(problem), **far_queries.far_query_resources(problem), **packed_resources(problem)},
            "_preprocess": BlockResources(ROW_THREADS, 0),
            "": BlockResources(THREADS, self.shared_bytes(problem, config)),
            "_postprocess": BlockResources(self.postprocess_threads(problem, config), self.postprocess_bytes(problem, config)),
            **gradient_resources(problem),
        }

    def postprocess_threads(self, problem: Problem, config: Any) -> int:
        """A warp for each warp of the consumers that has some of dQ."""
        return 32 * (padded(problem.head_dim) // 16 if config.transposes_d_q else int(config.block_q) // 16)

    def program(self, config: Any, call: Call, device: Device) -> Program:
        """See Family."""
        problem, w = call.problem, packed_gradients.room(call, config.block_q, self.block_kv)
        longest = packed_gradients.one_sequence(call.workload) if problem.is_packed else w
        l2_heads = heads_of_l2_group(problem, longest, self.tiles_of_head(config, longest)[1] * self.cluster, device)
        known = size_values(call, w, self.tiles_of_head(config, w), l2_heads)
        known |= modifier_values(call) | (batch_values(call) if problem.modifiers else {})
        known |= self.schedule_values(config, call, w, device)
        seen = seen_tiles.tile_launch(call, seen_tiles.TileShape(config.block_q, self.block_kv, rows_are_keys=True))
        known |= seen.values | order_values(problem, seen, w)
        maps, grids = tensor_maps(config.block_q, self.block_kv, call), self.grids(config, w, device)
        launches = [
            KernelLaunch(
                grids[kernel.suffix],
                kernel.parameters.values_of(known),
                {field.name: maps[field.name] for field in kernel.parameters.tensor_maps},
                kernel.suffix,
                waits=Waits.NOBODY if kernel.suffix else self.waits(problem),
                overlaps=problem.is_packed or kernel.suffix != "_preprocess",
            )
            for kernel in self.kernels(problem, config)
            if kernel.suffix in grids
        ]
        first, lists = packed_gradients.sequence_launches(call, config.block_q, self.block_kv, l2_heads, device)
        far, of_far = far_queries.far_query_launch(call, self.block_kv)
        buffers = (*self.buffers(config, call, w), *gradient_buffers(call), *seen.buffers, *order_buffers(problem, seen), *lists, *of_far)
        return Program((*first, *seen.launches, *far, *launches, *gradient_launches(call, buffers)), buffers)

    def tiles_of_head(self, config: Any, w: Workload) -> tuple[int, int]:
        """Query tiles of a query head, and work tiles of a key/value head."""
        return -(-w.len_q // config.block_q), -(-w.len_kv // (self.block_kv * self.cluster))

    def waits(self, problem: Problem) -> Waits:
        """For which others blocks of the main kernel wait."""
        return Waits.EARLIER if problem.deterministic else Waits.NOBODY

    def grids(self, config: Any, w: Workload, device: Device) -> dict[str, int]:
        """Blocks of each kernel but those of `gradient_kernels`, by its suffix."""
        query_tiles, key_tiles = self.tiles_of_head(config, w)
        tiles = w.batch * w.heads_q * query_tiles
        return {"_preprocess": tiles, "": key_tiles * self.cluster * w.heads_kv * w.batch, "_postprocess": tiles}

    def schedule_values(self, config: Any, call: Call, w: Workload, device: Device) -> dict[str, int | float]:
        """What is known of the work tiles of a launch beside the sizes of the problem: nothing where each block has one."""
        return {}

    def buffers(self, config: Any, call: Call, w: Workload) -> tuple[Buffer, ...]:
        """What the kernels share. w: the call's workload, or one with room for its packed sequences."""
        problem = call.problem
        tiles = w.batch * w.heads_q * self.tiles_of_head(config, w)[0]
        rows = tiles * int(config.block_q)
        sizes = {"row_lse": rows + tiles * FLAG, "row_delta": rows, "row_shift": rows, "d_q_sum": rows * padded(problem.head_dim)}
        return (*(Buffer(name, 4 * size) for name, size in sizes.items()), *semaphores(problem, tiles, self.cluster))

    def call_refusals(self, call: Call, config: Any = None) -> list[str]:
        """See Family. What cuTensorMapEncodeTiled would refuse: tensors without elements, strides of 2^40 bytes."""
        return map_refusals(call) + modifier_refusals(call) + super().call_refusals(call, config)

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        """See Family. Threads that wait for the turn of tiles that are sought one by one need more registers than others do."""
        seeks = problem.deterministic and seen_tiles.scatters(problem)
        return {
            "element": ELEMENTS[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "deterministic": problem.deterministic,
            "far": far_queries.leaves_out_far_queries(problem),
            "block_kv": self.block_kv,
            "cluster": self.cluster,
            "threads": THREADS,
            "d_scores_stages": D_SCORES_STAGES,
            "row_threads": ROW_THREADS,
            "row_threads_per_sm": (PACKED_ROW_THREADS_PER_SM if problem.is_packed else ROW_THREADS_PER_SM)
            // (1 + (reads_scores(problem) or (seen_tiles.scatters(problem) and (maps_scores(problem) or problem.is_packed)))),
            "producer_registers": PRODUCER_REGISTERS + 16 * seeks,
            "consumer_registers": CONSUMER_REGISTERS - 8 * seeks,
            "shared_bytes": self.shared_bytes(problem, config),
            "postprocess_threads": self.postprocess_threads(problem, config),
            "postprocess_bytes": self.postprocess_bytes(problem, config),
            **seen_tiles.tile_context(problem, seen_tiles.TileShape(config.block_q, self.block_kv, rows_are_keys=True)),
            **packed_gradients.gradient_context(problem, config.block_q, self.block_kv, overlap=True),
        }

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        files = packed_gradients.with_gradient_files(files_with_keeper(self, problem), problem)
        return far_keys.with_far_files(files) if far_queries.leaves_out_far_queries(problem) else files

    def instructions(self, problem: Problem, config: Any) -> str:
        """See Family. The shapes of wgmma: of S and dP, of dK and dV, of dQ."""
        element, columns = ELEMENTS[problem.dtype], padded(problem.head_dim)
        widths = sorted({columns, padded(problem.head_dim_v)})
        atoms = [wgmma.wgmma_ss(element, config.block_q), *(wgmma.wgmma_rs(element, width) for width in widths)]
        if not config.transposes_d_q:
            return "\n".join((*atoms, wgmma.wgmma_ss_trans_b(element, columns)))
        parts = [config.block_q] + [config.block_q // 2] * (panels(columns) % 2)  # the middle panel is shared
        return "\n".join((*atoms, *(wgmma.wgmma_ss_trans_a(element, queries) for queries in parts)))

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """See Family. A split helps where dQ is transposed and head dims are narrow."""
        widest = min(widest_tile(problem), widest_with_tensors(problem))
        narrow = max(problem.head_dim, problem.head_dim_v) <= NARROW and widest >= 64
        queries = (64, 80, 96, 128) if narrow and not is_crowded(problem) else (FEWEST_QUERIES, 48, 64, 80)
        for block_q, stages, split in itertools.product(queries, (2, 3), (False, True)):
            if split and (block_q == 128 or not narrow):
                continue
            config = AttentionBackwardSm90Config(block_q, stages, split)
            if not self.check(problem, config, target):
                yield config

    def default(self, problem: Problem, target: Target) -> Any:
        """See Family. The model's pick for a long sequence."""
        return default_of(self, problem, target)

    def predict(self, problem: Problem, config: Any, workload: Workload, device: Device, registers: int | None = None) -> Prediction:
        """See Family, and model.py. The compiler reports registers at entry, which say nothing here."""
        return model.predict(problem, config, equal_lengths(workload), device, self.block_kv, self.sum_cycles(config), self.persistent)

    def traffic(self, problem: Problem, config: Any, workload: Workload, device: Device) -> Traffic:
        """See Family and `gradient_traffic`. Copies count what lies within a tensor, not the columns beyond the head dim of a box of 64."""
        keys = self.block_kv * self.cluster  # that blocks of a cluster divide
        return gradient_traffic(problem, equal_lengths(workload), config.block_q, keys, flag_bytes=4 * FLAG, readers=self.cluster)

    def sum_cycles(self, config: Any) -> float:
        """What a number costs that is added to dQ, of an SM."""
        return model.SPLIT_SUM_CYCLES if config.split else model.SUM_CYCLES


FAMILY = AttentionBackwardSm90()


@cache
def default_of(family: Family, problem: Problem, target: Target) -> Any:
    """The model's pick of a family's space for a long sequence."""
    device, workload = device_of_target(target), Workload(batch=4, heads_q=16, heads_kv=16, len_q=4096, len_kv=4096)
    legal = family.legal_configs(problem, target)
    if not legal:
        family.require_legal(problem, next(iter(family.space(problem, target)), AttentionBackwardSm90Config(64)), target)
    return min(legal, key=lambda config: family.predict(problem, config, workload, device).seconds)
