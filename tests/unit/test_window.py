"""What a window is to problems, workloads, records, kernels' launches and the command line."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.cells import Cell, cells_of
from flashgen.cli.options import parse_window
from flashgen.codegen.attention import attention_call, local_steps, tiled_traffic, visits
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import families, find_family
from flashgen.codegen.modifier import given_modifiers, modifier_refusals, modifier_values, with_sizes_to_verify
from flashgen.codegen.modifiers.window import LONGEST
from flashgen.codegen.operation import operation_of
from flashgen.codegen.plain import from_plain, to_plain
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.seen import Seen
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import OPEN, Workload
from flashgen.launch.keywords import modified_of_call
from flashgen.records.choice import bucket, distance
from flashgen.records.record import BENCHMARK_VERSION, Record, RecordKey, Timing
from flashgen.records.store import Records
from flashgen.selection import loaded
from flashgen.selection.picks import model_picks, picks
from flashgen.tuning.generation import asked_workload
from flashgen.verification import cases
from flashgen.verification.cases import grouped_workload
from tests.support.examples import is_of_attention

PROBLEM = Problem(Dtype.BF16, 64, mask=Mask.FULL, modifiers=("window",))
PLAIN = Workload(1, 4, 2, 1000, 1200)
SIZES = Workload(1, 4, 2, 1000, 1200, 100, 20)


@pytest.mark.parametrize(
    ("causal", "window", "seen"),
    [
        (False, None, Seen(Mask.FULL)),
        (True, None, Seen(Mask.CAUSAL)),
        (False, (None, None), Seen(Mask.FULL)),
        (False, (None, 0), Seen(Mask.CAUSAL)),
        (True, (None, 5), Seen(Mask.CAUSAL)),
        (True, (5, None), Seen(Mask.FULL, ("window",), (5, 0, OPEN))),
        (False, (5, None), Seen(Mask.FULL, ("window",), (5, OPEN, OPEN))),
        (True, (None, -1), Seen(Mask.FULL, ("window",), (OPEN, -1, OPEN))),
        (False, (5, 6), Seen(Mask.FULL, ("window",), (5, 6, OPEN))),
    ],
)
def test_what_queries_see(causal: bool, window: Any, seen: Seen) -> None:
    assert Seen.of(causal, window) == seen


def test_what_operators_are_told() -> None:
    assert modified_of_call(True, (1024, None), None, None, None, top_left=0)[:2] == (False, ("window", (1024, 0), (), []))
    assert modified_of_call(False, (None, 0), None, None, None, top_left=0)[:2] == (True, ())
    assert modified_of_call(True, (5, None), 30.0, None, None, top_left=0)[:2] == (False, ("window,softcap", (5, 0), (30.0,), []))


def test_pairs_against_counting() -> None:
    draw = random.Random(3)
    for _ in range(500):
        len_q, len_kv, left, right = (draw.randrange(*ends) for ends in ((0, 12), (0, 12), (-15, 16), (-15, 16)))
        workload = Workload(1, 1, 1, len_q, len_kv, left, right)
        distances = [key - query - len_kv + len_q for query in range(len_q) for key in range(len_kv)]
        assert workload.visible_pairs(Mask.FULL) == sum(-left <= d <= right for d in distances), workload
        assert workload.visible_pairs(Mask.CAUSAL) == sum(-left <= d <= min(0, right) for d in distances), workload


def test_names_and_json() -> None:
    assert SIZES.name == "B1 H4/2 S1000x1200 W100:20"
    assert dataclasses.replace(SIZES, window_right=OPEN).name == "B1 H4/2 S1000x1200 W100:"
    assert PROBLEM.name == "bf16_d64_full_window"
    assert "window_left" not in to_plain(PLAIN)
    assert "modifiers" not in to_plain(Problem(Dtype.BF16, 64))
    for value in (SIZES, PROBLEM):
        assert from_plain(type(value), to_plain(value), "value") == value


@pytest.mark.parametrize("end", [2**31, -(2**31), 1.0])
def test_a_workload_refuses_an_end_out_of_range(end: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^window_left must be"):
        dataclasses.replace(SIZES, window_left=end)


def test_a_problem_refuses_unknown_modifiers_and_those_of_what_has_no_scores() -> None:
    with pytest.raises(ArgumentError, match=r"^modifiers must be one of alibi, bias, .*window; got 'windows'$"):
        Problem(Dtype.BF16, 64, modifiers=("windows",))
    with pytest.raises(ArgumentError, match=r"^modifiers must be none for softmax, which has no scores; got window$"):
        Problem(Dtype.BF16, operation="softmax", modifiers=("window",))
    assert Problem(Dtype.BF16, 64, modifiers=("window", "window")) == PROBLEM


def test_families_take_it_or_say_why_not() -> None:
    takes = {
        family.name
        for family in families().values()
        if is_of_attention(family) and not family.refusals(dataclasses.replace(PROBLEM, operation=family.operation), find_target("sm_90a"))
    }
    backward = {f"attention_backward{kind}" for kind in ("", "_sm90", "_persistent_sm90")}
    assert takes == {"attention_decode", "attention_decode_sm90", "attention_forward", "attention_forward_sm90", *backward}
    (reason,) = find_family("flash1_forward").refusals(PROBLEM, find_target("sm_90a"))
    assert reason == "modifiers must be of dropout in these kernels; got window"


def test_a_launch_has_its_ends_however_far_they_are() -> None:
    family, device = find_family("attention_forward"), find_device("h200")
    config = family.default(PROBLEM, device.target)
    for ends, wanted in (((100, 20), (100, 20)), ((OPEN, -OPEN), (2200, -2200)), ((40, -60), (-2200, -2200))):
        call = attention_call(PROBLEM, dataclasses.replace(SIZES, window_left=ends[0], window_right=ends[1]))
        values = family.program(config, call, device).launches[0].values
        assert (values["window_left"], values["window_right"]) == wanted
    far = attention_call(PROBLEM, Workload(1, 1, 1, 2**28, 2**28, 5, 5))
    assert family.call_refusals(far) == ["len_q + len_kv must be below 536870912 with a window; got 536870912"]


def test_steps_and_bytes_are_those_of_the_tiles_that_are_seen() -> None:
    w = Workload(1, 1, 1, 512, 512, 100, 0)
    met = [tiles for _, tiles, _ in visits(PROBLEM, w, 128, 64)]
    assert met == [2, 4, 4, 4], "keys 0-127; 28-255, 156-383 and 284-511 in tiles of 64"
    assert local_steps(PROBLEM, w, 128, 64) == (14.0, 4)
    whole = tiled_traffic(dataclasses.replace(PROBLEM, modifiers=()), Workload(1, 1, 1, 512, 512), 128, 64)
    assert tiled_traffic(PROBLEM, w, 128, 64).read < whole.read
    many = Workload(1, 1, 1, 128 * 5000, 128 * 5000, 1000, 0)
    estimated, longest = local_steps(PROBLEM, many, 128, 64)
    assert longest <= 19
    assert estimated == pytest.approx(5000 * longest, rel=0.1)


@pytest.mark.parametrize(
    "name",
    ["attention_forward", "attention_forward_sm90", "attention_backward", "attention_backward_sm90", "attention_backward_persistent_sm90"],
)
def test_models_expect_a_window_to_save_time(name: str) -> None:
    family, device = find_family(name), find_device("h200")
    problem, long = dataclasses.replace(PROBLEM, operation=family.operation), Workload(1, 16, 16, 16384, 16384)
    config = family.default(problem, device.target)
    times = [
        family.predict(problem, config, dataclasses.replace(long, window_left=left, window_right=0), device).seconds
        for left in (128, 1024, 4096, OPEN - 1)
    ]
    assert times == sorted(times)
    causal = family.predict(dataclasses.replace(problem, mask=Mask.CAUSAL, modifiers=()), config, long, device).seconds
    assert times[1] < causal / 3
    assert times[-1] == pytest.approx(causal, rel=0.1)


def test_flops_are_those_of_visible_pairs() -> None:
    pairs = SIZES.visible_pairs(Mask.FULL)
    assert operation_of(PROBLEM).flops(PROBLEM, SIZES) == 2 * 4 * pairs * 128


def test_ends_have_buckets_and_count_for_the_distance() -> None:
    assert bucket(SIZES) == Workload(1, 4, 2, 1024, 2048, 128, 32)
    assert bucket(dataclasses.replace(SIZES, window_left=-100, window_right=OPEN)) == Workload(1, 4, 2, 1024, 2048, -128, OPEN)
    assert bucket(bucket(SIZES)) == bucket(SIZES)
    assert distance(SIZES, SIZES) == 0
    assert 0.5 < distance(SIZES, dataclasses.replace(SIZES, window_left=250)) < 2
    assert distance(PLAIN, SIZES) > 2


def test_cells_of_a_window() -> None:
    both = cells_of(64, window=(1024, 1024), seqlens=[4096])
    assert [(cell.problem.modifiers, cell.problem.mask, cell.workload.name) for cell in both] == [
        (("window",), Mask.FULL, "B4 H32 S4096 W1024:1024"),
        (("window",), Mask.FULL, "B4 H32 S4096 W1024:0"),
    ]
    assert cells_of(64, window=(1024, 0), seqlens=[4096]) == [both[1]], "with and without a causal mask"
    assert cells_of(64, causal=False, window=(None, 0), seqlens=[4096]) == cells_of(64, causal=True, seqlens=[4096])
    assert isinstance(both[0], Cell)
    with pytest.raises(ArgumentError, match=r"^window must be left out for softmax, which has none; got \(1, 2\)$"):
        cells_of(passes="softmax", window=(1, 2))


@pytest.mark.parametrize(
    ("text", "window"),
    [
        (None, None),
        ("1024", (1024, 1024)),
        ("1024:0", (1024, 0)),
        ("-20:60", (-20, 60)),
        ("8:", (8, None)),
        (":8", (None, 8)),
        (":", (None, None)),
    ],
)
def test_the_command_line_s_form(text: str | None, window: Any) -> None:
    assert parse_window(text) == window


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "1.5", "1:b", "12345678901"])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^window must look like LEFT:RIGHT, in keys, such as 1024:0; got "):
        parse_window(text)


def test_without_records_of_windows_those_of_the_plain_kernel_give_their_configs() -> None:
    device, cell = find_device("h200"), cells_of(96, causal=True, window=(1024, None), seqlens=[4096])[0]
    plain = next(picks(Problem(Dtype.BF16, 96, mask=Mask.CAUSAL), cells_of(96, causal=True, seqlens=[4096])[0].workload, device, ("", "")))
    found = list(picks(cell.problem, cell.workload, device, ("", "")))
    specs = [pick.choice.spec(device.target) for pick in found]
    assert specs
    assert all(spec.problem == cell.problem for spec in specs)
    assert specs[0].config == plain.choice.spec(device.target).config
    assert all(pick.choice.older and "without modifiers" in pick.name for pick in found), "their times are of other kernels"
    kernels, gpu = loaded.Kernels(), SimpleNamespace(ordinal=0)
    keys = {kernels._key(pick, cell.problem, cell.workload, gpu, frozenset()) for pick in (found[0], plain)}  # type: ignore[arg-type]
    assert len(keys) == 2, "two kernels, whose record is one"


def test_another_window_needs_no_other_kernel() -> None:
    others = [dataclasses.replace(SIZES, window_left=left, window_right=right) for left, right in ((3, 0), (OPEN, -9))]
    wanted = list(model_picks(PROBLEM, SIZES, find_device("rtx4090")))
    assert [list(model_picks(PROBLEM, other, find_device("rtx4090"))) for other in others] == [wanted] * 2


def test_a_record_of_a_window_is_kept_and_found(tmp_path: Path) -> None:
    family, device = find_family("attention_forward"), find_device("h200")
    spec = KernelSpec(family, PROBLEM, family.default(PROBLEM, device.target), device.target)
    records = Records(tmp_path / "cache/records.sqlite3")
    (tmp_path / "cache").mkdir(mode=0o700)
    made = []
    for workload, seconds in (
        (SIZES, 2.0),
        (dataclasses.replace(SIZES, window_left=400), 3.0),
        (dataclasses.replace(SIZES, window_right=OPEN), 4.0),
    ):
        key = RecordKey(device.name, device.sm_count, "d", "n", spec.digest, workload, BENCHMARK_VERSION)
        made.append(Record(key, spec.to_json(), Timing(seconds, seconds, seconds, 5), 100, 0, 0))
        records.put(made[-1])
    assert [records.get(record.key) for record in made] == made
    assert sorted(record.outcome.seconds for record in Records(records.path).all() if isinstance(record.outcome, Timing)) == [2.0, 3.0, 4.0]
    known = records.known(PROBLEM, device, BENCHMARK_VERSION)
    assert [choice.record for record in made if (choice := known.exact(record.key.workload, ("d", "n")))] == made
    near = known.nearest(dataclasses.replace(SIZES, window_left=380), ("d", "n"))
    assert near is not None
    assert near.record == made[1]


def test_backward_passes_have_the_configs_of_plain_kernels_too() -> None:
    """On Hopper the plain record is of a family that has no dropout: then the best one counts of those that have."""
    device = find_device("h200")
    (local,) = cells_of(64, causal=True, window=(1024, None), seqlens=[4096], passes="backward")
    (dropping,) = cells_of(64, causal=True, modifiers=("dropout",), seqlens=[4096], passes="backward")
    for cell, family in ((local, "attention_backward_persistent_sm90"), (dropping, "attention_backward_sm90")):
        specs = [pick.choice.spec(device.target) for pick in picks(cell.problem, cell.workload, device, ("", ""))]
        assert {spec.family.name for spec in specs} == {family}


@pytest.mark.parametrize("causal", [1, 0, None, [], "top", "True"])
def test_causal_is_true_false_or_an_alignment(causal: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^causal must be True, False or 'top_left'; got "):
        Seen.of(causal, (1, 1))


def test_a_modifier_is_named_once() -> None:
    with pytest.raises(ArgumentError, match=r"^modifiers must name each once; got window,window$"):
        given_modifiers("window,window", [1, 2, 3, 4])


def test_kernels_are_verified_on_windows_that_let_something_through() -> None:
    """But where no key is there: rows without keys, one-sided and two-sided windows, some with whole tiles between their ends."""
    found = [with_sizes_to_verify(PROBLEM, grouped_workload(shape, 1), number) for number, shape in enumerate(cases.SHAPES)]
    assert all(w.visible_pairs(Mask.FULL) for w in found if w.len_kv)
    ends = [(w.window_left, w.window_right) for w in found]
    assert any(OPEN in pair for pair in ends)
    assert any(min(pair) < 0 for pair in ends)
    assert sum(OPEN not in pair and sum(pair) > 256 for pair in ends) >= 3
    special = [with_sizes_to_verify(PROBLEM, grouped_workload(shape, 1), None) for shape in cases.SPECIAL]
    assert all(
        w.visible_pairs(Mask.FULL) >= dataclasses.replace(w, window_left=OPEN, window_right=0).visible_pairs(Mask.FULL) for w in special
    )


def test_a_folder_of_one_bucket_has_one_window() -> None:
    with pytest.raises(ArgumentError, match=r"^causal must be given with this window and a seqlen, .* got B4 H32 S4096 W8: and"):
        asked_workload(64, [4096], None, None, None, None, window=(8, None))
    assert asked_workload(64, [4096], None, None, None, None, "forward", True, (8, None)) == Workload(4, 32, 32, 4096, 4096, 8, 0)


def test_a_packed_sequence_may_be_longer_than_expected() -> None:
    """What is expected of lengths must not narrow a window, or a chunk, of a sequence that is longer."""
    workload = Workload(2, 1, 1, 8, 8, window_left=500, window_right=300, chunk=700, tokens_q=1000, tokens_kv=1000)
    call = attention_call(Problem(Dtype.BF16, 64, modifiers=("chunk", "window"), sequences=Sequences.PACKED), workload)
    found = modifier_values(call)
    assert (found["window_left"], found["window_right"], found["chunk"]) == (500, 300, 700)
    assert modifier_refusals(call) == []
    far = dataclasses.replace(workload, tokens_kv=LONGEST)
    assert len(modifier_refusals(attention_call(call.problem, far))) == 2
