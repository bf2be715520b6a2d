"""`flashgen debug`: blocks in a program of their own. What is found, with the thread and the line, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.emulator.compiler import CxxCompilerMissingError, Emulated, SanitizerMissingError, compile_for_emulator, cxx_compiler
from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulationOrder, Schedule
from flashgen.build.nvrtc import compile_many
from flashgen.build.store.store import ArtifactStore
from flashgen.cli import app
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import Source, render_program
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.selection.families import default_spec
from flashgen.verification import debug
from flashgen.verification.debug import Debugged
from tests.support.cases import Case, Layout
from tests.support.plan import every_case

SPEC = default_spec(Problem(Dtype.FP16, 16), find_target("sm_90a"), family="attention_forward")
OPTIONS = (
    "--family",
    "attention_forward",
    "--head-dim",
    "16",
    "--dtype",
    "fp16",
    "--arch",
    "sm_90a",
    "--heads",
    "1",
    "--seqlen",
    "300",
)  # five blocks; the first has 44 rows
BEGIN = "    const auto chain = make_chain<kCausal>(len_q, len_kv);\n"


def planted(*patches: tuple[str, str]) -> Source:
    """The text of SPEC's program with faults, each of which must apply."""
    text = render_program(SPEC).text
    for find, replace in patches:
        assert text.count(find) == 1, find
        text = text.replace(find, replace)
    return Source(SPEC.name, text)


# Three texts, in which each block has a fault of its own, because a compile takes seconds.
BAD_ACCESSES = planted(
    ("pass * partition.kRowsPerPass + partition.row < rows_valid &&\n                ", ""),  # block 0: it has fewer rows than a tile
    ("v + last * kBlockKv * v_row", "v + (last * kBlockKv + (block_index() == 1) * 4000) * v_row"),
    (BEGIN, BEGIN + "    int few[4] = {};\n    few[block_index() == 2 ? p.len_q : 0] = 1;\n    if (few[p.len_kv % 4 + 1]) return;\n"),
)
SICK = planted(
    (
        BEGIN,
        BEGIN
        + """    if (block_index() == 0 && thread_index() == 33) printf("block 0 has %d keys\\n", p.len_kv);
    if (block_index() == 1 && warp_index() == 1) return;
    if (block_index() == 3) *(volatile int*)16 = 1;
""",
    ),
    ("queries_in(q, p.q_row);", "queries_in(q - (block_index() == 4) * 100000, p.q_row);"),
)
WRONG = planted(
    (BEGIN, BEGIN + "    if (block_index() == 2) return;\n"),
    ("softmax(p.scale_log2, p.ln2_hi", "softmax(block_index() == 3 ? 1.0f : p.scale_log2, p.ln2_hi"),
)


@cache
def missing_sanitizers() -> str:
    """Why sanitised programs cannot be made here; empty if they can."""
    try:
        compile_for_emulator(Source("main", "int main() {}\n"), Emulated.SANITIZED)
    except SanitizerMissingError as error:
        return str(error)
    return ""


@pytest.fixture
def sanitizers() -> None:
    if missing_sanitizers():
        pytest.skip(missing_sanitizers())


def sanitized(test: Callable[..., None]) -> Callable[..., None]:
    """A test of a program that sanitizers watch: for --slow."""
    marked: Callable[..., None] = pytest.mark.slow(pytest.mark.usefixtures("sanitizers")(test))
    return marked


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All programs, on all cores: one after the other they would take most of the time."""
    slow = every_case(request.config)
    texts = [(source, Emulated.PROGRAM) for source in (SICK, *[WRONG] * slow)]
    if slow and not missing_sanitizers():  # with sanitizers a text takes six times as long
        texts += [(source, Emulated.SANITIZED) for source in (render_program(SPEC), BAD_ACCESSES)]
    store = ArtifactStore()
    for _, result in compile_many(((source.digest, kind), partial(store.get_or_compile, source, kind)) for source, kind in texts):
        assert isinstance(result, Artifact), result


def flashgen(*options: str, code: int) -> tuple[str, str]:
    """Output and errors of `flashgen debug`."""
    command = [sys.executable, "-m", "flashgen", "debug", *OPTIONS, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def run(folder: Path, block: int = 0, layout: Layout = Layout.DENSE, **options: object) -> Debugged:
    """The same in this process: on padded and other tensors, too."""
    case = Case("small", SPEC.problem, Workload(1, 1, 1, 300, 300), 0.25, layouts=(layout,) * 4)
    made = case.make("cpu")
    tensors = Tensors(case.problem, case.workload, {"q": made.q, "k": made.k, "v": made.v, "out": made.out.view, "lse": made.lse.view})
    with open(os.devnull, "w") as output:
        return debug.run_blocks(SPEC, tensors, folder, block=block, output=output, **options)  # type: ignore[arg-type]


def fault_of(source: Source, folder: Path, block: int, layout: Layout = Layout.DENSE, sanitize: bool = False) -> EmulatorFaultError:
    """What is found in a block of this text."""
    found = run(folder, block, layout, source=source, sanitize=sanitize)
    assert not found.ok
    assert found.fault is not None
    return found.fault


def line_of(source: Source, part: str) -> int:
    """The number of the only line that has this in it."""
    (found,) = [number for number, line in enumerate(source.text.splitlines(), 1) if part in line]
    return found


@sanitized
def test_a_clean_run_says_what_ran_and_leaves_it_behind(tmp_path: Path) -> None:
    out, err = flashgen("--sanitize", "--out", str(tmp_path), code=0)
    flashgen("--sanitize", "--seqlen-kv", "0", code=0)  # rows that see no key
    assert not err
    for said in (SPEC.name, "0 to 0 of 5", str(tmp_path / "kernel.cpp"), "within all bounds", "printf works in the kernel"):
        assert said in out
    assert re.search(r"^rows +44$", out, re.MULTILINE)
    assert (tmp_path / "kernel.cpp").read_text() == render_program(SPEC).text
    again = subprocess.run([tmp_path / "kernel", tmp_path / "launch.bin", tmp_path / "again.bin"], capture_output=True, text=True)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "results.bin").read_bytes()


@sanitized
@pytest.mark.parametrize("layout", [Layout.DENSE, Layout.PADDED, Layout.HEADS_FIRST])
@pytest.mark.parametrize("late", [False, True])
def test_a_whole_grid_is_clean_and_right_in_any_layout(layout: Layout, late: bool, tmp_path: Path) -> None:
    found = run(tmp_path, layout=layout, blocks=5, sanitize=True, interleaving=EmulationOrder(Schedule.RANDOM, late, seed=5))
    assert found.fault is None
    assert found.ok
    assert len(found.rows) == 300


@sanitized
@pytest.mark.parametrize("layout", [Layout.DENSE, Layout.PADDED])
def test_a_store_past_the_end_of_out(layout: Layout, tmp_path: Path) -> None:
    fault = fault_of(BAD_ACCESSES, tmp_path, 0, layout, sanitize=True)
    assert fault.check == "AddressSanitizer"
    assert "WRITE of size 16" in fault.report
    line = line_of(BAD_ACCESSES, "*reinterpret_cast<uint4*>(destination")
    where = rf"block 0: thread \d+ \(warp \d, lane \d+\), \d+ bytes past the end of out: .* at kernel\.cpp:{line} in "
    assert re.match(where, fault.message)
    assert (tmp_path / "kernel.cpp").read_text() == BAD_ACCESSES.text


@sanitized
def test_a_read_far_past_the_end_of_v(tmp_path: Path) -> None:
    fault = fault_of(BAD_ACCESSES, tmp_path, 1, sanitize=True)
    assert fault.check == "AddressSanitizer"
    assert "READ of size 16" in fault.report
    assert re.match(r"block 1: thread \d+ \(warp \d, lane \d+\), \d+ bytes past the end of v: ", fault.message)
    line = line_of(BAD_ACCESSES, "if (step >= 0) keys_and_values.load_last(ring, len_kv);")
    assert re.search(rf"in {SPEC.name}.* \S*kernel\.cpp:{line}$", fault.report, re.MULTILINE)


@sanitized
def test_an_index_past_the_end_of_registers(tmp_path: Path) -> None:
    text = tmp_path / "edited.cpp"
    text.write_text(BAD_ACCESSES.text)
    out, err = flashgen("--sanitize", "--json", "--block", "2", "--text", str(text), code=1)
    found, line = json.loads(out), line_of(BAD_ACCESSES, "few[block_index() == 2 ? p.len_q : 0] = 1;")
    assert found["check"] == "UndefinedBehaviorSanitizer"
    assert found["text"] != str(text)
    report = rf"kernel\.cpp:{line}:\d+: runtime error: index 300 out of bounds for type 'int \[4\]'"
    assert re.search(report, err)
    assert re.match(rf"block 2: thread \d+ \(warp \d, lane \d+\): \S*{report}$", found["fault"])


@pytest.mark.slow
def test_printf_works_in_the_kernel(tmp_path: Path) -> None:
    text = tmp_path / "edited.cpp"
    text.write_text(SICK.text)
    out, _ = flashgen("--text", str(text), "--out", str(tmp_path / "out"), code=0)
    assert out.startswith("block 0 has 300 keys\nfact ")


@pytest.mark.parametrize(
    ("block", "check", "message"),
    [
        (1, "deadlock", r"no thread can go on: block 1: threads 0-31 wait at barrier_sync 0; threads 32-63 have ended$"),
        pytest.param(3, "crash", r"SIGSEGV; the address sanitizer \(--sanitize\) says more$", marks=pytest.mark.slow),
        (
            4,
            "global memory",
            r"block 4: thread \d+ \(warp \d, lane \d+\) copies 16 bytes from outside of the tensors: \d+ bytes before the begin of q$",
        ),
    ],
)
def test_what_is_found_without_sanitizers(block: int, check: str, message: str, tmp_path: Path) -> None:
    fault = fault_of(SICK, tmp_path, block)
    assert fault.check == check
    assert re.match(message, fault.message)


@pytest.mark.slow
def test_wrong_numbers_and_rows_that_were_not_written(tmp_path: Path) -> None:
    assert run(tmp_path, 0, source=WRONG).ok
    nothing = run(tmp_path, 2, source=WRONG)
    assert (nothing.ok, len(nothing.rows), nothing.verdict, nothing.missing) == (False, 0, None, "no row was written")
    wrong = run(tmp_path, 3, source=WRONG)
    assert (wrong.ok, len(wrong.rows), wrong.missing) == (False, 64, "")
    assert wrong.verdict is not None
    assert "out max error" in wrong.verdict.message
    assert run(tmp_path, blocks=5, source=WRONG).missing == "64 rows were not written"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--block", "5"], "block must be an integer from 0 to 4; got 5"),
        (["--block", "-1"], "block must be an integer from 0 to 4; got -1"),
        (["--block", "1", "--blocks", "5"], "blocks must be an integer from 1 to 4; got 5"),
        (["--seqlen", "0"], "seqlen must be an integer >= 1; got 0"),
        (["--seed", "-1"], "seed must be an integer from 0 to 9223372036854775807; got -1"),
        (["--schedule", "fastest"], "schedule must be one of round-robin, ahead, reversed, random; got 'fastest'"),
        (["--text", "/nonexistent.cpp"], "text must be a file that can be read; got /nonexistent.cpp"),
        (["--text", __file__], f"text must be an edited {SPEC.name}, as these options write it; got {__file__}"),
        (["--kv-heads", "2"], "heads_q must be a multiple of heads_kv"),
    ],
)
def test_misuse_names_the_argument(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["debug", *OPTIONS, *options])
    assert isinstance(done.exception, ArgumentError)
    assert str(done.exception).startswith(message)
    assert not done.output


@pytest.fixture
def new_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Lets $CXX name a compiler, and look for it anew."""

    def choose(path: Path) -> None:
        monkeypatch.setenv("CXX", str(path))
        cxx_compiler.cache_clear()

    yield choose
    cxx_compiler.cache_clear()


def test_without_a_compiler_or_its_sanitizers_the_message_says_what_to_install(
    new_compiler: Callable[[Path], None], tmp_path: Path
) -> None:
    found, bare = cxx_compiler().path, tmp_path / "g++"
    new_compiler(tmp_path / "nothing")
    with pytest.raises(CxxCompilerMissingError, match=r"kernels run on the CPU through a C\+\+ compiler"):
        run(tmp_path, sanitize=True)
    bare.write_text(
        f'#!/bin/sh\ncase "$*" in *-fsanitize=*) echo "/usr/bin/ld: cannot find libasan.so.8" >&2; exit 1;; esac\nexec {found} "$@"\n'
    )
    bare.chmod(0o700)
    new_compiler(bare)
    not_stored = planted((BEGIN, BEGIN + "\n"))
    with pytest.raises(SanitizerMissingError, match=r"sanitize needs AddressSanitizer and .* of g\+\+.*apt install libasan8"):
        run(tmp_path, source=not_stored, sanitize=True)


def test_a_text_that_does_not_compile_shows_its_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        run(tmp_path, source=planted((BEGIN, BEGIN + "    nonsense;\n")))
    assert re.search(r"^kernel\.cpp:\d+:5: error: .nonsense. was not declared", str(caught.value), re.MULTILINE)
