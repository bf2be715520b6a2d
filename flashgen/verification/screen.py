"""`verify`: the numerics rule over awkward shapes, and the small workloads that every tuning candidate must pass first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flashgen.build.emulator.kernel import EmulatedKernel, EmulationLimits
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import with_sizes_to_verify
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from ..launch.cpu import run_on_cpu
from ..launch.once import run_once
from ..launch.tensors import Tensors
from ..numerics.caches import poison_unused
from ..numerics.rule import Verdict
from . import cases
from .cases import COARSE, FAR, HUGE, LONG, SCREENING, SPECIAL, as_dense, grouped_workload, take_keys
from .expected import Expected

LIMITS = EmulationLimits(seconds=600.0)  # of one launch on the CPU, which takes seconds


class NothingToJudgeError(ArgumentError):
    """A kernel's family takes none of the cases by which the kernel is to be judged. The message has its reasons."""


@dataclass(frozen=True)
class CaseResult:
    """One workload at one logit magnitude (what q was multiplied by), with the rule's verdict."""

    workload: Workload
    magnitude: float
    verdict: Verdict


@dataclass(frozen=True)
class _Case:
    """`expected`: of groups of rows, each judged among its like: a bound that one group needs would hide what another loses.

    `changed`: what kernels change of the tensors, as it was before.
    """

    workload: Workload
    magnitude: float
    tensors: Tensors
    expected: tuple[Expected, ...]
    changed: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, magnitude: float, tensors: Tensors, samples: Sequence[torch.Tensor | None] = (None,)) -> _Case:
        """Of tensors as a kernel is to find them; a group for each sample."""
        expected = tuple(Expected.of(tensors, sample=sample) for sample in samples)
        return cls(tensors.workload, magnitude, tensors, expected, tensors.changed())

    def restore(self) -> None:
        """Undoes what a kernel changed, for the next one."""
        for name, before in self.changed.items():
            self.tensors[name].copy_(before)

    def judge(self) -> Verdict:
        """The first group's that failed."""
        verdicts = [expected.judge(self.tensors) for expected in self.expected]
        return next((verdict for verdict in verdicts if not verdict.ok), verdicts[0])


class Screen:
    """The small workloads of one problem, whole, with references computed once for all candidates.

    In every other case tensors lie apart; in those between, inputs that a call may leave out are left out.
    """

    def __init__(
        self,
        problem: Problem,
        device: str,
        shapes: Sequence[tuple[int, int, int, int, int]] = SCREENING,
        magnitudes: Sequence[float] = (1.0,),
        special: Sequence[tuple[int, int, int, int, int]] = (),
    ) -> None:
        """`device`: where inputs are drawn and references computed, 'cuda:0' or 'cpu'. `special`: which of LONG, HUGE, COARSE and FAR."""
        self.special = special
        self.problem, self.device, self.shapes, self.magnitudes = problem, device, shapes, magnitudes
        self._cases: dict[int, list[_Case]] = {}

    def cases(self, group_unit: int) -> list[_Case]:
        """Of each shape with as many query heads as make its groups a multiple of that: see `Family.group_unit`."""
        if group_unit not in self._cases:
            generator = torch.Generator(self.device).manual_seed(1)
            found: list[_Case] = []
            for shape in self.shapes:
                number = cases.SHAPES.index(shape) if shape in cases.SHAPES else 0
                workload = self._sized(grouped_workload(shape, group_unit, self.problem.sequences, 2), number)
                for magnitude in self.magnitudes:
                    tensors = Tensors.random(self.problem, workload, generator)
                    if magnitude != 1:
                        tensors["q"].mul_(magnitude)
                    is_apart = len(found) % 2 == 0
                    tensors = tensors.apart() if is_apart else tensors.without_optional_inputs()
                    if magnitude != 1 or not is_apart:  # of packed sequences how much is used may be left out
                        tensors.derive()
                    poison_unused(tensors)
                    found.append(_Case.of(magnitude, tensors))
            for shape in self.special:
                workload = self._sized(grouped_workload(shape, group_unit, self.problem.sequences), None)
                tensors, dense = as_dense(Tensors.random(self.problem, workload, generator))
                magnitude, groups = SPECIAL[shape](dense, self.problem.dtype)
                take_keys(tensors, dense)
                tensors = tensors.far() if shape == FAR else tensors
                tensors.derive()
                found.append(_Case.of(magnitude, tensors, [_rows(self.problem, workload, queries) for queries in groups]))
            self._cases[group_unit] = found
        return self._cases[group_unit]

    def _sized(self, workload: Workload, number: int | None) -> Workload:
        """With the sizes that modifiers have, and operations but attention."""
        return operation_of(self.problem).sizes_to_verify(with_sizes_to_verify(self.problem, workload, number))

    def judge(self, kernel: Kernel | EmulatedKernel) -> list[CaseResult]:
        """Runs the kernel on every case that it can take: calls like the others go to another family.

        Raises HungKernelError or DriverError if it does not finish or faults on a GPU, EmulatorFaultError if a check fails on the CPU, and
        NothingToJudgeError if it can take no case.
        """
        results, spec, refusals = [], kernel.spec, dict[str, None]()
        for case in self.cases(spec.family.group_unit(spec.config)):
            if refused := spec.family.call_refusals(case.tensors.call(), spec.config):
                refusals |= dict.fromkeys(refused)
                continue
            case.restore()
            _launch(kernel, case.tensors)
            results.append(CaseResult(case.workload, case.magnitude, case.judge()))
        if not results:
            raise NothingToJudgeError(f"{spec.family.name} takes none of the cases that it is to be judged by: {'; '.join(refusals)}")
        return results


def _rows(problem: Problem, workload: Workload, queries: Sequence[int]) -> torch.Tensor:
    """These queries of all heads, as a sample."""
    rows = torch.cartesian_prod(torch.arange(workload.batch), torch.arange(workload.heads_q), torch.tensor(queries))
    if problem.is_packed:  # of sequences that are equally long
        rows[:, 2] += rows[:, 0] * workload.len_q
        rows[:, 0] = 0
    return rows


def _launch(kernel: Kernel | EmulatedKernel, tensors: Tensors) -> None:
    if isinstance(kernel, Kernel):
        run_once(kernel, tensors)
    else:
        run_on_cpu(kernel, tensors, limits=LIMITS)


def verify_kernel(kernel: Kernel | EmulatedKernel) -> list[CaseResult]:
    """The numerics rule over all awkward shapes, at ordinary and at large logits, and over the special cases."""
    return whole_screen(kernel.spec.problem, f"cuda:{kernel.gpu.ordinal}" if isinstance(kernel, Kernel) else "cpu").judge(kernel)


def whole_screen(problem: Problem, device: str) -> Screen:
    """All that `verify_kernel` puts to a kernel.

    Large logits and most special cases are made for attention's inputs. FAR is for the CPU, and for operands with strides of their own.
    """
    operands = operation_of(problem).operands(problem)
    far = (FAR,) if device == "cpu" and any(operand.is_strided for operand in operands) else ()
    if not {"q", "k", "v"} <= {operand.name for operand in operands}:
        return Screen(problem, device, cases.SHAPES, special=far)
    return Screen(problem, device, cases.SHAPES, magnitudes=(1.0, 16.0), special=(LONG, HUGE, COARSE, *far))
