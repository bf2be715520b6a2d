"""What is read from the compiler's log, and what counts as a defect."""

from __future__ import annotations

import pytest

from flashgen.build.artifact import Artifact, CompileError, EntryReport, Report
from flashgen.build.nvrtc import compile_many, compile_source, nvrtc_version
from flashgen.codegen.render import Source

CLEAN = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers"""


def test_a_clean_log() -> None:
    report = Report.from_log(CLEAN)
    assert report == Report({"k": EntryReport(registers=168, spill_bytes=0, stack_bytes=0)})
    assert (report.registers, report.spill_bytes, report.stack_bytes) == (168, 0, 0)
    assert not report.defects


def test_spills_are_a_defect() -> None:
    report = Report.from_log(CLEAN.replace("0 bytes stack", "48 bytes stack").replace("0 bytes spill stores", "40 bytes spill stores"))
    assert report.spill_bytes == 40
    assert report.defects == ["spills 40 B a thread"]


def test_spills_are_what_is_stored_and_loaded() -> None:
    log = CLEAN.replace("0 bytes spill stores, 0 bytes spill loads", "16 bytes spill stores, 24 bytes spill loads")
    assert Report.from_log(log).spill_bytes == 40
    assert Report.from_log(CLEAN.replace("0 bytes spill loads", "8 bytes spill loads")).defects == ["spills 8 B a thread"]


def test_local_memory_is_a_defect() -> None:
    assert Report.from_log(CLEAN.replace("0 bytes stack", "64 bytes stack")).defects == ["keeps 64 B a thread in local memory"]


def test_each_kernel_of_a_text_is_reported() -> None:
    other = CLEAN.replace("'k'", "'k_other'").replace("168", "40")
    spilling = CLEAN.replace("'k'", "'k_third'").replace("0 bytes spill loads", "8 bytes spill loads").replace("168", "255")
    report = Report.from_log(f"ptxas info    : 0 bytes gmem\n{CLEAN}\n{other}\n{spilling}")
    assert report.entries == {"k": EntryReport(168), "k_other": EntryReport(40), "k_third": EntryReport(255, 8)}
    assert (report.registers, report.spill_bytes, report.stack_bytes) == (255, 8, 0)
    assert report.defects == ["k_third spills 8 B a thread"]


def test_a_kernel_without_a_report_is_an_error() -> None:
    with pytest.raises(CompileError, match="has no report of registers and spills"):
        Report.from_log(f"{CLEAN}\nptxas info    : Compiling entry function 'other' for 'sm_90a'")


def test_a_compiled_text_with_two_kernels() -> None:
    """The second one spills, as does a function that it calls."""
    work = "float v[64]; for (int i = 0; i < 64; ++i) v[i] = x[i * 32]; __syncthreads(); for (int i = 0; i < 64; ++i) x[i * 64] = v[i];"
    work = work.replace("for (int", "\n#pragma unroll\nfor (int")
    text = (
        f"__device__ __noinline__ void called(float* x) {{ {work} }}\n"
        'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }\n'
        f'extern "C" __global__ void __launch_bounds__(1024, 2) k_other(float* x) {{ called(x); {work} }}'
    )
    report = compile_source(Source("k", text), "sm_80").report
    assert report.entries.keys() == {"k", "k_other"}
    assert not report.entries["k"].defects
    (defect,) = report.defects
    assert defect.startswith(f"k_other spills {report.entries['k_other'].spill_bytes} B")


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
        "ptxas info    : (C7508) setmaxnreg is ignored to maintain minimum register requirement.",
        "ptxas warning : 'maxnreg' directive ignored",
    ],
)
def test_an_ignored_directive_is_a_defect(line: str) -> None:
    assert Report.from_log(f"{CLEAN}\n{line}").defects == [line]


@pytest.mark.parametrize("log", ["", "ptxas info    : Used 168 registers", "warning only"])
def test_a_log_without_a_report_is_an_error(log: str) -> None:
    with pytest.raises(CompileError, match="has no report of registers and spills"):
        Report.from_log(log)


def test_an_error_carries_the_compilers_words() -> None:
    with pytest.raises(
        CompileError, match=r"k does not compile for sm_80:\n(.|\n)*k\.cu\(1\): error: identifier \"nonsense\" is undefined"
    ):
        compile_source(Source("k", 'extern "C" __global__ void k() { nonsense; }'), "sm_80")


def test_the_same_source_compiles_twice_with_a_report() -> None:
    """NVRTC's own cache would answer the second time without a log."""
    source = Source("k", 'extern "C" __global__ void k(float* p) { p[threadIdx.x] = 3; }')
    first, second = compile_source(source, "sm_90a"), compile_source(source, "sm_90a")
    assert first.cubin == second.cubin
    assert first.report == second.report
    assert first.compiler_version == nvrtc_version()


def test_many_compile_side_by_side_and_failures_are_values() -> None:
    good = Source("k", 'extern "C" __global__ void k() {}')
    bad = Source("k", "int")
    results = dict(
        compile_many([("good", lambda: compile_source(good, "sm_80")), ("bad", lambda: compile_source(bad, "sm_80"))], workers=2)
    )
    assert isinstance(results["good"], Artifact)
    assert isinstance(results["bad"], CompileError)
