"""The generic decode family: how rows and keys are divided, what it refuses, and which calls take it where nothing is measured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.families.attention_decode.config import AttentionDecodeConfig as Config
from flashgen.codegen.families.attention_decode.family import FAMILY
from flashgen.codegen.families.attention_decode.shares import Shares, shares_of
from flashgen.codegen.families.attention_forward.config import QueryPlace
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import BufferKind
from flashgen.codegen.target import find_target, targets
from flashgen.codegen.workload import Workload
from flashgen.records.choice import bucket
from flashgen.selection.picks import model_picks

A100, H200 = find_device("a100"), find_device("h200")
PROBLEM = Problem(Dtype.BF16, 128, 128)
TARGET = find_target("sm_80")
PLAIN = Config(16, 16, 64, 4, 3, QueryPlace.REGISTERS)


@pytest.mark.parametrize(
    ("sizes", "config", "shares"),
    [
        ((1, 32, 8, 1, 8192), PLAIN, Shares(1, 8, 128, 104)),  # 13 blocks an item, on 108 SMs
        ((1, 32, 8, 1, 8192), dataclasses.replace(PLAIN, blocks_per_sm=2), Shares(1, 8, 128, 216)),
        ((1, 32, 8, 5, 8192), PLAIN, Shares(2, 16, 128, 96)),  # 20 rows, two items; 6 blocks an item
        ((1, 32, 8, 5, 8192), dataclasses.replace(PLAIN, block_q=32), Shares(1, 8, 128, 104)),
        ((64, 32, 32, 1, 2048), PLAIN, Shares(1, 2048, 32, 108)),
        ((2, 8, 8, 1, 0), PLAIN, Shares(1, 16, 1, 16)),  # somebody writes what sees no key
        ((2, 8, 8, 0, 100), PLAIN, Shares(0, 0, 2, 0)),
    ],
)
def test_work_items_and_their_keys_are_shared(sizes: tuple[int, ...], config: Config, shares: Shares) -> None:
    assert shares_of(config, PROBLEM, Workload(*sizes), A100) == shares


def test_partial_outputs_only_where_an_item_is_in_several_blocks() -> None:
    whole = FAMILY.program(PLAIN, attention_call(PROBLEM, Workload(27, 32, 8, 1, 8192)), A100)
    split = FAMILY.program(PLAIN, attention_call(PROBLEM, Workload(1, 32, 8, 1, 8192)), A100)
    assert not whole.buffers
    assert whole.launches[0].values["heads_of_share"] == 2
    partials, counters = split.buffers
    assert partials.bytes == 2 * 104 * 16 * (128 + 4) * 4
    assert (counters.kind, counters.bytes) == (BufferKind.STREAM_COUNTER, 4 * 104)
    assert split.launches[0].values["heads_of_share"] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"warps": 17}, "warps must be from 1 to 16; got 17"),
        ({"stages": 1}, "stages must be from 2 to 8; got 1"),
        ({"block_q": 48}, "block_q must be 16 or 32 or 64; got 48"),
        ({"block_kv": 96}, "block_kv must be a multiple of 64 up to 256 with 4 key groups; got 96"),
        ({"stages": 5}, "needs 188432 B of shared memory, sm_80 has 166912 B a block: lower block_kv, stages or warps"),
        (
            {"blocks_per_sm": 2},
            "blocks_per_sm 2 needs 247840 B of shared memory, sm_80 has 167936 B an SM: lower blocks_per_sm, block_kv or stages",
        ),
    ],
)
def test_what_is_illegal(changes: dict[str, Any], reason: str) -> None:
    assert FAMILY.check(PROBLEM, dataclasses.replace(PLAIN, **changes), TARGET) == [reason]


def test_warps_are_whole_row_groups() -> None:
    for config in (dataclasses.replace(PLAIN, warp_q=32), dataclasses.replace(PLAIN, block_q=64, warps=6)):
        (reason,) = FAMILY.check(PROBLEM, config, TARGET)
        assert reason.startswith("warps must be a multiple of")


def test_every_target_has_configs_for_every_width() -> None:
    for target in targets().values():
        for width in range(8, 257, 8):
            problem = Problem(Dtype.FP16, width, 264 - width, Mask.CAUSAL)
            configs = list(FAMILY.space(problem, target))
            assert 1 <= len(configs) <= 20
            assert all(not FAMILY.check(problem, config, target) for config in configs)
            assert FAMILY.default(problem, target) == configs[0]


def test_more_tiles_than_an_int_counts_are_refused() -> None:
    call = attention_call(PROBLEM, Workload(2**20, 64, 64, 1, 2**17))
    (reason,) = FAMILY.call_refusals(call)
    assert reason == f"tiles of 16 packed rows by 16 keys must be at most {2**31 - 1} in a decode kernel; got {2**20 * 64 * 2**13}"


DECODES = [(1, 32, 8, 1, 65536), (16, 32, 8, 1, 8192), (4, 8, 8, 1, 100), (16, 64, 8, 8, 8192), (3, 40, 8, 8, 5000)]
OTHERS = [(1, 32, 8, 8192, 8192), (4, 32, 8, 128, 128), (1, 64, 8, 9, 8192), (8, 16, 16, 512, 4096), (32, 16, 16, 1, 4)]


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("sizes", [*DECODES, *OTHERS], ids=lambda sizes: "-".join(map(str, sizes)))
def test_few_queries_of_many_keys_take_it_by_themselves(mask: Mask, sizes: tuple[int, ...]) -> None:
    """Where there is no family for the architecture that is preferred to it."""
    problem, workload = dataclasses.replace(PROBLEM, mask=mask), Workload(*sizes)
    spec = next(model_picks(problem, workload, A100))
    assert spec.family.name == ("attention_decode" if sizes in DECODES else "attention_forward")
    assert next(model_picks(problem, bucket(workload), A100)) == spec
    assert next(model_picks(problem, workload, H200)).family.name != "attention_decode"


@pytest.mark.parametrize(("len_q", "block_q"), [(1, 16), (4, 16), (5, 32), (8, 32), (9, 64), (16, 64)])
def test_a_work_item_has_all_rows_of_a_key_value_head(len_q: int, block_q: int) -> None:
    """Else keys would be read as often as there are items."""
    problem, workload = PROBLEM, Workload(16, 32, 8, len_q, 8192)
    for device in (A100, H200):
        first = next(model_picks(problem, workload, device, family="attention_decode"))
        assert isinstance(first.config, Config)
        assert first.config.block_q == block_q


def test_the_model_knows_what_bounds_it() -> None:
    """Keys of many heads are read at the speed of the memory, where warps enough compute; for one tile it is a launch."""
    memory = FAMILY.predict(PROBLEM, PLAIN, Workload(16, 32, 8, 1, 8192), A100)
    read = 2 * 16 * 8 * 8192 * 128 * 2 / A100.memory_bandwidth
    assert memory.bound_by == "memory"
    assert read < memory.seconds < 1.15 * read
    assert FAMILY.predict(PROBLEM, PLAIN, Workload(1, 8, 8, 1, 64), A100).seconds < 10e-6
    two_warps = dataclasses.replace(PLAIN, warps=2, block_kv=32, stages=8)
    assert FAMILY.predict(PROBLEM, two_warps, Workload(16, 32, 8, 1, 8192), H200).bound_by == "latency"
