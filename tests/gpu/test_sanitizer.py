"""compute-sanitizer finds nothing in ten configs: no bad access, no race in shared memory, no misused barrier."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from flashgen.build.gpu.driver import gpu
from flashgen.codegen.family import families, find_family
from flashgen.codegen.problem import Dtype, Problem

pytestmark = pytest.mark.gpu

SANITIZER = shutil.which("compute-sanitizer")
BY_BARRIERS = (  # whose threads wait for each other by barriers that racecheck knows
    *("attention_forward", "attention_backward", "standard_attention", "memory_efficient_attention"),
    *("flash1_forward", "flash2_forward", "flash1_backward", "flash2_backward"),
)


needs_sanitizer = pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer (CUDA toolkit) on the PATH")


def sanitize(tool: str, *arguments: str) -> tuple[int, str]:
    """Exit code (9 if the tool found something) and everything that was printed."""
    # Without the caching allocator every tensor is an allocation of its own, so an access past its end is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    kernels = arguments[0] if arguments[0] in families() else "attention_"
    options = ["--kernel-name", f"kns={kernels}", "--error-exitcode", "9"]
    if tool == "racecheck":  # its default report passes over hazards that the planted fault shows
        options += ["--racecheck-report", "all"]
    command = [str(SANITIZER), "--tool", tool, *options, sys.executable, "-m", "tests.support.sanitized", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    return done.returncode, done.stdout + done.stderr


# racecheck knows nothing of mbarriers that order tensor copies: what they fill looks like a race to it.
@needs_sanitizer
@pytest.mark.parametrize(
    ("family", "tool"),
    [
        *((name, tool) for name in BY_BARRIERS for tool in ("memcheck", "racecheck", "synccheck")),
        *(
            (name, tool)
            for name in (
                "attention_forward_sm90",
                "attention_backward_sm90",
                "attention_backward_wide_sm90",
                "attention_backward_pair_sm90",
                "attention_backward_persistent_sm90",
            )
            for tool in ("memcheck", "synccheck")
        ),
    ],
)
def test_nothing_is_found(family: str, tool: str) -> None:
    asked, target = find_family(family), gpu(0).device.target
    reasons = [asked.refusals(Problem(Dtype.BF16, width, operation=asked.operation), target) for width in (64, 256)]
    if all(reasons):
        pytest.skip("; ".join(reasons[0]))
    code, report = sanitize(tool, family)
    assert code == 0, report[-5000:]
    assert report.count("launched on") == 10


@needs_sanitizer
@pytest.mark.parametrize(
    ("tool", "fault"), [("memcheck", "lse-past-the-end-written"), ("racecheck", "output-in-the-place-of-another-warp")]
)
def test_a_planted_fault_is_found(tool: str, fault: str) -> None:
    code, report = sanitize(tool, fault)
    assert code == 9, report[-5000:]
