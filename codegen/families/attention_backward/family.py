"""The generic backward family: FlashAttention-2's algorithm 2, for every architecture from sm_80 on.

Three kernels: what each query row needs (row_lse, row_delta), the gradients, and dQ from its fp32 sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from flashgen.codegen import packed_gradients, seen_tiles
from flashgen.codegen.attention import ELEMENTS, gradient_traffic, l2_group_heads, padded, problem_reasons
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Family, Prediction, Traffic
from flashgen.codegen.modifier import adds_to_scores, maps_scores, modifier_refusals, opens_keys, reads_scores, with_modifiers
from flashgen.codegen.modifiers import TAKEN_BY_MOST
from flashgen.codegen.operands import Call
from flashgen.codegen.packed import most_key_tiles, most_tiles, packed_reasons, packed_resources
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.program import BlockResources, KernelText, Program, Waits
from flashgen.codegen.semaphores import files_with_semaphores, semaphores, with_semaphores
from flashgen.codegen.target import Target
from flashgen.codegen.tensor_gradients import gradient_kernels, gradient_resources
from flashgen.codegen.workload import Workload, equal_lengths

from . import model
from .config import AttentionBackwardConfig, Hoisted
from .launches import gradient_program
from .parameters import PARAMETERS, ROW_PARAMETERS, SUM_PARAMETERS

ROW_THREADS = 256  # of a block of the first kernel
ROW_THREADS_PER_SM = 1024  # half as many where it reads elements of scores or looks at each key: else it spills on older targets
PACKED_ROW_THREADS_PER_SM = 768  # else it spills
L2_GROUP_SHARE = 2  # one part in so many: blocks of neighbouring L2 groups run together
LEAST_WITH_TENSORS = AttentionBackwardConfig(32, 64, 16, 8, 2, 16, 1)  # where each score has an element in memory less of it spills
MAX_TILES = 2**31 - 1  # over batch and heads, of queries and of keys: blocks of a launch


class AttentionBackward(Family):
    """See the module's docstring; the algorithm is templates/kernels/attention_backward.cu.j2."""

    name = "attention_backward"
    revision = 8
    operation = "backward"
    modifiers = TAKEN_BY_MOST
    template = "kernels/attention_backward.cu.j2"
    config_type = AttentionBackwardConfig
    parameters = PARAMETERS
    row_parameters = ROW_PARAMETERS
    sum_parameters = SUM_PARAMETERS
    atoms = (
        *("types", "register", "index", "shared_memory", "shared_pair", "barrier", "cp_async", "ldmatrix", "mma_sync"),
        *("cvt", "set_f16", "cvt_f32", "ex2", "rcp", "mul", "shfl_sync", "vote_sync", "red"),
    )
    tiles = (
        *("warp/shared_tile", "common/shared_regions", "common/tile_scheduler", "common/sequences", "common/score_chain"),
        *("common/softmax_rows", "common/lse", "common/row_statistics", "warp/exact_rows"),
        *("warp/load", "warp/load_tile", "warp/gemm", "warp/query_loader", "warp/column_group", "warp/score_gradients"),
        *("warp/gradient_products", "warp/gradient_sum", "warp/epilogue", "warp/backward_beside"),
    )

    # Registers that a thread needs beside what it accumulates and holds, while it has S^T and dP^T, and while it has dQ.
    registers_beside_scores, registers_beside_dq = 60, 44
    registers_of_tensors = 32  # the same, where each score has an element in memory, beside those of a step
    spare_registers = 20  # that a default config leaves: the assembler takes a few more on some targets

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation, self.modifiers, packed=True) + packed_reasons(problem)
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        if not reasons and reads_scores(problem):
            needed, has = self.shared_bytes(problem, LEAST_WITH_TENSORS), target.shared_memory_per_block
            if needed > has:
                reasons.append(f"a bias and a mask need {needed} B of shared memory at these head dims, {target.name} has {has} B a block")
        return reasons

    def check(self, problem: Problem, config: AttentionBackwardConfig, target: Target) -> list[str]:
        """See Family."""
        reasons, c = self.refusals(problem, target), config
        choices = {
            "block_q": (32, 64, 128),
            "warps": (2, 4, 8, 16),
            "column_groups": (1, 2),
            "rows_dq": (16, 32),
            "stages": (1, 2),
            "blocks_per_sm": (1, 2, 3, 4),
        }
        for name, allowed in choices.items():
            if (value := getattr(c, name)) not in allowed:
                nearest = min(allowed, key=lambda choice: abs(choice - value))
                reasons.append(f"{name} must be one of {', '.join(map(str, allowed))}; got {value} (nearest: {nearest})")
        if reasons:
            return reasons
        rows = (c.warps // c.column_groups * 16, c.warps // c.column_groups * 32)
        if c.block_kv not in rows:
            nearest = min(rows, key=lambda n: abs(n - c.block_kv))
            given = f"{rows[0]} or {rows[1]} with warps {c.warps} and column_groups {c.column_groups}"
            reasons.append(f"block_kv must give each warp 16 or 32 rows, so {given}; got {c.block_kv} (nearest: {nearest})")
        columns = c.block_q // c.column_groups
        steps = [step for step in range(16, columns + 1, 16) if columns % step == 0]
        if c.step_q not in steps:
            nearest = min(steps, key=lambda n: abs(n - c.step_q))
            reasons.append(
                f"step_q must be a multiple of 16 that divides block_q / column_groups {columns}; got {c.step_q} (nearest: {nearest})"
            )
        if c.block_q // c.rows_dq > c.warps:
            reasons.append(f"rows_dq must be at least block_q / warps {c.block_q / c.warps:g}; got {c.rows_dq}")
        if c.block_q > c.warps * 64:
            reasons.append(f"block_q must be at most 64 a warp: {c.warps * 64}; got {c.block_q}")
        return reasons or seen_tiles.block_reasons(problem, config) or self._resource_reasons(problem, config, target)

    def _resource_reasons(self, problem: Problem, config: AttentionBackwardConfig, target: Target) -> list[str]:
        reasons = []
        threads, blocks, shared = config.warps * 32, config.blocks_per_sm, self.shared_bytes(problem, config)
        cap = min(target.registers_per_thread, target.registers_per_sm // (threads * blocks) // 8 * 8)
        needed = self.registers_needed(problem, config)
        if shared > target.shared_memory_per_block:
            has = f"{target.name} has {target.shared_memory_per_block} B a block"
            reasons.append(f"needs {shared} B of shared memory, {has}: lower block_q, block_kv or stages")
        elif blocks * (shared + target.shared_memory_reserved) > target.shared_memory_per_sm:
            needs, has = blocks * (shared + target.shared_memory_reserved), f"{target.name} has {target.shared_memory_per_sm} B an SM"
            fit = target.shared_memory_per_sm // (shared + target.shared_memory_reserved)
            reasons.append(f"needs {needs} B of shared memory with blocks_per_sm {blocks}, {has}: lower it to {fit}")
        if needed > cap:
            has = f"{cap} are available with {threads} threads and blocks_per_sm {blocks}"
            reasons.append(f"needs about {needed} registers a thread, {has}: lower step_q or block_kv, or raise column_groups")
        if blocks * threads > target.threads_per_sm:
            has = f"{target.name} has {target.threads_per_sm} an SM"
            reasons.append(f"blocks_per_sm {blocks} needs {blocks * threads} threads, {has}: lower blocks_per_sm or warps")
        return reasons

    def registers_needed(self, problem: Problem, config: AttentionBackwardConfig) -> int:
        """A thread's registers, about: dK and dV, what it holds of S^T and dP^T or of dQ, hoisted operands, and the rest."""
        c, d, dv = config, padded(problem.head_dim), padded(problem.head_dim_v)
        row_tiles, groups_dq = c.key_rows // 16, c.warps // (c.block_q // c.rows_dq)

        def accumulated(tiles: int, width: int, groups: int) -> int:
            return tiles * -(-width // 16 // groups) * 8

        sums = accumulated(row_tiles, d, c.column_groups) + accumulated(row_tiles, dv, c.column_groups)
        hoisted = {Hoisted.NONE: 0, Hoisted.VALUES: dv, Hoisted.BOTH: d + dv}[c.hoisted] // 4 * row_tiles
        while_scores = (
            row_tiles * c.step_q + self.registers_beside_scores + (row_tiles * c.step_q + self.registers_of_tensors) * reads_scores(problem)
        )
        return sums + hoisted + max(while_scores, accumulated(c.rows_dq // 16, d, groups_dq) + self.registers_beside_dq)

    def kernels(self, problem: Problem, config: AttentionBackwardConfig) -> tuple[KernelText, ...]:
        """See Family. In the order in which they are launched."""
        rows, sums = (packed_gradients.gradient_block(block, problem) for block in (self.row_parameters, self.sum_parameters))
        main = packed_gradients.gradient_block(self.parameters, problem, main=True, sums=False)
        return (
            *packed_gradients.gradient_sequences(problem),
            *seen_tiles.tile_kernels(problem),
            KernelText(with_modifiers(with_semaphores(rows, problem), problem), "_preprocess", "RowParameters"),
            KernelText(with_modifiers(with_semaphores(seen_tiles.with_seen_tiles(main, problem), problem), problem)),
            KernelText(sums, "_postprocess", "SumParameters"),
            *gradient_kernels(problem),
        )

    def resources(self, problem: Problem, config: AttentionBackwardConfig) -> Mapping[str, BlockResources]:
        """See Family."""
        return {
            **seen_tiles.tile_resources(problem),
            **packed_resources(problem),
            "_preprocess": BlockResources(ROW_THREADS, 0),
            "": BlockResources(config.warps * 32, self.shared_bytes(problem, config)),
            "_postprocess": BlockResources(config.block_q * 2, self.sum_bytes(problem, config)),
            **gradient_resources(problem),
        }

    def shared_bytes(self, problem: Problem, config: AttentionBackwardConfig) -> int:
        """Shared memory of the main kernel: K, V, dS (and P, where warps share keys), and stages of Q, dO and their rows' statistics."""
        columns = padded(problem.head_dim) + padded(problem.head_dim_v)
        stage = config.block_q * (columns * problem.dtype.bytes + 2 * 4)
        return config.block_kv * (columns + config.column_groups * config.block_q) * problem.dtype.bytes + config.stages * stage

    def sum_bytes(self, problem: Problem, config: AttentionBackwardConfig) -> int:
        """Of the last kernel: dQ, rounded."""
        return config.block_q * padded(problem.head_dim) * problem.dtype.bytes

    def program(self, config: AttentionBackwardConfig, call: Call, device: Device) -> Program:
        """See Family. A call without queries, or without keys, has one tile of them: there are zeros to write."""
        problem, w = call.problem, call.workload
        if problem.is_packed:
            return self._packed_program(config, call, device)
        query_tiles, key_tiles = self._tiles(config, w)
        # A block reads Q and dO of a group's heads as often as there are key tiles: keys take the place of queries in the launch's order.
        turned = Workload(w.batch, w.heads_kv, w.heads_kv, w.len_kv, w.len_q * (w.heads_q // w.heads_kv))
        l2_heads = l2_group_heads(problem, turned, device.l2_bytes // L2_GROUP_SHARE)
        counts = {"query_tiles": query_tiles, "key_tiles": key_tiles, "l2_group_heads": l2_heads, "l2_group_tiles": l2_heads * key_tiles}
        waits = Waits.EARLIER if problem.deterministic else Waits.NOBODY
        more = semaphores(problem, w.batch * w.heads_q * query_tiles, config.warps)
        blocks = key_tiles * w.batch * w.heads_kv
        seen = seen_tiles.tile_launch(call, seen_tiles.TileShape(config.block_q, config.block_kv, rows_are_keys=True))
        return gradient_program(self.kernels(problem, config), call, counts, blocks, config.block_q, waits, more, seen)

    def _packed_program(self, config: AttentionBackwardConfig, call: Call, device: Device) -> Program:
        """Of packed sequences: as many blocks as there may be tiles for. Those that get none end at once."""
        problem, w = call.problem, call.workload
        query_tiles, longest = max(1, most_tiles(w, config.block_q)), packed_gradients.one_sequence(w)
        turned = Workload(1, w.heads_kv, w.heads_kv, longest.len_kv, longest.len_q * (w.heads_q // w.heads_kv))
        l2_heads = l2_group_heads(problem, turned, device.l2_bytes // L2_GROUP_SHARE)
        counts = {"query_tiles": query_tiles, "l2_group_heads": l2_heads}
        waits = Waits.EARLIER if problem.deterministic else Waits.NOBODY
        first, lists = packed_gradients.sequence_launches(call, config.block_q, config.block_kv, l2_heads, device)
        more = (*semaphores(problem, w.heads_q * query_tiles, config.warps), *lists)
        blocks = max(1, most_key_tiles(w, config.block_kv) * w.heads_kv)
        tiles = seen_tiles.tile_launch(call, seen_tiles.TileShape(config.block_q, config.block_kv, rows_are_keys=True))
        seen = tiles._replace(launches=(*first, *tiles.launches))
        return gradient_program(self.kernels(problem, config)[1:], call, counts, blocks, config.block_q, waits, more, seen)

    def _tiles(self, config: AttentionBackwardConfig, workload: Workload) -> tuple[int, int]:
        """Of queries and of keys, at least one."""
        return max(1, -(-workload.len_q // config.block_q)), max(1, -(-workload.len_kv // config.block_kv))

    def call_refusals(self, call: Call, config: AttentionBackwardConfig | None = None) -> list[str]:
        """See Family. Blocks are counted in an int."""
        w = call.workload
        if call.problem.is_packed:
            return packed_gradients.gradient_call_reasons(call, 32, 32) + modifier_refusals(call)
        counts = {"q": w.batch * w.heads_q * -(-w.len_q // 32), "k": w.batch * w.heads_kv * -(-w.len_kv // 32)}
        return modifier_refusals(call) + [
            f"{name} must have at most {MAX_TILES} tiles of 32 rows; got {count}" for name, count in counts.items() if count > MAX_TILES
        ]

    def context(self, problem: Problem, config: AttentionBackwardConfig, target: Target) -> dict[str, object]:
        """See Family. Reductions of 16 bytes came with sm_90."""
        return {
            "element": ELEMENTS[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "deterministic": problem.deterministic,
            "vector_reductions": target.capability >= (9, 0),
            "row_threads": ROW_THREADS,
            "row_threads_per_sm": (PACKED_ROW_THREADS_PER_SM if problem.is_packed else ROW_THREADS_PER_SM)
            // (1 + (reads_scores(problem) or seen_tiles.scatters(problem))),
            "shared_bytes": self.shared_bytes(problem, config),
            "sum_bytes": self.sum_bytes(problem, config),
            **seen_tiles.tile_context(problem, seen_tiles.TileShape(config.block_q, config.block_kv, rows_are_keys=True)),
            **packed_gradients.gradient_context(problem, config.block_q, config.block_kv, overlap=False),
        }

    def files(self, problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See Family."""
        return packed_gradients.with_gradient_files(files_with_semaphores(self, problem), problem)

    def space(self, problem: Problem, target: Target) -> Iterator[AttentionBackwardConfig]:
        """See Family."""
        tiles = itertools.product((32, 64, 128), (32, 64, 128), (16, 32, 64), (4, 8), (1, 2), (16, 32), (1, 2), Hoisted, (1, 2))
        for block_q, block_kv, step_q, warps, groups, rows_dq, stages, hoisted, blocks in tiles:
            yield AttentionBackwardConfig(block_q, block_kv, step_q, warps, groups, rows_dq, stages, hoisted, blocks)

    def default(self, problem: Problem, target: Target) -> AttentionBackwardConfig:
        """See Family. The first one of a list, the largest tiles first, that leaves registers to spare; else the last legal one."""
        made, looks = AttentionBackwardConfig, seen_tiles.scatters(problem)
        changes = maps_scores(problem) or adds_to_scores(problem) or opens_keys(problem) or looks
        narrow = (made(128, 128, 32, 8, 1, 16, 2), made(128, 128, 32, 8, 1, 16, 1)) if problem.head_dim <= 96 else ()
        hides_much = "chunk" in problem.modifiers or {"prefix_len", "window"} <= {*problem.modifiers}  # they would spill on sm_80
        many = target.capability >= (10, 0) or (problem.is_packed and problem.deterministic)
        hides_much |= looks and problem.head_dim > 96 and many  # and it on sm_100a, or where there is much beside it
        wide = () if hides_much else (made(64, 128, 32, 8, 1, 16, 2), made(64, 128, 32, 8, 1, 16, 1))
        rows_dq = 32 if changes and target.capability < (12, 0) else 16  # with 16 it spills where scores change, with a prefix or looks
        choices = (
            *narrow,
            *wide,
            *(() if problem.modifiers else (made(64, 64, 32, 8, 2, 16, 2),)),  # with a window it spills on sm_87
            *(() if reads_scores(problem) else (made(64, 64, 32, 8, 2, 16, 1),)),  # with a mask it spills at head dim 128
            made(32, 64, 16, 8, 2, 16, 1),
            made(32, 32, 16, 4, 2, rows_dq, 1),
            *((LEAST_WITH_TENSORS,) if reads_scores(problem) else ()),
        )
        legal: list[AttentionBackwardConfig] = [choice for choice in choices if not self.check(problem, choice, target)]
        if not legal:
            self.require_legal(problem, choices[-1], target)
        most = target.registers_per_thread - self.spare_registers
        return next((choice for choice in legal if self.registers_needed(problem, choice) <= most), legal[-1])

    def predict(
        self, problem: Problem, config: AttentionBackwardConfig, workload: Workload, device: Device, registers: int | None = None
    ) -> Prediction:
        """See Family, and model.py."""
        return model.predict(problem, config, equal_lengths(workload), device)

    def traffic(self, problem: Problem, config: AttentionBackwardConfig, workload: Workload, device: Device) -> Traffic:
        """See Family and `gradient_traffic`."""
        return gradient_traffic(problem, equal_lengths(workload), config.block_q, config.block_kv)


FAMILY = AttentionBackward()
