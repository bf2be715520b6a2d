"""What the Hopper family refuses, needs and launches: hand-counted numbers, and what is one beyond each limit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import IllegalConfigError
from flashgen.codegen.families.attention_forward_sm90 import registers
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax, Scheduler
from flashgen.codegen.families.attention_forward_sm90.family import FAMILY
from flashgen.codegen.families.attention_forward_sm90.registers import registers_needed
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import Buffer, BufferKind
from flashgen.codegen.target import find_target, targets
from flashgen.codegen.tensor_map import TensorMapShape
from flashgen.codegen.workload import OPEN, Workload
from tests.support.programs import program_of, values_of

H200 = find_device("h200")
SM_90 = find_target("sm_90a")
D64, D128 = Problem(Dtype.BF16, 64), Problem(Dtype.BF16, 128)
GOOD = AttentionForwardSm90Config(2, 128)
BARRIERS = 512  # bytes of shared memory that barriers, and what a block knows of its tiles, take at most


def config(**changes: Any) -> AttentionForwardSm90Config:
    return dataclasses.replace(GOOD, **changes)


def reasons(problem: Problem = D128, **changes: Any) -> list[str]:
    return FAMILY.check(problem, config(**changes), SM_90)


def values(chosen: AttentionForwardSm90Config, workload: Workload, problem: Problem = D128) -> dict[str, Any]:
    return values_of(FAMILY, problem, chosen, workload)


def test_legal() -> None:
    assert reasons() == []


@pytest.mark.parametrize("name", [name for name in targets() if name != "sm_90a"])
def test_it_is_for_one_architecture(name: str) -> None:
    assert FAMILY.refusals(D128, find_target(name)) == [f"target must be sm_90a; got {name}"]
    assert FAMILY.check(D128, GOOD, find_target(name)) == [f"target must be sm_90a; got {name}"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"warpgroups": 4, "scheduler": Scheduler.DYNAMIC}, "warpgroups must be from 1 to 3; got 4"),
        ({"warpgroups": 0}, "warpgroups must be from 1 to 3; got 0"),
        ({"block_kv": 16}, "block_kv must be a multiple of 16 from 32 to 256; got 16"),
        ({"block_kv": 40}, "block_kv must be a multiple of 16 from 32 to 256; got 40"),
        ({"block_kv": 272}, "block_kv must be a multiple of 16 from 32 to 256; got 272"),
        ({"stages": 1}, "stages must be from 2 to 4; got 1"),
        ({"stages": 5}, "stages must be from 2 to 4; got 5"),
        ({"query_stages": 0}, "query_stages must be from 1 to 2; got 0"),
        ({"query_stages": 3}, "query_stages must be from 1 to 2; got 3"),
        ({"out_panels": 0}, "out_panels must be from 1 to 2; got 0"),
        ({"out_panels": 3}, "out_panels must be from 1 to 2; got 3"),
        ({"pack_gqa": 3}, "pack_gqa must be one of 1, 2, 4, 8, 16; got 3"),
        ({"pack_gqa": 32}, "pack_gqa must be one of 1, 2, 4, 8, 16; got 32"),
        ({"warpgroups": 1}, "ping_pong must be false with warpgroups 1: it takes two consumers; got true"),
        (
            {"warpgroups": 3, "block_kv": 64, "query_stages": 1},
            "scheduler must be dynamic with warpgroups 3: the static one does not fit 160 registers; got static",
        ),
    ],
)
def test_fields(changes: dict[str, Any], reason: str) -> None:
    assert reasons(**changes) == [reason]


@pytest.mark.parametrize(
    "changes",
    [
        {"block_kv": 32},
        {"stages": 4, "block_kv": 32},
        {"query_stages": 1, "out_panels": 1},
        {"pack_gqa": 16},
        {"ping_pong": False},
        {"warpgroups": 1, "ping_pong": False},
        {"warpgroups": 3, "block_kv": 64, "query_stages": 1, "scheduler": Scheduler.DYNAMIC},
    ],
)
def test_what_is_at_a_limit_is_legal(changes: dict[str, Any]) -> None:
    assert reasons(**changes) == []


@pytest.mark.parametrize(("head_dims", "panels"), [((192, 64), 1), ((64, 72), 2), ((64, 192), 3)])
def test_the_output_has_so_many_panels(head_dims: tuple[int, int], panels: int) -> None:
    for given, found in ((panels, []), (panels + 1, [f"out_panels must be from 1 to {panels}; got {panels + 1}"])):
        assert reasons(Problem(Dtype.BF16, *head_dims), block_kv=48, out_panels=given) == found


def test_all_reasons_at_once() -> None:
    bad = config(warpgroups=4, block_kv=33, stages=9, query_stages=0, out_panels=9, pack_gqa=5)
    found = FAMILY.check(Problem(Dtype.BF16, 60), bad, SM_90)
    assert [r.split()[0] for r in found] == [
        *("head_dim", "head_dim_v", "warpgroups", "block_kv", "stages", "query_stages", "out_panels", "pack_gqa")
    ]
    with pytest.raises(IllegalConfigError) as error:
        FAMILY.require_legal(Problem(Dtype.BF16, 60), bad, SM_90)
    assert list(error.value.reasons) == found


@pytest.mark.parametrize(
    ("problem", "changes", "tiles"),
    [
        (D128, {}, 2 * 128 * 256 + 2 * 128 * (256 + 256) + 128 * 256),  # queries, keys and values, output
        (D128, {"query_stages": 1}, 128 * 256 + 2 * 128 * (256 + 256) + 128 * 256),
        (D128, {"stages": 3, "block_kv": 64}, 2 * 128 * 256 + 3 * 64 * (256 + 256) + 128 * 256),
        (D128, {"out_panels": 1}, 2 * 128 * 256 + 2 * 128 * (256 + 256) + 128 * 128),
        (D128, {"warpgroups": 3, "scheduler": Scheduler.DYNAMIC}, 2 * 192 * 256 + 2 * 128 * (256 + 256) + 192 * 256),
        (Problem(Dtype.FP16, 72, 8), {"out_panels": 1}, 2 * 128 * 256 + 2 * 128 * (256 + 128) + 128 * 128),  # panels are whole
        (Problem(Dtype.BF16, 192, 128), {}, 2 * 128 * 384 + 2 * 128 * (384 + 256) + 128 * 256),
    ],
)
def test_shared_memory_needed(problem: Problem, changes: dict[str, Any], tiles: int) -> None:
    chosen = config(**changes)
    sums = 8 * chosen.block_q
    assert tiles + sums < FAMILY.shared_bytes(problem, chosen) <= tiles + sums + BARRIERS


def test_shared_memory() -> None:
    (reason,) = reasons(Problem(Dtype.BF16, 256), block_kv=64)
    needed = FAMILY.shared_bytes(Problem(Dtype.BF16, 256), config(block_kv=64))
    cure = "lower block_kv, stages, query_stages, out_panels or warpgroups"
    assert reason == f"needs {needed} B of shared memory, sm_90a has 232448 B a block: {cure}"
    needed = FAMILY.shared_bytes(D128, GOOD)
    for available, count in ((needed, 0), (needed - 1, 1)):
        target = dataclasses.replace(SM_90, shared_memory_per_block=available)
        assert len(FAMILY.check(D128, GOOD, target)) == count


@pytest.mark.parametrize(
    ("warpgroups", "block_kv", "head_dim_v", "needed"),
    [
        (1, 64, 128, 64 + 64 + 48),
        (2, 128, 128, 128 + 64 + 40),
        (3, 64, 128, 64 + 64 + 32),
        (2, 64, 72, 64 + 40 + 40),
        (2, 64, 256, 64 + 128 + 40),
    ],
)
def test_registers_needed(warpgroups: int, block_kv: int, head_dim_v: int, needed: int) -> None:
    """Scores, the probabilities of two blocks, the output, and the rest."""
    chosen = config(warpgroups=warpgroups, block_kv=block_kv)
    assert registers_needed(Problem(Dtype.BF16, 128, head_dim_v), chosen) == needed


@pytest.mark.parametrize(
    ("modifiers", "more"),
    [(("softcap",), 0), (("softcap", "window"), 8), (("document_ids", "softcap"), 32), (("boolean_mask", "softcap"), 48)],
)
def test_registers_of_a_softcap(modifiers: tuple[str, ...], more: int) -> None:
    """Two consumers need no more than without it, but beside windows and where the map is no part of the exponent."""
    chosen = config(warpgroups=2, block_kv=160)
    plain, problem = Problem(Dtype.BF16, 64), Problem(Dtype.BF16, 64, modifiers=modifiers)
    assert registers_needed(problem, chosen) == registers_needed(plain, chosen) + more


@pytest.mark.parametrize(
    ("changes", "available"),
    [({"warpgroups": 1, "block_kv": 144}, 255), ({"block_kv": 144}, 232), ({"warpgroups": 3, "block_kv": 80}, 160)],
)
def test_registers(changes: dict[str, Any], available: int) -> None:
    changes = {"ping_pong": False, "scheduler": Scheduler.DYNAMIC, "query_stages": 1, "out_panels": 1, **changes}
    needed = registers_needed(D128, config(**changes))
    has = f"{available} are available with warpgroups {config(**changes).warpgroups}"
    assert needed > available
    assert reasons(**changes) == [f"needs about {needed} registers a thread, {has}: lower block_kv"]
    assert reasons(**{**changes, "block_kv": changes["block_kv"] - 16}) == [], "the next one fits"


@pytest.mark.parametrize(("needed", "count"), [(232, 0), (233, 1)])
def test_registers_may_be_used_up(needed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registers, "BESIDE", (0, needed - 128 - 64, 0))
    assert len(FAMILY.check(D128, GOOD, SM_90)) == count


@pytest.mark.parametrize(
    ("problem", "changes", "blocks", "registers"),
    [
        (D64, {"warpgroups": 1}, 2, (40, 216)),
        (D128, {"warpgroups": 1}, 1, (255, 255)),  # two do not fit the shared memory
        (D128, {"warpgroups": 1, "block_kv": 64, "query_stages": 1, "out_panels": 1}, 2, (40, 216)),
        (Problem(Dtype.BF16, 64, 192), {"warpgroups": 1, "block_kv": 32, "query_stages": 1, "out_panels": 1}, 2, (40, 216)),
        (Problem(Dtype.BF16, 64, 200), {"warpgroups": 1, "block_kv": 32, "query_stages": 1, "out_panels": 1}, 1, (255, 255)),
        (D64, {"warpgroups": 2, "block_kv": 32}, 1, (40, 232)),
        (D64, {"warpgroups": 3, "block_kv": 32}, 1, (32, 160)),
    ],
)
def test_blocks_that_share_an_sm(problem: Problem, changes: dict[str, Any], blocks: int, registers: tuple[int, int]) -> None:
    chosen = config(**changes)
    assert FAMILY.blocks_per_sm(problem, chosen) == blocks
    assert FAMILY.registers(problem, chosen) == registers
    text = FAMILY.context(problem, chosen, SM_90)
    assert text["blocks_per_sm"] == blocks
    assert (text["producer_registers"], text["consumer_registers"]) == registers
    assert text["shared_bytes"] == FAMILY.shared_bytes(problem, chosen)


def test_blocks_share_an_sm_if_they_and_what_each_costs_fit() -> None:
    """An SM has 228 KiB, of which each block costs 1 KiB beside what it asks for."""
    sizes = itertools.product((32, 48, 64, 80, 96, 112, 128), (1, 2), (1, 2), (2, 3, 4), (64, 96, 128, 192))
    shared = set()
    for block_kv, queries, panels, stages, width in sizes:
        chosen, problem = AttentionForwardSm90Config(1, block_kv, stages, queries, panels, ping_pong=False), Problem(Dtype.BF16, width)
        fit = 2 * (FAMILY.shared_bytes(problem, chosen) + 1024) <= 228 * 1024
        assert FAMILY.blocks_per_sm(problem, chosen) == (2 if fit else 1)
        shared.add(fit)
    assert shared == {False, True}


def test_registers_are_no_more_than_an_sm_has() -> None:
    for head_dim in (64, 128, 192, 256):
        for chosen in FAMILY.space(Problem(Dtype.BF16, head_dim), SM_90):
            problem = Problem(Dtype.BF16, head_dim)
            (producer, consumer), blocks = FAMILY.registers(problem, chosen), FAMILY.blocks_per_sm(problem, chosen)
            if (producer, consumer) != (255, 255):
                assert producer % 8 == consumer % 8 == 0, "setmaxnreg takes eights"
                assert blocks * 128 * (producer + chosen.warpgroups * consumer) <= 65536
            else:
                assert blocks * 256 * 256 <= 65536


@pytest.mark.parametrize(
    ("changes", "workload", "tiles", "grid"),
    [
        ({}, Workload(2, 8, 2, 128, 500), 16, 16),
        ({}, Workload(2, 8, 2, 129, 500), 32, 32),
        ({}, Workload(2, 8, 2, 128 * 20, 500), 320, 132),
        (
            {"warpgroups": 1, "ping_pong": False, "block_kv": 64, "query_stages": 1, "out_panels": 1},
            Workload(2, 8, 2, 64 * 20, 500),
            320,
            264,
        ),
        ({"pack_gqa": 4}, Workload(2, 8, 2, 33, 500), 2 * 2 * 2, 8),  # 32 queries a tile
    ],
)
def test_grid(changes: dict[str, Any], workload: Workload, tiles: int, grid: int) -> None:
    chosen = config(**changes)
    (launch,) = program_of(FAMILY, D128, chosen, workload).launches
    assert launch.grid == grid
    given = values(chosen, workload)
    assert (given["tiles"], given["launched_blocks"]) == (tiles, grid)
    assert given["query_tiles"] == -(-workload.len_q // chosen.queries)
    assert given["head_sets"] == workload.heads_q // chosen.pack_gqa
    assert given["group_reciprocal"] == -(-(2**64) // 4), "query heads of a key/value head, packed or not"
    assert given["head_sets_reciprocal"] == -(-(2**64) // given["head_sets"])


@pytest.mark.parametrize(
    ("len_kv", "packed", "section"),
    [
        (2048, 1, 32),  # a head's K and V are 1 MiB, and 32 MiB are allowed
        (2047, 1, 16),  # 16 MiB
        (65536, 1, 1),
        (2048, 2, 32),  # sets of heads, of which half as many share a head's K and V, which are 64 MiB together
    ],
)
def test_sections_take_so_much_of_the_l2(len_kv: int, packed: int, section: int) -> None:
    causal = Problem(Dtype.BF16, 128, mask=Mask.CAUSAL)
    group = packed
    workload = Workload(1, 64 * group, 64, 4096, len_kv)
    given = values(config(pack_gqa=packed), workload, causal)
    assert given["l2_group_heads"] == section
    assert given["l2_group_tiles"] == section * given["query_tiles"]
    assert given["l2_group_tiles_reciprocal"] == -(-(2**64) // given["l2_group_tiles"])
    assert values(config(pack_gqa=packed), workload)["l2_group_heads"] == 1, "without a mask"


@pytest.mark.parametrize(
    ("window", "scheduler", "heads"),
    [
        ((1024, 0), Scheduler.DYNAMIC, 8),  # 0.5 MiB each, of which 16 MiB are allowed, but no more than 8 heads
        ((8191, 0), Scheduler.DYNAMIC, 4),  # 4 MiB
        ((-5, 4), Scheduler.DYNAMIC, 8),  # no keys
        ((OPEN, 7), Scheduler.DYNAMIC, 2),  # 8 MiB: all keys
        ((1024, 0), Scheduler.STATIC, 1),
        ((OPEN, OPEN), Scheduler.DYNAMIC, 1),
    ],
)
def test_under_a_window_heads_share_the_l2_by_the_keys_that_are_seen(window: tuple[int, int], scheduler: Scheduler, heads: int) -> None:
    local, workload = dataclasses.replace(D128, modifiers=("window",)), Workload(2, 16, 16, 16384, 16384, *window)
    assert values(config(scheduler=scheduler), workload, local)["l2_group_heads"] == heads


def test_threads() -> None:
    assert [FAMILY.threads(config(warpgroups=n)) for n in (1, 2, 3)] == [256, 384, 512]


@pytest.mark.parametrize("scheduler", Scheduler)
def test_tiles_are_counted_where_they_are_claimed(scheduler: Scheduler) -> None:
    buffers = program_of(FAMILY, D128, config(scheduler=scheduler), Workload(2, 8, 2, 5, 7)).buffers
    assert buffers == ((Buffer("tile_counter", 4, BufferKind.STREAM_COUNTER),) if scheduler is Scheduler.DYNAMIC else ())


def maps_of(
    problem: Problem, chosen: AttentionForwardSm90Config, workload: Workload, strides: Mapping[str, tuple[int, ...]]
) -> list[TensorMapShape]:
    """Of q, k, v and out."""
    (launch,) = program_of(FAMILY, problem, chosen, workload, strides=strides).launches
    assert list(launch.maps) == ["q", "k", "v", "out"]
    return list(launch.maps.values())


def test_maps_say_where_every_element_is() -> None:
    problem, workload = Problem(Dtype.FP16, 72, 40), Workload(2, 8, 2, 5, 7)
    strides = {name: (1000 * i, 10 * i, 100 * i, 1) for name, i in zip(("q", "k", "v", "out"), (8, 16, 24, 32), strict=True)}
    boxes = [(64, 128, 1, 1), (64, 96, 1, 1), (64, 96, 1, 1), (64, 16, 1, 1)]
    sizes = [(72, 5, 8, 2), (72, 7, 2, 2), (40, 7, 2, 2), (40, 5, 8, 2)]
    maps = maps_of(problem, config(block_kv=96), workload, strides)
    assert [m.dtype for m in maps] == [Dtype.FP16] * 4
    assert [m.sizes for m in maps] == sizes
    assert [m.box for m in maps] == boxes
    assert [m.strides for m in maps] == [(2 * row, 2 * head, 2 * batch) for batch, row, head, _ in strides.values()]
    packed = maps_of(problem, config(block_kv=96, pack_gqa=4), workload, strides)
    assert packed[1:3] == maps[1:3], "k and v are not packed"
    assert [m.sizes for m in (packed[0], packed[3])] == [(72, 8, 5, 2), (40, 8, 5, 2)]
    assert [m.box for m in (packed[0], packed[3])] == [(64, 4, 32, 1), (64, 4, 4, 1)]
    assert [m.strides for m in (packed[0], packed[3])] == [(2 * h, 2 * r, 2 * b) for b, r, h, _ in (strides["q"], strides["out"])]


def test_launches_that_tensor_maps_cannot_describe_are_refused() -> None:
    workload = Workload(1, 2, 2, 3, 4)
    assert FAMILY.call_refusals(attention_call(D128, workload)) == []
    no_keys = attention_call(D128, Workload(1, 2, 2, 3, 0))
    assert FAMILY.call_refusals(no_keys) == ["len_kv must be at least 1 for tensor copies; got 0"]
    assert FAMILY.call_refusals(no_keys, config()) == FAMILY.call_refusals(no_keys)
    for name in ("q", "k", "v", "out"):
        for dim in range(3):
            for stride, refused in ((2**39 - 8, False), (2**39, True)):
                own = [1024, 1024, 1024, 1]
                own[dim] = stride
                found = FAMILY.call_refusals(attention_call(D128, workload, {name: tuple(own)}))
                assert found == ([f"strides of {name} must be below {2**39} elements; got {stride}"] if refused else [])


@pytest.mark.parametrize(
    ("head_dims", "count"), [((8, 8), 640), ((64, 64), 520), ((72, 72), 500), ((128, 128), 400), ((192, 128), 400), ((256, 256), 120)]
)
def test_how_many_configs_are_legal(head_dims: tuple[int, int], count: int) -> None:
    """Another count is a change of what may be chosen: right only if that was meant."""
    problem = Problem(Dtype.BF16, *head_dims)
    space = list(FAMILY.space(problem, SM_90))
    assert len(space) == count
    assert all(FAMILY.check(problem, chosen, SM_90) == [] for chosen in space)
    assert {chosen.pack_gqa for chosen in space} == {1, 2, 4, 8, 16}
    assert {chosen.row_max for chosen in space} == set(RowMax)
    assert {chosen.scheduler for chosen in space} == set(Scheduler)
    bare = {dataclasses.replace(chosen, query_stages=1, out_panels=1) for chosen in space}
    assert len(bare) == len(space), "of buffers, one choice each"


def test_the_space_has_the_most_buffers_that_fit() -> None:
    two: list[dict[str, Any]] = [{"query_stages": 2}, {"out_panels": 2}]
    for problem in (D64, D128, Problem(Dtype.BF16, 256)):
        for chosen in FAMILY.space(problem, SM_90):
            more = {dataclasses.replace(chosen, **changes) for changes in two} - {chosen}
            for other in more:
                alone = FAMILY.blocks_per_sm(problem, other) < FAMILY.blocks_per_sm(problem, chosen)
                assert alone or FAMILY.check(problem, other, SM_90), f"{chosen.name} could have another buffer"


def test_the_default_is_the_model_s_pick_of_those_that_pack_nothing() -> None:
    for problem in (D64, D128, Problem(Dtype.FP16, 192, 128, Mask.CAUSAL)):
        default = FAMILY.default(problem, SM_90)
        long = Workload(4, 16, 16, 4096, 4096)
        seconds = {c: FAMILY.predict(problem, c, long, H200).seconds for c in FAMILY.space(problem, SM_90) if c.pack_gqa == 1}
        assert seconds[default] == min(seconds.values())
