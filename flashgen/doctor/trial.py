"""Checks from end to end: one small kernel is rendered, compiled, and launched and verified where there is a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from flashgen.build.artifact import Artifact
from flashgen.build.gpu.driver import Gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import compile_source
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target

from ..selection.families import default_spec
from .finding import Finding, Status
from .machine import torch_state

if TYPE_CHECKING:  # it loads PyTorch, whose absence is another check's finding
    from ..verification.screen import CaseResult

PROBLEM = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL)


@dataclass(frozen=True)
class _Compiled:
    spec: KernelSpec
    artifact: Artifact
    render_seconds: float
    compile_seconds: float


@cache
def _compiled(target: Target) -> _Compiled:
    """Compiled anew: a hit in the store would say nothing of the compiler."""
    spec, begun = default_spec(PROBLEM, target), time.perf_counter()
    source = render(spec)
    rendered = time.perf_counter()
    artifact = compile_source(source, target.name)
    return _Compiled(spec, artifact, rendered - begun, time.perf_counter() - rendered)


def compiling(name: str, target: Target) -> Finding:
    """Renders and compiles."""
    made = _compiled(target)
    report = made.artifact.report
    times = f"rendered in {made.render_seconds * 1e3:.0f} ms, compiled in {made.compile_seconds * 1e3:.0f} ms"
    found = f"{PROBLEM.name} for {target.name}: {times}, {report.registers} registers"
    if report.defects:
        meaning = "this compiler does not do for flashgen's kernels what others do"
        return Finding(name, Status.WRONG, f"{found}; {'; '.join(report.defects)}", meaning, "pip install -U 'nvidia-cuda-nvrtc>=13,<14'")
    return Finding(name, Status.OK, found)


def launching(name: str, on: Gpu) -> Finding:
    """Loads, launches and verifies against the reference, with the two workloads that every tuning candidate must pass."""
    state = torch_state()
    if isinstance(state, str) or on.ordinal >= state.gpus:
        return Finding(name, Status.NOTE, "not tried: PyTorch cannot use this GPU", "whether kernels run is not known", "see PyTorch above")
    from ..verification.screen import Screen

    made, begun = _compiled(on.device.target), time.perf_counter()
    results = Screen(PROBLEM, f"cuda:{on.ordinal}").judge(Kernel(made.spec, made.artifact, on))
    return judge_launches(name, results, time.perf_counter() - begun)


def judge_launches(name: str, results: list[CaseResult], seconds: float) -> Finding:
    """What to say of verified launches."""
    wrong = [f"{case.workload.name}: {case.verdict.message}" for case in results if not case.verdict.ok]
    found = f"{PROBLEM.name}: {len(results) - len(wrong)} of {len(results)} workloads right, in {seconds * 1e3:.0f} ms"
    if wrong:
        found = f"{found}; {'; '.join(wrong)}"
        return Finding(name, Status.WRONG, found, "this GPU gives wrong results", "flashgen verify --head-dim 64; then report both outputs")
    return Finding(name, Status.OK, found)
