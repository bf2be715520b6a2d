"""The page of `flashgen explain` in Chromium: every step to the end, what is shown beside what, keys, themes, a phone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flashgen.build.emulator.compiler import CxxCompilerMissingError, cxx_compiler
from flashgen.codegen.devices import find_device
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Atoms
from flashgen.explain.page import page_html
from flashgen.explain.product import tiled_product
from flashgen.explain.rows import tile_statistics
from flashgen.explain.run import EXPLAINED, MAX_TILES, SmallProblem, compile_ahead_of, explained_spec, record, texts_of
from tests.browser.conftest import Watched
from tests.emulator.test_flash2_forward_faults import FAULTS
from tests.support.online_softmax import running_statistics

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
H200 = find_device("h200")
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}
LARGEST, FIRST_FRAME_MS = 1_000_000, 1000
LOADS = 3  # the quickest counts: what the page takes, without the browser's own start and what else the machine does
PAINTED = """() => new Promise((resolve) => {
  const look = () => {
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    if (paint) resolve(paint.startTime); else requestAnimationFrame(look);
  };
  look();
})"""


def written_page(folder: Path, cases: list[tuple[str, SmallProblem]]) -> str:
    """The address of a page of these runs."""
    try:
        cxx_compiler()
    except CxxCompilerMissingError as error:
        pytest.skip(str(error))
    specs = [(explained_spec(family, small, H200), small) for family, small in cases]
    compile_ahead_of([spec for spec, _ in specs])
    path, runs = folder / "page.html", [record(spec, small, H200) for spec, small in specs]
    alone = [tiled_product(run) for run in runs if run.name == "standard_attention"]
    path.write_text(page_html([*alone, *runs], H200), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of all rungs, causal, with 4 tiles; `browser` comes first, so that nothing is recorded where there is none."""
    small = SmallProblem(Mask.CAUSAL, 4)
    return written_page(tmp_path_factory.mktemp("page"), [(family, small) for family in EXPLAINED])


@pytest.fixture(scope="module")
def eight_tiles(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of versions 1 and 2 with as many tiles as there may be."""
    small = SmallProblem(Mask.CAUSAL, MAX_TILES)
    return written_page(tmp_path_factory.mktemp("eight"), [(family, small) for family in ("flash1_forward", "flash2_forward")])


@pytest.fixture(scope="module")
def two_masks(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of version 1 with and without the mask."""
    return written_page(tmp_path_factory.mktemp("masks"), [("flash1_forward", SmallProblem(mask, 2)) for mask in Mask])


def position(page: Page) -> tuple[int, int]:
    """The step that is shown, from 1, and how many there are."""
    step, _, count = page.inner_text("#position").partition(" of ")
    return int(step), int(count)


def choose(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def to_the_end(page: Page) -> int:
    """Presses the button for one step on until there is none; says how often."""
    return int(
        page.evaluate("""() => {
          const count = () => document.getElementById("position").textContent;
          let presses = 0;
          for (let before = ""; before !== count(); presses++) before = count(), document.getElementById("forward").click();
          return presses - 1;
        }""")
    )


def first_frame_ms(page: Page, address: str) -> float:
    """Milliseconds from the start of loading the page to the first frame that shows some of it."""
    page.goto(address)
    return float(page.evaluate(PAINTED))


def require_small_and_fast(page: Page, address: str) -> None:
    assert Path(address.removeprefix("file://")).stat().st_size <= LARGEST
    assert min(first_frame_ms(page, address) for _ in range(LOADS)) <= FIRST_FRAME_MS
    assert page.locator(".panel").first.locator('[data-tile^="S"]').count() == MAX_TILES**2


def test_size_and_first_frame(watched: Watched, eight_tiles: str) -> None:
    require_small_and_fast(watched.page, eight_tiles)


@pytest.mark.slow
def test_size_and_first_frame_of_all_rungs(watched: Watched, tmp_path: Path) -> None:
    cases = [(family, SmallProblem(mask, MAX_TILES)) for mask in Mask for family in EXPLAINED]
    require_small_and_fast(watched.page, written_page(tmp_path, cases))


@pytest.mark.parametrize(
    "name",
    [
        *("Version 1 and 2", "Standard attention", "Memory-efficient attention", "FlashAttention 3"),
        *("Version 1 and 2, backward", "FlashAttention 3, backward"),
    ],
)
def test_stepping_to_the_end_agrees_with_the_formula(watched: Watched, address: str, name: str) -> None:
    page = watched.page
    page.goto(address)
    choose(page, name)
    first, count = position(page)
    assert first == 1
    assert to_the_end(page) == count - 1
    assert position(page) == (count, count)
    for panel in page.locator(".panel").all():
        last = panel.locator(".counters tr").last.inner_text()
        adds = panel.get_attribute("data-family") in ("flash2_backward", "attention_backward_sm90")
        assert last.count("✓") == (3 if adds else 2), last
        assert "✗" not in panel.inner_text()


def test_versions_side_by_side_and_alone(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    families = "els => els.map((el) => el.dataset.family)"
    assert page.eval_on_selector_all(".panel", families) == ["flash1_forward", "flash2_forward"]
    page.keyboard.press("End")
    assert page.eval_on_selector_all(".panel", "els => els.map((el) => Number(el.dataset.writes))") == [10, 4]
    choose(page, "FlashAttention 1")
    assert page.eval_on_selector_all(".panel", families) == ["flash1_forward"]
    assert page.get_by_role("button", name="FlashAttention 1", exact=True).get_attribute("aria-pressed") == "true"
    choose(page, "FlashAttention 2")
    assert page.eval_on_selector_all(".panel", families) == ["flash2_forward"]
    choose(page, "Version 1 and 2")
    assert page.locator(".panel").count() == 2


def test_a_backward_pass(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    choose(page, "Version 1 and 2, backward")
    first, second = page.locator(".panel").all()
    assert second.locator(".tile").evaluate_all("els => [...new Set(els.map((el) => el.dataset.tile[0]))].sort().join('')") == "KOQSVkoqv"
    assert second.locator('[data-tile="q1"] .name').inner_text() == "dQ1"
    assert "dQ 3 by block 0: read, added to and written back" in first.locator(".who").inner_text()
    assert "dQ 3 by blocks 0, 1, 2, 3: atomic additions" in second.locator(".who").inner_text()
    second.locator('[data-tile="q2"]').click()
    needs = "S 2,0, K 0, S 2,1, K 1, S 2,2, K 2"
    assert second.locator(".detail").inner_text() == f"dQ 2: it needs {needs}; it feeds nothing."
    for tile, words in (
        ("A", "dS 0,0 \u00d7 K 0, this key tile's part of sums of dQ 0"),
        ("v", "dV 0 += P 0,0\u1d40 \u00d7 dO 0"),
        ("s", "dP 0,0\u1d40 = V 0 \u00d7 dO 0\u1d40, then dS = P \u00d7 (dP - delta)"),
    ):
        product = f"(step) => step.kind === 'product' && step.tiles[0][0] === '{tile}'"
        page.evaluate(f"goTo(RUNS.find((run) => run.family === 'flash2_backward').steps.findIndex({product}))")
        assert words in second.locator(".now").inner_text()
    page.evaluate("goTo(RUNS.find((run) => run.family === 'flash2_backward').steps.findIndex((step) => step.kind === 'add'))")
    assert "add to sums of dQ 0 in device memory, atomically (4,096 B)" in second.locator(".now").inner_text()


def test_the_rung_of_hopper(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    choose(page, "FlashAttention 3")
    assert "One head of 512 queries and keys, head dim 32, fp16: tiles of 128 rows." in page.inner_text("#problem")
    steps = "RUNS.find((run) => run.family === 'attention_forward_sm90').steps"
    for condition, words in (
        ("kind === 'copy'", "producer, warp 0: start to copy K 3 from device memory to shared memory (8,192 B)"),
        ("kind === 'product' && step.needs[0][0] === 'S'", "consumer 0, warps 4-7: O 3 += P 3,3 \u00d7 V 3, for its 64 rows"),
        ("atom === 'bar_sync'", "consumer 0, warps 4-7: wait for its turn to issue products"),
        (
            "operation === 'producer_acquire' && step.tiles.length",
            "warp 0: wait until all consumers have released the stage of K 3",
        ),
        ("kind === 'release' && step.tiles.length", "consumer 0, warp 4: release the stage of K 3: it may be filled again"),
        ("kind === 'store'", "consumer 0, warps 4-7: write O 3 to device memory (4,096 B)"),
    ):
        page.evaluate(f"goTo({steps}.findIndex((step) => step.{condition}))")
        assert words in page.inner_text(".now")
        assert page.locator(".line.current").count() > 0
    assert page.locator('[data-tile="O3"] .marks').inner_text().endswith("½w")
    page.keyboard.press("End")
    assert page.inner_text(".writes") == "Tiles of O written so far: 4 of 4 in all"
    assert "they take turns to issue products" in page.inner_text(".who")
    page.fill("#row", "400")
    page.keyboard.press("Tab")
    row_max, _, row_sum = map(float, page.locator(".rows tr").last.inner_text().split("\t")[2:])
    exact = running_statistics(tile_statistics(SmallProblem(Mask.CAUSAL, 4, 128))[400])[-1]
    assert row_max + math.log(row_sum) == pytest.approx(exact[0] + math.log(exact[1]), rel=1e-3)
    assert row_max < exact[0] + 8 * math.log(2)
    choose(page, "FlashAttention 2")
    assert "One head of 128 queries and keys" in page.inner_text("#problem")
    assert page.input_value("#row") == "127"


def test_the_backward_pass_of_hopper(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    choose(page, "FlashAttention 3, backward")
    assert "One head of 512 queries and keys, head dim 32, fp16: tiles of 128 rows." in page.inner_text("#problem")
    steps = "RUNS.find((run) => run.family === 'attention_backward_sm90').steps"
    product, complete = "kind === 'product' && step.tiles[0][0]", "atom === 'wgmma_complete' && step.tiles[0][0]"
    for condition, words in (
        ("kind === 'reduce'", "Kernel preprocess, block 0 of 4, warps 0-3: delta 0 = rowsum(dO \u00d7 O)"),
        (
            "operand === 'row_lse' && step.kind === 'copy'",
            "producer, warp 0: start to copy lse 0 from device memory to shared memory (528 B)",
        ),
        ("operation === 'consumer_wait'", "consumer 0, warps 4-7: wait until K 0, Q 0, lse 0 have landed: the stage is full"),
        (f"{product} === 'S'", "consumer 0, warps 4-7: S 0,0\u1d40 = K 0 \u00d7 Q 0\u1d40, for its 64 keys"),
        (f"{complete} === 's'", "wait until the product for dP 0,0 is complete, then dS = P \u00d7 (dP - delta)"),
        ("kind === 'stage'", "consumer 0, warps 4-7: put dS 0,0 into shared memory, for products"),
        ("atom === 'bar_sync'", "wait until both consumers have put their keys of dS 0,0 into shared memory"),
        (f"{product} === 'A'", "dS 0,0 \u00d7 K 0, this key tile's part of sums of dQ 0, for its 64 queries"),
        ("kind === 'add'", "consumer 0, warps 4-7: add to sums of dQ 0 in device memory, atomically (8,192 B)"),
        ("kind === 'release'", "consumer 0, warps 4-7: release the stage of dO 0, delta 0: it may be filled again"),
        ("operand === 'd_v'", "consumer 0, warps 4-7: write dV 0 to device memory (4,096 B)"),
        ("operand === 'd_q'", "Kernel postprocess, block 0 of 4, warp 0: write dQ 0 to device memory (8,192 B)"),
    ):
        page.evaluate(f"goTo({steps}.findIndex((step) => step.{condition}))")
        assert words in page.inner_text(".now")
        assert page.locator(".line.current").count() > 0
    page.keyboard.press("End")
    # Zeros, what the key tiles add, and dQ.
    assert [page.locator(f'[data-tile="q{i}"] .marks').inner_text().split()[-1] for i in range(4)] == ["3w", "4w", "5w", "6w"]
    who = page.inner_text(".who")
    assert "Each of consumers 0 and 1, 4 warps, has 64 keys of S, dP, dV and dK, and 64 queries of dQ" in who
    assert "dQ 3 by blocks 0, 1, 2, 3: atomic additions" in who


def test_with_and_without_the_mask(watched: Watched, two_masks: str) -> None:
    page = watched.page
    page.goto(two_masks)
    assert page.locator("#views").is_hidden()
    assert page.locator(".tile.skipped").count() == 0
    choose(page, "Causal mask")
    assert [tile.get_attribute("data-tile") for tile in page.locator(".tile.skipped").all()] == ["S0,1"]
    assert "skipped" in (page.locator('[data-tile="S0,1"]').get_attribute("aria-label") or "")


def test_a_planted_fault_shows(watched: Watched, tmp_path: Path) -> None:
    """A kernel that skips the last key tile of each query tile: the page says what is missing, and that the bytes are not the formula's."""
    small = SmallProblem(Mask.FULL, 2)
    spec = explained_spec("flash2_forward", small, H200)
    (fault,) = [fault for fault in FAULTS.wrong if fault.name == "last-tile-skipped"]
    shown, emulated = texts_of(spec)
    faulty = record(spec, small, H200, (fault.apply(shown), fault.apply(emulated, Atoms.EMULATED)))
    path = tmp_path / "faulty.html"
    path.write_text(page_html([faulty], H200), encoding="utf-8")
    page = watched.page
    page.goto(path.as_uri())
    page.keyboard.press("End")
    assert [tile.get_attribute("data-tile") for tile in page.locator(".tile.skipped").all()] == ["S0,1", "S1,1"]
    last = page.locator(".counters tr").last.inner_text()
    assert (last.count("✗"), last.count("✓")) == (1, 1), "less is read, and as much is written"
    assert any("seen.end - 1" in text for text in page.locator(".line").all_inner_texts())


def test_keys(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    _, count = position(page)
    shown = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowLeft"):
        page.keyboard.press(key)
        shown.append(position(page)[0])
    assert shown == [2, 3, 2, count, count, 1, 1]
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Pause"
    page.wait_for_function("() => player.step > 1")
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Play"
    page.focus("#slider")
    before = position(page)[0]
    page.keyboard.press("ArrowRight")
    assert position(page)[0] == before + 1, "the slider moves by one, not twice"
    page.focus("#row")
    page.keyboard.press("Home")
    assert position(page)[0] == before + 1, "keys of a field are its own"


def test_scrubbing(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    page.fill("#slider", "20")
    assert position(page)[0] == 21
    assert page.locator("#slider").get_attribute("aria-valuetext") == f"step 21 of {position(page)[1]}"


def test_a_tile_says_what_it_needs_and_feeds(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    panel = page.locator("[data-family=flash2_forward]")
    panel.locator('[data-tile="S3,1"]').click()
    assert panel.locator(".detail").inner_text() == "S 3,1: it needs Q 3, K 1; it feeds O 3."
    marked = "els => els.map((el) => el.dataset.tile)"
    assert panel.locator(".tile.needs").evaluate_all(marked) == ["K1", "Q3"]
    assert panel.locator(".tile.feeds").evaluate_all(marked) == ["O3"]
    panel.locator('[data-tile="V3"]').click()
    assert panel.locator(".detail").inner_text() == "V 3: it comes from device memory; it feeds O 3."


def test_the_tiled_product_alone(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    choose(page, "Tiled product")
    page.keyboard.press("End")
    panel = page.locator("[data-family=tiled_product]")
    assert {tile[0] for tile in panel.locator(".tile").evaluate_all("els => els.map((el) => el.dataset.tile)")} == set("QKS")
    assert panel.locator(".writes").inner_text() == "Tiles of S written so far: 10 of 10 in all"
    assert panel.locator(".counters tr").last.inner_text().count("✓") == 2
    assert panel.locator(".rows tr").count() == 0, "there is no softmax"
    assert "block 0: S" in panel.locator(".who").inner_text()


def test_a_step_shows_its_lines_and_tiles(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    choose(page, "FlashAttention 2")
    page.evaluate("goTo(RUNS.find((run) => run.family === 'flash2_forward').steps.findIndex((step) => step.kind === 'product'))")
    assert "S 3,0 = Q 3 \u00d7 K 0\u1d40" in page.inner_text(".now")
    assert any("gemm_scores<Element" in text for text in page.locator(".line.current").all_inner_texts())
    assert page.locator(".line.current").last.evaluate("""(line) => {
      const [box, own] = [line.parentElement.getBoundingClientRect(), line.getBoundingClientRect()];
      return own.top >= box.top && own.bottom <= box.bottom;
    }"""), "the lines are in view"
    assert "computed now" in (page.locator('[data-tile="S3,0"]').get_attribute("aria-label") or "")
    labels = {tile: page.locator(f'[data-tile="{tile}"]').get_attribute("aria-label") for tile in ("Q3", "K0", "K1", "Q0")}
    assert labels == {
        "Q3": "Q 3: needed now; in shared memory",
        "K0": "K 0: needed now; in shared memory",
        "K1": "K 1: on its way to shared memory",
        "Q0": "Q 0: in device memory",
    }


def test_statistics_of_a_row(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    choose(page, "FlashAttention 2")
    page.fill("#row", "100")
    page.keyboard.press("Tab")
    page.evaluate("goTo(lastStep())")
    assert page.inner_text(".row-title") == "Softmax of row 100"
    rows = page.locator(".rows tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows[1:]] == ["K 0", "K 1", "K 2", "K 3"]
    assert rows[1].split("\t")[3] == "-", "there is nothing to rescale yet"
    row_max, _, row_sum = map(float, rows[4].split("\t")[2:])
    exact = running_statistics(tile_statistics(SmallProblem(Mask.CAUSAL, 4))[100])[-1]
    assert [row_max, row_sum] == pytest.approx(exact[:2], rel=1e-3)


@pytest.mark.parametrize("watched", [{"color_scheme": "dark"}, {"color_scheme": "light"}], indirect=True, ids=["dark", "light"])
def test_themes(watched: Watched, address: str) -> None:
    page = watched.page
    page.goto(address)
    wanted = "dark" if page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") else "light"
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == wanted
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate(theme) != wanted
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


@pytest.mark.parametrize("watched", [PHONE], indirect=True, ids=["phone"])
def test_a_phone_needs_no_scrolling_sideways(watched: Watched, address: str, eight_tiles: str) -> None:
    page = watched.page
    names = "Standard attention", "FlashAttention 3", "Version 1 and 2, backward", "FlashAttention 3, backward"
    for url, name in (*((address, name) for name in names), (eight_tiles, "Version 1 and 2")):
        page.goto(url)
        choose(page, name)
        page.evaluate("goTo(40)")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        wide = "els => els.filter((el) => el.getBoundingClientRect().right > innerWidth + 1).length"
        assert page.eval_on_selector_all(".tile, td, button", wide) == 0


def test_a_page_that_asks_for_something_or_complains_is_seen(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text('<img src="http://192.0.2.1/x.png"><script>nothing()</script>')
    page = Watched(browser.new_context().new_page())
    page.page.goto(path.as_uri())
    with pytest.raises(AssertionError):
        page.require_quiet()
    assert any("nothing is not defined" in text for text in page.complaints)
