"""Every planted fault still applies to today's templates, changes the text, and gives a kernel that compiles without a GPU."""

from __future__ import annotations

from functools import partial

import pytest

from flashgen.build.artifact import Artifact
from flashgen.build.nvrtc import compile_many, compile_source
from flashgen.codegen.render import render
from flashgen.codegen.target import find_target
from tests.support.fault import Fault, FaultError
from tests.support.faults import FAULTS
from tests.support.plan import of_family, sample

TARGET = find_target("sm_90a")
QUICK = 1  # of each family are compiled in every run
PART = 10


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_applies(fault: Fault) -> None:
    source = render(fault.setting.spec(TARGET))
    patched = fault.apply(source)
    assert patched.entry == source.entry
    assert patched.text != source.text


def shares() -> list[object]:
    """A family's faults as parameters: some for every run, and the others in parts, of which CI has some."""
    by_family: dict[str, list[Fault]] = {}
    for fault in FAULTS:
        by_family.setdefault(fault.setting.spec(TARGET).family.name, []).append(fault)
    found: list[object] = []
    for name, mine in by_family.items():
        some = sample(mine, QUICK, name, lambda fault: (fault.setting.config, fault.race))
        others = [fault for fault in mine if fault not in some]
        parts = [others[begin : begin + PART] for begin in range(0, len(others), PART)]
        found.append(pytest.param(some, id=f"{name}-some"))
        marks = [[pytest.mark.slow, of_family(name, len(part) * 0.5)] for part in parts]
        found += [pytest.param(part, id=f"{name}-{part[0].name}", marks=own) for part, own in zip(parts, marks, strict=True)]
    return found


@pytest.mark.parametrize("faults", shares())
def test_compile(faults: list[Fault]) -> None:
    jobs = [(f.name, partial(compile_source, f.apply(render(f.setting.spec(TARGET))), TARGET.name)) for f in faults]
    failed = {name: result for name, result in compile_many(jobs, workers=2) if not isinstance(result, Artifact)}
    assert not failed


def test_names_are_unique_and_enough() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_a_patch_that_does_not_apply_is_an_error() -> None:
    fault = FAULTS[0]
    source = render(fault.setting.spec(TARGET))
    with pytest.raises(FaultError, match=f"{fault.name} must find its text once .* found it 0 times"):
        fault.apply(fault.apply(source))
    twice = Fault("twice", "barrier_sync();", "", fault.setting)
    with pytest.raises(FaultError, match="twice must find its text once"):
        twice.apply(source)
