"""Faults planted into the bodies of probes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulationOrder
from tests.support.probes import Probe, Words

LATE, EARLY = EmulationOrder(), EmulationOrder(late_copies=False)


@dataclass(frozen=True)
class Planted:
    """`old` becomes `new` in the body of a `probe`; the launch is stopped by `check`, with a message that `says` so."""

    name: str
    old: str
    new: str
    check: str
    says: str
    order: EmulationOrder = LATE
    probe: str = "pipeline"


class FaultyProbe:
    """A probe with all faults that there are of it: the word after its input says which one is planted, 0 that none is.

    One text of many: to compile it takes far longer than to run it.
    """

    def __init__(self, probe: Probe, faults: Iterable[Planted]) -> None:
        self.probe, self.planted = probe, [None, *(fault for fault in faults if fault.probe == probe.name)]
        text = f"switch (in[{len(probe.inputs())}]) {{\n"
        for number, fault in enumerate(self.planted):
            body = probe.body
            if fault:
                assert body.count(fault.old) == 1, f"{fault.name} does not apply"
                body = body.replace(fault.old, fault.new)
            text += f"case {number}: {{\n{body}}} break;\n"
        self.of_many = dataclasses.replace(probe, name=f"{probe.name}-with-faults", body=text + "}")

    def run(self, fault: Planted | None, order: EmulationOrder) -> Words:
        """The output with this fault, or with none. Raises EmulatorFaultError if it is found."""
        inputs = np.append(self.probe.inputs(), np.uint32(self.planted.index(fault)))
        return dataclasses.replace(self.of_many, inputs=lambda: inputs).on_cpu(order)


def faulty_probes(probes: Iterable[Probe], faults: Iterable[Planted]) -> dict[str, FaultyProbe]:
    """The probes that have faults, by name."""
    return {probe.name: FaultyProbe(probe, faults) for probe in probes if any(fault.probe == probe.name for fault in faults)}


def require_caught(probes: dict[str, FaultyProbe], fault: Planted, order: EmulationOrder | None = None) -> None:
    """Fails unless the fault is found by its check, in its order or another one."""
    with pytest.raises(EmulatorFaultError) as caught:
        probes[fault.probe].run(fault, order or fault.order)
    assert caught.value.check == fault.check, caught.value
    assert re.search(fault.says, str(caught.value)), caught.value
