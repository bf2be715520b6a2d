"""What chunks are to problems, workloads, records, kernels' launches and models."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from flashgen.cells import cells_of
from flashgen.codegen.attention import attention_call, local_steps, tiled_traffic, visits
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import families, find_family
from flashgen.codegen.modifier import with_sizes_to_verify
from flashgen.codegen.modifiers.chunk import MODIFIER
from flashgen.codegen.operation import operation_of
from flashgen.codegen.plain import from_plain, to_plain
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.seen import Seen
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.keywords import modified_of_call
from flashgen.records.choice import bucket, distance
from flashgen.selection.picks import model_picks, picks
from flashgen.tuning.generation import asked_workload
from flashgen.verification import cases
from flashgen.verification.cases import grouped_workload
from tests.support.examples import is_of_attention

PROBLEM = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL, modifiers=("chunk",))
SIZES = Workload(1, 4, 2, 1000, 1200, chunk=100)


@pytest.mark.parametrize(
    ("causal", "window", "seen", "sizes"),
    [
        (True, None, Seen(Mask.CAUSAL, ("chunk",), (OPEN, OPEN, 8)), (8,)),
        (False, None, Seen(Mask.FULL, ("chunk",), (OPEN, OPEN, 8)), (8,)),
        (True, (5, None), Seen(Mask.FULL, ("chunk", "window"), (5, 0, 8)), (8, 5, 0)),
    ],
)
def test_what_queries_see(causal: bool, window: Any, seen: Seen, sizes: tuple[int, ...]) -> None:
    assert Seen.of(causal, window, 8) == seen
    assert seen.sizes_of_modifiers == sizes
    told: tuple[Any, ...] = (",".join(seen.modifiers), sizes, (), [])
    assert modified_of_call(causal, window, None, None, None, chunk=8, top_left=0)[:2] == (seen.mask is Mask.CAUSAL, told)


def test_pairs_and_visited_tiles_against_counting() -> None:
    draw = random.Random(3)
    for _ in range(500):
        len_q, len_kv = draw.randrange(14), draw.randrange(14)
        left, right = draw.choice([(OPEN, OPEN), (draw.randrange(-6, 9), draw.randrange(-6, 9))])
        workload, offset = Workload(1, 1, 1, len_q, len_kv, left, right, draw.randrange(1, 9)), len_kv - len_q
        for mask in Mask:
            most = min(0, right) if mask is Mask.CAUSAL else right
            seen = {
                (query, key)
                for query in range(len_q)
                for key in range(len_kv)
                if key // workload.chunk == (query + offset) // workload.chunk and -left <= key - query - offset <= most
            }
            assert workload.visible_pairs(mask) == len(seen), (workload, mask)
            problem = dataclasses.replace(PROBLEM, mask=mask)
            for tile, (_, tiles, _) in enumerate(visits(problem, workload, 4, 2)):
                assert tiles >= len({key // 2 for query, key in seen if query // 4 == tile}), (workload, mask, tile)


def test_steps_and_bytes_are_those_of_the_tiles_that_are_seen() -> None:
    w = Workload(1, 1, 1, 512, 512, chunk=160)
    met = [tiles for _, tiles, _ in visits(PROBLEM, w, 128, 64)]
    assert met == [2, 4, 4, 3], "keys 0-127; 0-255; 160-383; 320-511 in tiles of 64"
    assert local_steps(PROBLEM, w, 128, 64) == (13.0, 4)
    whole = tiled_traffic(dataclasses.replace(PROBLEM, modifiers=()), Workload(1, 1, 1, 512, 512), 128, 64)
    assert tiled_traffic(PROBLEM, w, 128, 64).read < whole.read


def test_names_and_json() -> None:
    assert SIZES.name == "B1 H4/2 S1000x1200 C100"
    assert dataclasses.replace(SIZES, window_right=0).name == "B1 H4/2 S1000x1200 W:0 C100"
    assert PROBLEM.name == "bf16_d64_causal_chunk"
    assert "chunk" not in to_plain(Workload(1, 1, 1, 5, 5))
    assert from_plain(Workload, to_plain(SIZES), "workload") == SIZES


@pytest.mark.parametrize("chunk", [0, -1, 2**31, 1.0])
def test_a_workload_refuses_a_chunk_out_of_range(chunk: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^chunk must be"):
        dataclasses.replace(SIZES, chunk=chunk)


def test_families_take_it_or_say_why_not() -> None:
    attention = [family for family in families().values() if is_of_attention(family)]
    wide = dataclasses.replace(PROBLEM, head_dim=256, head_dim_v=256)
    takes = {
        family.name
        for family in attention
        for problem in (PROBLEM, wide)
        if not family.refusals(dataclasses.replace(problem, operation=family.operation), find_target("sm_90a"))
    }
    backward = {f"attention_backward{kind}" for kind in ("", "_sm90", "_persistent_sm90", "_wide_sm90")}
    assert takes == {"attention_decode", "attention_decode_sm90", "attention_forward", "attention_forward_sm90", *backward}
    (reason,) = find_family("flash1_forward").refusals(PROBLEM, find_target("sm_90a"))
    assert reason == "modifiers must be of dropout in these kernels; got chunk"


def test_positions_are_divided_exactly() -> None:
    """As templates/tile/modifiers/chunk.cuh does."""
    draw = random.Random(7)
    for chunk in (1, 2, 3, 7, 2**13, 2**28 - 1, 2**28, 2**28 + 1, *(draw.randrange(1, 2**29) for _ in range(500))):
        call = attention_call(PROBLEM, Workload(1, 1, 1, 2**28, 2**28 - 1, chunk=chunk))
        values = {name: int(value) for name, value in MODIFIER.values(call).items()}
        assert values["chunk"] == chunk
        assert 0 < values["chunk_multiplier"] < 2**31
        multiples = [draw.randrange(2**29 // chunk + 1) * chunk for _ in range(20)]
        for position in (0, 2**29 - 1, *(max(0, near + d) for near in multiples for d in (-1, 0, 1))):
            assert 4 * position * values["chunk_multiplier"] >> 32 + values["chunk_shift"] == position // chunk, (position, chunk)


def test_a_launch_has_its_chunk_however_long() -> None:
    family, device = find_family("attention_forward"), find_device("h200")
    config = family.default(PROBLEM, device.target)
    for chunk, wanted in ((1, 1), (100, 100), (OPEN - 1, 2200)):
        values = family.program(config, attention_call(PROBLEM, dataclasses.replace(SIZES, chunk=chunk)), device).launches[0].values
        assert values["chunk"] == wanted
    far = attention_call(PROBLEM, Workload(1, 1, 1, 2**28, 2**28, chunk=5))
    assert family.call_refusals(far) == ["len_q + len_kv must be below 536870912 with chunks; got 536870912"]


@pytest.mark.parametrize(
    "name",
    ["attention_forward", "attention_forward_sm90", "attention_backward", "attention_backward_sm90", "attention_backward_persistent_sm90"],
)
def test_models_expect_chunks_to_save_time(name: str) -> None:
    family, device = find_family(name), find_device("h200")
    problem, long = dataclasses.replace(PROBLEM, operation=family.operation), Workload(1, 16, 16, 16384, 16384)
    config = family.default(problem, device.target)
    times = [
        family.predict(problem, config, dataclasses.replace(long, chunk=chunk), device).seconds for chunk in (256, 1024, 8192, OPEN - 1)
    ]
    assert times == sorted(times)
    causal = family.predict(dataclasses.replace(problem, modifiers=()), config, long, device).seconds
    assert times[1] < causal / 3
    assert times[-1] == pytest.approx(causal, rel=0.1)


def test_flops_are_those_of_visible_pairs() -> None:
    pairs = SIZES.visible_pairs(Mask.CAUSAL)
    assert operation_of(PROBLEM).flops(PROBLEM, SIZES) == 2 * 4 * pairs * 128


def test_chunks_have_buckets_and_count_for_the_distance() -> None:
    assert bucket(SIZES) == Workload(1, 4, 2, 1024, 2048, chunk=128)
    assert bucket(bucket(SIZES)) == bucket(SIZES)
    assert 0.5 < distance(SIZES, dataclasses.replace(SIZES, chunk=250)) < 2


def test_cells_of_chunks() -> None:
    (cell,) = cells_of(64, causal=True, chunk=512, seqlens=[4096])
    assert (cell.problem.modifiers, cell.problem.mask, cell.workload.name) == (("chunk",), Mask.CAUSAL, "B4 H32 S4096 C512")
    assert asked_workload(64, [4096], None, None, None, None, chunk=512) == cell.workload
    with pytest.raises(ArgumentError, match=r"^chunk must be left out for softmax, which has none; got 8$"):
        cells_of(passes="softmax", chunk=8)
    with pytest.raises(ArgumentError, match=r"^modifiers must be without chunk, which has an option of its own; got chunk$"):
        cells_of(64, modifiers=["chunk"])


def test_the_plain_kernels_records_give_their_configs_and_another_chunk_needs_no_other_kernel() -> None:
    device, (cell,) = find_device("h200"), cells_of(64, causal=True, chunk=512, seqlens=[4096])
    found = list(picks(cell.problem, cell.workload, device, ("", "")))
    assert found
    assert all(pick.choice.older and "without modifiers" in pick.name for pick in found)
    other = dataclasses.replace(SIZES, chunk=7)
    wanted, again = (list(model_picks(PROBLEM, sizes, find_device("rtx4090"))) for sizes in (SIZES, other))
    assert wanted == again


def test_kernels_are_verified_on_chunks_of_all_kinds() -> None:
    """Rows without keys, chunks shorter than tiles, with whole tiles between their ends, and longer than all keys."""
    found = [with_sizes_to_verify(PROBLEM, grouped_workload(shape, 1), number) for number, shape in enumerate(cases.SHAPES)]
    assert all(w.visible_pairs(Mask.CAUSAL) for w in found if w.len_kv)
    assert any(w.len_q > w.len_kv > w.chunk for w in found)
    assert any(256 < w.chunk < w.len_kv for w in found)
    assert any(w.chunk > w.len_kv > 1 for w in found)
    special = [with_sizes_to_verify(PROBLEM, grouped_workload(shape, 1), None) for shape in cases.SPECIAL]
    assert all(w.visible_pairs(Mask.CAUSAL) == dataclasses.replace(w, chunk=OPEN).visible_pairs(Mask.CAUSAL) for w in special)
