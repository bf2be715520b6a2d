"""`flashgen explain` of the rung for Hopper: bytes of tensor copies, roles, stages, products under way, and kernels with planted faults."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from flashgen.build.emulator.compiler import Emulated
from flashgen.build.emulator.kernel import EmulationOrder, Schedule
from flashgen.build.emulator.memory import MemoryView
from flashgen.build.emulator.trace import TracedKernel
from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, render, traced
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.explain.events import OperationKind, tile_operations
from flashgen.explain.lines import ShownText, plain_name
from flashgen.explain.page import page_data, page_html
from flashgen.explain.run import (
    EXPLAINED,
    HOPPER,
    HOPPER_BACKWARD,
    RecordedRun,
    SmallProblem,
    explained_on,
    explained_spec,
    record,
    texts_of,
)
from flashgen.explain.steps import ScheduleStep, Tiling, schedule, totals
from flashgen.selection import compilation
from tests.support.faults_sm90 import SM90

H200, TILES = find_device("h200"), 4
(FAMILY,) = HOPPER
PRODUCER, CONSUMERS = (0,), ((4, 5, 6, 7), (8, 9, 10, 11))


@cache
def recorded(mask: Mask, tiles: int = TILES, fault: str = "") -> RecordedRun:
    small = SmallProblem(mask, tiles)
    spec = explained_spec(FAMILY, small, H200)
    texts = shown, emulated = texts_of(spec)
    for planted in SM90:
        if planted.name == fault:
            texts = planted.apply(shown), planted.apply(emulated, Atoms.EMULATED)
    assert not fault or texts[0] != shown
    return record(spec, small, H200, texts)


def of_kind(run: RecordedRun, kind: OperationKind, block: int = 0) -> list[ScheduleStep]:
    return [step for step in run.steps if (step.operation.kind, step.operation.block) == (kind, block)]


def computed(run: RecordedRun, letter: str) -> list[ScheduleStep]:
    return [step for step in run.steps if step.operation.kind is OperationKind.PRODUCT and step.tiles[0][0] == letter]


@pytest.mark.slow
@pytest.mark.parametrize("tiles", [4, 8])
@pytest.mark.parametrize("mask", Mask)
def test_bytes_are_those_of_the_formula(mask: Mask, tiles: int) -> None:
    run = recorded(mask, tiles)
    assert totals(run.steps).all == run.formula
    assert totals(run.steps).read.keys() == {"q", "k", "v"}
    assert len(page_html([run], H200).encode()) < 1e6


@pytest.mark.slow
def test_roles_do_what_is_theirs() -> None:
    run = recorded(Mask.CAUSAL)
    for kind, warps in (
        (OperationKind.COPY, {PRODUCER}),
        (OperationKind.PRODUCT, {*CONSUMERS}),
        (OperationKind.REDUCE, {*CONSUMERS}),
        (OperationKind.STORE, {*CONSUMERS}),
    ):
        assert {step.operation.warps for step in of_kind(run, kind)} == warps
    stored = [(step.operation.warps, step.tiles, step.bytes_written) for step in of_kind(run, OperationKind.STORE)]
    assert stored == [(warps, ("O3",), 64 * 32 * 2) for warps in CONSUMERS]
    assert {step.operation.atom for step in of_kind(run, OperationKind.STORE)} == {"cp_async_bulk_tensor_store"}


@pytest.mark.slow
def test_each_p_is_multiplied_with_its_values() -> None:
    """Beside the next S = Q K^T, of each consumer: blocks go from the last to the first."""
    run = recorded(Mask.CAUSAL)
    for step in computed(run, "O"):
        factor, values = step.needs
        assert (factor[0], values[0]) == ("S", "V")
        assert factor.partition(",")[2] == values[1:]
    for warps in CONSUMERS:
        own = [step.tiles[0] for step in of_kind(run, OperationKind.PRODUCT) if step.operation.warps == warps]
        assert own == ["S3,3", "S3,2", "O3", "S3,1", "O3", "S3,0", "O3", "O3"]


@pytest.mark.slow
def test_stages_are_waited_for_and_released() -> None:
    """A consumer waits until a tile has landed; the producer fills its stage again once both consumers have released it."""
    steps = [step for step in recorded(Mask.FULL).steps if step.operation.block == 0]
    for position, step in enumerate(steps):
        before, what = steps[:position], step.operation
        if what.function == "producer_acquire" and step.tiles:
            released = [one for one in before if one.operation.kind is OperationKind.RELEASE and one.tiles == step.tiles]
            assert {one.operation.warps[0] // 4 for one in released} == {1, 2}, step.tiles
        if what.kind is OperationKind.COPY:
            assert [resident.landed for resident in step.shared if resident.tile == step.tiles[0]] == [False]
        if what.kind is OperationKind.PRODUCT:
            waits = [one for one in before if (one.operation.warps, one.operation.function) == (what.warps, "consumer_wait")]
            assert {tile for tile in step.needs if tile[0] != "S"} <= {tile for one in waits for tile in one.tiles}
    held = {resident.tile for resident in steps[-1].shared}
    assert held == {"Q3", "K0", "K1", "V0", "V1", "O3"}, "two stages of K and of V"


@pytest.mark.slow
def test_products_are_complete_once_they_are_waited_for() -> None:
    for warps in CONSUMERS:
        own = [step for step in recorded(Mask.FULL).steps if (step.operation.block, step.operation.warps) == (0, warps)]
        under_way: list[str] = []
        for step in own:
            if step.operation.kind is OperationKind.PRODUCT:
                under_way += step.tiles
                assert len(under_way) <= 2
            elif step.operation.atom == "wgmma_complete":
                assert list(step.tiles) == under_way[: len(step.tiles)]
                under_way = under_way[len(step.tiles) :]
            elif step.operation.kind is OperationKind.REDUCE and step.operation.function == "exp2_and_sum":
                assert step.tiles[0] not in under_way, "P is made of a complete S"
        assert under_way == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sound", "faulty"),
    [
        ("sm90-first-block-skipped", ("K3",), ("K2",)),
        ("sm90-values-of-the-block-before", ("V3",), ("V2",)),
    ],
)
def test_a_planted_fault_shows_where_it_acts(fault: str, sound: tuple[str, ...], faulty: tuple[str, ...]) -> None:
    runs = recorded(Mask.CAUSAL), recorded(Mask.CAUSAL, fault=fault)
    one, other = next(pair for pair in zip(*(run.steps for run in runs), strict=False) if pair[0].tiles != pair[1].tiles)
    assert {step.operation.kind for step in (one, other)} == {OperationKind.COPY}
    assert (one.tiles, other.tiles) == (sound, faulty)


@pytest.mark.slow
def test_a_page_has_the_headroom_of_its_text() -> None:
    data = page_data([recorded(Mask.CAUSAL)], H200)
    (run,) = data["runs"]
    assert (run["block"], run["length"], run["headroom"]) == (128, 512, 8)
    assert len(data["rows"][128]) == len(data["edges"][128]) == 512


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "lengths", "heads"),
    [(64, (70, 70), (2, 1)), (32, (190, 333), (4, 2)), (32, (333, 190), (4, 2)), (32, (50, 300), (1, 1))],
    ids=str,
)
def test_odd_sizes_are_recorded_to_the_byte(head_dim: int, lengths: tuple[int, int], heads: tuple[int, int]) -> None:
    """Tiles of which rows or columns lie outside of the tensors, heads that share keys, and queries that see none. Causal."""
    problem, workload = Problem(Dtype.FP16, head_dim, head_dim, Mask.CAUSAL), Workload(1, *heads, *lengths)
    config = AttentionForwardSm90Config(2, 128, query_stages=1, out_panels=1, row_max=RowMax.EXACT, pack_gqa=1)
    spec = KernelSpec(find_family(FAMILY), problem, config, H200.target)
    shown, emulated = texts_of(spec)
    kernel = TracedKernel(spec, compilation.store().get_or_compile(traced(emulated), Emulated.TRACED))
    sizes = {name: (lengths[name in "kv"], heads[name in "kv"]) for name in ("q", "k", "v", "out")}
    arrays = {name: np.ones((length, head * head_dim), np.float16) for name, (length, head) in sizes.items()}
    views = {
        name: MemoryView(
            name, array.ctypes.data, 2, (1, *sizes[name], head_dim), (array.size, array.shape[1], head_dim, 1), writable=name == "out"
        )
        for name, array in arrays.items()
    }
    strides = {name: view.strides for name, view in views.items()}
    program = spec.family.program(config, attention_call(problem, workload, strides), H200)
    kernel.launch(program, views, EmulationOrder(Schedule.AHEAD, late_copies=False), workers=1)
    tilings = {name: Tiling(array.shape[1] * 2, 128) for name, array in arrays.items()}
    steps = schedule([tile_operations(trace, ShownText(shown, emulated)) for trace in kernel.traces], tilings)
    assert totals(steps).all == spec.family.traffic(problem, config, workload, H200)
    for step in steps:
        if step.operation.kind is OperationKind.PRODUCT:
            assert step.tiles
            assert {tile for tile in step.needs if tile[0] != "S"} <= {resident.tile for resident in step.shared if resident.landed}


# ---- what needs no compiler ----


def test_the_rung_is_of_hopper_alone() -> None:
    a100 = find_device("a100")
    assert explained_on(H200) == EXPLAINED
    assert explained_on(a100) == tuple(family for family in EXPLAINED if family not in (*HOPPER, *HOPPER_BACKWARD))
    with pytest.raises(ArgumentError, match=r"device must run attention_forward_sm90; got NVIDIA A100.*: target must be sm_90a; got sm_80"):
        explained_spec(FAMILY, SmallProblem(Mask.FULL, TILES), a100)


def test_both_texts_of_the_rung_differ_in_their_atoms_alone() -> None:
    spec = explained_spec(FAMILY, SmallProblem(Mask.CAUSAL, TILES), H200)
    shown, emulated = texts_of(spec)
    assert ShownText(shown, emulated).lines == render(spec).text.splitlines()


@pytest.mark.parametrize(
    ("function", "plain"),
    [
        ("Pipeline<2>::producer_acquire(PipelineState<2> const&) const", "producer_acquire"),
        ("void OnlineSoftmax<Fp16, false>::exp2_and_sum<16>(unsigned int (&) [8][4], float (&) [16][4], bool)", "exp2_and_sum"),
        ("void store_operand<Fp16, Tile<32, 32> >(unsigned int)", "store_operand"),
        ("quad_max(float)", "quad_max"),
    ],
)
def test_plain_names_of_functions(function: str, plain: str) -> None:
    assert plain_name(function) == plain
