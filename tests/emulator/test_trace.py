"""What the emulator records of a launch: which atoms, at which bytes of which tensor, at which lines of the text."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.build.emulator.compiler import Emulated
from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.build.emulator.memory import MemoryView
from flashgen.build.emulator.trace import LaunchTrace, TracedKernel, TraceError, frames_at
from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.flash2_forward.config import Flash2ForwardConfig
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import Atoms, Source, render, traced
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.selection import compilation
from tests.support.runs import emulated_text

PROBLEM, WORKLOAD = Problem(Dtype.FP16, 32, 32), Workload(1, 1, 1, 40, 70)
SPEC = KernelSpec(find_family("flash2_forward"), PROBLEM, Flash2ForwardConfig(32, 32, 2), find_target("sm_90a"))
TEXT = traced(render(SPEC, Atoms.EMULATED))


@pytest.fixture(scope="module")
def kernel() -> TracedKernel:
    return TracedKernel(SPEC, compilation.store().get_or_compile(TEXT, Emulated.TRACED))


def launched(kernel: EmulatedKernel, workers: int = 1) -> np.ndarray:
    """The output of a launch on numbers that are always the same."""
    random = np.random.default_rng(1)
    lengths = {"q": 40, "k": 70, "v": 70, "out": 40}
    tensors = {name: random.standard_normal((length, 32)).astype(np.float16) for name, length in lengths.items()}
    views = {
        name: MemoryView(name, array.ctypes.data, 2, (1, lengths[name], 1, 32), (array.size, 32, 32, 1), name == "out")
        for name, array in tensors.items()
    }
    program = SPEC.family.program(SPEC.config, attention_call(PROBLEM, WORKLOAD), device_of_target(SPEC.target))
    kernel.launch(program, views, workers=workers)
    return tensors["out"]


@pytest.fixture(scope="module")
def trace(kernel: TracedKernel) -> LaunchTrace:
    launched(kernel)
    return kernel.traces[0]


def moved(trace: LaunchTrace, operand: str, written: bool) -> list[tuple[int, int]]:
    """The (offset, bytes) of an operand that were read or written, each as often as it was."""
    records = trace.records[(trace.records["operand"] == trace.operands.index(operand)) & (trace.records["written"] == written)]
    return list(zip(records["offset"].tolist(), records["bytes"].tolist(), strict=True))


def test_each_byte_that_moves_is_recorded(trace: LaunchTrace) -> None:
    assert not moved(trace, "q", True)
    assert sorted(moved(trace, "q", False)) == [(offset, 16) for offset in range(0, 40 * 64, 16)]
    assert sorted(moved(trace, "k", False)) == sorted([(offset, 16) for offset in range(0, 70 * 64, 16)] * 2), "each query tile reads all"
    written = [byte for offset, size in moved(trace, "out", True) for byte in range(offset, offset + size)]
    assert sorted(written) == list(range(40 * 64))
    assert not moved(trace, "out", False)


def test_stacks_lead_from_an_atom_to_the_kernel(trace: LaunchTrace) -> None:
    lines = TEXT.text.splitlines()
    product = next(record for record in trace.records if trace.ops[record["op"]] == "mma_sync_m16n8k16")
    stack = [frame for frame in trace.stacks[int(product["stack"])] if frame.line]
    called = [lines[frame.line - 1] for frame in stack]
    assert any("mma_sync_m16n8k16<Element>(" in line for line in called)
    assert any("gemm_scores<Element, kKeysPerWarp / 8>(S" in line for line in called)
    assert any("for_each_tile<kStages>" in line or "use(tile" in line for line in called)


def test_tracing_changes_neither_results_nor_lines(kernel: TracedKernel) -> None:
    plain = EmulatedKernel(SPEC, compilation.store().get_or_compile(emulated_text(SPEC), Emulated.LIBRARY))
    assert np.array_equal(launched(plain), launched(kernel))
    assert TEXT.text.startswith(emulated_text(SPEC).text)


def test_what_cannot_be_traced_is_refused(kernel: TracedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="a trace needs 1 worker; got 2"):
        launched(kernel, workers=2)
    with pytest.raises(Exception, match="artifact must be for emulator; got emulator-traced"):
        EmulatedKernel(SPEC, kernel.artifact)
    monkeypatch.setattr("flashgen.build.emulator.trace._TRACED", 1 << 20)
    with pytest.raises(TraceError, match=r"a trace holds .* records; the launch made .*: take a smaller problem"):
        launched(kernel)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(TraceError, match=r"addr2line, llvm-addr2line on the PATH \(apt install binutils\)"):
        frames_at(b"", [1])


def test_a_traced_text_of_one_line_stays_a_text() -> None:
    assert traced(Source("k", "int x;\n")).text.startswith("int x;\n\n// ==== emulator/trace.cuh")
