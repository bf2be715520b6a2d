"""`flashgen explain`: what is recorded of each rung, against its byte formula, its algorithm, and kernels with planted faults."""

from __future__ import annotations

import dataclasses
import itertools
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flashgen.cli import app
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import Traffic
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Atoms, Source
from flashgen.explain.events import OperationKind
from flashgen.explain.page import TITLES, page_html
from flashgen.explain.product import tiled_product
from flashgen.explain.rows import tile_statistics
from flashgen.explain.run import (
    BACKWARD,
    EXPLAINED,
    FORWARD,
    HEAD_DIM,
    HOPPER,
    HOPPER_BACKWARD,
    RecordedRun,
    SmallProblem,
    compile_ahead_of,
    explained_spec,
    record,
    texts_of,
)
from flashgen.explain.steps import ScheduleStep, Tiling, totals
from tests.emulator import test_flash1_forward_faults, test_flash2_forward_faults
from tests.support.fault import Fault
from tests.support.online_softmax import running_statistics
from tests.support.plan import every_case

H200 = find_device("h200")
TILES = 4
CAUSAL, FULL = SmallProblem(Mask.CAUSAL, TILES), SmallProblem(Mask.FULL, TILES)


def cases(families: tuple[str, ...]) -> list[object]:
    """Each with and without the mask, as parameters. For --slow: without it, and backward, which pages in a browser show, too."""
    quick = [(family, CAUSAL) for family in FORWARD]
    every = [(family, small) for small in (CAUSAL, FULL) for family in families]
    return [pytest.param(*one, marks=[] if one in quick else [pytest.mark.slow]) for one in every]


every_rung = pytest.mark.parametrize(("family", "small"), cases(EXPLAINED))
every_forward_rung = pytest.mark.parametrize(("family", "small"), cases((*FORWARD, *HOPPER)))
every_backward_rung = pytest.mark.parametrize(("family", "small"), cases((*BACKWARD, *HOPPER_BACKWARD)))


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    slow = every_case(request.config)
    wanted = itertools.product(EXPLAINED if slow else FORWARD, [CAUSAL, FULL] if slow else [CAUSAL])
    compile_ahead_of([explained_spec(family, small, H200) for family, small in wanted])


@cache
def recorded(family: str, small: SmallProblem) -> RecordedRun:
    return record(explained_spec(family, small, H200), small, H200)


@cache
def planted(fault: Fault, family: str) -> RecordedRun:
    """The run of a rung's kernel, not of the fault's own setting, with the fault in it."""
    spec = explained_spec(family, CAUSAL, H200)
    shown, emulated = texts_of(spec)
    return record(spec, CAUSAL, H200, (fault.apply(shown), fault.apply(emulated, Atoms.EMULATED)))


def products(run: RecordedRun, letter: str) -> list[ScheduleStep]:
    """The products that compute tiles of S, or of O."""
    return [step for step in run.steps if step.operation.kind is OperationKind.PRODUCT and step.tiles[0][0] == letter]


def meaning(step: ScheduleStep) -> tuple[object, ...]:
    """What a step does, without the addresses at which it does it."""
    return step.launch, step.operation.block, step.operation.kind, step.operation.operand, step.tiles, step.needs


# ---- what moves ----


@pytest.mark.slow
@pytest.mark.parametrize("small", [CAUSAL, pytest.param(FULL, marks=pytest.mark.slow)])
def test_the_tiled_product_alone_is_the_first_kernel(small: SmallProblem) -> None:
    whole = recorded("standard_attention", small)
    run = tiled_product(whole)
    moved = totals(run.steps)
    assert (moved.all.read, moved.written, moved.added) == (run.formula.read, {"S": run.formula.written}, {})
    assert moved.read.keys() == {"q", "k"}
    assert run.steps == [step for step in whole.steps if step.launch == 0]
    assert {tile for step in products(run, "S") for tile in step.tiles} == {tile for step in products(whole, "S") for tile in step.tiles}


@every_rung
def test_bytes_are_those_of_the_formula(family: str, small: SmallProblem) -> None:
    run = recorded(family, small)
    assert totals(run.steps).all == run.formula
    assert bool(run.formula.reduced) == (family in ("flash2_backward", *HOPPER_BACKWARD))


@pytest.mark.slow
@pytest.mark.parametrize("family", BACKWARD)
def test_rows_of_few_keys_are_left_out_as_in_the_formula(family: str) -> None:
    """A backward pass computes them once more."""
    run = recorded(family, SmallProblem(Mask.CAUSAL, 1))
    assert totals(run.steps).all == run.formula


def attention(small: SmallProblem) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Its inputs in float64, and their attention by PyTorch."""
    inputs = {name: torch.from_numpy(array).double().requires_grad_() for name, array in small.inputs().items()}
    scores = inputs["q"] @ inputs["k"].T * HEAD_DIM**-0.5
    if small.mask is Mask.CAUSAL:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return inputs, torch.softmax(scores, -1) @ inputs["v"]


@every_forward_rung
def test_a_recorded_run_computes_attention(family: str, small: SmallProblem) -> None:
    run = recorded(family, small)
    _, exact = attention(run.small)
    torch.testing.assert_close(torch.from_numpy(run.results["out"]).double(), exact.detach(), atol=4e-3, rtol=0)


@every_backward_rung
def test_a_recorded_run_computes_gradients(family: str, small: SmallProblem) -> None:
    run = recorded(family, small)
    inputs, exact = attention(run.small)
    exact.backward(torch.from_numpy(run.small.saved()["d_out"]).double())
    for name, tensor in inputs.items():
        found = torch.from_numpy(run.results[f"d_{name}"]).double()
        torch.testing.assert_close(found, tensor.grad, atol=8e-3, rtol=2e-3)


@every_rung
def test_products_read_what_is_in_shared_memory(family: str, small: SmallProblem) -> None:
    for step in recorded(family, small).steps:
        if step.operation.kind is OperationKind.PRODUCT:
            held = {resident.tile for resident in step.shared if resident.landed}
            in_registers = {tile for tile in step.needs if tile[0] in "Ss"}  # dS lies in shared memory, too
            assert set(step.needs) - in_registers <= held, meaning(step)


@every_rung
def test_tiles_that_the_mask_hides_are_skipped(family: str, small: SmallProblem) -> None:
    seen = {f"S{i},{j}" for i in range(TILES) for j in range(TILES) if small.mask is Mask.FULL or j <= i}
    assert {tile for step in products(recorded(family, small), "S") for tile in step.tiles} == seen


def test_version_1_has_key_tiles_outside_and_version_2_query_tiles() -> None:
    first, second = ([step.tiles[0] for step in products(recorded(family, CAUSAL), "S")] for family in ("flash1_forward", "flash2_forward"))
    queries = range(TILES - 1, -1, -1)  # the longest first
    assert first == [f"S{i},{j}" for j in range(TILES) for i in queries if j <= i]
    assert second == [f"S{i},{j}" for i in queries for j in range(TILES) if j <= i]


def test_how_often_a_tile_of_the_output_is_written() -> None:
    def writes(family: str, small: SmallProblem) -> list[int]:
        stored = [
            tile[1:] for step in recorded(family, small).steps if step.bytes_written for tile in step.tiles if tile[0] in "OR"
        ]  # R: O between two steps
        return [stored.count(str(i)) for i in range(TILES)]

    assert writes("flash1_forward", FULL) == [TILES] * TILES
    assert writes("flash1_forward", CAUSAL) == [1, 2, 3, 4]
    assert writes("flash2_forward", CAUSAL) == writes("memory_efficient_attention", CAUSAL) == [1] * TILES


def added_by(family: str) -> dict[str, list[int]]:
    """The blocks that add a key tile's part to each tile of dQ, in the order in which they do."""
    main = [step for step in recorded(family, CAUSAL).steps if step.launch == 1 and (step.bytes_written or step.bytes_added)]
    return {f"A{i}": [step.operation.block for step in main if step.tiles == (f"A{i}",)] for i in range(TILES)}


@pytest.mark.slow
def test_who_adds_up_the_gradient_of_the_queries() -> None:
    """One block of version 1, at every key tile that the queries see; of version 2 the block of each of these key tiles."""
    assert added_by("flash1_backward") == {f"A{i}": [0] * (i + 1) for i in range(TILES)}
    assert added_by("flash2_backward") == {f"A{i}": list(range(i + 1)) for i in range(TILES)}
    stored = [(step.operation.block, step.tiles[0]) for step in recorded("flash2_backward", CAUSAL).steps if step.bytes_written]
    assert [(block, tile) for block, tile in stored if tile[0] in "kv"] == [(i, f"{letter}{i}") for i in range(TILES) for letter in "kv"]


@pytest.mark.slow
@pytest.mark.parametrize("family", BACKWARD)
def test_the_products_of_a_backward_pass(family: str) -> None:
    """Five for each tile of S that is seen, in the order of the algorithms' lines, each from what it is made of."""
    run = recorded(family, CAUSAL)
    found = [(step.tiles[0], step.needs) for step in run.steps if step.operation.kind is OperationKind.PRODUCT]
    wanted = []
    for tile, _ in found[::5]:
        i, j = tile[1:].split(",")
        ds = f"s{i},{j}"
        wanted += [(tile, {f"K{j}", f"Q{i}"}), (ds, {f"V{j}", f"o{i}"}), (f"v{j}", {tile, f"o{i}"}), (f"k{j}", {ds, f"Q{i}"})]
        wanted += [(f"A{i}", {ds, f"K{j}"})]
    assert [(tile, set(needs)) for tile, needs in found] == wanted


@pytest.mark.slow
def test_warps_that_divide_the_queries_move_and_compute_the_same() -> None:
    usual = recorded("flash2_backward", CAUSAL)
    spec = dataclasses.replace(usual.spec, config=usual.spec.config.replace_from_text({"warp_split": "queries"}))
    run = record(spec, CAUSAL, H200)
    assert totals(run.steps) == totals(usual.steps)
    staged = (OperationKind.STAGE, OperationKind.WAIT)
    found, wanted = ([meaning(step) for step in each.steps if step.operation.kind not in staged] for each in (run, usual))
    assert found == wanted
    tiles = [step.tiles for step in run.steps if step.operation.function == "add_up_parts" and step.operation.kind is OperationKind.STAGE]
    blocks = range(TILES)
    assert tiles == [made for block in blocks for made in ((), (f"k{block}",), (), (f"v{block}",))], "parts have no letter"


def test_one_pass_more_is_shown() -> None:
    tiles = [step.tiles[0] for step in products(recorded("memory_efficient_attention", CAUSAL), "S")]
    assert all(tiles.count(tile) == 2 for tile in tiles), "S is computed twice"


def test_lines_are_those_of_the_text_that_is_shown() -> None:
    run = recorded("flash2_forward", CAUSAL)
    for step, wanted in ((products(run, "S")[0], "gemm_scores<Element"), (products(run, "O")[0], "gemm_probabilities<Element")):
        shown = [run.text.lines[line - 1] for line in step.operation.lines.kernel]
        assert any(wanted in line for line in shown)
    copy = next(step for step in run.steps if step.tiles == ("V0",))
    assert any("ValueTile{to" in run.text.lines[line - 1] for line in copy.operation.lines.kernel)
    assert copy.operation.warps == (0, 1)


# ---- planted faults ----


def first_difference(sound: RecordedRun, faulty: RecordedRun) -> tuple[ScheduleStep, ScheduleStep]:
    """The first steps that differ."""
    pairs = zip(sound.steps, faulty.steps, strict=False)
    return next((one, other) for one, other in pairs if meaning(one) != meaning(other))


def fault_named(faults: object, name: str) -> Fault:
    (found,) = [fault for fault in faults.wrong if fault.name == name]  # type: ignore[attr-defined]
    assert isinstance(found, Fault)
    return found


@pytest.mark.slow
def test_a_skipped_key_tile_shows_where_it_should_be_copied() -> None:
    fault = fault_named(test_flash2_forward_faults.FAULTS, "last-tile-skipped")
    sound, faulty = recorded("flash2_forward", CAUSAL), planted(fault, "flash2_forward")
    one, other = first_difference(sound, faulty)
    assert (one.operation.block, one.operation.kind, one.tiles) == (0, OperationKind.COPY, ("K3",))
    assert other.operation.kind is OperationKind.PRODUCT
    missing = {step.tiles for step in products(sound, "S")} - {step.tiles for step in products(faulty, "S")}
    assert missing == {(f"S{i},{i}",) for i in range(TILES)}
    assert totals(faulty.steps).all.read == faulty.formula.read - TILES * 2 * 2048


@pytest.mark.slow
def test_an_output_that_is_not_read_back_shows_at_the_second_key_tile() -> None:
    fault = fault_named(test_flash1_forward_faults.FAULTS, "buffer-not-read-at-the-second-step")
    sound, faulty = recorded("flash1_forward", CAUSAL), planted(fault, "flash1_forward")
    one, other = first_difference(sound, faulty)
    assert (one.operation.kind, one.operation.operand, one.tiles) == (OperationKind.LOAD, "running_rows", ("R3",))
    assert (other.operation.kind, other.tiles) == (OperationKind.PRODUCT, ("S3,1",))
    assert totals(faulty.steps).all.read < faulty.formula.read


# ---- rows, tiles, the page ----


def test_statistics_of_a_row_end_at_its_log_sum_exp() -> None:
    rows = tile_statistics(CAUSAL)
    inputs = CAUSAL.inputs()
    for row in (0, 31, 32, 127):
        products = inputs["k"][: row + 1].astype(np.float64) @ inputs["q"][row].astype(np.float64) * HEAD_DIM**-0.5
        row_max, row_sum, _ = running_statistics(rows[row])[-1]
        assert row_max == pytest.approx(products.max())
        assert row_max + np.log(row_sum) == pytest.approx(np.log(np.exp(products).sum()))


def test_running_statistics_of_the_papers_example() -> None:
    """Online softmax over 3, 2, 5, 1, one key a tile (Milakov and Gimelshein 2018)."""
    found = running_statistics([(3.0, 1.0), (2.0, 1.0), (5.0, 1.0), (1.0, 1.0)])
    assert [row_max for row_max, _, _ in found] == [3, 3, 5, 5]
    assert [row_sum for _, row_sum, _ in found] == pytest.approx([1, 1.368, 1.185, 1.203], abs=5e-4)
    assert found[2][2] == pytest.approx(np.exp(-2))


def test_tiles_of_bytes() -> None:
    rows, cells = Tiling(64, 32), Tiling(512, 32, 128)
    assert rows.tiles([(0, 64), (2048, 2064)]) == ["0", "1"]
    assert cells.tiles([(0, 512)]) == ["0,0", "0,1", "0,2", "0,3"]
    assert cells.tiles([(32 * 512 + 128, 32 * 512 + 130)]) == ["1,1"]


def test_the_page_is_one_file() -> None:
    html = page_html([recorded(family, CAUSAL) for family in FORWARD], H200)
    assert len(html.encode()) < 1e6
    assert not re.search(r"\b(src|href)=\"(?!data:)|https?://|@import|/\*(style|data|script)\*/", html)
    assert all(TITLES[family] in html for family in FORWARD)


def test_texts_that_differ_behind_the_atoms_are_refused() -> None:
    spec = explained_spec("flash2_forward", CAUSAL, H200)
    shown, emulated = texts_of(spec)
    edited = Source(shown.entry, shown.text.replace("seen.end, ring", "seen.end - 1, ring"))
    with pytest.raises(Exception, match="tile operations or kernels that differ between a GPU and the emulator"):
        record(spec, CAUSAL, H200, (edited, emulated))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ArgumentError, match="tiles must be an integer from 1 to 8; got 9"):
        SmallProblem(Mask.FULL, 9)
    with pytest.raises(ArgumentError, match=r"family must be one of standard_attention, .*; got 'attention_forward'"):
        explained_spec("attention_forward", FULL, H200)


# ---- the command ----


def test_the_command_writes_its_page_and_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_nothing(address: str) -> bool:
        opened.append(address)
        return False

    monkeypatch.setattr("webbrowser.open", open_nothing)
    page = tmp_path / "new" / "page.html"
    for options in ([], ["--open"]):
        done = CliRunner().invoke(app, ["explain", "--family", "flash2_forward", "--causal", "--out", str(page), *options])
        assert done.exit_code == 0, done.output
        assert f"wrote {page}" in done.stderr
        assert ("no browser is known here" in done.stderr) is bool(options)
        assert re.search(r"flash2_forward +causal +84 +49152 +8192 +0 +49152 +8192 +0", done.stdout)
    assert opened == [page.as_uri()]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_command_fails_where_bytes_and_formula_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = recorded("flash2_forward", CAUSAL)
    monkeypatch.setattr("flashgen.explain.run.record", lambda *_: dataclasses.replace(sound, formula=Traffic(1, 2)))
    done = CliRunner().invoke(app, ["explain", "--family", "flash2_forward", "--causal", "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 1
    assert "a kernel moves other bytes than its algorithm's loops say" in done.stderr
