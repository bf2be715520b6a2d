"""Attention as it was first written down (Vaswani et al. 2017), for every architecture from sm_80 on: S = Q K^T, P = softmax(S), O = P V.

Three kernels with S and P in global memory between them: what FlashAttention is measured against. It runs where it is asked for by name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from flashgen.codegen.attention import ELEMENTS, TENSORS, l2_group_heads, padded, problem_reasons, reciprocal, scale_values, visits
from flashgen.codegen.config import range_reasons
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Family, Prediction, Traffic
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.program import BlockResources, Buffer, KernelLaunch, KernelText, Program
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from . import model
from .config import StandardAttentionConfig

ROW_UNIT = 16  # rows of S and P begin at multiples of so many elements: at sectors of 32 bytes in both
L2_GROUP_SHARE = 2  # one part in so many: blocks of neighbouring L2 groups run together
SOFTMAX_THREADS_PER_SM = 1024  # what the launch bounds of the softmax make room for
MAX_ROWS = 2**31 - 1024  # over batch and heads: the softmax counts them in an int


def _strides(*tensors: str) -> tuple[Parameter, ...]:
    return tuple(Parameter("i64", f"{tensor}_{dim}") for tensor in tensors for dim in ("batch", "head", "row"))


_ORDER_RECIPROCALS = tuple(Parameter("u64", f"{n}_reciprocal") for n in ("heads_q", "group", "l2_group_heads", "l2_group_tiles"))
_ORDER = tuple(Parameter("int", n) for n in ("heads_q", "len_q", "len_kv", "query_tiles", "l2_group_heads", "l2_group_tiles"))
_SCORES = (
    *(Parameter("const Element*", n) for n in ("q", "k")),
    Parameter("float*", "S"),
    *_strides("q", "k", "score"),
    *_ORDER_RECIPROCALS,
    *_ORDER,
)
_SOFTMAX = (
    Parameter("const float*", "S"),
    Parameter("Element*", "P"),
    Parameter("float*", "lse"),
    Parameter("i64", "score_row"),
    Parameter("u64", "len_q_reciprocal"),
    *(Parameter("int", n) for n in ("rows", "len_q", "len_kv", "row_warps")),
    *(Parameter("float", n) for n in ("scale_log2", "ln2_hi", "ln2_lo")),
)
_OUTPUT = (
    *(Parameter("const Element*", n) for n in ("P", "v")),
    Parameter("Element*", "out"),
    *_strides("score", "v", "out"),
    *_ORDER_RECIPROCALS,
    *_ORDER,
)


def _scores_read(problem: Problem, workload: Workload) -> int:
    """Scores of a head that the softmax reads at once: of each row those that it sees, up to a multiple of 4."""
    len_q, len_kv = workload.len_q, workload.len_kv
    if problem.mask is Mask.FULL:
        return len_q * (-(-len_kv // 4) * 4)

    def of_rows_up_to(visible: int) -> int:  # of rows that see 1, 2, .. keys
        quads, rest = divmod(visible, 4)
        return 4 * (quads + 1) * (2 * quads + rest)

    return of_rows_up_to(len_kv) - of_rows_up_to(max(0, len_kv - len_q))


class StandardAttention(Family):
    """See the module's docstring; the algorithm is templates/kernels/standard_attention.cu.j2."""

    name = "standard_attention"
    revision = 6
    template = "kernels/standard_attention.cu.j2"
    config_type = StandardAttentionConfig
    parameters = ParameterBlock(_SCORES)
    softmax_parameters = ParameterBlock(_SOFTMAX)
    output_parameters = ParameterBlock(_OUTPUT)
    atoms = (
        *("types", "register", "index", "shared_memory", "barrier", "cp_async", "ldmatrix", "mma_sync"),
        *("cvt", "ex2", "mul", "shfl_sync"),
    )
    tiles = (
        *(
            "warp/shared_tile",
            "common/shared_regions",
            "common/tile_scheduler",
            "common/sequences",
            "common/score_chain",
            "warp/load",
            "warp/load_tile",
            "warp/tile_pipeline",
            "warp/gemm",
            "warp/store_scores",
        ),
        *("common/softmax_rows", "common/lse", "warp/row_slice", "warp/epilogue"),
    )
    automatic = False
    preference = -1

    # Registers a thread needs beside what it accumulates, or beside the scores that it holds.
    scores_registers_beside, softmax_registers_beside, output_registers_beside = 70, 30, 38

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation)
        if target.capability < (8, 0):
            reasons.append(f"target must be sm_80 or newer; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: StandardAttentionConfig, target: Target) -> list[str]:
        """See Family."""
        reasons = self.refusals(problem, target)
        ranges = (("warps", 2, 16, 1), ("block_kv", 16, 256, 16), ("stages", 2, 4, 1), ("blocks_per_sm", 1, 8, 1), ("row_scores", 4, 64, 4))
        reasons += range_reasons(config, ranges)
        powers = [2**n for n in range(6)]
        if config.softmax_warps not in powers:
            nearest = min(powers, key=lambda power: abs(power - config.softmax_warps))
            reasons.append(f"softmax_warps must be a power of two from 1 to 32; got {config.softmax_warps} (nearest: {nearest})")
        rows = (config.warps * 16, config.warps * 32)
        if config.warps >= 1 and config.block_q not in rows:
            given, nearest = f"{rows[0]} or {rows[1]} with warps {config.warps}", min(rows, key=lambda n: abs(n - config.block_q))
            reasons.append(f"block_q must give each warp 16 or 32 rows, so {given}; got {config.block_q} (nearest: {nearest})")
        return reasons or self._resource_reasons(problem, config, target)

    def _resource_reasons(self, problem: Problem, config: StandardAttentionConfig, target: Target) -> list[str]:
        reasons = []
        row_tiles, threads, blocks = config.block_q // config.warps // 16, config.warps * 32, config.blocks_per_sm
        cap = min(target.registers_per_thread, target.registers_per_sm // (threads * blocks) // 8 * 8)
        score_registers = row_tiles * config.block_kv // 2 + self.scores_registers_beside
        output = row_tiles * padded(problem.head_dim_v) // 2 + self.output_registers_beside
        for kernel, shared, needed, cure in (
            ("S = Q K^T", self.scores_bytes(problem, config), score_registers, "lower block_kv, blocks_per_sm or the rows of a warp"),
            ("O = P V", self.output_bytes(problem, config), output, "lower blocks_per_sm or the rows of a warp"),
        ):
            if shared > target.shared_memory_per_block:
                has = f"{target.name} has {target.shared_memory_per_block} B a block"
                reasons.append(f"{kernel} needs {shared} B of shared memory, {has}: lower block_kv, stages or block_q")
            elif blocks * (shared + target.shared_memory_reserved) > target.shared_memory_per_sm:
                needs, has = blocks * (shared + target.shared_memory_reserved), f"{target.name} has {target.shared_memory_per_sm} B an SM"
                fit = target.shared_memory_per_sm // (shared + target.shared_memory_reserved)
                reasons.append(f"{kernel} needs {needs} B of shared memory with blocks_per_sm {blocks}, {has}: lower it to {fit}")
            if needed > cap:
                has = f"{cap} are available with {threads} threads and blocks_per_sm {blocks}"
                reasons.append(f"{kernel} needs about {needed} registers a thread, {has}: {cure}")
        if blocks * threads > target.threads_per_sm:
            has = f"{target.name} has {target.threads_per_sm} an SM"
            reasons.append(f"blocks_per_sm {blocks} needs {blocks * threads} threads, {has}: lower blocks_per_sm or warps")
        needed, cap = config.row_scores + self.softmax_registers_beside, target.registers_per_sm // SOFTMAX_THREADS_PER_SM
        if needed > cap:
            has = f"{cap} are available with {SOFTMAX_THREADS_PER_SM} threads an SM"
            largest = (cap - self.softmax_registers_beside) // 4 * 4
            reasons.append(f"the softmax needs about {needed} registers a thread, {has}: lower row_scores (nearest: {largest})")
        return reasons

    def kernels(self, problem: Problem, config: StandardAttentionConfig) -> tuple[KernelText, ...]:
        """See Family."""
        return (
            KernelText(self.parameters),
            KernelText(self.softmax_parameters, "_softmax", "SoftmaxParameters"),
            KernelText(self.output_parameters, "_output", "OutputParameters"),
        )

    def resources(self, problem: Problem, config: StandardAttentionConfig) -> Mapping[str, BlockResources]:
        """See Family."""
        return {
            "": BlockResources(config.warps * 32, self.scores_bytes(problem, config)),
            "_softmax": BlockResources(config.softmax_warps * 32, self.softmax_bytes(config)),
            "_output": BlockResources(config.warps * 32, self.output_bytes(problem, config)),
        }

    def scores_bytes(self, problem: Problem, config: StandardAttentionConfig) -> int:
        """Shared memory of S = Q K^T: queries, and stages of keys."""
        return (config.block_q + config.stages * config.block_kv) * padded(problem.head_dim) * problem.dtype.bytes

    def softmax_bytes(self, config: StandardAttentionConfig) -> int:
        """Of the softmax: a maximum and a sum of each warp."""
        return 2 * 4 * config.softmax_warps

    def output_bytes(self, problem: Problem, config: StandardAttentionConfig) -> int:
        """Of O = P V: stages of P and V, whose place the output takes in the end."""
        columns = padded(problem.head_dim_v)
        stages = config.stages * config.block_kv * (config.block_q + columns)
        return max(stages, config.block_q * columns) * problem.dtype.bytes

    def program(self, config: StandardAttentionConfig, call: Call, device: Device) -> Program:
        """See Family. S and P take 6 bytes a score."""
        problem, w = call.problem, call.workload
        query_tiles = -(-w.len_q // config.block_q)
        heads, rows = w.batch * w.heads_q, w.batch * w.heads_q * w.len_q
        row = max(1, -(-w.len_kv // ROW_UNIT)) * ROW_UNIT
        l2_heads = l2_group_heads(problem, w, device.l2_bytes // L2_GROUP_SHARE)
        divisors = {
            "heads_q": w.heads_q,
            "group": w.heads_q // w.heads_kv,
            "l2_group_heads": l2_heads,
            "l2_group_tiles": l2_heads * query_tiles,
            "len_q": w.len_q,
        }
        row_warps = self.row_warps(config, w)
        known: dict[str, int | float] = {f"{name}_reciprocal": reciprocal(divisor) for name, divisor in divisors.items()}
        known |= {name: divisors[name] for name in ("heads_q", "l2_group_heads", "l2_group_tiles")}
        known |= {"len_q": w.len_q, "len_kv": w.len_kv, "query_tiles": query_tiles, "rows": rows, "row_warps": row_warps}
        known |= {"score_batch": w.heads_q * w.len_q * row, "score_head": w.len_q * row, "score_row": row}
        known |= scale_values(call.scalars["scale"])
        for name in TENSORS:
            batch, row_stride, head, _ = call.views[name].strides
            known |= {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row_stride}

        softmax_grid = -(-rows // (config.softmax_warps // row_warps))
        grids = (query_tiles * heads, softmax_grid, query_tiles * heads)
        launches = [
            KernelLaunch(
                grid,
                kernel.parameters.values_of(known),
                suffix=kernel.suffix,
            )
            for grid, kernel in zip(grids, self.kernels(problem, config), strict=True)
        ]
        return Program(tuple(launches), (Buffer("S", model.SCORE_BYTES * rows * row), Buffer("P", problem.dtype.bytes * rows * row)))

    def traffic(self, problem: Problem, config: StandardAttentionConfig, workload: Workload, device: Device) -> Traffic:
        """See Family. S is written and read, three times where a row does not fit its warps' registers; P is written and read.

        All in chunks of 16 bytes: a row of S ends at a multiple of 4 keys, one of P at a multiple of 8.
        """
        w, d, dv, element = workload, problem.head_dim, problem.head_dim_v, problem.dtype.bytes
        heads, row_reads = w.batch * w.heads_q, 1 if w.len_kv <= config.softmax_warps * 32 * config.row_scores else 3
        read, written = 0, w.len_q * dv * element
        for queries, _, keys in visits(problem, w, config.block_q, config.block_kv):
            row_of_s, row_of_p = -(-keys // 4) * 4, -(-keys // 8) * 8
            read += (queries * d + keys * (d + dv) + queries * row_of_p) * element
            written += queries * (row_of_s * model.SCORE_BYTES + row_of_p * element)
        return Traffic(heads * (read + row_reads * _scores_read(problem, w) * model.SCORE_BYTES), heads * written)

    def row_warps(self, config: StandardAttentionConfig, workload: Workload) -> int:
        """Warps that share a row of S: as few as hold it in their registers, a power of two, and at most all of a block's."""
        row_warps = 1
        while row_warps < config.softmax_warps and row_warps * 32 * config.row_scores < workload.len_kv:
            row_warps *= 2
        return row_warps

    def call_refusals(self, call: Call, config: StandardAttentionConfig | None = None) -> list[str]:
        """See Family. The softmax counts rows in an int."""
        rows = call.workload.batch * call.workload.heads_q * call.workload.len_q
        return [] if rows <= MAX_ROWS else [f"q must have at most {MAX_ROWS} rows, over batch and heads; got {rows}"]

    def context(self, problem: Problem, config: StandardAttentionConfig, target: Target) -> dict[str, object]:
        """See Family."""
        return {
            "element": ELEMENTS[problem.dtype],
            "causal": problem.mask is Mask.CAUSAL,
            "scores_bytes": self.scores_bytes(problem, config),
            "softmax_bytes": self.softmax_bytes(config),
            "output_bytes": self.output_bytes(problem, config),
        }

    def space(self, problem: Problem, target: Target) -> Iterator[StandardAttentionConfig]:
        """See Family. The softmax has nothing to do with the products' tiles, so it varies beside one choice of these."""
        rows = ((64, 4), (128, 4), (128, 8), (256, 8))
        for (block_q, warps), block_kv, stages in itertools.product(rows, (64, 128), (2, 3)):
            yield self._most_blocks(problem, StandardAttentionConfig(block_q, block_kv, warps, stages), target)
        default = self.default(problem, target)
        for softmax_warps, row_scores in ((4, 32), (8, 16), (16, 16), (16, 32)):
            yield dataclasses.replace(default, softmax_warps=softmax_warps, row_scores=row_scores)

    def default(self, problem: Problem, target: Target) -> StandardAttentionConfig:
        """See Family. The largest tiles of which two blocks fit on an SM, else the smallest ones."""
        sizes = ((128, 64, 4), (128, 64, 8), (64, 64, 4))
        configs = [self._most_blocks(problem, StandardAttentionConfig(*size), target) for size in sizes]
        legal = [config for config in configs if not self.check(problem, config, target)]
        if not legal:
            self.require_legal(problem, configs[-1], target)
        return next((config for config in legal if config.blocks_per_sm > 1), legal[-1])

    def _most_blocks(self, problem: Problem, config: StandardAttentionConfig, target: Target) -> StandardAttentionConfig:
        """The config with the most blocks an SM that are legal, up to 4: one computes while another waits for memory."""
        choices = [dataclasses.replace(config, blocks_per_sm=blocks) for blocks in (4, 3, 2, 1)]
        return next((choice for choice in choices if not self.check(problem, choice, target)), choices[-1])

    def predict(
        self, problem: Problem, config: StandardAttentionConfig, workload: Workload, device: Device, registers: int | None = None
    ) -> Prediction:
        """See Family, and model.py."""
        return model.predict(problem, config, workload, device)


FAMILY = StandardAttention()
