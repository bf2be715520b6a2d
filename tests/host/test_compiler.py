"""The host's compiler as distributions ship it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flashgen.build.host_compiler import host_compiler

ROOT = Path(__file__).parents[2]
# Threads that wait for each other: each jumps from its own stack to others.
WITH_A_BARRIER = """
import numpy as np
from flashgen.build.host_kernel import HostOrder
from tests.host.probes import Probe
print(Probe("barrier", "barrier_sync(); out[0] = 7;", lambda: np.zeros(1, np.uint32)).on_host(HostOrder()).sum())
"""


def test_a_compiler_that_fortifies_by_default(tmp_path: Path) -> None:
    """In a process of its own: glibc's checked longjmp would abort it."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {host_compiler().path} -D_FORTIFY_SOURCE=2 "$@"\n')
    compiler.chmod(0o700)
    environment = {**os.environ, "CXX": str(compiler), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", WITH_A_BARRIER], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout == f"{64 * 7}\n", done.stderr
