"""The family of standard attention: what it refuses, what it launches, and what its model expects."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import IllegalConfigError
from flashgen.codegen.families.standard_attention.config import StandardAttentionConfig
from flashgen.codegen.families.standard_attention.family import FAMILY, MAX_ROWS
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import BufferKind
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target, targets
from flashgen.codegen.workload import Workload
from tests.support.programs import H200, program_of

PROBLEM = Problem(Dtype.FP16, 64)
SM_80, SM_90 = find_target("sm_80"), find_target("sm_90a")
GOOD = StandardAttentionConfig()


def reasons(problem: Problem = PROBLEM, target: str = "sm_90a", **changes: Any) -> list[str]:
    return FAMILY.check(problem, dataclasses.replace(GOOD, **changes), find_target(target))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"warps": 1, "block_q": 32}, "warps must be from 2 to 16; got 1 (nearest: 2)"),
        ({"block_kv": 40}, "block_kv must be a multiple of 16 from 16 to 256; got 40 (nearest: 48)"),
        ({"block_kv": 0}, "block_kv must be a multiple of 16 from 16 to 256; got 0 (nearest: 16)"),
        ({"stages": 1}, "stages must be from 2 to 4; got 1 (nearest: 2)"),
        ({"blocks_per_sm": 9}, "blocks_per_sm must be from 1 to 8; got 9 (nearest: 8)"),
        ({"row_scores": 6}, "row_scores must be a multiple of 4 from 4 to 64; got 6 (nearest: 8)"),
        ({"softmax_warps": 6}, "softmax_warps must be a power of two from 1 to 32; got 6 (nearest: 4)"),
        ({"block_q": 96}, "block_q must give each warp 16 or 32 rows, so 64 or 128 with warps 4; got 96 (nearest: 64)"),
        (
            {"row_scores": 64},
            "the softmax needs about 94 registers a thread, 64 are available with 1024 threads an SM: lower row_scores (nearest: 32)",
        ),
    ],
)
def test_fields(changes: dict[str, Any], reason: str) -> None:
    assert reasons() == []
    assert reasons(**changes) == [reason]


def test_resources_of_both_products() -> None:
    wide = Problem(Dtype.BF16, 256, 128)
    queries_and_keys = (128 + 2 * 128) * 256 * 2
    assert any(
        r.startswith(f"S = Q K^T needs {queries_and_keys} B of shared memory, sm_80 has") for r in reasons(wide, "sm_80", block_kv=128)
    )
    values = Problem(Dtype.BF16, 64, 256)
    (reason,) = reasons(values)
    assert reason.startswith("O = P V needs about 294 registers a thread, 255 are available with 128 threads")
    (reason,) = reasons(blocks_per_sm=4)
    assert reason.startswith("S = Q K^T needs about 134 registers a thread, 128 are available with 128 threads and blocks_per_sm 4")
    found = reasons(Problem(Dtype.BF16, 128), blocks_per_sm=4)
    assert any(r.endswith("sm_90a has 233472 B an SM: lower it to 3") for r in found)


def test_problems_that_it_cannot_compute() -> None:
    assert FAMILY.refusals(Problem(Dtype.BF16, 60, 264), SM_80) == [
        "head_dim must be a multiple of 8 from 8 to 256; got 60 (nearest: 64)",
        "head_dim_v must be a multiple of 8 from 8 to 256; got 264 (nearest: 256)",
    ]
    with pytest.raises(IllegalConfigError, match="head_dim must be a multiple of 8"):
        FAMILY.default(Problem(Dtype.BF16, 60), SM_80)


def test_it_runs_by_name_only() -> None:
    assert not FAMILY.automatic


def test_the_space_is_small_and_has_the_default() -> None:
    for target, widths in itertools.product(targets().values(), ((8, 8), (64, 64), (128, 128), (192, 128), (40, 256), (256, 256))):
        problem = Problem(Dtype.BF16, *widths)
        legal = FAMILY.legal_configs(problem, target)
        assert len(list(FAMILY.space(problem, target))) <= 24
        assert 4 <= len(legal) <= 24, f"{target.name} {widths}"
        default = FAMILY.default(problem, target)
        assert default in legal
        if 2 * (KernelSpec(FAMILY, problem, default, target).largest_block.shared_bytes + 1024) <= target.shared_memory_per_sm:
            assert default.blocks_per_sm >= 2, "one block would leave the SM idle while it waits"


@pytest.mark.parametrize(
    ("len_kv", "row_warps"), [(0, 1), (1, 1), (1024, 1), (1025, 2), (2048, 2), (3000, 4), (8192, 8), (8193, 8), (65536, 8)]
)
def test_a_row_has_as_few_warps_as_hold_it(len_kv: int, row_warps: int) -> None:
    workload = Workload(2, 6, 2, 77, len_kv)
    _, softmax, _ = program_of(FAMILY, PROBLEM, GOOD, workload).launches
    assert softmax.values["row_warps"] == row_warps
    rows_of_a_block = 8 // row_warps
    assert softmax.grid == -(-2 * 6 * 77 // rows_of_a_block)


def test_what_a_block_takes() -> None:
    scores, softmax, output = FAMILY.resources(PROBLEM, GOOD).values()
    assert (scores.threads, softmax.threads, output.threads) == (128, 256, 128)
    assert scores.shared_bytes == (128 + 2 * 64) * 64 * 2
    assert softmax.shared_bytes == 2 * 4 * 8
    assert output.shared_bytes == 2 * (128 + 64) * 64 * 2


def test_launches_and_buffers() -> None:
    workload = Workload(2, 6, 2, 300, 333)
    program = program_of(FAMILY, PROBLEM, GOOD, workload)
    scores, softmax, output = program.launches
    assert [launch.suffix for launch in program.launches] == ["", "_softmax", "_output"]
    assert scores.grid == output.grid == 3 * 6 * 2
    rows, row = 2 * 6 * 300, 336  # of 16 elements, so that rows begin at sectors
    assert [(b.name, b.bytes, b.kind) for b in program.buffers] == [
        ("S", 4 * rows * row, BufferKind.CALL),
        ("P", 2 * rows * row, BufferKind.CALL),
    ]
    assert [softmax.values[name] for name in ("rows", "score_row")] == [rows, row]
    for launch in (scores, output):
        assert [launch.values[f"score_{dim}"] for dim in ("batch", "head", "row")] == [6 * 300 * row, 300 * row, row]


def test_offsets_past_2_31_elements() -> None:
    """64 heads of 16384 x 16384 scores are 17 * 10^9 of them."""
    program = program_of(FAMILY, PROBLEM, GOOD, Workload(1, 64, 64, 16384, 16384))
    assert program.buffers[0].bytes == 4 * 64 * 2**28
    for launch, kernel in zip(program.launches, FAMILY.kernels(PROBLEM, GOOD), strict=True):
        assert {f.c_type for f in kernel.parameters.values if f.name.endswith(("_row", "_head", "_batch"))} == {"i64"}
        assert kernel.parameters.pack(launch.values)


def test_without_keys_there_is_still_a_row_of_scores() -> None:
    program = program_of(FAMILY, PROBLEM, GOOD, Workload(1, 2, 2, 5, 0))
    assert [buffer.bytes for buffer in program.buffers] == [4 * 10 * 16, 2 * 10 * 16]


def test_more_rows_than_an_int_counts_are_refused() -> None:
    fits, too_many = Workload(1, 2, 2, MAX_ROWS // 2, 1), Workload(1, 2, 2, MAX_ROWS // 2 + 1, 1)
    assert FAMILY.call_refusals(operation_of(PROBLEM).call(PROBLEM, fits)) == []
    (reason,) = FAMILY.call_refusals(operation_of(PROBLEM).call(PROBLEM, too_many))
    assert reason == f"q must have at most {MAX_ROWS} rows, over batch and heads; got {MAX_ROWS + 2}"


@pytest.mark.parametrize("mask", Mask)
def test_the_structs_are_the_parameter_blocks(mask: Mask) -> None:
    problem = Problem(Dtype.BF16, 192, 128, mask)
    spec = KernelSpec(FAMILY, problem, FAMILY.default(problem, SM_90), SM_90)
    text = render(spec).text
    for suffix, kernel in spec.kernels.items():
        (body,) = re.findall(rf"^struct {kernel.struct} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
        fields = re.findall(r"^ +(.*?)([A-Za-z_]\w*);$", body, re.MULTILINE)
        assert ", ".join(f"{kind.strip()} {name}" for kind, name in fields) == kernel.parameters.signature
        assert text.count(f"\n{spec.name}{suffix}(const __grid_constant__ {kernel.struct} p) {{") == 1


class TestModel:
    """A roofline: what moves through memory, and what does not fit into it."""

    def seconds(self, workload: Workload, problem: Problem = PROBLEM, config: StandardAttentionConfig = GOOD) -> float:
        return FAMILY.predict(problem, config, workload, H200).seconds

    def test_long_rows_take_the_time_of_12_bytes_a_score(self) -> None:
        workload = Workload(2, 32, 32, 8192, 8192)
        scores = workload.batch * workload.heads_q * workload.len_q * workload.len_kv
        expected = 12 * scores / (0.85 * H200.memory_bandwidth)
        assert self.seconds(workload) == pytest.approx(expected, rel=0.15)
        assert FAMILY.predict(PROBLEM, GOOD, workload, H200).bound_by == "memory"
        assert self.seconds(workload, dataclasses.replace(PROBLEM, mask=Mask.CAUSAL)) == pytest.approx(expected / 2, rel=0.15)

    def test_rows_that_registers_do_not_hold_are_read_again(self) -> None:
        workload = Workload(2, 32, 32, 8192, 8192)
        assert self.seconds(workload, config=dataclasses.replace(GOOD, softmax_warps=4)) > 1.5 * self.seconds(workload)

    def test_large_tiles_read_values_from_the_l2_less_often(self) -> None:
        workload, wide = Workload(2, 16, 16, 8192, 8192), Problem(Dtype.FP16, 128)
        assert FAMILY.predict(wide, GOOD, workload, find_device("h200")).seconds > self.seconds(
            workload, wide, StandardAttentionConfig(256, 64, 8, 2)
        )
