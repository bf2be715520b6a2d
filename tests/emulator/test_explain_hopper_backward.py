"""`flashgen explain` of the backward pass on Hopper: launches that overlap, stages of several tiles, products, and planted faults."""

from __future__ import annotations

from functools import cache

import pytest

from flashgen.codegen.devices import find_device
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import Source
from flashgen.explain.events import OperationKind
from flashgen.explain.page import page_html
from flashgen.explain.run import HEAD_DIM, HOPPER_BACKWARD, HOPPER_BLOCK, RecordedRun, SmallProblem, explained_spec, record, texts_of
from flashgen.explain.steps import ScheduleStep, totals
from tests.emulator.test_backward_sm90_faults import NUMBERS

H200, TILES = find_device("h200"), 4
(FAMILY,) = HOPPER_BACKWARD
CONSUMERS = (4, 5, 6, 7), (8, 9, 10, 11)
PREPROCESS, MAIN, POSTPROCESS = range(3)  # launches
pytestmark = pytest.mark.slow


@cache
def recorded(mask: Mask, tiles: int = TILES, fault: str = "") -> RecordedRun:
    small = SmallProblem(mask, tiles)
    spec = explained_spec(FAMILY, small, H200)
    texts = texts_of(spec)
    for planted in NUMBERS:
        if planted.name == fault:
            assert all(text.text.count(planted.find) == 1 for text in texts)
            shown, emulated = (Source(text.entry, text.text.replace(planted.find, planted.replace)) for text in texts)
            return record(spec, small, H200, (shown, emulated))
    assert not fault
    return record(spec, small, H200, texts)


def main_steps(run: RecordedRun, warps: tuple[int, ...] = (), block: int = 0) -> list[ScheduleStep]:
    """Of a block of the main kernel, by all of its warps or by some."""
    own = [step for step in run.steps if (step.launch, step.operation.block) == (MAIN, block)]
    return [step for step in own if not warps or step.operation.warps == warps]


@pytest.mark.parametrize("tiles", [1, 8])
@pytest.mark.parametrize("mask", Mask)
def test_bytes_are_those_of_the_formula(mask: Mask, tiles: int) -> None:
    run = recorded(mask, tiles)
    assert totals(run.steps).all == run.formula
    assert len(page_html([run], H200).encode()) < 1e6


def test_launches_that_may_overlap_are_told_apart() -> None:
    """The main kernel's begins when all of dQ is 0, and the last one when all is added."""
    run = recorded(Mask.CAUSAL)
    assert [launch.overlaps for launch in run.program.launches] == [False, True, True]
    assert [step.launch for step in run.steps] == sorted(step.launch for step in run.steps)
    moves: list[set[tuple[str, str]]] = [set(), set(), set()]
    for step in run.steps:
        if step.operation.operand:
            way = "in" if step.bytes_read else "added" if step.bytes_added else "out"
            moves[step.launch].add((way, step.operation.operand))
    before = {("in", "out"), ("in", "d_out"), ("in", "lse"), ("out", "d_q_sum"), ("out", "row_lse"), ("out", "row_delta")}
    main = {("in", name) for name in ("q", "k", "v", "d_out", "row_lse", "row_delta")} | {
        ("added", "d_q_sum"),
        ("out", "d_k"),
        ("out", "d_v"),
    }
    assert moves == [before, main, {("in", "d_q_sum"), ("out", "d_q")}]


def test_an_mbarrier_announces_several_tiles() -> None:
    """A stage's copies, and of the first ones K and V, land at one mbarrier; the producer fills a stage once both consumers released it."""
    steps = main_steps(recorded(Mask.FULL))
    waits = [step for step in steps if step.operation.function == "consumer_wait" and step.operation.warps == CONSUMERS[0]]
    assert [set(step.tiles) for step in waits[:2]] == [{"K0", "Q0", "L0"}, {"V0", "o0", "D0"}]
    assert [set(step.tiles) for step in waits[2:]] == [
        {f"{letter}{i}" for letter in pair} for i in range(1, TILES) for pair in ("QL", "oD")
    ]
    for position, step in enumerate(steps):
        if step.operation.kind is OperationKind.COPY:
            assert [resident.landed for resident in step.shared if resident.tile == step.tiles[0]] == [False]
        if step.operation.function == "producer_acquire" and step.tiles:
            before = [one for one in steps[:position] if one.operation.kind is OperationKind.RELEASE and one.tiles == step.tiles]
            assert {one.operation.warps[0] // 4 for one in before} == {1, 2}
    acquired = [set(step.tiles) for step in steps if step.operation.function == "producer_acquire" and step.tiles]
    assert acquired == [{f"{x}{i}", f"{y}{i}"} for i in range(TILES - 2) for x, y in ("QL", "oD")], "two stages; K and V stay"


def test_the_products_of_a_consumer() -> None:
    """Five for each tile of S that is seen: dV before dQ, and dK behind it, from what is in shared memory or in its registers."""
    run = recorded(Mask.CAUSAL)
    for block in range(TILES):
        keys, _ = (step.tiles[0] for step in main_steps(run, block=block) if step.operation.operand in ("k", "v"))
        for warps in CONSUMERS:
            products = [step for step in main_steps(run, warps, block) if step.operation.kind is OperationKind.PRODUCT]
            wanted: list[tuple[str, set[str]]] = []
            for i in range(int(keys[1:]), TILES):
                key, scores = keys[1:], f"{i},{keys[1:]}"
                wanted += [(f"S{scores}", {f"Q{i}", keys}), (f"s{scores}", {f"o{i}", f"V{key}"}), (f"v{key}", {f"S{scores}", f"o{i}"})]
                wanted += [(f"A{i}", {f"s{scores}", keys}), (f"k{key}", {f"s{scores}", f"Q{i}"})]
            assert [(step.tiles[0], set(step.needs)) for step in products] == wanted
            for step in products:
                held = {resident.tile for resident in step.shared if resident.landed}
                registers = {tile for tile in step.needs if tile[0] in "Ss" and step.tiles[0][0] in "kv"}
                assert set(step.needs) - registers <= held


def test_ds_of_both_consumers_is_there_before_dq() -> None:
    for warps in CONSUMERS:
        steps = main_steps(recorded(Mask.FULL), warps)
        for position, step in enumerate(steps):
            if step.operation.kind is OperationKind.PRODUCT and step.tiles[0][0] == "A":
                (d_scores,) = (tile for tile in step.needs if tile[0] == "s")
                kinds = [(one.operation.kind, one.operation.atom) for one in steps[:position] if one.tiles == (d_scores,)]
                assert kinds[-2:] == [(OperationKind.STAGE, "store_shared"), (OperationKind.WAIT, "bar_sync")]


def test_products_are_complete_once_they_are_waited_for() -> None:
    for warps in CONSUMERS:
        under_way: list[str] = []
        for step in main_steps(recorded(Mask.FULL), warps):
            if step.operation.kind is OperationKind.PRODUCT:
                under_way += step.tiles
            elif step.operation.atom == "wgmma_complete":
                assert list(step.tiles) == under_way[: len(step.tiles)]
                under_way = under_way[len(step.tiles) :]
            elif step.operation.kind in (OperationKind.ADD, OperationKind.STAGE, OperationKind.STORE):
                assert not set(step.tiles) & set(under_way), "what leaves the registers is complete"
        assert under_way == []


def test_each_consumer_adds_its_queries_and_writes_its_keys() -> None:
    run = recorded(Mask.CAUSAL)
    half = HOPPER_BLOCK // 2 * HEAD_DIM
    for warps in CONSUMERS:
        moved = [(step.tiles[0][0], step.bytes_added, step.bytes_written) for step in main_steps(run, warps) if step.operation.operand]
        assert moved[-2:] == [("v", 0, half * 2), ("k", 0, half * 2)]
        assert set(moved[:-2]) == {("A", half * 4, 0)}
    added = [step.tiles[0] for step in run.steps if step.bytes_added]
    assert {tile: added.count(tile) for tile in added} == {f"A{i}": 2 * (i + 1) for i in range(TILES)}


@pytest.mark.parametrize(
    ("fault", "sound", "faulty"),
    [
        ("first-query-tile-skipped", (OperationKind.COPY, "Q"), (OperationKind.COPY, "Q")),
        ("dQ-begins-with-what-was-there", (OperationKind.STORE, "A"), (OperationKind.LOAD, "O")),
    ],
)
def test_a_planted_fault_shows_where_it_acts(fault: str, sound: tuple[object, str], faulty: tuple[object, str]) -> None:
    runs = recorded(Mask.CAUSAL), recorded(Mask.CAUSAL, fault=fault)
    pair = next(pair for pair in zip(*(run.steps for run in runs), strict=False) if pair[0].tiles != pair[1].tiles)
    assert [(step.operation.kind, step.tiles[0][0]) for step in pair] == [sound, faulty]
    right, wrong = (totals(run.steps).all for run in runs)
    assert right == runs[1].formula != wrong
    assert wrong.read <= right.read
    assert wrong.written <= right.written
