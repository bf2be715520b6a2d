"""The page of `flashgen tune --html`: what of a result is on it, what its texts cannot do, and where it may be written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flashgen import tuning
from flashgen.cells import cells_of
from flashgen.cli import app
from flashgen.codegen.errors import ArgumentError
from flashgen.compare.formula import Roofline
from flashgen.tuning.passed_over import PassedOver, passed_over
from flashgen.tuning.request import Request
from flashgen.tuning.result import TuneResult
from flashgen.tuning_page import page
from flashgen.tuning_page.data import tune_page_data
from tests.support.tune_results import DEVICE, REASONS, made_request, made_result

REQUEST = made_request((1024,))
NOTHING = PassedOver([], [], [])


@pytest.fixture(scope="module")
def result() -> TuneResult:
    return made_result(REQUEST)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, result: TuneResult) -> None:
    """A tune that takes no time, of cells that pass nothing over."""
    monkeypatch.setattr(tuning, "run", lambda request, progress: result)
    monkeypatch.setattr(page, "passed_over", lambda request, row, device: NOTHING)


def data_of(text: str) -> Any:
    """What the page's scripts will read."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def tuned(*options: str | Path) -> Result:
    arguments = ("tune", "--device", "h200", "--head-dim", "64", "--seqlen", "1024")
    return CliRunner().invoke(app, [*arguments, *map(str, options)])


@pytest.mark.usefixtures("quick")
def test_each_number_is_on_the_page(result: TuneResult) -> None:
    data = data_of(page.tune_page(REQUEST, result, DEVICE))
    assert (data["device"], data["timed"], data["complete"], data["measured"], data["seconds"]) == ("NVIDIA H200", True, False, 22, 12.5)
    assert data["notVerified"] == result.not_verified
    roof = Roofline.of(DEVICE)
    assert data["roof"] == {"flops": roof.flops, "bandwidth": roof.bandwidth}
    for cell, row in zip(data["cells"], result.rows, strict=True):
        assert (cell["problem"], cell["workload"]) == (row.cell.problem.name, row.cell.workload.name)
        shown = row.to_json()
        names = {"spills": "spill_bytes", "shared": "shared_bytes", "boundBy": "bound_by"}
        for name in ("seconds", "tflops", "gain", "registers", "spills", "shared", "boundBy", "tried", "failed", "measured"):
            assert cell[name] == shown[names.get(name, name)], name
        assert cell["intensity"] == row.cell.flops / row.cell.io_bytes
        assert cell["attainable"] == roof.attainable(cell["intensity"])
        for values, each in zip(cell["candidates"], row.candidates, strict=True):
            state, *numbers = values[:8]
            assert numbers == [each.seconds, each.low, each.high, each.predicted, each.registers, each.spill_bytes, each.shared_bytes]
            texts = [data["texts"][number] for number in values[8:]]
            assert [texts[0], texts[2:]] == [each.spec.family.name, [each.spec.config.describe(), each.failure]]
            assert state == ("failed" if each.failure else "measured" if each.seconds else "untried")
        assert row.candidates[cell["winner"]].spec == row.spec
        assert row.candidates[cell["default"]].spec == row.default


@pytest.mark.usefixtures("quick")
def test_no_text_of_a_result_leaves_its_script(result: TuneResult) -> None:
    text = page.tune_page(REQUEST, replace(result, device="</title><script>/*style*/"), DEVICE)
    data = data_of(text)
    assert set(REASONS) <= set(data["texts"])
    assert data["device"] == "</title><script>/*style*/"
    assert (text.count("<script"), text.count("</script>"), text.count("<!--")) == (2, 2, 0), "the frame's own"
    assert "http" not in text.replace("http-equiv", "")
    assert len(text.encode()) < page.LARGEST_PAGE


def test_predictions_are_called_so() -> None:
    result = made_result(Request(REQUEST.cells[:1], device="h200"), timed=False)
    data = tune_page_data(result, [NOTHING], DEVICE)
    assert (data["timed"], data["cells"][0]["measured"]) == (False, False)
    assert {values[0] for values in data["cells"][0]["candidates"]} == {"predicted", "failed", "untried"}


def test_a_winner_of_an_earlier_tune_is_shown(result: TuneResult) -> None:
    row = result.rows[0]
    others = tuple(each for each in row.candidates if each.spec != row.spec)
    rows = [replace(row, candidates=others), replace(row, spec=None, seconds=None, registers=None, candidates=())]
    with_other, without_any = tune_page_data(replace(result, rows=rows), [NOTHING] * 2, DEVICE)["cells"]
    assert with_other["winner"] == len(others)
    assert with_other["candidates"][-1][:2] == ["measured", row.seconds]
    assert (without_any["winner"], without_any["tflops"], without_any["candidates"]) == (None, None, [])


def test_what_was_not_tried_is_all_that_is_left() -> None:
    request = Request(cells_of(passes="softmax", seqlens=(1024,)), device="h200", family="softmax_online")
    (row,) = made_result(request).rows
    assert row.spec is not None
    other, family = passed_over(request, row, DEVICE), row.spec.family
    configs = [each.spec.config for each in row.candidates]
    configs += [
        *(config for _, config, _ in other.refused),
        *(config for _, config in other.dominated),
        *(each.config for each in other.slower),
    ]
    assert {config.name for config in configs} == {config.name for config in family.space(row.cell.problem, DEVICE.target)}
    assert len({config.name for config in configs}) == len(configs)
    assert passed_over(replace(request, settings={"warps": "4"}), row, DEVICE) == NOTHING


def test_too_many_refusals_are_counted(result: TuneResult, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result.rows[0].spec is not None
    family, config = result.rows[0].spec.family, result.rows[0].spec.config
    monkeypatch.setattr(page, "passed_over", lambda *_: PassedOver([(family, config, ["it does not fit", "<nor> ever"])] * 30, [], []))
    (why, count, which) = data_of(full := page.tune_page(REQUEST, result, DEVICE))["cells"][0]["refused"][0]
    texts = data_of(full)["texts"]
    assert (texts[why], count, texts[which].count(config.name)) == ("it does not fit; <nor> ever", 30, 30)
    monkeypatch.setattr(page, "LARGEST_PAGE", len(full) - 1)
    assert data_of(page.tune_page(REQUEST, result, DEVICE))["cells"][0]["refused"][0][1:] == [30, None]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("page.txt", "a file that ends in .html"),
        ("folder.html", "a file that can be written"),
        ("nowhere/page.html", "in a folder that is there"),
        ("mine.html/page.html", "in a folder that is there"),
        ("mine.html", "a new file or a page that flashgen tune wrote"),
        ("loop.html", "a file that can be written"),
        ("x" * 300 + ".html", "a file that can be written"),
    ],
)
def test_bad_places_are_refused_before_anything_is_measured(
    name: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "run", lambda *_: pytest.fail("it began"))
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "mine.html").write_text("<p>months of work")
    (tmp_path / "loop.html").symlink_to("loop.html")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = tuned("--html", tmp_path / name)
    assert isinstance(done.exception, ArgumentError)
    assert str(done.exception).startswith(f"html must be {complaint}; got {tmp_path}/{name}")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "mine.html").read_text() == "<p>months of work"


def test_a_dry_run_has_no_page(tmp_path: Path) -> None:
    done = tuned("--dry-run", "--html", tmp_path / "page.html")
    assert str(done.exception).startswith("html must be left out of a dry run")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_a_page_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for options in ([], ["--json"]):
        done = tuned("--html", path, *options)
        assert done.exit_code == 0, done.output
        assert f"wrote {path}" in done.stderr
        assert len(data_of(path.read_text())["cells"]) == 2
    assert json.loads(done.stdout)["device"] == "NVIDIA H200"
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.usefixtures("quick")
def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    tuned("--html", path)
    before = path.read_bytes()
    monkeypatch.setattr("flashgen.build.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    done = tuned("--html", path)
    assert str(done.exception) == f"{path} cannot be written: No space left on device"
    assert "bf16_d64_full" in done.stdout, "the result is told all the same"
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]
