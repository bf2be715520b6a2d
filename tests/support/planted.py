"""Faults planted in the text of any family's kernel, each with tensors on which the numerics rule or the emulator must reject it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.verification.expected import Expected
from tests.support.runs import emulated_kernel, emulated_text


def rejected(kernel: EmulatedKernel, tensors: Tensors, scalars: Mapping[str, float] | None = None) -> str:
    """Why the rule rejects what the kernel makes of these; empty if it does not. scalars: those that are not as usual."""
    expected = Expected.of(tensors, scalars)
    run_on_cpu(kernel, tensors, scalars)
    verdict = expected.judge(tensors)
    return "" if verdict.ok else verdict.message


@dataclass(frozen=True)
class Planted:
    """Replaces `find`, which must occur exactly once, by `replace`. `make` makes the tensors; scalars: those that are not as usual."""

    name: str
    spec: KernelSpec
    find: str
    replace: str
    make: Callable[[], Tensors]
    scalars: tuple[tuple[str, float], ...] = ()

    def text(self) -> Source:
        """The faulty kernel."""
        source = emulated_text(self.spec)
        assert source.text.count(self.find) == 1, f"fault {self.name} must find its text once: {self.find!r}"
        return Source(source.entry, source.text.replace(self.find, self.replace))

    def caught_by(self) -> str:
        """What rejects the faulty kernel on tensors on which the right one is accepted; empty if nothing does."""
        assert not _rejected_without_a_fault(self.spec, self.make, self.scalars)
        try:
            return rejected(emulated_kernel(self.spec, self.text()), self.make(), dict(self.scalars))
        except EmulatorFaultError as error:
            return str(error)


@cache
def _rejected_without_a_fault(spec: KernelSpec, make: Callable[[], Tensors], scalars: tuple[tuple[str, float], ...]) -> str:
    """Once for all faults that are planted there."""
    return rejected(emulated_kernel(spec), make(), dict(scalars))
