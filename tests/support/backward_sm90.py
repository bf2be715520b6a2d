"""Cases of the Hopper backward families, and faults planted in them, which run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashgen.build.emulator.kernel import EmulatedKernel, EmulationOrder
from flashgen.codegen.config import Config
from flashgen.codegen.family import Family, families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.verification.expected import Expected
from tests.support.runs import COMPILE_SECONDS, LIMITS

_NAMES = ("", "wide_", "pair_", "persistent_")
NARROW, WIDE, PAIR, PERSISTENT = (families()[f"attention_backward_{name}sm90"] for name in _NAMES)
TARGET = find_target("sm_90a")


@dataclass(frozen=True)
class BackwardCase:
    """One call: lengths are (len_q, len_kv), heads (query, key/value). `apart`: no stride of a tensor is one of another.

    block_q: None for the family's default
    family: of the four, where several can compute the head dims
    """

    lengths: tuple[int, int]
    width: tuple[int, int] = (64, 64)
    mask: Mask = Mask.FULL
    dtype: Dtype = Dtype.BF16
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    block_q: int | None = None
    apart: bool = False
    family: Family = NARROW

    @property
    def name(self) -> str:
        """For people."""
        lengths, width = ("x".join(map(str, pair)) for pair in (self.lengths, self.width))
        others = {id(WIDE): "_wide", id(PAIR): "_pair", id(PERSISTENT): "_persistent"}
        rest = ("_apart" if self.apart else "") + others.get(id(self.family), "")
        return f"{self.dtype.value}_d{width}_{self.mask.value}_{lengths}_h{self.heads[0]}-{self.heads[1]}_bq{self.block_q}{rest}"

    def spec(self) -> KernelSpec:
        """Its kernels."""
        problem = Problem(self.dtype, *self.width, self.mask, "backward")
        if self.block_q is None:
            return KernelSpec(self.family, problem, self.family.default(problem, TARGET), TARGET)
        chosen = {"block_q": self.block_q, **({"sum_stages": 4} if self.family is PERSISTENT else {})}
        make: Callable[..., Config] = self.family.config_type
        return KernelSpec(self.family, problem, make(**chosen), TARGET)

    def tensors(self) -> Tensors:
        """Its inputs, the same each time."""
        workload = Workload(self.batch, *self.heads, *self.lengths)
        tensors = Tensors.random(self.spec().problem, workload, torch.Generator().manual_seed(3))
        return tensors.apart() if self.apart else tensors

    def why_rejected(self, kernel: EmulatedKernel, order: EmulationOrder | None = None, tensors: Tensors | None = None) -> str:
        """What the numerics rule says of the kernel's outputs: empty if they are right. Raises EmulatorFaultError if a check fails."""
        tensors = tensors or self.tensors()
        run_on_cpu(kernel, tensors, interleaving=order, limits=LIMITS)
        verdict = Expected.of(tensors).judge(tensors)
        return "" if verdict.ok else str(verdict)

    @property
    def seconds(self) -> float:
        """About how long a test takes on two cores."""
        return COMPILE_SECONDS + 1.6
