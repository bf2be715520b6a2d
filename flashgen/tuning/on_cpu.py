"""Verifying a tune's winners without a GPU: the same kernels on emulated atoms, on the workloads that every timed candidate must pass."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from flashgen.build.emulator.compiler import CxxCompilerMissingError, cxx_compiler
from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.codegen.problem import Problem
from flashgen.codegen.spec import KernelSpec

if TYPE_CHECKING:  # PyTorch is loaded only when something is verified
    from ..verification.screen import Screen


class CpuScreen:
    """Judges each kernel once, until `deadline` (of time.monotonic). `skipped`: why some were not judged, empty if all were."""

    def __init__(self, deadline: float) -> None:
        self.deadline, self.skipped = deadline, ""
        self._screens: dict[Problem, Screen] = {}
        self._faults: dict[KernelSpec, str] = {}
        try:
            cxx_compiler()
        except CxxCompilerMissingError as error:
            self.skipped = str(error)

    @property
    def verified(self) -> int:
        """How many kernels were judged and found right."""
        return sum(not fault for fault in self._faults.values())

    def fault(self, spec: KernelSpec) -> str:
        """What is wrong with a kernel's results or with how it comes to them; empty if nothing is known to be."""
        if spec not in self._faults:
            if not self.skipped and time.monotonic() > self.deadline:
                self.skipped = "the budget had ended"
            if self.skipped:
                return ""
            self._faults[spec] = self._judge(spec)
        return self._faults[spec]

    def _judge(self, spec: KernelSpec) -> str:
        from ..launch import cpu
        from ..verification.screen import NothingToJudgeError, Screen

        if spec.problem not in self._screens:
            self._screens[spec.problem] = Screen(spec.problem, "cpu")
        try:
            cases = self._screens[spec.problem].judge(cpu.load_emulated(spec))
        except (EmulatorFaultError, NothingToJudgeError) as error:
            return str(error)
        return "; ".join(f"{case.workload.name}: {case.verdict.message}" for case in cases if not case.verdict.ok)
