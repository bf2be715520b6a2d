"""Packed sequences in codegen: what is refused, that launches follow from sizes alone, and where tensor maps lead."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, Scheduler
from flashgen.codegen.family import find_family
from flashgen.codegen.modifier import modifier_refusals
from flashgen.codegen.modifiers import TAKEN_BY_MOST
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.operands import Call
from flashgen.codegen.packed import AROUND, MAP_ROWS, MODIFIERS, packed_map
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.program import KernelLaunch
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.selection.picks import picked_spec
from flashgen.traced.modifier import modifier_in_call

PROBLEM = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL, sequences=Sequences.PACKED)
WORKLOAD = Workload(16, 32, 8, 4096, 4096, tokens_q=20000, tokens_kv=30000)
GENERIC, HOPPER, H200 = find_family("attention_forward"), find_family("attention_forward_sm90"), find_device("h200")
CONFIG = AttentionForwardSm90Config(2, 128, out_panels=1, scheduler=Scheduler.DYNAMIC)
SCORE_MOD = name_of_functions(modifier_in_call(lambda score, batch, head, query, key: score + head * 0.5).modifier)
FAMILIES = pytest.mark.parametrize("family", [GENERIC, HOPPER], ids=lambda family: family.name)


def call(workload: Workload = WORKLOAD, **strides: tuple[int, ...]) -> Call:
    return attention_call(PROBLEM, workload, strides)


def launches(family: Any, workload: Workload) -> tuple[KernelLaunch, KernelLaunch]:
    config = CONFIG if family is HOPPER else family.default(PROBLEM, H200.target)
    first, second = family.program(config, call(workload), H200).launches
    return first, second


@FAMILIES
def test_modifiers_that_know_more_than_their_sequence_are_refused(family: Any) -> None:
    assert set(MODIFIERS) < set(TAKEN_BY_MOST)
    for name in TAKEN_BY_MOST:
        reasons = family.refusals(replace(PROBLEM, modifiers=(name,)), H200.target)
        assert bool(reasons) == (name not in MODIFIERS), name
        assert all(reason.endswith(f"got {name}") and "packed sequences" in reason for reason in reasons)
    assert family.refusals(replace(PROBLEM, modifiers=(SCORE_MOD,)), H200.target) == []
    longer = replace(WORKLOAD, tokens_kv=2**29)
    (reason,) = modifier_refusals(attention_call(replace(PROBLEM, modifiers=(SCORE_MOD,)), longer, {}))
    assert f"lengths must be below {2**29}" in reason, "a sequence may have all tokens"


@pytest.mark.parametrize("others", [{"pack_gqa": 2}, {"scheduler": Scheduler.STATIC}])
def test_hopper_claims_work_tiles_and_packs_no_heads(others: dict[str, Any]) -> None:
    config = replace(CONFIG, **others)
    (reason,) = HOPPER.check(PROBLEM, config, H200.target)
    assert reason.startswith("scheduler must be dynamic and pack_gqa 1 with packed sequences; got ")
    assert HOPPER.adapted(PROBLEM, config) == CONFIG
    assert HOPPER.adapted(replace(PROBLEM, sequences=Sequences.DENSE), config) == config
    assert all(one.dynamic and one.pack_gqa == 1 for one in HOPPER.space(PROBLEM, H200.target))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sizes", "strides", "reason"),
    [
        ({"tokens_kv": 0}, {}, "tokens_kv must be at least 1 for tensor copies; got 0"),
        ({"tokens_q": 2**30 + 1}, {}, f"tokens_q must be at most {2**30} with packed sequences; got {2**30 + 1}"),
        ({}, {"v": (2**33, 64, 1)}, f"strides of rows of v must be below {2**33} elements with packed sequences; got {2**33}"),
        ({}, {"q": (2048, 2**39, 1)}, f"strides of heads of q must be below {2**39} elements with packed sequences; got {2**39}"),
        ({"tokens_q": 2**30, "heads_q": 2**8}, {}, "query tiles of all heads must be at most 2147483647; got 4294971392: lower batch"),
    ],
)
def test_hopper_refuses_calls(sizes: dict[str, int], strides: dict[str, tuple[int, ...]], reason: str) -> None:
    found = HOPPER.call_refusals(call(replace(WORKLOAD, **sizes), **strides))
    assert any(one.startswith(reason) for one in found), found
    assert not HOPPER.call_refusals(call())


@FAMILIES
def test_launches_follow_from_how_many_sequences_and_tokens_there_are(family: Any) -> None:
    config = CONFIG if family is HOPPER else family.default(PROBLEM, H200.target)
    program = family.program(config, call(), H200)
    most = 20000 // config.block_q + 16
    sizes = {buffer.name: buffer.bytes for buffer in program.buffers}
    assert sizes == {"work_list": (most + 1) * 32, "sequence_rows": 16 * 16, "sequence_order": 16 * 4}
    first, second = program.launches
    assert first.suffix == "_sequences"
    assert first.grid == 1 + first.values["clearing_blocks"] == 1 + 20000 // 256
    assert second.grid == (132 if family is HOPPER else most * 32)
    assert second.overlaps == (family is HOPPER)
    assert {"len_q", "len_kv", "query_tiles"}.isdisjoint(second.values)


@FAMILIES
def test_expected_lengths_say_how_many_heads_share_the_l2_and_nothing_else(family: Any) -> None:
    heads = set()
    for length in (64, 2000, 30000):
        both = launches(family, replace(WORKLOAD, len_q=length, len_kv=length))
        heads.add(both[0].values["l2_group_heads"])
        assert both[0].values["l2_group_heads"] == both[1].values["l2_group_heads"]
        of_first = [{name: value for name, value in one.values.items() if not name.startswith("l2_")} for one in both]
        again = [{name: value for name, value in one.values.items() if not name.startswith("l2_")} for one in launches(family, WORKLOAD)]
        assert of_first == again
    assert len(heads) > 1
    assert all(32 % of_group == 0 for of_group in heads)


def test_more_tokens_than_an_l2_holds_still_have_a_head_a_group() -> None:
    assert launches(HOPPER, replace(WORKLOAD, len_kv=10**6, tokens_kv=10**6))[0].values["l2_group_heads"] == 1


def test_maps_lead_to_the_rows_of_a_sequence_modulo_2_to_the_64() -> None:
    drawn = random.Random(0)
    for _ in range(200):
        row = drawn.choice([0, 8, 2048, 12345 * 8, AROUND // 2 - 8])
        shape = packed_map(Dtype.FP16, 64, 4, (row, 64), (64, 16))
        first, length = drawn.randrange(2**30), drawn.randrange(2**30)
        index, head = drawn.randrange(max(1, length)), drawn.randrange(4)
        coordinates = MAP_ROWS - length + index, head, first + length, MAP_ROWS
        assert all(0 <= at < size for at, size in zip(coordinates, shape.sizes[1:], strict=True))
        offset = sum(at * stride for at, stride in zip(coordinates, shape.strides, strict=True)) % 2**64
        assert offset == ((first + index) * row * 2 + head * 128) % 2**64
        assert MAP_ROWS - length + length >= shape.sizes[1], "the row behind the last is outside"
        assert max(coordinates) < 2**31, "coordinates are 32 bits with a sign"


@pytest.mark.parametrize(("heads_q", "modifiers"), [(16, ()), (16, ("softcap",)), (64, ())])
def test_records_of_dense_sequences_speak_for_packed_ones(heads_q: int, modifiers: tuple[str, ...]) -> None:
    problem = replace(PROBLEM, head_dim=128, head_dim_v=128, modifiers=modifiers)
    dense = replace(problem, sequences=Sequences.DENSE)
    packed = Workload(16, heads_q, 16, 8192, 8192, tokens_q=16 * 2048, tokens_kv=16 * 2048)
    expected = picked_spec(dense, Workload(16, heads_q, 16, 2048, 2048), H200, ("", ""), None)
    found = picked_spec(problem, packed, H200, ("", ""), None)
    assert found.problem == problem
    assert found.config == HOPPER.adapted(problem, expected.config)


def test_targets_without_tensor_copies_have_the_generic_family() -> None:
    for name in ("sm_80", "sm_89", "sm_120a"):
        assert not GENERIC.refusals(PROBLEM, find_target(name))
        assert HOPPER.refusals(PROBLEM, find_target(name))
