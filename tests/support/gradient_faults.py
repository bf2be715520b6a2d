"""Planted faults of backward kernels: the settings in which they run on the CPU, and what rejects each fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationOrder, Schedule
from flashgen.codegen.config import Config
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.selection.families import family_of
from flashgen.verification import cases
from flashgen.verification.expected import Expected
from flashgen.verification.screen import Screen
from tests.support.runs import LIMITS, compile_ahead, emulated_kernel, emulated_text

TARGET = find_target("sm_90a")
ORDER = EmulationOrder(Schedule.ROUND_ROBIN, late_copies=True)
HUGE, FAR = cases.HUGE, cases.FAR
# What the emulator says of races.
IN_FLIGHT = "read under an asynchronous copy that was not waited for"
OVERWRITE, UNORDERED = "write over what another warp may still read", "no barrier between"


@dataclass(frozen=True)
class GradientSetting:
    """A kernel, and the sizes that it is launched on: batch, heads_q, heads_kv, len_q, len_kv.

    special: whether the input is the screen's case of these sizes
    lowered: whether all scores are far below 0: a P that belongs to none of them overflows
    peaked: whether most rows have nearly all their probability at one key, so that their dS nearly vanishes
    """

    config: Config
    sizes: tuple[int, int, int, int, int]
    mask: Mask = Mask.CAUSAL
    special: bool = False
    lowered: bool = False
    peaked: bool = False
    width: tuple[int, int] = (64, 64)

    @property
    def spec(self) -> KernelSpec:
        """The kernel without a fault."""
        return KernelSpec(family_of(self.config), Problem(Dtype.BF16, *self.width, self.mask, "backward"), self.config, TARGET)

    def why_rejected(self, kernel: EmulatedKernel) -> str:
        """What the numerics rule or a check of the emulator says, empty if nothing."""
        try:
            if self.special:
                results = Screen(self.spec.problem, "cpu", (), special=(self.sizes,)).judge(kernel)
                return "; ".join(result.verdict.message for result in results if not result.verdict.ok)
            tensors = Tensors.random(self.spec.problem, Workload(*self.sizes), torch.Generator().manual_seed(3)).apart()
            if self.lowered:
                tensors["q"].mul_(0.1).add_(8)
                tensors["k"].mul_(0.1).sub_(4)
                tensors.derive()
            if self.peaked:
                tensors["q"].mul_(16)
                tensors.derive()
                tensors = tensors.without_optional_inputs()
            run_on_cpu(kernel, tensors, interleaving=ORDER, limits=LIMITS)
            verdict = Expected.of(tensors).judge(tensors)
            return "" if verdict.ok else verdict.message
        except EmulatorFaultError as error:
            return str(error)


@dataclass(frozen=True)
class GradientFault:
    """Replaces `find`, which must occur exactly once in the text, by `replace`. `check`: what the emulator says, where it catches it."""

    name: str
    find: str
    replace: str
    setting: GradientSetting
    check: str = ""

    def text(self) -> Source:
        """With the fault."""
        source = emulated_text(self.setting.spec)
        found = source.text.count(self.find)
        assert found == 1, f"fault {self.name} must find its text once; found it {found} times: {self.find!r}"
        return Source(source.entry, source.text.replace(self.find, self.replace))

    def require_caught(self) -> None:
        """Fails unless the kernel without the fault is right, and the one with it is rejected."""
        assert not _rejected_without_a_fault(self.setting)
        why = self.setting.why_rejected(emulated_kernel(self.setting.spec, self.text()))
        assert why, f"fault {self.name} was accepted"
        assert self.check in why


@cache
def _rejected_without_a_fault(setting: GradientSetting) -> str:
    return setting.why_rejected(emulated_kernel(setting.spec))


def compile_faults(faults: Iterable[GradientFault]) -> None:
    """All texts, on all cores."""
    compile_ahead(text for fault in faults for text in (emulated_text(fault.setting.spec), fault.text()))


def require_own_names(faults: Sequence[GradientFault]) -> None:
    """Each fault goes by its name."""
    assert len({fault.name for fault in faults}) == len(faults)
