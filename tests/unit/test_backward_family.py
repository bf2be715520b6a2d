"""The generic backward family: which configs are legal, what they take, and what a call launches."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from flashgen.codegen.attention import padded
from flashgen.codegen.devices import find_device
from flashgen.codegen.families.attention_backward import FAMILY
from flashgen.codegen.families.attention_backward.config import AttentionBackwardConfig, Hoisted
from flashgen.codegen.families.attention_backward.model import shared_bytes_of_tile
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import Program
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target, targets
from flashgen.codegen.workload import Workload

SM_90, SM_86, H200 = find_target("sm_90a"), find_target("sm_86"), find_device("h200")
PROBLEM = Problem(Dtype.BF16, 64, 64, Mask.CAUSAL, "backward")
CONFIG = AttentionBackwardConfig(block_q=64, block_kv=128, step_q=32, warps=8, rows_dq=16, stages=2)


def program_of(workload: Workload, problem: Problem = PROBLEM, config: AttentionBackwardConfig = CONFIG) -> Program:
    return FAMILY.program(config, operation_of(problem).call(problem, workload), H200)


def test_it_computes_backward_alone() -> None:
    assert FAMILY.refusals(PROBLEM, SM_90) == []
    assert FAMILY.refusals(dataclasses.replace(PROBLEM, operation="forward"), SM_90) == ["pass must be backward; got forward"]
    assert FAMILY.refusals(dataclasses.replace(PROBLEM, head_dim=264), SM_90) == [
        "head_dim must be a multiple of 8 from 8 to 256; got 264 (nearest: 256)"
    ]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"block_q": 48}, "block_q must be one of 32, 64, 128; got 48 (nearest: 32)"),
        ({"warps": 6}, "warps must be one of 2, 4, 8, 16; got 6 (nearest: 4)"),
        (
            {"block_kv": 64},
            "block_kv must give each warp 16 or 32 rows, so 128 or 256 with warps 8 and column_groups 1; got 64 (nearest: 128)",
        ),
        ({"step_q": 48}, "step_q must be a multiple of 16 that divides block_q / column_groups 64; got 48 (nearest: 32)"),
        (
            {"column_groups": 2, "step_q": 64},
            "step_q must be a multiple of 16 that divides block_q / column_groups 32; got 64 (nearest: 32)",
        ),
        ({"block_q": 128, "warps": 4, "block_kv": 64}, "rows_dq must be at least block_q / warps 32; got 16"),
        ({"blocks_per_sm": 2}, "needs about 156 registers a thread, 128 are available with 256 threads and blocks_per_sm 2"),
    ],
)
def test_an_illegal_config_is_refused_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    assert FAMILY.check(PROBLEM, CONFIG, SM_90) == []
    found = FAMILY.check(PROBLEM, dataclasses.replace(CONFIG, **changed), SM_90)
    assert any(one.startswith(reason) for one in found), found


def test_shared_memory_limits() -> None:
    wide = dataclasses.replace(PROBLEM, head_dim=128, head_dim_v=128)
    assert FAMILY.shared_bytes(wide, CONFIG) == 2 * (128 * 256 + 128 * 64 + 2 * 64 * 256) + 2 * 2 * 64 * 4
    assert FAMILY.check(wide, CONFIG, SM_90) == []
    assert FAMILY.check(wide, CONFIG, SM_86) == [
        "needs 148480 B of shared memory, sm_86 has 101376 B a block: lower block_q, block_kv or stages"
    ]


def test_each_width_has_a_default_on_each_target() -> None:
    for target, mask, (d, dv) in itertools.product(targets().values(), Mask, itertools.product(range(8, 257, 24), repeat=2)):
        problem = Problem(Dtype.FP16, d, dv, mask, "backward")
        default = FAMILY.default(problem, target)
        assert FAMILY.check(problem, default, target) == [], f"{problem.name} {target.name}"


def test_the_space_is_worth_tuning() -> None:
    legal = FAMILY.legal_configs(PROBLEM, SM_90)
    assert len(legal) >= 100
    for name, value in (("stages", 2), ("blocks_per_sm", 2), ("column_groups", 2), ("hoisted", Hoisted.BOTH), ("block_q", 128)):
        assert any(getattr(config, name) == value for config in legal), name


def test_a_call_launches_three_kernels_in_order() -> None:
    workload = Workload(2, 6, 3, 100, 300)
    program = program_of(workload)
    assert [launch.suffix for launch in program.launches] == ["_preprocess", "", "_postprocess"]
    assert [launch.grid for launch in program.launches] == [2 * 6 * 2, 2 * 3 * 3, 2 * 6 * 2]
    rows = 2 * 6 * 2 * 64 * 4
    sizes = {"row_lse": rows, "row_delta": rows, "row_shift": rows, "huge_tiles": 2 * 6 * 2 * 4, "d_q_sum": rows * 64}
    assert {buffer.name: buffer.bytes for buffer in program.buffers} == sizes
    assert program.launches[1].values["group"] == 2
    assert program.launches[1].values["scale"] == program.launches[2].values["scale"] == 0.125


def test_what_has_nothing_to_sum_up_is_written_nevertheless() -> None:
    """d_k and d_v are zeros without queries, d_q without keys: no launch is left out, and none is empty."""
    for lengths in ((0, 70), (70, 0), (0, 0)):
        assert all(launch.grid >= 1 for launch in program_of(Workload(1, 2, 1, *lengths)).launches)


def test_sections_hold_what_the_key_tiles_of_a_head_read() -> None:
    """Q and dO of a group's heads, under a causal mask as many as fit into half of the L2."""
    few, many = (program_of(Workload(4, 8, 8, 1024 * n, 1024)).launches[1].values["l2_group_heads"] for n in (32, 1))
    assert 1 <= few < many <= 32
    full = dataclasses.replace(PROBLEM, mask=Mask.FULL)
    assert program_of(Workload(4, 8, 8, 1024, 1024), full).launches[1].values["l2_group_heads"] == 1


def test_too_many_tiles_are_refused() -> None:
    call = operation_of(PROBLEM).call(PROBLEM, Workload(2**16, 2**16, 1, 64, 1))
    assert FAMILY.call_refusals(call) == ["q must have at most 2147483647 tiles of 32 rows; got 8589934592"]


def test_wide_reductions_are_for_those_that_have_them() -> None:
    for name, wide in (("sm_80", False), ("sm_89", False), ("sm_90a", True), ("sm_120a", True)):
        target = find_target(name)
        text = render(KernelSpec(FAMILY, PROBLEM, FAMILY.default(PROBLEM, target), target)).text
        assert f"kVectorReductions = {'true' if wide else 'false'};" in text


def test_the_model_counts_less_traffic_where_operands_are_shared() -> None:
    narrow, hoisted = (
        shared_bytes_of_tile(dataclasses.replace(CONFIG, hoisted=h), padded(64), padded(64)) for h in (Hoisted.NONE, Hoisted.BOTH)
    )
    assert hoisted < narrow
    rows_16, rows_32 = (shared_bytes_of_tile(AttentionBackwardConfig(64, 128, 32, 8, groups, 16, 2), 128, 128) for groups in (1, 2))
    assert rows_32 < rows_16, "twice the rows a warp: B operands are read half as often"
