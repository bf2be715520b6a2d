"""The Hopper backward families: what they refuse, what blocks take, and the launches and buffers of a call."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.config import Config
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.attention_backward_pair_sm90.config import AttentionBackwardPairSm90Config
from flashgen.codegen.families.attention_backward_persistent_sm90.config import AttentionBackwardPersistentSm90Config
from flashgen.codegen.families.attention_backward_sm90.config import AttentionBackwardSm90Config
from flashgen.codegen.families.attention_backward_wide_sm90.config import AttentionBackwardWideSm90Config
from flashgen.codegen.family import Family, Traffic, families
from flashgen.codegen.plain import to_plain
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import KernelLaunch
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import OPEN, Workload
from flashgen.selection.families import families_for

NARROW, WIDE, PAIR, PERSISTENT = (families()[f"attention_backward_{name}sm90"] for name in ("", "wide_", "pair_", "persistent_"))
TARGET = find_target("sm_90a")
DEVICE = device_of_target(TARGET)
WORKLOAD = Workload(batch=2, heads_q=6, heads_kv=3, len_q=100, len_kv=300)


MASK_MOD = "traced(mask: eq(t0:int32[batch, query], t0:int32[batch, key]))"
SCORE_MOD = "traced(score: add(score, mul(t0:bf16[head, add(query, neg(key))], n0:float32)))"


def problem(width: int, width_v: int | None = None, mask: Mask = Mask.FULL) -> Problem:
    return Problem(Dtype.BF16, width, width if width_v is None else width_v, mask, "backward")


@pytest.mark.parametrize(
    ("family", "given", "target", "says"),
    [
        (NARROW, Problem(Dtype.BF16, 64), "sm_90a", "pass must be backward; got forward"),
        (NARROW, problem(64), "sm_80", "target must be sm_90a; got sm_80"),
        (NARROW, problem(192, 192), "sm_90a", "dK, dV and the accumulators of 32 queries need 228 registers a thread, 208 are available"),
        (NARROW, problem(60), "sm_90a", "head_dim must be a multiple of 8 from 8 to 256; got 60"),
        (WIDE, problem(128), "sm_90a", "head_dim or head_dim_v must be above 128; got 128 and 128"),
        (PERSISTENT, replace(problem(64), modifiers=("alibi", "document_ids")), "sm_90a", "document_ids and mask_mods must be of dense"),
        (PERSISTENT, replace(problem(64), modifiers=(SCORE_MOD,)), "sm_90a", "score_mod must be None in blocks that are persistent"),
        (PERSISTENT, replace(problem(64), modifiers=(MASK_MOD,)), "sm_90a", "mask_mods must be alone, and load what is the same in"),
        (PAIR, problem(192), "sm_90a", "head_dim must be above 192, for each warpgroup of a pair to have columns of dQ; got 192"),
        (PAIR, problem(256, 64), "sm_90a", "head_dim_v must be at least 72, for each warpgroup to have columns; got 64"),
        (WIDE, problem(256, 64), "sm_90a", "head_dim_v must be at least 72, for each warpgroup to have columns; got 64"),
    ],
)
def test_refusals(family: Family, given: Problem, target: str, says: str) -> None:
    assert any(reason.startswith(says) for reason in family.refusals(given, find_target(target)))


def test_the_one_with_more_keys_a_block_comes_first() -> None:
    """Where both can; and each can compute something with every config that is to be tried."""
    for width in range(8, 257, 8):
        for width_v in (8, 64, 128, 136, 256):
            given = problem(width, width_v)
            able = [family for family in (NARROW, WIDE) if not family.refusals(given, TARGET)]
            assert able or min(width, width_v) < 72
            assert all(family.legal_configs(given, TARGET) for family in able)
            if len(able) == 2:
                assert families_for(given, TARGET)[0] is NARROW


@pytest.mark.parametrize(
    ("width", "config", "says"),
    [
        (64, AttentionBackwardSm90Config(72), "block_q must be a multiple of 16 from 16 to 128; got 72 (nearest: 80)"),
        (64, AttentionBackwardSm90Config(64, stages=1), "stages must be from 2 to 4; got 1 (nearest: 2)"),
        (128, AttentionBackwardSm90Config(96), "needs 224 registers a thread for accumulators, 208 are available: lower block_q"),
        (128, AttentionBackwardSm90Config(80, stages=4), "needs 273088 B of shared memory, sm_90a has 232448 B a block: lower block_q"),
    ],
)
def test_illegal_configs(width: int, config: AttentionBackwardSm90Config, says: str) -> None:
    assert any(reason.startswith(says) for reason in NARROW.check(problem(width), config, TARGET)), NARROW.check(
        problem(width), config, TARGET
    )


def test_masks_of_no_range_leave_no_registers_for_the_widest_tiles() -> None:
    documents = replace(problem(128), modifiers=("document_ids",))
    widest = AttentionBackwardPersistentSm90Config(80, stages=2, sum_stages=4)
    assert PERSISTENT.adapted(problem(128), widest) is widest
    found = PERSISTENT.adapted(documents, widest)
    assert found == AttentionBackwardPersistentSm90Config(64, stages=2, sum_stages=8)
    assert PERSISTENT.check(documents, widest, find_target("sm_90a"))
    assert not PERSISTENT.check(documents, found, find_target("sm_90a"))


@pytest.mark.parametrize("family", [NARROW, PERSISTENT])
@pytest.mark.parametrize(
    ("modifiers", "most"), [(("boolean_mask", "window"), 80), (("bias_fp32",), 64), (("alibi", "boolean_mask"), 64), (("alibi",), 80)]
)
def test_the_widest_tiles_leave_no_registers_for_all_that_adds_to_scores(family: Family, modifiers: tuple[str, ...], most: int) -> None:
    given = dataclasses.replace(problem(128), modifiers=modifiers)
    assert max(to_plain(config)["block_q"] for config in family.legal_configs(given, TARGET)) == most


def test_wide_stages() -> None:
    (reason,) = WIDE.check(problem(256), AttentionBackwardWideSm90Config(3), TARGET)
    assert reason.endswith("B a block: lower stages")


def launches(family: Family, given: Problem, config: object, workload: Workload = WORKLOAD) -> dict[str, KernelLaunch]:
    program = family.program(config, attention_call(given, workload), DEVICE)
    assert [launch.suffix for launch in program.launches] == ["_preprocess", "", "_postprocess"] == list(family.resources(given, config))
    assert [kernel.suffix for kernel in family.kernels(given, config)] == [launch.suffix for launch in program.launches]
    return {launch.suffix: launch for launch in program.launches}


def test_program() -> None:
    given, config = problem(72, 120), AttentionBackwardSm90Config(80)
    found = launches(NARROW, given, config)
    assert [launch.grid for launch in found.values()] == [2 * 6 * 2, 2 * 3 * 3, 2 * 6 * 2]
    program = NARROW.program(config, attention_call(given, WORKLOAD), DEVICE)
    rows, tiles = 2 * 6 * 2 * 80, 2 * 6 * 2
    sizes = {"row_lse": 4 * (rows + 4 * tiles), "row_delta": 4 * rows, "row_shift": 4 * rows, "d_q_sum": 4 * rows * 80}
    assert {buffer.name: buffer.bytes for buffer in program.buffers} == sizes
    assert {name: shape.box for name, shape in found[""].maps.items()} == {
        "q": (64, 80, 1, 1),
        "k": (64, 128, 1, 1),
        "v": (64, 128, 1, 1),
        "d_out": (64, 80, 1, 1),
        "d_k": (64, 16, 1, 1),
        "d_v": (64, 16, 1, 1),
    }
    assert found[""].maps["d_out"].sizes == (120, 100, 6, 2)
    assert found["_postprocess"].maps["d_q"].sizes == (72, 100, 6, 2)


def test_wide_program() -> None:
    found = launches(WIDE, problem(256), AttentionBackwardWideSm90Config())
    assert [launch.grid for launch in found.values()] == [2 * 6 * 2, 2 * 3 * 5, 2 * 6 * 2]
    assert found[""].maps["k"].box == (64, 64, 1, 1)


def test_pair_program() -> None:
    """Whole pairs, of which the last one's second block may have no keys, and a counter for each block of a pair."""
    ordered = dataclasses.replace(problem(256), deterministic=True)
    found, config = launches(PAIR, ordered, AttentionBackwardPairSm90Config()), AttentionBackwardPairSm90Config()
    assert [launch.grid for launch in found.values()] == [2 * 6 * 2, 2 * 3 * 6, 2 * 6 * 2]
    assert (found[""].values["key_tiles"], found[""].maps["k"].box) == (3, (64, 64, 1, 1))
    assert {kernel: block.cluster for kernel, block in PAIR.resources(ordered, config).items()} == {
        "_preprocess": 1,
        "": 2,
        "_postprocess": 1,
    }
    program = PAIR.program(config, attention_call(ordered, WORKLOAD), DEVICE)
    assert program.buffers[-1].bytes == 4 * 2 * 2 * 6 * 2


def test_one_key_tile_needs_no_pair() -> None:
    one = dataclasses.replace(WORKLOAD, len_kv=64)
    assert [PAIR.not_dominated(AttentionBackwardPairSm90Config(), w) for w in (one, WORKLOAD)] == [False, True]


@pytest.mark.parametrize(("family", "width"), [(NARROW, 128), (WIDE, 256), (PAIR, 256)])
def test_heads_share_the_l2_under_a_mask(family: Family, width: int) -> None:
    """Q, dO and the sums of dQ of a section's heads, of the two query heads of each, take at most 32 MiB. Without a mask there are none."""
    workload = Workload(batch=2, heads_q=16, heads_kv=8, len_q=4096, len_kv=4096)
    causal, full = problem(width, mask=Mask.CAUSAL), problem(width)
    found = launches(family, causal, family.default(causal, TARGET), workload)[""].values["l2_group_heads"]
    assert found * 2 * 4096 * width * 8 <= 32 * 2**20 < 2 * found * 2 * 4096 * width * 8
    assert launches(family, full, family.default(full, TARGET), workload)[""].values["l2_group_heads"] == 1


@pytest.mark.parametrize("family", [NARROW, PERSISTENT])
def test_a_launch_with_a_window_ends_with_the_keys_that_fewest_queries_see(family: Family) -> None:
    """Those of the last key tiles of several heads, as under a causal mask; but where a window has no end, all see as many."""
    local, call = Workload(1, 16, 16, 4096, 4096, 1024, 0), dataclasses.replace(problem(128), modifiers=("window",))
    heads = [
        family.program(family.default(given, TARGET), attention_call(given, workload), DEVICE).launches[1].values["l2_group_heads"]
        for given, workload in (
            (call, local),
            (problem(128, mask=Mask.CAUSAL), dataclasses.replace(local, window_left=OPEN, window_right=OPEN)),
            (call, dataclasses.replace(local, window_left=OPEN, window_right=OPEN)),
        )
    ]
    assert heads == [8, 8, 1]


@pytest.mark.parametrize(("sms", "len_kv", "heads"), [(132, 4096, 4), (114, 4096, 4), (132, 1024, 16), (132, 16384, 1), (78, 16384, 1)])
def test_blocks_of_grouped_heads_that_share_the_l2_run_together(sms: int, len_kv: int, heads: int) -> None:
    """About as many blocks as SMs, by 128 keys each, though the L2 would hold what more heads of dim 64 read."""
    workload = Workload(batch=4, heads_q=64, heads_kv=8, len_q=2048, len_kv=len_kv)
    call = attention_call(problem(64, mask=Mask.CAUSAL), workload)
    device = dataclasses.replace(DEVICE, sm_count=sms)
    launch = PERSISTENT.program(PERSISTENT.default(call.problem, TARGET), call, device).launches[-1]
    assert launch.values["l2_group_heads"] == heads


@pytest.mark.parametrize("name", ["len_q", "len_kv"])
def test_calls_without_elements_are_refused(name: str) -> None:
    call = attention_call(problem(64), dataclasses.replace(WORKLOAD, **{name: 0}))
    assert f"{name} must be at least 1 for tensor copies; got 0" in NARROW.call_refusals(call)


def test_defaults() -> None:
    """What was fastest on an H200: 64 queries at head dim 128, and 128 at 64."""
    assert NARROW.default(problem(128), TARGET) == AttentionBackwardSm90Config(64, split=True)
    assert NARROW.default(problem(64), TARGET) == AttentionBackwardSm90Config(128)


def moved(family: Family, given: Problem, workload: Workload, config: Config) -> Traffic:
    found = family.traffic(given, config, workload, DEVICE)
    assert found is not None
    return found


def test_traffic_is_what_the_loops_say() -> None:
    """Written out for whole tiles and no mask: 2 heads share keys, 2 bytes a number, 4 of dQ; 16 beside row_lse of a tile."""
    w, config = Workload(1, 2, 1, 256, 512), AttentionBackwardSm90Config(64)
    row, tiles, steps = 64 * 2, 2 * 4, 2 * 4 * 4  # query tiles of both heads; of these and key tiles
    statistics, sums, keys = 64 * 8 + 16, 64 * 64 * 4, 512 * 2 * row
    before_read, before_written = 2 * 256 * (2 * row + 4), tiles * (statistics + sums)
    main_read = steps * (64 * 2 * row + statistics) + keys
    after_read, after_written = tiles * sums, 2 * 256 * row
    expected = Traffic(before_read + main_read + after_read, before_written + keys + after_written, steps * sums)
    assert moved(NARROW, problem(64), w, config) == expected
    assert moved(PERSISTENT, problem(64), w, AttentionBackwardPersistentSm90Config(64)) == expected, (
        "the last kernel's part by other blocks"
    )


@pytest.mark.parametrize("mask", Mask)
def test_a_pair_adds_half_as_much_to_dq(mask: Mask) -> None:
    """And reads as much of the queries as two blocks of the wide family do where both see them, and half of K once more."""
    w, given = Workload(1, 1, 1, 512, 512), problem(256, mask=mask)
    pair, wide = (moved(family, given, w, family.default(given, TARGET)) for family in (PAIR, WIDE))
    keys = 512 * 128 * 2
    if mask is Mask.FULL:
        assert (2 * pair.reduced, pair.read, pair.written) == (wide.reduced, wide.read + keys, wide.written)
    else:  # one block of a pair also walks over a tile that only the other one's keys are seen by
        assert 2 * pair.reduced > wide.reduced
        assert pair.read > wide.read + keys


def test_traffic_of_columns_that_a_pair_shares() -> None:
    """Of the keys of second blocks the first ones read 128 columns, of those of first blocks the second ones read the others."""

    def read(len_kv: int) -> int:
        w = Workload(1, 1, 1, 64, len_kv)
        return moved(PAIR, problem(200), w, AttentionBackwardPairSm90Config()).read

    assert read(64) - read(63) == 2 * (200 + 200 + 72)
    assert read(128) - read(127) == 2 * (200 + 200 + 128)
