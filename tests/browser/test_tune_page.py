"""The page of `flashgen tune --html` in Chromium: what a reader sees without colour, without a mouse, in the dark and on a phone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flashgen.tuning_page.page import LARGEST_PAGE, tune_page
from tests.browser.conftest import Watched
from tests.support.tune_results import DEVICE, REASONS, made_request, made_result

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
WIDTH = 360
PHONE = {"viewport": {"width": WIDTH, "height": 740}, "device_scale_factor": 2, "has_touch": True}
THEMES = pytest.mark.parametrize("watched", [{"color_scheme": "dark"}, {"color_scheme": "light"}], indirect=True, ids=["dark", "light"])


def written_page(folder: Path, timed: bool) -> str:
    """The address of a page of four cells."""
    request = made_request()
    path = folder / "page.html"
    path.write_text(tune_page(request, made_result(request, timed), DEVICE), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def measured(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written_page(tmp_path_factory.mktemp("measured"), timed=True)


@pytest.fixture(scope="module")
def predicted(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    return written_page(tmp_path_factory.mktemp("predicted"), timed=False)


def walked(page: Page, chart: str) -> list[str]:
    """What a voice reads of each point of a chart, from the first by the right arrow. No two are called the same."""
    page.locator(f"{chart} [role=listbox] [tabindex='0']").focus()
    page.keyboard.press("Home")
    label, found = "document.activeElement.getAttribute('aria-label')", list[str]()
    while not found or found[-1] != page.evaluate(label):
        found.append(page.evaluate(label))
        page.keyboard.press("ArrowRight")
    return found


def test_tab_reaches_a_chart_and_arrows_a_reason(watched: Watched, measured: str) -> None:
    page = watched.page
    page.goto(measured)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#space') !== null"):
            break
    assert page.evaluate("document.activeElement.getAttribute('role')") == "option"
    labels = walked(page, "#space")
    assert len(labels) == 16
    assert labels[0].startswith("Winner, measured; ")
    for reason in REASONS:
        (label,) = [label for label in labels if reason in label]
        assert "failed; why: " in label.lower()
    assert labels[-1].startswith("Not tried: the budget ended")
    assert page.inner_text("#panel .detail") == re.sub(r"\s+", " ", labels[-1])
    page.keyboard.press("Home")
    assert page.inner_text("#panel .detail").startswith("Winner, ")
    chosen = page.locator("#panel tr.chosen")
    assert (chosen.count(), chosen.locator("td").first.inner_text()) == (1, "1")
    assert page.locator("#panel [aria-selected=true]").count() == 2, "the same config in both charts"


def test_a_pointer_and_a_finger_reach_a_reason(watched: Watched, measured: str) -> None:
    page = watched.page
    page.goto(measured)
    page.locator("#space [role=option].failed").first.hover()
    assert REASONS[0] in page.inner_text("#panel .detail")
    page.locator("#space [role=option].failed").last.click()
    assert REASONS[3] in page.inner_text("#panel .detail")


def test_outcomes_differ_by_shape(watched: Watched, measured: str, predicted: str) -> None:
    page = watched.page
    shapes: dict[str, set[str]] = {}
    for address in (measured, predicted):
        page.goto(address)
        page.check("#with-slower")
        drawn = "els => els.map((el) => [el.getAttribute('class'), el.querySelector('.shape').getAttribute('d')])"
        for classes, shape in page.locator("#space [role=option]").evaluate_all(drawn):
            shapes.setdefault(" ".join(sorted({*classes.split()} - {"default"})), set()).add(shape)
    assert shapes.keys() == {"measured winner", "predicted winner", "measured", "predicted", "failed", "untried", "slower"}
    assert all(len(each) == 1 for each in shapes.values()), "one shape each"
    assert shapes.pop("measured winner") == shapes["predicted winner"], "the key says which"
    assert len(set.union(*shapes.values())) == len(shapes)


def test_tables_have_the_numbers_of_the_charts(watched: Watched, measured: str) -> None:
    page = watched.page
    page.goto(measured)
    result = made_result(made_request())
    for row, line in zip(result.rows, page.locator("#winners tbody tr").all(), strict=True):
        texts = line.locator("td").all_inner_texts()
        assert row.seconds is not None
        assert row.tflops is not None
        assert texts[:5] == [row.cell.problem.name, row.cell.workload.name, f"{row.seconds * 1e6:.1f}", "measured", f"{row.tflops:.1f}"]
    assert page.locator("#roofline [role=option]").count() == page.locator("#roofline tbody tr").count() == 4
    rows = page.locator("#panel > section > .scroll tbody tr").all_inner_texts()
    assert len(rows) == 16
    for each in result.rows[0].candidates:
        words = f"{each.seconds * 1e6:.1f}" if each.seconds else each.failure or "not tried"
        assert any(re.sub(r"\s+", " ", words) in re.sub(r"\s+", " ", row) for row in rows), words
    assert "Measured over predicted, of 11 configs: median" in page.inner_text("#prediction")


def test_each_cell_is_shown(watched: Watched, measured: str) -> None:
    page = watched.page
    page.goto(measured)
    assert page.locator("#cell option").all_inner_texts()[1] == "bf16_d64_full, B4 H32 S4096"
    page.select_option("#cell", "2")
    assert page.locator("#panel > section").get_attribute("aria-label") == "bf16_d64_causal, B16 H32 S1024"
    page.locator("#roofline [role=option]").last.focus()
    assert "of the roof there, which is that of the tensor cores" in page.inner_text("#roofline .detail")
    page.keyboard.press("Enter")
    assert page.locator("#panel > section").get_attribute("aria-label") == "bf16_d64_full, B4 H32 S4096"
    assert page.input_value("#cell") == "1"


def test_what_was_not_tried_unfolds(watched: Watched, measured: str) -> None:
    page = watched.page
    page.goto(measured)
    page.locator("summary", has_text="Refused").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("details[open] table")  # it is made when it is opened
    assert "pack_gqa must divide the 1 query heads of a key/value head; got 2" in page.inner_text("details[open]")
    page.locator("summary", has_text="expects to be slower").click()
    slower = page.locator("details[open]", has_text="expects to be slower")
    slower.locator("table").wait_for()
    lines = slower.locator("tbody tr").count()
    points = page.locator("#space [role=option]").count()
    page.check("#with-slower")
    assert page.locator("#space [role=option]").count() == points + lines


def test_predictions_are_called_so(watched: Watched, measured: str, predicted: str) -> None:
    page = watched.page
    page.goto(predicted)
    assert page.inner_text("#verdict").startswith("Predicted nothing was timed")
    assert "Nothing was measured in this cell" in page.inner_text("#prediction")
    assert page.locator("#prediction [role=option]").count() == 0
    page.goto(measured)
    assert page.inner_text("#verdict").startswith("Measured on this GPU")


def test_cells_without_a_winner(watched: Watched, tmp_path: Path) -> None:
    request = made_request()
    result = made_result(request)
    failed = tuple(replace(each, seconds=None, low=None, high=None, failure="wrong: all of it") for each in result.rows[0].candidates)
    none: dict[str, Any] = {
        "spec": None,
        "seconds": None,
        "gain": None,
        "registers": None,
        "spill_bytes": None,
        "shared_bytes": None,
        "bound_by": "",
    }
    rows = [replace(row, **none, candidates=tried) for row, tried in zip(result.rows, (failed, (), failed, ()), strict=True)]
    path = tmp_path / "page.html"
    path.write_text(tune_page(request, replace(result, rows=rows), DEVICE), encoding="utf-8")
    page = watched.page
    page.goto(path.as_uri())
    assert page.locator("#winners tbody").inner_text().count("none sound") == 4
    assert page.locator("#roofline [role=option]").count() == 0
    assert len(walked(page, "#space")) == len(failed)
    page.select_option("#cell", "1")
    assert page.locator("#space [role=option]").count() == 0
    page.check("#with-slower")
    assert page.locator("#space [role=option]").count() > 400


@THEMES
def test_themes(watched: Watched, measured: str) -> None:
    page = watched.page
    page.goto(measured)
    wanted = "dark" if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "light"
    assert page.evaluate("document.documentElement.dataset.theme") == wanted
    back = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(back)
    page.click("#theme")
    assert page.evaluate(back) != before


@pytest.mark.parametrize("watched", [PHONE], indirect=True, ids=["phone"])
def test_a_phone_needs_no_scrolling_sideways(watched: Watched, measured: str, predicted: str) -> None:
    page = watched.page
    for address in (measured, predicted):
        assert Path(address.removeprefix("file://")).stat().st_size <= LARGEST_PAGE
        page.goto(address)
        page.locator("#space [role=option].failed").first.tap()
        assert REASONS[0] in page.inner_text("#panel .detail")
        for summary in page.locator("summary").all():
            summary.click()
        page.wait_for_function("() => [...document.querySelectorAll('details')].every((el) => el.querySelector('table'))")
        assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH
        wide = "els => els.filter((el) => el.getBoundingClientRect().right > innerWidth + 1).length"
        assert page.eval_on_selector_all("svg, [role=option] .shape, .card, select, button, .scroll", wide) == 0


def test_a_chart_fits_a_window_that_is_resized(watched: Watched, measured: str) -> None:
    page = watched.page
    page.goto(measured)
    page.locator("#space [role=option].failed").first.focus()
    page.set_viewport_size({"width": 500, "height": 800})
    page.wait_for_function("() => document.querySelector('#space svg').viewBox.baseVal.width < 500")
    assert REASONS[0] in page.evaluate("document.activeElement.getAttribute('aria-label')"), "and keep the focus"
