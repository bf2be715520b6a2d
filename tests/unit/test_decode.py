"""The generic decode family: how rows and keys are divided, what it refuses, and which calls take it where nothing is measured."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.cached import ENTRIES
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_decode.config import AttentionDecodeConfig as Config
from flashgen.codegen.families.attention_decode.family import FAMILY
from flashgen.codegen.families.attention_decode.shares import Shares, shares_of
from flashgen.codegen.families.attention_decode_sm90.boxes import PART_COST
from flashgen.codegen.families.attention_forward.config import QueryPlace
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import CacheDtype, Dtype, Mask, Problem, Sequences
from flashgen.codegen.program import BufferKind
from flashgen.codegen.target import find_target, targets
from flashgen.codegen.workload import Workload
from flashgen.records.choice import bucket
from flashgen.selection.picks import model_picks

A100, H200 = find_device("a100"), find_device("h200")
PROBLEM = Problem(Dtype.BF16, 128, 128)
TARGET = find_target("sm_80")
PLAIN = Config(16, 16, 64, 4, 3, QueryPlace.REGISTERS)
CACHED = dataclasses.replace(PROBLEM, sequences=Sequences.CACHED)


@pytest.mark.parametrize(
    ("sizes", "config", "shares"),
    [
        ((1, 32, 8, 1, 8192), PLAIN, Shares(1, 8, 128, 104)),  # 13 blocks an item, on 108 SMs
        ((1, 32, 8, 1, 8192), dataclasses.replace(PLAIN, blocks_per_sm=2), Shares(1, 8, 128, 216)),
        ((1, 32, 8, 5, 8192), PLAIN, Shares(2, 16, 128, 96)),  # 20 rows, two items; 6 blocks an item
        ((1, 32, 8, 5, 8192), dataclasses.replace(PLAIN, block_q=32), Shares(1, 8, 128, 104)),
        (
            (1, 32, 1, 1, 8192),
            dataclasses.replace(PLAIN, block_q=32),
            Shares(1, 1, 128, 15),
        ),  # with more parts, adding them up takes longer
        ((1, 64, 1, 1, 8192), dataclasses.replace(PLAIN, block_q=64), Shares(1, 1, 128, 108)),  # not so with more rows
        ((64, 32, 32, 1, 2048), PLAIN, Shares(1, 2048, 32, 96)),  # all heads of a sequence at the same keys
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
    partials, counters = split.buffers
    assert partials.bytes == 2 * 104 * 16 * (128 + 4) * 4
    assert (counters.kind, counters.bytes) == (BufferKind.STREAM_COUNTER, 4 * 104)


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


@pytest.mark.parametrize("sequences", [Sequences.DENSE, Sequences.CACHED])
def test_every_target_has_configs_for_every_width(sequences: Sequences) -> None:
    for target in targets().values():
        for width in range(8, 257, 8):
            problem = Problem(Dtype.FP16, width, 264 - width, Mask.CAUSAL, sequences=sequences)
            configs = list(FAMILY.space(problem, target))
            assert 1 <= len(configs) <= 20
            assert all(not FAMILY.check(problem, config, target) for config in configs)
            assert FAMILY.default(problem, target) == configs[0]


def test_more_tiles_than_an_int_counts_are_refused() -> None:
    call = attention_call(PROBLEM, Workload(2**20, 64, 64, 1, 2**17))
    (reason,) = FAMILY.call_refusals(call)
    assert reason == f"tiles of 16 packed rows by 16 keys must be at most {2**31 - 1} in a decode kernel; got {2**20 * 64 * 2**13}"


def cached_workload(batch: int, page_size: int, table_pages: int, pages: int = 1000) -> Workload:
    return Workload(batch, 32, 8, 1, page_size * table_pages, pages=pages, page_size=page_size, table_pages=table_pages)


def test_sequences_in_a_cache_may_be_cut_even_if_room_for_keys_is_shared_in_whole_items() -> None:
    program = FAMILY.program(PLAIN, attention_call(CACHED, cached_workload(27, 64, 128)), A100)
    assert [buffer.bytes for buffer in program.buffers] == [2 * 108 * 16 * (128 + 4) * 4, 4 * 108]
    values = program.launches[0].values
    assert (values["blocks"], values["key_tiles"], values["len_kv"]) == (108, 128, 8192)
    assert (values["pages"], values["page_size"], values["page_size_reciprocal"], values["block_table_row"]) == (1000, 64, 2**58, 128)
    assert not FAMILY.program(PLAIN, attention_call(CACHED, cached_workload(27, 64, 1)), A100).buffers
    assert FAMILY.program(PLAIN, attention_call(CACHED, cached_workload(600, 64, 1)), A100).buffers, "nobody knows that they are alike"


@pytest.mark.parametrize(("batch", "entries", "each"), [(1, 1, 1), (512, 512, 1), (513, 257, 2), (5000, 500, 10)])
def test_each_sequence_of_a_cache_is_of_an_entry(batch: int, entries: int, each: int) -> None:
    values = FAMILY.program(PLAIN, attention_call(CACHED, cached_workload(batch, 16, 4)), A100).launches[0].values
    assert (values["entries"], values["entry_sequences"]) == (entries, each)
    assert each * (entries - 1) < batch <= each * entries <= each * ENTRIES


def test_a_cache_without_pages_has_no_room() -> None:
    values = FAMILY.program(PLAIN, attention_call(CACHED, cached_workload(2, 16, 4, pages=0)), A100).launches[0].values
    assert values["len_kv"] == 0


@pytest.mark.parametrize(
    "sizes", [(1, 32, 8, 131072, 131072), (8, 64, 8, 8192, 131072), (64, 32, 8, 2048, 131072), (64, 64, 8, 131072, 131072)]
)
def test_whole_prompts_against_a_cache_are_taken(sizes: tuple[int, int, int, int, int]) -> None:
    """Where an int does not count all tiles of 16 keys, several of them count as one."""
    len_kv = sizes[-1]
    workload = Workload(*sizes, pages=2**20, page_size=16, table_pages=len_kv // 16)
    assert not FAMILY.call_refusals(attention_call(CACHED, workload))
    for config in FAMILY.space(CACHED, TARGET):
        shares = shares_of(config, CACHED, workload, A100)
        assert shares.items * (shares.units + PART_COST) <= 2**31 - 1
        assert shares.units * shares.unit >= shares.key_tiles > (shares.units - 1) * shares.unit
        assert shares.unit == 1 or shares.items * (-(-shares.key_tiles // (shares.unit - 1)) + PART_COST) > 2**31 - 1
        values = FAMILY.program(config, attention_call(CACHED, workload), A100).launches[0].values
        assert (values["unit"], values["key_tiles"]) == (shares.unit, shares.units)
    many = dataclasses.replace(workload, batch=2**15, len_q=131072)
    (reason,) = FAMILY.call_refusals(attention_call(CACHED, many))
    assert reason.startswith(f"tiles of 16 packed rows, 3 times each, must be at most {2**31 - 1} in a decode kernel; got ")


def test_splits_depend_on_the_keys_alone() -> None:
    problems = [dataclasses.replace(problem, batch_invariant=True) for problem in (PROBLEM, CACHED)]
    ((config,), same) = (list(FAMILY.space(problem, TARGET)) for problem in problems)
    assert [config] == same
    assert FAMILY.default(problems[0], TARGET) == config
    (reason,) = FAMILY.check(problems[0], dataclasses.replace(config, stages=2), TARGET)
    assert reason.startswith(f"config must be {config.name} with batch_invariant, so that all calls sum up in one order; got")
    for batch, device in itertools.product((1, 40), (A100, H200)):
        shares = shares_of(config, problems[0], Workload(batch, 32, 8, 2, 5000), device)
        assert (shares.items, shares.units, shares.unit) == (8 * batch, 5, 1024 // config.block_kv)
        program = FAMILY.program(config, attention_call(problems[0], Workload(batch, 32, 8, 2, 5000)), device)
        assert [buffer.bytes for buffer in program.buffers] == [8 * batch * 5 * 8 * (128 + 4) * 4, 4 * 8 * batch]
        assert (program.launches[0].values["slot_rows"], program.launches[0].values["key_tiles"]) == (4, 5)
    assert not FAMILY.program(config, attention_call(problems[0], Workload(3, 32, 8, 1, 1024)), A100).buffers
    of_prompt = attention_call(problems[0], Workload(64, 32, 8, 2048, 131072))
    assert not FAMILY.call_refusals(of_prompt)
    assert not FAMILY.program(config, of_prompt, A100).buffers, "items enough: nobody splits them"


@pytest.mark.parametrize(
    ("widths", "keys"), [((64, 64), 2048), ((80, 80), 1024), ((128, 128), 1024), ((192, 128), 2048), ((256, 256), 2048)]
)
def test_splits_are_as_long_as_parts_cost(widths: tuple[int, int], keys: int) -> None:
    problem = Problem(Dtype.BF16, *widths, batch_invariant=True)
    config = FAMILY.default(problem, TARGET)
    assert shares_of(config, problem, Workload(1, 8, 8, 1, 8192), A100).unit * config.block_kv == keys


def test_who_cannot_be_batch_invariant_says_so() -> None:
    problem = dataclasses.replace(PROBLEM, batch_invariant=True)
    assert problem.name == "bf16_d128_full_invariant"
    for name in ("attention_forward", "attention_forward_sm90", "attention_decode_sm90"):
        (reason,) = find_family(name).refusals(problem, find_target("sm_90a"))
        assert reason == "batch_invariant must be False in these kernels, whose order of summation depends on sizes; got True"
    with pytest.raises(ArgumentError, match="batch_invariant must be False for backward"):
        dataclasses.replace(problem, operation="backward")


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


@pytest.mark.parametrize(
    ("head_dim", "sizes", "picked"),
    [
        (128, (16, 32, 8, 1, 8192), "bq16_wq16_bk256_w8"),
        (128, (16, 32, 8, 8, 8192), "bq32_wq16_bk256_w8"),
        (128, (16, 32, 8, 16, 8192), "bq64_wq16_bk128_w8"),
        (64, (128, 64, 8, 1, 4096), "bq16_wq16_bk128_w4"),
        (64, (1, 64, 8, 1, 65536), "bq16_wq16_bk256_w8"),
        (64, (128, 64, 8, 4, 4096), "bq32_wq32_bk128_w4"),
        (64, (128, 64, 8, 8, 4096), "bq64_wq32_bk64_w4"),
        (256, (8, 16, 2, 1, 32768), "bq16_wq16_bk128_w8"),
    ],
)
def test_what_the_model_picks_for_e4m3_keys_is_what_was_fastest(head_dim: int, sizes: tuple[int, ...], picked: str) -> None:
    problem = dataclasses.replace(CACHED, head_dim=head_dim, head_dim_v=head_dim, dtype_kv=CacheDtype.E4M3)
    dense = Workload(*sizes)
    table_pages = dense.len_kv // 64
    workload = dataclasses.replace(dense, pages=dense.batch * table_pages, page_size=64, table_pages=table_pages)
    configs = [each for each in FAMILY.space(problem, H200.target) if FAMILY.not_dominated(each, workload)]
    assert min(configs, key=lambda each: FAMILY.predict(problem, each, workload, H200).seconds).name.startswith(picked)
