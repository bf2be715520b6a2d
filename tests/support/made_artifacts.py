"""Artifacts made up for tests: machine code that no GPU could run, in no time."""

from __future__ import annotations

from flashgen.build.artifact import Artifact
from flashgen.codegen.spec import KernelSpec

LOG = (
    "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
    "ptxas info : 0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\nptxas info : Used 100 registers"
)


def made_artifact(spec: KernelSpec, spills: int = 0) -> Artifact:
    """As a generated folder may hold it. `spills`: bytes a thread, by the compiler's log."""
    cubin = f".text.{spec.name}\0".encode()
    return Artifact(spec.name, spec.target.name, f"void {spec.name}();", cubin, LOG.format(spills=spills), "13.0")
