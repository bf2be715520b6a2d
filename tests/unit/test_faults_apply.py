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

TARGET = find_target("sm_90a")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_applies(fault: Fault) -> None:
    source = render(fault.setting.spec(TARGET))
    patched = fault.apply(source)
    assert patched.entry == source.entry
    assert patched.text != source.text


@pytest.mark.parametrize(
    "share", [pytest.param(slice(0, None, 4), id="every-fourth"), pytest.param(slice(None), marks=pytest.mark.slow, id="all")]
)
def test_compile(share: slice) -> None:
    jobs = [(f.name, partial(compile_source, f.apply(render(f.setting.spec(TARGET))), TARGET.name)) for f in FAULTS[share]]
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
