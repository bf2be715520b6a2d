"""Bytes by hardware counters without a GPU: what a profiler writes, and profilers that are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flashgen.cells import Cell
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.workload import Workload
from flashgen.compare.counters import METRICS, CountersError, count_bytes, counted
from flashgen.compare.profiled import MARK
from flashgen.compare.result import CountedBytes

CALLS = [(name, Cell(Problem(Dtype.FP16, 64), Workload(1, 2, 2, 128, 128))) for name in ("flash2_forward", "flash")]


def line(*values: object) -> str:
    return ",".join(f'"{value}"' for value in values)


HEAD = line("ID", "Kernel Name", *METRICS)
UNITS = line("", "", "byte", "sector", "sector", "byte", "byte")
END = line(9, f"void at::cuda::{MARK}(long)", 0, 0, 0, 0, 0)


def test_the_kernels_up_to_a_mark_are_one_call() -> None:
    lines = [
        "==PROF== Connected to process 851",
        HEAD,
        UNITS,
        line(0, "first", 100, 2, 0, 64, 32),
        line(1, "second", "1,000", 3, 4, 1, 1),
        END,
    ]
    assert counted([*lines, END, line(2, "third", 7, 0, 0, 0, 0), END]) == [
        CountedBytes(1100, 5 * 32, 4 * 32, 65, 33),
        None,
        CountedBytes(7, 0, 0, 0, 0),
    ]
    assert counted([]) == []


def profiler(folder: Path, code: str) -> str:
    """A program that stands for ncu, its arguments in `given` and its input in `asked`."""
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\nimport json, sys\ngiven, asked = sys.argv[1:], json.load(sys.stdin)\n{code}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_the_profiler_is_given_the_calls(tmp_path: Path) -> None:
    code = f"""
json.dump([given, asked], open({str(tmp_path / "asked")!r}, "w"))
print("==PROF== Disconnected")
print({HEAD!r}); print({UNITS!r})
for _ in asked: print({line(0, "kernel", 5, 1, 0, 0, 0)!r}); print({END!r})"""
    assert count_bytes(CALLS, 3, profiler(tmp_path, code)) == [CountedBytes(5, 32, 0, 0, 0)] * 2
    given, asked = json.loads((tmp_path / "asked").read_text())
    assert given[given.index("--metrics") + 1] == ",".join(METRICS)
    assert given[-4:] == [sys.executable, "-m", "flashgen.compare.profiled", "3"]
    assert [name for name, _, _ in asked] == ["flash2_forward", "flash"]
    assert asked[0][1]["head_dim"] == 64
    assert asked[0][2]["len_q"] == 128


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "print('==ERROR== ERR_NVGPUCTRPERM - no permission'); sys.exit(1)",
            "could not be read: ==ERROR== ERR_NVGPUCTRPERM - no permission$",
        ),
        ("print('no such GPU', file=sys.stderr); sys.exit(2)", "could not be read: no such GPU$"),
        ("sys.exit(7)", "could not be read: ncu ended with 7$"),
        (f"print({HEAD!r}); print({END!r})", "could not be read: ncu told of 1 of 2 calls$"),
    ],
)
def test_a_profiler_that_gives_no_counters(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(CountersError, match=message):
        count_bytes(CALLS, 0, profiler(tmp_path, code))


def test_a_profiler_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(CountersError, match=r"could not be read: .*No such file"):
        count_bytes(CALLS, 0, str(tmp_path / "none"))
