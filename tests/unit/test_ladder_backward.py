"""The ladder's backward families: what they refuse, what they launch, what their loops move, and what their models expect."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from flashgen.codegen.attention import attention_call, padded
from flashgen.codegen.families.flash1_backward.config import Flash1BackwardConfig
from flashgen.codegen.families.flash1_backward.family import FAMILY as FLASH1
from flashgen.codegen.families.flash2_backward.config import Flash2BackwardConfig
from flashgen.codegen.families.flash2_backward.family import FAMILY as FLASH2
from flashgen.codegen.family import Traffic
from flashgen.codegen.ladder import GridOrder, WarpSplit
from flashgen.codegen.ladder_backward import LadderBackward
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target, targets
from flashgen.codegen.workload import Workload
from tests.support.programs import H200, program_of

FAMILIES = (FLASH1, FLASH2)
PROBLEM = Problem(Dtype.FP16, 64, operation="backward")
SM_90 = find_target("sm_90a")
WHOLE = Workload(2, 8, 4, 1024, 2048)  # of whole tiles
SPLIT = Flash2BackwardConfig(64, 32, 4, warp_split=WarpSplit.QUERIES)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@every_family
def test_it_runs_by_name_only(family: LadderBackward) -> None:
    assert not family.automatic
    assert family.preference < 0


@every_family
def test_problems_that_it_cannot_compute(family: LadderBackward) -> None:
    assert family.refusals(PROBLEM, SM_90) == []
    assert family.refusals(Problem(Dtype.BF16, 60, 192, operation="backward"), SM_90) == [
        "head_dim must be a multiple of 8 from 8 to 256; got 60 (nearest: 64)",
        f"head_dim_v must be at most 128 in {family.name}; got 192 (nearest: 128)",
    ]
    assert family.refusals(Problem(Dtype.BF16, 64), SM_90) == ["pass must be backward; got forward"]


def test_one_block_a_head_is_deterministic_and_many_are_not() -> None:
    problem = dataclasses.replace(PROBLEM, deterministic=True)
    assert FLASH1.refusals(problem, SM_90) == []
    assert FLASH2.refusals(problem, SM_90) == ["deterministic must be false in flash2_backward: blocks add to dQ in any order"]


def test_the_grids_orders() -> None:
    """The key tiles of one head side by side, or one key tile of all heads."""
    for grid_order, heads in ((GridOrder.TILE_BATCH_HEAD, 1), (GridOrder.BATCH_HEAD_TILE, 8)):
        config = Flash2BackwardConfig(block_kv=128, grid_order=grid_order)
        _, main, _ = program_of(FLASH2, PROBLEM, config, WHOLE).launches
        assert main.grid == 16 * 4 * 2
        assert (main.values["l2_group_heads"], main.values["l2_group_tiles"]) == (heads, heads * 16)


@every_family
def test_the_space_is_small_and_has_a_default_for_each_width(family: LadderBackward) -> None:
    for target, width in itertools.product(targets().values(), ((32, 32), (64, 64), (128, 128), (40, 128), (128, 40))):
        problem = Problem(Dtype.BF16, *width, operation="backward")
        assert 2 <= len(family.legal_configs(problem, target)) <= 48, f"{target.name} {width}"
        assert family.check(problem, family.default(problem, target), target) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"warps": 6, "block_kv": 96}, "warps must be a power of two; got 6 (nearest: 4)"),
        ({"warps": 1, "block_kv": 16, "block_q": 32}, "warps must be from 2 to 16; got 1 (nearest: 2)"),
        ({"block_kv": 96}, "block_kv must give each warp 16 or 32 keys, so 64 or 128 with warps 4; got 96 (nearest: 64)"),
        ({"block_q": 48}, "block_q must be 32 or 64 with warps 4, 16 rows of dQ a warp; got 48 (nearest: 32)"),
        ({"block_q": 128}, "block_q must be 32 or 64 with warps 4, 16 rows of dQ a warp; got 128 (nearest: 64)"),
        ({"warps": 2, "block_kv": 32}, "block_q must be 32 with warps 2, 16 rows of dQ a warp; got 64 (nearest: 32)"),
        ({"stages": 1}, "stages must be from 2 to 4; got 1 (nearest: 2)"),
        ({"warps": 2, "block_kv": 32, "block_q": 32}, ""),
    ],
)
def test_fields(changes: dict[str, Any], reason: str) -> None:
    config = Flash1BackwardConfig()
    assert FLASH1.check(PROBLEM, config, SM_90) == []
    assert FLASH1.check(PROBLEM, dataclasses.replace(config, **changes), SM_90) == ([reason] if reason else [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"block_q": 128, "warps": 8}, ""),
        ({"block_q": 32, "warps": 2, "block_kv": 16}, ""),
        ({"block_kv": 48}, ""),
        ({"warps": 6}, "warps must be 2, 4 or 8 where they divide the queries; got 6 (nearest: 4)"),
        ({"warps": 16}, "warps must be 2, 4 or 8 where they divide the queries; got 16 (nearest: 8)"),
        ({"block_q": 32}, "block_q must be 64 where 4 warps divide the queries, 16 for each; got 32 (nearest: 64)"),
        ({"block_kv": 40}, "block_kv must be a multiple of 16 from 16 to 256; got 40 (nearest: 48)"),
    ],
)
def test_fields_where_warps_divide_the_queries(changes: dict[str, Any], reason: str) -> None:
    problem, config = Problem(Dtype.FP16, 32, operation="backward"), dataclasses.replace(SPLIT, stages=3)
    assert FLASH2.check(problem, dataclasses.replace(config, **changes), SM_90) == ([reason] if reason else [])


def test_a_warp_that_has_all_keys_of_a_tile_has_few_of_them() -> None:
    """dK and dV of the tile are in each warp's registers, and those of all warps in the stages, before they are added up."""
    for width, most in ((32, 48), (64, 32), (128, 16)):
        problem, tiles = Problem(Dtype.FP16, width, operation="backward"), range(16, 256, 16)
        given = [keys for keys in tiles if not FLASH2.check(problem, dataclasses.replace(SPLIT, block_kv=keys, stages=3), SM_90)]
        assert given == [keys for keys in tiles if keys <= most]
    needed, ring = 4 * 32 * 128 * 4, 2 * 64 * ((16 + 128) * 2 + 8)
    reasons = FLASH2.check(Problem(Dtype.FP16, 8, 128, operation="backward"), SPLIT, SM_90)
    assert reasons == [f"4 warps' parts of dV need {needed} B of the stages, which have {ring} B: lower block_kv or raise stages"]


def test_the_space_has_both_splits() -> None:
    splits = [config.to_json().get("warp_split", "keys") for config in FLASH2.legal_configs(PROBLEM, SM_90)]
    assert {split: splits.count(split) for split in splits} == {"keys": 32, "queries": 4}


def test_the_usual_split_is_in_no_name_and_no_json() -> None:
    """As before there was another one."""
    usual = Flash2BackwardConfig()
    assert usual.name == "bq64_bk64_w4_s2_bps1_gotile_batch_head"
    assert SPLIT.name == "bq64_bk32_w4_s2_bps1_wsqueries_gotile_batch_head"
    assert "warp_split" not in usual.to_json()
    assert "warp_split" not in usual.describe()
    assert SPLIT.settings(usual) == "block_kv=32 warp_split=queries"
    for config in (usual, SPLIT):
        assert Flash2BackwardConfig.from_json(config.to_json()) == config
    assert usual.replace_from_text({"warp_split": "queries", "block_kv": "32"}) == SPLIT


def test_shared_memory() -> None:
    wide, config = Problem(Dtype.FP16, 128, operation="backward"), Flash1BackwardConfig(64, 128, 8)
    assert FLASH1.shared_bytes(wide, config) == 2 * (128 * 256 + 128 * 64) + 2 * 64 * (2 * 256 + 8) == 148480
    assert FLASH2.check(wide, Flash2BackwardConfig(64, 128, 8), find_target("sm_86")) == [
        "needs 148480 B of shared memory, sm_86 has 101376 B a block: lower block_kv, stages or block_q"
    ]


@every_family
def test_a_call_launches_three_kernels_in_order(family: LadderBackward) -> None:
    config = family.config_of(64, 64, 4)
    program = program_of(family, PROBLEM, config, Workload(2, 6, 3, 100, 300))
    assert [launch.suffix for launch in program.launches] == ["_preprocess", "", "_postprocess"]
    blocks = 1 if family is FLASH1 else 5
    assert [launch.grid for launch in program.launches] == [2 * 6 * 2, 2 * 3 * blocks, 2 * 6 * 2]
    values = program.launches[1].values
    assert (values["group"], values["key_tiles"], values["l2_group_heads"], values["l2_group_tiles"]) == (2, 5, 1, blocks)
    rows = 2 * 6 * 2 * 64 * 4
    sizes = {"row_lse": rows, "row_delta": rows, "row_shift": rows, "huge_tiles": 2 * 6 * 2 * 4, "d_q_sum": rows * 64}
    assert {buffer.name: buffer.bytes for buffer in program.buffers} == sizes


@every_family
def test_what_has_nothing_to_sum_up_is_written_nevertheless(family: LadderBackward) -> None:
    for lengths in ((0, 70), (70, 0), (0, 0)):
        program = program_of(family, PROBLEM, family.default(PROBLEM, SM_90), Workload(1, 2, 1, *lengths))
        assert all(launch.grid >= 1 for launch in program.launches)


@every_family
def test_too_many_tiles_are_refused(family: LadderBackward) -> None:
    call = attention_call(PROBLEM, Workload(2**16, 2**16, 1, 64, 1))
    assert family.call_refusals(call) == ["q must have at most 2147483647 tiles of 32 rows; got 8589934592"]


def test_reductions_of_16_bytes_are_for_those_that_have_them() -> None:
    for name, wide in (("sm_80", False), ("sm_89", False), ("sm_90a", True), ("sm_120a", True)):
        target = find_target(name)
        for family in FAMILIES:
            text = render(KernelSpec(family, PROBLEM, family.default(PROBLEM, target), target)).text
            assert f"kVectors = {'true' if wide or family is FLASH1 else 'false'};" in text


# ---- traffic and model ----


@every_family
def test_traffic_is_what_the_papers_loops_say(family: LadderBackward) -> None:
    """Written out for whole tiles and no mask: N queries, M keys, T_c key tiles, 2 bytes a number, 4 of dQ."""
    config = family.default(PROBLEM, SM_90)
    n, m, d, heads, sets = WHOLE.len_q, WHOLE.len_kv, 64, WHOLE.batch * WHOLE.heads_q, WHOLE.batch * WHOLE.heads_kv
    key_tiles, row = m // config.block_kv, 2 * d
    before_read, before_written = n * (2 * row + 4), n * (8 + 4 * d)  # O, dO, lse; row_lse, row_delta, dQ = 0
    after_read, after_written = n * 4 * d, n * row
    steps = key_tiles * n * (2 * row + 8)  # Q, dO, row_lse, row_delta
    d_q = heads * key_tiles * n * 4 * d
    keys = sets * m * 2 * row  # K and V, or dK and dV
    read, written = heads * (before_read + steps + after_read) + keys, heads * (before_written + after_written) + keys
    expected = Traffic(read + d_q, written + d_q) if family is FLASH1 else Traffic(read, written, d_q)
    assert family.traffic(PROBLEM, config, WHOLE, H200) == expected


@pytest.mark.parametrize("mask", Mask)
@every_family
def test_traffic_of_odd_sizes(family: LadderBackward, mask: Mask) -> None:
    """Under a causal mask less, and never less than each operand once; without queries only dK and dV, without keys only dQ."""
    problem = dataclasses.replace(PROBLEM, mask=mask)
    config = family.default(problem, SM_90)
    odd = Workload(2, 4, 4, 1001, 777)
    found, full = family.traffic(problem, config, odd, H200), family.traffic(PROBLEM, config, odd, H200)
    assert (found.read < full.read) is (mask is Mask.CAUSAL)
    assert found.read + found.written + found.reduced >= operation_of(problem).io_bytes(problem, odd)
    no_queries, keys = family.traffic(problem, config, Workload(2, 4, 4, 0, 100), H200), 2 * 4 * 100 * 2 * 64 * 2
    assert (no_queries.written - keys, no_queries.reduced) == (2 * 4 * config.block_q * (8 + padded(64) * 4), 0)  # a tile of zeros
    assert family.traffic(problem, config, Workload(2, 4, 4, 100, 0), H200).reduced == 0


class TestModel:
    """What the second version saves."""

    def seconds(self, family: LadderBackward, workload: Workload, keys: int = 64) -> float:
        return family.predict(PROBLEM, family.config_of(32, keys, 4), workload, H200).seconds

    def test_one_block_a_head_leaves_a_gpu_idle(self) -> None:
        few = Workload(1, 8, 8, 4096, 4096)
        assert self.seconds(FLASH1, few) > 3 * self.seconds(FLASH2, few)

    def test_small_key_tiles_take_time(self) -> None:
        """Which are all that warps that divide the queries can have."""
        many, keys = Workload(16, 32, 32, 2048, 2048), FLASH2.default(PROBLEM, SM_90)
        assert FLASH2.predict(PROBLEM, SPLIT, many, H200).seconds > FLASH2.predict(PROBLEM, keys, many, H200).seconds

    def test_reading_d_q_back_takes_time_where_key_tiles_are_small(self) -> None:
        many = Workload(16, 32, 32, 2048, 2048)
        assert self.seconds(FLASH1, many) > self.seconds(FLASH2, many)
        assert self.seconds(FLASH1, many) > self.seconds(FLASH1, many, 128)
