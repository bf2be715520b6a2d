"""The family for attention backward on Hopper where the head dim is above 128: two warpgroups divide the columns of the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from flashgen.codegen import wgmma
from flashgen.codegen.attention import ELEMENTS, padded, problem_reasons
from flashgen.codegen.config import Config
from flashgen.codegen.families.attention_backward_sm90 import model
from flashgen.codegen.families.attention_backward_sm90.family import (
    NARROW,
    ROW_THREADS,
    SEMAPHORE_BYTES,
    THREADS,
    AttentionBackwardSm90,
    row_bytes,
)
from flashgen.codegen.families.attention_backward_sm90.launch import PANEL, panels
from flashgen.codegen.far_queries import far_query_resources
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import BlockResources
from flashgen.codegen.target import Target
from flashgen.codegen.tensor_gradients import gradient_resources

from .config import AttentionBackwardWideSm90Config

SCORE_TILES = 2  # in shared memory: P and dS
NARROWEST = PANEL + 8  # each warpgroup needs a panel of its own


class AttentionBackwardWideSm90(AttentionBackwardSm90):
    """See the module's docstring; the algorithm is templates/kernels/attention_backward_wide_sm90.cu.j2."""

    name = "attention_backward_wide_sm90"
    revision = 11
    packs = False
    preference = 1
    block_kv = 64
    modifiers: ClassVar[tuple[str, ...]] = ("alibi", "boolean_mask", "chunk", "prefix_len", "sinks", "window")
    template = "kernels/attention_backward_wide_sm90.cu.j2"
    config_type: ClassVar[type[Config]] = AttentionBackwardWideSm90Config
    atoms: ClassVar[tuple[str, ...]] = (*AttentionBackwardSm90.atoms, "named_barrier_unaligned", "ldmatrix")
    tiles: ClassVar[tuple[str, ...]] = (
        *("common/shared_regions", "common/tile_scheduler", "common/sequences", "common/score_chain", "common/softmax_rows"),
        *("common/lse", "common/row_statistics", "warp/exact_rows"),
        *("warpgroup/pipeline", "warpgroup/panel_tile", "warpgroup/gemm", "warp/score_gradients", "warpgroup/transposed_operand"),
        *("warpgroup/wide_products", "warpgroup/backward_beside", "common/key_work", "warpgroup/backward_inputs"),
        *("warpgroup/store_columns", "warpgroup/split_roles", "warpgroup/wide_consumer"),
    )

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = problem_reasons(problem, self.operation, self.modifiers)
        if max(problem.head_dim, problem.head_dim_v) <= NARROW:
            reasons.append(f"head_dim or head_dim_v must be above {NARROW}; got {problem.head_dim} and {problem.head_dim_v}")
        for name, width in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if width < NARROWEST:
                reasons.append(f"{name} must be at least {NARROWEST}, for each warpgroup to have columns; got {width}")
        if target.name != "sm_90a":
            reasons.append(f"target must be sm_90a; got {target.name}")
        return reasons

    def check(self, problem: Problem, config: AttentionBackwardWideSm90Config, target: Target) -> list[str]:
        """See Family."""
        reasons = self.refusals(problem, target)
        if not 2 <= config.stages <= 4:
            reasons.append(f"stages must be from 2 to 4; got {config.stages}")
        shared, available = self.shared_bytes(problem, config), target.shared_memory_per_block
        if not reasons and shared > available:
            reasons.append(f"needs {shared} B of shared memory, {target.name} has {available} B a block: lower stages")
        return reasons

    def shared_bytes(self, problem: Problem, config: AttentionBackwardWideSm90Config) -> int:
        """Dynamic shared memory of a block of the main kernel, in bytes."""
        of_row = panels(problem.head_dim) + panels(problem.head_dim_v)
        rows = (self.block_kv + config.stages * config.block_q) * of_row + SCORE_TILES * config.block_q
        return rows * PANEL * problem.dtype.bytes + config.stages * (row_bytes(config.block_q) + SEMAPHORE_BYTES * problem.deterministic)

    def resources(self, problem: Problem, config: AttentionBackwardWideSm90Config) -> Mapping[str, BlockResources]:
        """See Family."""
        return {
            **far_query_resources(problem),
            "_preprocess": BlockResources(ROW_THREADS, 0),
            "": BlockResources(THREADS, self.shared_bytes(problem, config), self.cluster),
            "_postprocess": BlockResources(self.postprocess_threads(problem, config), self.postprocess_bytes(problem, config)),
            **gradient_resources(problem),
        }

    def postprocess_threads(self, problem: Problem, config: Any) -> int:
        """Four warps for each panel of dQ."""
        return 128 * panels(problem.head_dim)

    def instructions(self, problem: Problem, config: AttentionBackwardWideSm90Config) -> str:
        """See Family. The shapes of wgmma: of S and dP, of each warpgroup's columns of dK and dV, and of dQ by parts of a panel."""
        element, columns, columns_v = ELEMENTS[problem.dtype], padded(problem.head_dim), padded(problem.head_dim_v)
        widths = sorted({*shares(columns), *shares(columns_v)})
        parts = sorted({min(PANEL, columns - first) for first in range(0, columns, PANEL)})
        atoms = [wgmma.wgmma_ss(element, config.block_q)]
        atoms += [wgmma.wgmma_ss_trans_ab(element, width) for width in widths]
        atoms += [wgmma.wgmma_ss_trans_b(element, part) for part in parts]
        return "\n".join(atoms)

    def sum_cycles(self, config: Any) -> float:
        """See AttentionBackwardSm90."""
        return model.WIDE_SUM_CYCLES

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """See Family."""
        yield from map(AttentionBackwardWideSm90Config, (2, 3))


def shares(columns: int) -> tuple[int, int]:
    """Columns of each warpgroup: the first one has the odd panel."""
    first = -(-panels(columns) // 2) * PANEL
    return first, columns - first


FAMILY = AttentionBackwardWideSm90()
