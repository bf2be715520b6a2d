"""Memory-efficient attention (Rabe and Staats 2021, as Dao et al. 2022 restate it in appendix B), for every architecture from sm_80 on.

For each query tile a first pass over the keys computes lse, the log-sum-exp of each row, relative to a running maximum: the paper's sum
alone overflows. A second pass computes S again, P = exp(S - lse) and O = P V. Memory is linear in the length, and no score leaves the
registers, but S is computed twice. The family runs where it is asked for by name.
"""

from __future__ import annotations

from flashgen.codegen.attention import l2_group_heads, padded, visits
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Traffic
from flashgen.codegen.ladder import LadderFamily, Work
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import KernelLaunch, Program
from flashgen.codegen.workload import Workload

from .config import MemoryEfficientAttentionConfig

L2_GROUP_SHARE = 2  # one part in so many: blocks of neighbouring L2 groups run together


class MemoryEfficientAttention(LadderFamily):
    """See the module's docstring; the algorithm is templates/kernels/memory_efficient_attention.cu.j2."""

    name = "memory_efficient_attention"
    revision = 4
    template = "kernels/memory_efficient_attention.cu.j2"
    config_type = MemoryEfficientAttentionConfig

    def program(self, config: MemoryEfficientAttentionConfig, call: Call, device: Device) -> Program:
        """See Family."""
        w, tiles = call.workload, self.query_tiles(config, call.workload)
        l2_heads = l2_group_heads(call.problem, w, device.l2_bytes // L2_GROUP_SHARE)
        return Program((KernelLaunch(tiles * w.heads_q * w.batch, self.values(config, call, tiles, l2_heads)),))

    def traffic(self, problem: Problem, config: MemoryEfficientAttentionConfig, workload: Workload, device: Device) -> Traffic:
        """See Family. Each query tile reads K of the keys that it sees in both passes, and V in the second."""
        d, dv, element = problem.head_dim, problem.head_dim_v, problem.dtype.bytes
        heads = workload.batch * workload.heads_q
        read = sum(queries * d + keys * (2 * d + dv) for queries, _, keys in visits(problem, workload, config.block_q, config.block_kv))
        return Traffic(heads * read * element, heads * workload.len_q * dv * element)

    def work(self, problem: Problem, config: MemoryEfficientAttentionConfig, workload: Workload, device: Device, computed: float) -> Work:
        """See LadderFamily. S and its exponentials are computed twice, and keys are read twice."""
        columns, columns_v = padded(problem.head_dim), padded(problem.head_dim_v)
        blocks = self.query_tiles(config, workload) * workload.heads_q * workload.batch
        read = computed / config.block_q * (2 * columns + columns_v) * problem.dtype.bytes
        return Work(2 * computed * (2 * columns + columns_v), 2 * computed, 0.0, read, blocks, 1 / blocks)


FAMILY = MemoryEfficientAttention()
