"""The numerics rule rejects every planted fault, and accepts the same kernel without it on the same inputs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.gpu.driver import gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import compile_many, compile_source
from flashgen.codegen.render import Source, render
from tests.support.cases import Case, Tensors
from tests.support.fault import Fault
from tests.support.faults import FAULTS

TIME_LIMIT = 20.0  # seconds; a launch takes milliseconds
RACE_LAUNCHES = 50

Key = tuple[str, str]  # the entry and the digest of a text
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def artifacts() -> dict[Key, Artifact]:
    """Every text of these tests, faulty or not, compiled on all cores."""
    target = gpu(0).device.target
    right = [render(fault.setting.spec(target)) for fault in FAULTS]
    faulty = [fault.apply(source) for fault, source in zip(FAULTS, right, strict=True)]
    texts: dict[Key, Source] = {(source.entry, source.digest): source for source in (*right, *faulty)}
    jobs = ((key, partial(compile_source, source, target.name)) for key, source in texts.items())
    found = {}
    for key, result in compile_many(jobs):
        if isinstance(result, CompileError):
            pytest.fail(str(result), pytrace=False)
        found[key] = result
    return found


def load(fault: Fault, source: Source, artifacts: dict[Key, Artifact]) -> Kernel:
    on = gpu(0)
    return Kernel(fault.setting.spec(on.device.target), artifacts[source.entry, source.digest], on)


def run(kernel: Kernel, case: Case, tensors: Tensors) -> None:
    """Poisons the results, launches, and waits. A kernel that hangs ends the whole run, since nothing else can use the GPU then."""
    tensors.out.buffer.fill_(torch.nan)
    tensors.lse.buffer.fill_(torch.nan)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    case.launch(kernel, tensors)
    done.record()
    deadline = time.monotonic() + TIME_LIMIT
    while not done.query():
        if time.monotonic() > deadline:
            pytest.exit(f"{kernel.spec.name} still runs after {TIME_LIMIT} s on {case.name}", returncode=1)
        time.sleep(1e-4)


def faulty_results(kernel: Kernel, case: Case, tensors: Tensors, race: bool) -> Iterator[int]:
    """Launches, and yields the number of each launch to judge: the one, or of a race those that differ from `tensors` as they were."""
    right = tensors.out.view.clone(), tensors.lse.view.clone()
    for number in range(RACE_LAUNCHES if race else 1):
        run(kernel, case, tensors)
        same = torch.equal(tensors.out.view, right[0]) and torch.equal(tensors.lse.view, right[1])
        if not race or not same:
            yield number


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_rejected(fault: Fault, artifacts: dict[Key, Artifact]) -> None:
    source = render(fault.setting.spec(gpu(0).device.target))
    right, faulty = load(fault, source, artifacts), load(fault, fault.apply(source), artifacts)
    launches = differing = 0
    for case in fault.setting.cases:
        tensors = case.make("cuda")
        run(right, case, tensors)
        control = case.rejections(tensors)
        assert not control, f"the kernel without the fault is rejected on {case.name}: {'; '.join(control)}"
        for _ in faulty_results(faulty, case, tensors, fault.race):
            differing += 1
            if case.rejections(tensors):
                return
        launches += RACE_LAUNCHES if fault.race else 1
    names = ", ".join(case.name for case in fault.setting.cases)
    pytest.fail(f"fault {fault.name} was accepted: {differing} of {launches} launches judged on {names}", pytrace=False)
