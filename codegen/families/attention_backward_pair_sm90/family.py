"""The family for attention backward on Hopper where the head dim is above 192: two blocks of a cluster share the sums of dQ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from flashgen.codegen import wgmma
from flashgen.codegen.attention import ELEMENTS, padded
from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device
from flashgen.codegen.families.attention_backward_sm90 import model
from flashgen.codegen.families.attention_backward_sm90.family import STAGE_BYTES
from flashgen.codegen.families.attention_backward_sm90.launch import PANEL, panels
from flashgen.codegen.families.attention_backward_wide_sm90.family import AttentionBackwardWideSm90, shares
from flashgen.codegen.family import Traffic
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from .config import AttentionBackwardPairSm90Config

PAIR = 2  # blocks of a cluster
D_Q_PANELS = PAIR * 2  # of a query tile, one for each warpgroup of the pair
BARRIERS = 3  # of the exchange


class AttentionBackwardPairSm90(AttentionBackwardWideSm90):
    """See the module's docstring; the algorithm is templates/kernels/attention_backward_pair_sm90.cu.j2."""

    name = "attention_backward_pair_sm90"
    revision = 9
    packs = False
    preference = 2
    cluster: ClassVar[int] = PAIR
    modifiers = ("sinks",)
    template = "kernels/attention_backward_pair_sm90.cu.j2"
    config_type = AttentionBackwardPairSm90Config
    atoms = (*AttentionBackwardWideSm90.atoms, "cluster", "barrier_cluster", "mbarrier_cluster", "cp_async_bulk_send")
    tiles = (*AttentionBackwardWideSm90.tiles[:-1], "warpgroup/block_pair", "warpgroup/pair_consumer")  # a consumer of its own

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        """See Family."""
        reasons = super().refusals(problem, target)
        if panels(problem.head_dim) != D_Q_PANELS:
            least = (D_Q_PANELS - 1) * PANEL
            reasons.append(f"head_dim must be above {least}, for each warpgroup of a pair to have columns of dQ; got {problem.head_dim}")
        return reasons

    def shared_bytes(self, problem: Problem, config: Any) -> int:
        """Dynamic shared memory of a block of the main kernel, in bytes."""
        exchange = self.block_kv * D_Q_PANELS // PAIR * PANEL * problem.dtype.bytes + BARRIERS * STAGE_BYTES // 2
        return super().shared_bytes(problem, config) + exchange

    def instructions(self, problem: Problem, config: Any) -> str:
        """See Family. The shapes of wgmma: of S and dP, of each warpgroup's columns of dK and dV, and of a panel of dQ."""
        element = ELEMENTS[problem.dtype]
        widths = sorted({*shares(padded(problem.head_dim)), *shares(padded(problem.head_dim_v))})
        atoms = [wgmma.wgmma_ss(element, config.block_q)]
        atoms += [wgmma.wgmma_ss_trans_ab(element, width) for width in widths]
        atoms += [wgmma.wgmma_ss_trans_b(element, PANEL)]
        return "\n".join(atoms)

    def traffic(self, problem: Problem, config: Any, workload: Workload, device: Device) -> Traffic:
        """See AttentionBackwardSm90. Each block reads K of the other one, too, the columns that it has of dQ; dS goes past the L2."""
        shared = super().traffic(problem, config, workload, device)
        pairs, rest = divmod(workload.len_kv, self.block_kv * PAIR)
        first = pairs * self.block_kv + min(self.block_kv, rest)  # keys of all first blocks
        columns = D_Q_PANELS // PAIR * PANEL  # that a first block has of dQ
        others = (workload.len_kv - first) * columns + first * (problem.head_dim - columns)
        return replace(shared, read=shared.read + workload.batch * workload.heads_kv * others * problem.dtype.bytes)

    def sum_cycles(self, config: Any) -> float:
        """See AttentionBackwardSm90."""
        return model.PAIR_SUM_CYCLES

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """See Family."""
        yield AttentionBackwardPairSm90Config()

    def not_dominated(self, config: Config, workload: Workload) -> bool:
        """See Family. Where there is one key tile, half of the blocks would have nothing to do."""
        return workload.len_kv > self.block_kv


FAMILY = AttentionBackwardPairSm90()
