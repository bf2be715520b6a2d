"""The benchmark's arithmetic, tables, files and figures, from results that are made up."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.bench import files, report
from flashgen.bench.relative import RELATIVE
from flashgen.bench.result import BenchResult, CellResult, PeerTimes, result_from_json
from flashgen.build.own_files import LIST, write_own
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.timing.spread import Spread
from tests.support.bench_results import CAUSAL, DECODE, FULL, cell, result


def close(spread: Spread | None, median: float, low: float, high: float) -> None:
    assert spread is not None
    assert (spread.median, spread.low, spread.high) == pytest.approx((median, low, high))


def test_ratios_are_taken_a_round_and_then_their_median() -> None:
    found = cell(FULL, a=(1.0, 2.0, 4.0), b=(2.0, 2.0, 2.0))
    close(found.ratio("a", "b"), 1.0, 0.5, 2.0)
    found = cell(FULL, a=(1.0, 10.0, 100.0), b=(3.0, 10.0, 50.0))
    close(found.ratio("a", "b"), 1.0, 0.5, 3.0)
    assert found.ratio("a", "c") is None
    assert found.ratio("c", "a") is None
    assert found.ratio("a", None) is None


def test_speeds_and_their_units() -> None:
    full, causal, decode = cell(FULL, a=(1.0, 2.0, 4.0)), cell(CAUSAL, a=(1.0,)), cell(DECODE, a=(0.1,))
    assert (full.unit, causal.unit, decode.unit) == ("TFLOP/s", "TFLOP/s", "GB/s")
    close(full.speed("a"), 0.128, 0.064, 0.256)
    close(causal.speed("a"), 0.128, 0.128, 0.128)
    # 2 * (8 query heads * 1 token + 2 key/value heads * 5000 tokens) rows of 128 + 64 elements of 2 bytes, in 0.1 ms.
    gb = 2 * (8 * 1 + 2 * 5000) * (128 + 64) * 2 / 0.1e-3 / 1e9
    close(decode.speed("a"), gb, gb, gb)
    assert full.speed("b") is None


def test_the_best_other_peer_is_by_median() -> None:
    found = cell(FULL, ours=(1.0, 1.0, 1.0), a=(0.1, 3.0, 3.0), b=(2.0, 2.0, 9.0))
    assert found.best("ours") == "b"
    assert found.best("b") == "ours"
    assert cell(FULL, ours=(1.0,)).best("ours") is None


def test_summaries_give_the_geometric_mean_and_the_worst_cell() -> None:
    to_flash, to_best = result().summaries()
    assert (to_flash.subject, to_flash.against, to_flash.cells) == ("flashgen", "flash", 3)
    assert to_flash.geometric_mean == pytest.approx((1.0 * 2.0 * 4.0) ** (1 / 3))
    assert to_flash.worst == pytest.approx(1.0)
    assert to_flash.worst_cell == "bf16_d64_full B1 H1 S1000 (standard)"
    # The full cell's flash and cudnn have the same median: the first of them counts, so it is flash there.
    assert to_best.against == "best other peer"
    assert to_best.geometric_mean == pytest.approx((1.0 * 2.0 * 2.0) ** (1 / 3))


@pytest.mark.parametrize(
    ("peers", "baseline", "subject"),
    [
        (["flash", "cudnn"], "flash", "cudnn"),
        (["flash", "flashgen"], "flash", "flashgen"),
        (["flashgen", "cudnn"], "flashgen", "cudnn"),
        (["flash"], "flash", "flash"),
        (["cudnn", "fa4"], None, "cudnn"),
    ],
)
def test_whose_ratios_are_told(peers: list[str], baseline: str | None, subject: str) -> None:
    found = result()
    found.peers, found.baseline = peers, baseline
    assert found.subject == subject
    assert all(s.subject != s.against for s in found.summaries())
    report.markdown(found)


def test_json_and_back() -> None:
    found = result()
    values = json.loads(json.dumps(found.to_json()))
    assert result_from_json(values) == found
    times = values["cells"][0]["peers"]["flashgen"]
    assert times["rounds_ms"] == [1.0, 2.0, 4.0]
    assert times["ratio_to_baseline"] == {"median": 1.0, "low": 0.5, "high": 2.0}
    assert values["cells"][1]["errors"] == {"cudnn": "RuntimeError: no | kernel"}
    assert values["ratios"][0]["worst"] == 1.0


def test_a_relative_bias_is_named_and_read_back(tmp_path: Path) -> None:
    found = result()
    found.cells = [cell(replace(CAUSAL, problem=replace(CAUSAL.problem, modifiers=(RELATIVE,))), "relative", flash=(1.0, 2.0, 2.0))]
    assert found.cells[0].name == "bf16_d64_causal_relative B1 H1 S1000"
    assert report.tables(found)[0].rows[0][0] == "bf16_d64_causal_relative"
    files.save(found, tmp_path)
    assert files.read_result(tmp_path / "bench.json") == found
    assert [path.name for path in files.draw(found, tmp_path)] == ["bench-relative.png"]


def test_a_file_with_the_earlier_names_is_read() -> None:
    found = result()
    values = found.to_json()
    values["host"], values["host_errors"] = values.pop("call_overhead"), values.pop("call_overhead_errors")
    assert found.call_overhead
    assert result_from_json(values) == found
    with pytest.raises(ArgumentError, match="host"):
        result_from_json({**values, "call_overhead": {}})


def test_a_result_says_its_pass_and_one_of_before_is_forward() -> None:
    found = result()
    values = found.to_json()
    assert values.pop("pass") == "forward"
    assert result_from_json(values) == found
    for each in found.cells:
        each.cell = replace(each.cell, problem=replace(each.cell.problem, operation="backward"))
    values = json.loads(json.dumps(found.to_json()))
    assert (values["pass"], result_from_json(values)) == ("backward", found)
    assert "; backward, 3 rounds, " in report.heading(found)
    assert BenchResult(found.environment, 3, ["flash"], {}, None).operation == "forward"


def test_speeds_of_the_backward_pass_are_of_its_own_work() -> None:
    backward = cell(replace(FULL, problem=replace(FULL.problem, operation="backward")), a=(1.0,))
    close(backward.speed("a"), 2.5 * 0.256, 2.5 * 0.256, 2.5 * 0.256)


def set_in(values: Any, path: tuple[Any, ...], value: object) -> None:
    for key in path[:-1]:
        values = values[key]
    values[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 99, "schema must be 1; got 99"),
        (("schema",), "x" * 10_000, r"schema must be 1; got 'x{199}\.\.\.$"),
        *(
            (("cells", 0, "grid"), grid, "grid must be a name of letters, digits and hyphens; got '")
            for grid in ("../../x", "", "*", "x" * 65)
        ),
        (("environment",), {"device": "x"}, "environment must have the fields date, .*; got device"),
        (("cells", 0, "peers", "flash", "rounds_ms"), [1.0, -2.0, 3.0], "rounds_ms must be finite"),
        (
            ("cells", 0, "peers", "flash", "rounds_ms"),
            [1.0, "x", 3.0],
            "peers flash field rounds_ms value 1 must be of type float; got 'x'",
        ),
        (("cells", 0, "peers", "flash", "rounds_ms"), [1.0, 2.0], "rounds_ms of flash must have 3 values; got 2"),
        (("cells", 0, "workload", "batch"), -1, "batch must be an integer"),
        (("cells", 0, "problem", "mask"), "odd", "problem field mask must be one of full, causal; got 'odd'"),
        (("cells",), 3, "cells must be of type list; got 3"),
        (("cells", 0, "peers", "flash", "graph"), 1, "peers flash field graph must be of type bool; got 1"),
        (("cells", 0, "peers", "flash", "first_call_s"), "x", "peers flash field first_call_s must be of type float"),
        (("cells", 0, "peers", "flash", "clock"), 1, "peers flash must have the fields rounds_ms, graph, first_call_s; got "),
        (("cells", 0, "errors"), {"flash": 7}, "errors flash must be of type str; got 7"),
        (("peers",), [], "peers must name all that were timed, at least one; got \\[\\]"),
        (("peers",), ["flash", "cudnn"], "peers must name all that were timed, .*, and times of \\['flashgen', "),
        (("baseline",), "fa4", "peers must name all that were timed, .*, and times of \\['fa4'\\]"),
        (("cells", 0, "problem", "head_dim"), 10**400, "head_dim must be an integer from 1 to 2147483647"),
        (("peers",), ["x" * 10_000], r"peers must name all that were timed, .*; got \['x{198}\.\.\., and times of \["),
        (("rounds",), 3.0, "result field rounds must be of type int; got 3.0"),
        (("rounds",), True, "result field rounds must be of type int; got True"),
        (("complete",), None, "result field complete must be of type bool"),
        (("call_overhead", "flashgen", "us"), "x", "call_overhead flashgen field us must be of type float"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_with_the_reason(tmp_path: Path, path: tuple[Any, ...], value: object, message: str) -> None:
    values = json.loads(json.dumps(result().to_json()))
    set_in(values, path, value)
    (tmp_path / "x.json").write_text(json.dumps(values))
    with pytest.raises(ArgumentError, match=message) as caught:
        files.read_result(tmp_path / "x.json")
    assert str(caught.value).startswith("from must be a bench.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", "\udcff"])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ArgumentError, match=r"from must be a bench\.json that `flashgen bench` wrote"):
        files.read_result(tmp_path / "x.json")


def test_times_must_be_times() -> None:
    for wrong in ((), (0.0,), (math.nan,), (math.inf,)):
        with pytest.raises(ArgumentError, match="rounds_ms must be"):
            PeerTimes(wrong, False, 0.1)


def test_the_tables() -> None:
    standard, decode, overhead = report.tables(result())
    assert [heading for heading, _ in standard.columns] == [
        "problem", "workload", "flashgen TFLOP/s", "flash TFLOP/s", "cudnn TFLOP/s",
        "flashgen / flash x [10..90 %]", "flashgen / best other x [10..90 %]", "best other",
    ]  # fmt: skip
    assert standard.rows[0][2:] == ["0.1", "0.1", "0.1", "1.000 [0.500..2.000]", "1.000 [0.500..2.000]", "flash"]
    assert standard.rows[1][4:] == ["failed", "2.000 [2.000..2.000]", "2.000 [2.000..2.000]", "flash"]
    assert "flash GB/s" in [heading for heading, _ in decode.columns]
    assert decode.rows[0][-1] == "cudnn"
    assert overhead.rows == [["flashgen", "11.2", "15.5", "-"], ["flash", "failed", "failed", "failed"], ["cudnn", "-", "-", "-"]]
    for table in (standard, decode, overhead):
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_cells_of_one_grid_with_two_units_are_two_tables() -> None:
    found = result()
    found.cells = [
        cell(FULL, "workload", flashgen=(1.0,)),
        cell(DECODE, "workload", flashgen=(1.0,)),
        cell(CAUSAL, "workload", flash=(1.0,)),
    ]
    full, decode, _ = report.tables(found)
    assert (len(full.rows), len(decode.rows)) == (2, 1)


def test_the_summary_names_everything_that_is_missing() -> None:
    lines = report.summary(result())
    assert lines[0].startswith(
        "flashgen / flash: geometric mean 2.000 x over 3 cells, worst 1.000 x in bf16_d64_full B1 H1 S1000 (standard)"
    )
    assert "fa4 is absent: ModuleNotFoundError: No module named 'flash_attn'" in lines
    assert "cudnn failed: RuntimeError: no | kernel; in bf16_d64_causal B1 H1 S1000 (standard)" in lines
    assert "flash failed: OSError: gone; in the CPU cost of a call" in lines
    assert not any("stopped" in line for line in lines)
    stopped = result()
    stopped.complete = False
    assert "the run was stopped before its end" in report.summary(stopped)


def test_markdown_is_whole_and_an_error_cannot_break_it() -> None:
    text = report.markdown(result())
    assert (
        "NVIDIA H200, driver 580.1; flashgen 0.1.0, PyTorch 2.11.0, cuDNN 9.19.0, NVRTC 13.0, flash-attn-4 4.0.0; forward, 3 rounds" in text
    )
    assert "| bf16_d64_full | B1 H1 S1000 | 0.1 |" in text
    assert "no \\| kernel" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.endswith(" |") for line in rows)


def test_an_empty_result_can_be_told(tmp_path: Path) -> None:
    empty = BenchResult(result().environment, 3, ["flashgen"], {}, None)
    assert report.tables(empty) == []
    files.save(empty, tmp_path)
    assert files.draw(empty, tmp_path) == []
    nobody = CellResult("standard", FULL, errors={"flashgen": "x"})
    empty.cells.append(nobody)
    assert report.tables(empty)[0].rows[0][2] == "failed"
    assert files.draw(empty, tmp_path) == []


def test_saving_reads_back_and_leaves_nothing_else(tmp_path: Path) -> None:
    written = files.save(result(), tmp_path)
    assert {*tmp_path.iterdir()} == {*written, tmp_path / LIST}
    assert files.read_result(tmp_path / "bench.json") == result()
    assert stat.S_IMODE((tmp_path / "bench.json").stat().st_mode) == 0o644


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    files.save(result(), tmp_path)
    before = (tmp_path / "bench.json").read_bytes()

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, call, broken)
    with pytest.raises(FlashgenError, match=r" cannot be written: disk full"):
        files.save(replace(result(), complete=False), tmp_path)
    assert (tmp_path / "bench.json").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [LIST, "bench.json", "bench.md"]


def test_figures_are_drawn_and_those_of_an_earlier_run_removed(tmp_path: Path) -> None:
    write_own(tmp_path, {"bench-old.png": b"old"})
    (tmp_path / "mine.png").write_bytes(b"mine")
    written = files.draw(result(), tmp_path)
    assert sorted(p.name for p in written) == ["bench-decode.png", "bench-standard.png"]
    assert sorted(os.listdir(tmp_path)) == [LIST, "bench-decode.png", "bench-standard.png", "mine.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("name", ["bench-old.png", "bench-decode.png", "bench.json", "bench.md"])
@pytest.mark.parametrize("written", [False, True])
def test_a_file_of_the_users_is_kept_and_named(name: str, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashgen.bench.plot._png", lambda figure: b"drawn")  # drawing takes most of the time
    if written:
        write_own(tmp_path, {"bench-old.png": b"old"})
        files.save(result(), tmp_path)
        files.draw(result(), tmp_path)
        files.make_folder(tmp_path)
    write_own(tmp_path, {"bench-old.png": b"old"})
    (tmp_path / name).write_bytes(b"mine")
    for action in (
        lambda: files.make_folder(tmp_path),
        lambda: files.make_folder(tmp_path, result()),
        lambda: files.draw(result(), tmp_path) if name.endswith(".png") else files.save(result(), tmp_path),
    ):
        with pytest.raises(ArgumentError, match=rf"^out must .*; got {tmp_path}, in which {tmp_path / name} is of somebody else"):
            action()
        assert (tmp_path / name).read_bytes() == b"mine"


def test_a_figure_holds_a_bar_for_each_time() -> None:
    from flashgen.bench.plot import draw_grid

    figure = draw_grid(result(), "standard", "TFLOP/s", result().cells[:2])
    full, causal = figure.axes
    assert (full.get_title(), causal.get_title()) == ("bf16, head dim 64, full", "bf16, head dim 64, causal")
    assert (len(full.patches), len(causal.patches)) == (3, 2)
    assert full.get_ylabel() == "TFLOP/s"
    assert [label.get_text() for label in full.get_xticklabels()] == ["S1000\nB1 H1"]
    heights = [bar.get_height() for bar in full.patches]  # type: ignore[attr-defined]
    assert heights == pytest.approx([0.128, 0.128, 0.128])


def test_without_matplotlib_there_is_a_message_and_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "flashgen.bench.plot", raising=False)
    with pytest.raises(files.PlotError, match=r"pip install 'flashgen\[plot\]'"):
        files.draw(result(), tmp_path)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="out must be a folder that can be written"):
        files.make_folder(tmp_path / "file")
    files.make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
