"""The byte formulas of the backward families against what their kernels move in the emulator, as `flashgen explain` counts it."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.build.emulator.compiler import Emulated
from flashgen.build.emulator.trace import TracedKernel
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.family import find_family
from flashgen.codegen.operands import Role
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Atoms, render, traced
from flashgen.codegen.workload import Workload
from flashgen.explain.events import tile_operations
from flashgen.explain.lines import ShownText
from flashgen.explain.steps import ScheduleStep, totals
from flashgen.launch.cpu import view_of
from flashgen.selection import compilation
from tests.support.backward_sm90 import PAIR, PERSISTENT, WIDE, BackwardCase
from tests.support.plan import of_family
from tests.support.runs import LIMITS

GENERIC = find_family("attention_backward")
# Whole query tiles, as rows past the end are not in the formula; key tiles that end beyond the keys; heads that share keys.
CASES = [
    BackwardCase((192, 320), (72, 40), block_q=96),
    BackwardCase((128, 200), (136, 136), family=WIDE),
    BackwardCase((128, 200), (200, 136), family=PAIR),  # the second block of the last pair has 8 keys
    BackwardCase((128, 280), (256, 256), heads=(1, 1), family=PAIR),  # and here none
    BackwardCase((128, 200), block_q=64, family=PERSISTENT),
    BackwardCase((128, 160), family=GENERIC),
]


@pytest.mark.parametrize(
    ("case", "mask"),
    [
        pytest.param(case, mask, marks=[pytest.mark.slow, of_family(case.family.name, 20.0)], id=dataclasses.replace(case, mask=mask).name)
        for case in CASES
        for mask in Mask
    ],
)
def test_bytes_are_those_of_the_formula(case: BackwardCase, mask: Mask) -> None:
    case = dataclasses.replace(case, mask=mask)
    spec, tensors, workload = case.spec(), case.tensors(), Workload(case.batch, *case.heads, *case.lengths)
    shown, emulated = render(spec), render(spec, Atoms.EMULATED)
    kernel = TracedKernel(spec, compilation.store().get_or_compile(traced(emulated), Emulated.TRACED))
    device = device_of_target(spec.target)
    wanted = [operand for operand in tensors.operands if not operand.optional]
    given = {operand.name: view_of(operand.name, tensors[operand.name], operand.role is not Role.IN) for operand in wanted}
    kernel.launch(spec.family.program(spec.config, tensors.call(), device), given, limits=LIMITS, workers=1)
    assert len(kernel.traces) == len(spec.kernels), "launches that may overlap have a trace each"
    operations = [operation for trace in kernel.traces for operation in tile_operations(trace, ShownText(shown, emulated))]
    moved = totals([ScheduleStep(0, operation, (), (), ()) for operation in operations])
    assert moved.all == spec.family.traffic(spec.problem, spec.config, workload, device)
    assert moved.added.keys() == {"d_q_sum"}
