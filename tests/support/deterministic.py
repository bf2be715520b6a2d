"""Deterministic gradients on the CPU: a call in one order of blocks and threads after the other, and whether all give the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationOrder, Schedule
from flashgen.codegen.config import Config
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.attention_backward.config import AttentionBackwardConfig
from flashgen.codegen.families.attention_backward_pair_sm90.config import AttentionBackwardPairSm90Config
from flashgen.codegen.families.attention_backward_sm90.config import AttentionBackwardSm90Config
from flashgen.codegen.families.attention_backward_wide_sm90.config import AttentionBackwardWideSm90Config
from flashgen.codegen.families.flash1_backward.config import Flash1BackwardConfig
from flashgen.codegen.families.flash2_backward.config import Flash2BackwardConfig
from flashgen.codegen.operands import Role
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import Program
from flashgen.codegen.semaphores import SEMAPHORES
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import view_of
from flashgen.launch.tensors import Tensors
from flashgen.selection.families import family_of
from flashgen.verification.expected import Expected
from tests.support.runs import LIMITS

# Small tiles, so that few rows have many of them. Of each family, with the head dims that it is tried on.
GENERIC = AttentionBackwardConfig(32, 32, 16, 2, 1, 16, 1), (64, 64)
NARROW = AttentionBackwardSm90Config(48), (136, 64)  # an odd number of panels of dQ
WIDE = AttentionBackwardWideSm90Config(), (136, 72)
PAIR = AttentionBackwardPairSm90Config(), (200, 72)
ALONE = Flash1BackwardConfig(block_q=32, block_kv=64, warps=4), (64, 64)  # one block adds to a row of dQ
ATOMIC = Flash2BackwardConfig(block_q=32, block_kv=64, warps=4), (64, 64)  # many do, in any order
# Blocks that are resident together, and the order of their threads: one block after the other, then several that race.
ORDERS = (
    (1, EmulationOrder(late_copies=False)),
    (2, EmulationOrder(Schedule.REVERSED)),
    *((4 + seed, EmulationOrder(Schedule.RANDOM, seed=seed)) for seed in range(2)),
)
DIFFERENT = "the sums of dQ are not the same to the bit"


@dataclass(frozen=True)
class OrderedCase:
    """A call: lengths are (len_q, len_kv), heads (query, key/value), `of` a config with head dims."""

    of: tuple[Config, tuple[int, int]]
    mask: Mask
    lengths: tuple[int, int] = (200, 300)
    heads: tuple[int, int] = (2, 1)
    deterministic: bool = True

    @property
    def name(self) -> str:
        """For people."""
        return f"{family_of(self.of[0]).name}-{self.mask.value}-{self.lengths[0]}x{self.lengths[1]}-h{self.heads[0]}"

    @property
    def spec(self) -> KernelSpec:
        """Its kernels."""
        config, width = self.of
        problem = Problem(Dtype.BF16, *width, self.mask, "backward", self.deterministic)
        return KernelSpec(family_of(config), problem, config, find_target("sm_90a"))

    def why_rejected(self, kernel: EmulatedKernel) -> str:
        """What the numerics rule, a check of the emulator or the comparison of all orders says, empty if nothing."""
        tensors = Tensors.random(self.spec.problem, Workload(1, *self.heads, *self.lengths), torch.Generator().manual_seed(3))
        found = []
        try:
            for resident, order in ORDERS:
                found.append(run(kernel, tensors, order, resident))
                verdict = Expected.of(tensors).judge(tensors)
                if not verdict.ok:
                    return verdict.message
                if not torch.equal(found[-1], found[0]):
                    return DIFFERENT
        except EmulatorFaultError as error:
            return str(error)
        return ""


def run(kernel: EmulatedKernel, tensors: Tensors, order: EmulationOrder, resident: int) -> torch.Tensor:
    """One call on poisoned outputs with at most so many blocks resident together, or as many as a launch has.

    Returns the fp32 sums of dQ, which tell orders apart far more often than dQ does once it is rounded.
    """
    tensors.poison()
    spec, call = kernel.spec, tensors.call()
    program = spec.family.program(spec.config, call, device_of_target(spec.target))
    fitting = min(resident, *(launch.grid for launch in program.launches))
    memory = {buffer.name: torch.full((buffer.bytes,), 0xFF, dtype=torch.uint8) for buffer in program.buffers}
    if SEMAPHORES.name in memory:
        memory[SEMAPHORES.name].view(torch.int32).fill_(1)  # what another call may have left there: somebody's turn
    given = {operand.name: view_of(operand.name, tensors[operand.name], operand.role is not Role.IN) for operand in tensors.operands}
    given |= {name: view_of(name, buffer, writable=True) for name, buffer in memory.items()}
    kernel.launch(Program(program.launches), given, order, limits=LIMITS, resident=fitting)
    return memory["d_q_sum"].view(torch.float32)
