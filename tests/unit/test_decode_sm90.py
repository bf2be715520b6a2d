"""The decode family for Hopper: how rows and keys are divided, what it refuses, and which calls take it where nothing is measured."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.families.attention_decode_sm90.config import AttentionDecodeSm90Config as Config
from flashgen.codegen.families.attention_decode_sm90.family import FAMILY
from flashgen.codegen.families.attention_decode_sm90.rows import LEAST_SHARE, RowTiles, blocks_for, most_parts, row_tiles, seen_key_tiles
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.program import BufferKind
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.records.choice import bucket
from flashgen.selection.picks import model_picks

H200 = find_device("h200")
PROBLEM = Problem(Dtype.BF16, 128, 128)
TARGET = find_target("sm_90a")
PAGES = {"page_size": 64, "table_pages": 128, "pages": 512}


@pytest.mark.parametrize(
    ("group", "len_q", "most", "tiles"),
    [
        (4, 1, 64, RowTiles(4, 1, 1, 1)),
        (4, 16, 64, RowTiles(4, 16, 1, 1)),
        (4, 17, 64, RowTiles(4, 9, 1, 2)),
        (5, 13, 64, RowTiles(5, 7, 1, 2)),
        (5, 13, 128, RowTiles(5, 13, 1, 1)),
        (71, 1, 128, RowTiles(71, 1, 1, 1)),
        (71, 3, 64, RowTiles(36, 1, 2, 3)),
        (1, 4096, 64, RowTiles(1, 64, 1, 64)),
        (64, 0, 64, RowTiles(64, 1, 1, 1)),
    ],
)
def test_rows_are_packed(group: int, len_q: int, most: int, tiles: RowTiles) -> None:
    assert row_tiles(group, len_q, most) == tiles
    assert tiles.rows <= most
    assert tiles.heads * tiles.head_sets >= group
    assert tiles.queries * tiles.query_tiles >= len_q


@pytest.mark.parametrize(
    ("heads", "key_tiles", "blocks"),
    [
        (8, 1024, 128),  # 16 blocks a head
        (128, 128, 128),  # a head a block
        (2048, 32, 128),  # 16 heads a block
        (16, 512, 128),
        (1000, 10, 125),
        (100, 64, 100),  # a head a block on three quarters of the SMs
        (90, 10, 132),  # 90 blocks would leave a third of the SMs idle: shares end inside heads
        (131, 7, 131),
        (8, 2, 16),  # a tile each
        (1, 5, 5),
        (67, 100, 132),  # 67 is too few, 134 too many
    ],
)
def test_shares_end_where_heads_end_if_that_costs_few_sms(heads: int, key_tiles: int, blocks: int) -> None:
    assert blocks_for(heads, 1, key_tiles, 132, key_tiles) == blocks


def test_no_more_blocks_than_tiles_and_none_idle_for_nothing() -> None:
    for heads, batch, key_tiles, sms in itertools.product((1, 3, 7, 64, 500), (1, 5, 131), (1, 2, 9, 300), (1, 7, 108, 132)):
        blocks = blocks_for(heads, batch, key_tiles, sms, key_tiles)
        most = min(sms, heads * batch * key_tiles)
        assert LEAST_SHARE * most < blocks <= most
        if blocks < most:
            assert not (blocks % heads and heads * batch % blocks)


@pytest.mark.parametrize(
    ("heads", "batch", "key_tiles", "parts", "blocks"),
    [
        (1, 1, 128, 15, 15),
        (8, 1, 128, 15, 128),  # nearly all
        (8, 1, 128, 11, 64),  # 88 would be more than half, and not nearly all
        (8, 2, 64, 7, 64),
        (1, 4, 128, 22, 64),
        (100, 1, 64, 1, 100),
        (8, 1, 3, 40, 24),  # no more than there are tiles
    ],
)
def test_parts_are_no_more_than_is_worth_adding_up(heads: int, batch: int, key_tiles: int, parts: int, blocks: int) -> None:
    assert blocks_for(heads, batch, key_tiles, 132, parts) == blocks


@pytest.mark.parametrize(
    ("group", "len_q", "keys", "parts"),
    [
        (4, 1, 8192, 44),
        (4, 16, 8192, 11),
        (32, 1, 8192, 15),
        (4, 16, 1024, 3),
        (4, 16, 16, 1),
    ],
)
def test_as_many_parts_as_are_read_and_added_up_soonest(group: int, len_q: int, keys: int, parts: int) -> None:
    """A part's keys and all partial outputs of a head take the same time there, as far as whole parts allow that."""
    rows = group * len_q
    assert most_parts(PROBLEM, keys, rows) == parts
    assert [keys * 512 // p >= p * rows * 132 * 4 for p in (parts, parts + 1)] in ([True, False], [False, False])
    spec = Workload(1, group, 1, len_q, keys)
    (launch,) = FAMILY.program(Config(1, 2, 64, 4), attention_call(PROBLEM, spec), H200).launches
    assert launch.grid == min(parts, -(-keys // 64))


@pytest.mark.parametrize(
    ("heads", "batch", "blocks"),
    [
        (8, 9, 128),  # 72 is too few, 144 too many
        (8, 33, 132),  # two heads each
        (40, 3, 120),
        (7, 19, 126),
        (70, 2, 132),  # 70 is too few
    ],
)
def test_all_heads_of_a_sequence_are_cut_at_the_same_keys(heads: int, batch: int, blocks: int) -> None:
    assert blocks_for(heads, batch, 100, 132, 100) == blocks


def test_partial_outputs_only_where_a_head_is_in_several_blocks() -> None:
    config = Config(1, 2, 64, 4)
    whole = FAMILY.program(config, attention_call(PROBLEM, Workload(16, 32, 8, 1, 8192)), H200)
    split = FAMILY.program(config, attention_call(PROBLEM, Workload(1, 32, 8, 3, 8192)), H200)
    assert not whole.buffers
    partials, counters = split.buffers
    assert partials.bytes == 2 * 128 * 12 * (128 + 4) * 4
    assert (counters.kind, counters.bytes) == (BufferKind.STREAM_COUNTER, 4 * 128)
    two = FAMILY.program(Config(2, 1, 64, 4), attention_call(PROBLEM, Workload(1, 32, 8, 3, 8192)), H200).buffers[1]
    assert two.bytes == 4 * 2 * 128


def test_launches_begin_while_others_end() -> None:
    for workload in (Workload(1, 32, 8, 1, 64), Workload(64, 32, 8, 1, 8192)):
        (launch,) = FAMILY.program(Config(1, 2, 64, 4), attention_call(PROBLEM, workload), H200).launches
        assert launch.overlaps


def test_maps_fill_the_l2_by_no_more_than_a_box_has() -> None:
    (launch,) = FAMILY.program(Config(1, 2, 64, 4), attention_call(PROBLEM, Workload(2, 12, 2, 5, 100)), H200).launches
    assert {shape.l2_promotion for shape in launch.maps.values()} == {128}
    assert launch.maps["q"].box == (64, 6, 5, 1)
    assert launch.maps["k"].box == launch.maps["v"].box == (64, 64, 1, 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Config(2, 2, 64, 4), "row_groups * key_groups * heads must be at most 2: registers do for two consumers; got 4"),
        (Config(1, 2, 64, 2, 2), "row_groups * key_groups * heads must be at most 2: registers do for two consumers; got 4"),
        (Config(1, 2, 64, 5), "stages must be a multiple of key_groups 2; got 5 (nearest: 4)"),
        (Config(3, 1, 64, 4), "row_groups must be from 1 to 2; got 3 (nearest: 2)"),
        (Config(1, 1, 24, 4), "block_kv must be a multiple of 16 from 32 to 128; got 24 (nearest: 32)"),
        (Config(1, 1, 64, 1), "stages must be from 2 to 16; got 1 (nearest: 2)"),
        (
            Config(1, 2, 64, 8),
            "needs 311984 B of shared memory, sm_90a has 232448 B a block: lower block_kv, stages or row_groups",
        ),
    ],
)
def test_what_is_illegal(config: Config, reason: str) -> None:
    assert FAMILY.check(PROBLEM, config, TARGET) == [reason]


def test_registers_must_do() -> None:
    assert FAMILY.check(Problem(Dtype.BF16, 8, 256), Config(1, 2, 128, 2), TARGET) == [
        "needs about 296 registers a thread, 232 are available: lower block_kv"
    ]


@pytest.mark.parametrize(
    ("modifiers", "config", "needed"),
    [
        (("tree_mask",), Config(2, 1, 96, 3), 241),
        (("tree_mask",), Config(2, 1, 64, 4), None),
        (("boolean_mask",), Config(1, 2, 64, 4), None),
        (("bias_fp32",), Config(2, 1, 64, 4), None),
        (("bias_fp32", "boolean_mask"), Config(2, 1, 48, 6), None),
        (("bias_fp32", "boolean_mask"), Config(2, 1, 96, 3), 289),
    ],
)
def test_registers_must_do_for_what_is_loaded_ahead(modifiers: tuple[str, ...], config: Config, needed: int | None) -> None:
    reasons = FAMILY.check(dataclasses.replace(PROBLEM, modifiers=modifiers), config, TARGET)
    assert reasons == ([] if needed is None else [f"needs about {needed} registers a thread, 232 are available: lower block_kv"])


def test_masks_are_for_heads_that_leave_registers() -> None:
    wide = Problem(Dtype.BF16, 256, modifiers=("boolean_mask",))
    assert FAMILY.refusals(wide, TARGET) == [
        "head_dim_v must be at most 128 with a mask or a bias, and modifiers at most 3: registers do for no more; got 256 and 1"
    ]
    assert not FAMILY.refusals(dataclasses.replace(wide, modifiers=("alibi", "sinks", "softcap", "tree_mask", "window")), TARGET)


@pytest.mark.parametrize("sequences", [Sequences.DENSE, Sequences.CACHED])
@pytest.mark.parametrize(
    ("window", "tiles"),
    [({"window_left": 100, "window_right": 0}, 3), ({"window_left": 20000}, 128), ({"window_right": 0}, 128), ({"chunk": 200}, 5)],
)
def test_shares_are_of_tiles_that_some_row_sees(sequences: Sequences, window: dict[str, int], tiles: int) -> None:
    pages = {"page_size": 8192, "table_pages": 1, "pages": 2} if sequences is Sequences.CACHED else {}
    name = "chunk" if "chunk" in window else "window"
    problem = dataclasses.replace(PROBLEM, mask=Mask.CAUSAL, modifiers=(name,), sequences=sequences)
    call = attention_call(problem, Workload(2, 8, 2, 4, 8192, **window, **pages))
    (launch,) = FAMILY.program(Config(1, 2, 64, 4), call, H200).launches
    assert launch.values["key_tiles"] == tiles


@pytest.mark.parametrize("mask", Mask)
def test_no_row_of_a_chunk_sees_keys_behind_the_tiles_of_a_share(mask: Mask) -> None:
    rng, problem = random.Random(7), dataclasses.replace(PROBLEM, mask=mask, modifiers=("chunk",))
    for _ in range(300):
        len_q, len_kv, chunk, queries, block_kv = (rng.randint(1, most) for most in (40, 300, 90, 20, 40))
        tiles = seen_key_tiles(problem, Workload(1, 1, 1, len_q, len_kv, chunk=chunk), queries, block_kv)
        for first in range(0, len_q, queries):
            own = [i + len_kv - len_q for i in range(first, min(first + queries, len_q)) if i + len_kv >= len_q]
            seen = [
                k for i in own for k in range(i // chunk * chunk, min(i // chunk * chunk + chunk, len_kv)) if mask is Mask.FULL or k <= i
            ]
            assert not seen or max(seen) // block_kv - min(seen) // block_kv < tiles


def test_more_tiles_than_an_int_counts_are_refused() -> None:
    call = attention_call(PROBLEM, Workload(2**20, 64, 64, 1, 2**17))
    assert FAMILY.call_refusals(call) == [
        f"batch, heads and lengths must make fewer than 2147483648 tiles of 32 keys; got {2**20 * 64 * 2**12}"
    ]


@pytest.mark.parametrize("name", ["attention_decode", "attention_decode_sm90"])
def test_the_end_of_a_tile_is_an_int(name: str) -> None:
    """Of the last one, too: else it would end before the first key."""
    problem, most = Problem(Dtype.BF16, 8), 2**31 - 1 - 1024
    for workload, reason in (
        (Workload(1, 1, 1, 1, most), None),
        (Workload(1, 1, 1, 1, most + 1), f"len_kv must be at most {most} in a decode kernel; got {most + 1}"),
        (Workload(1, 8, 1, 2**28, 16), f"len_q * heads_q / heads_kv must be at most {most} in a decode kernel; got {2**31}"),
    ):
        reasons = find_family(name).call_refusals(attention_call(problem, workload))
        assert reasons == ([] if reason is None else [reason])


DECODES = [
    (1, 32, 8, 1, 65536),
    (16, 32, 8, 1, 8192),
    (64, 32, 32, 1, 2048),
    (4, 8, 8, 1, 100),
    (16, 64, 8, 16, 8192),
    (3, 40, 8, 16, 5000),
    (1, 64, 8, 17, 8192),  # several row tiles, but few
    (4, 32, 8, 32, 8192),
]
OTHERS = [
    (1, 32, 8, 8192, 8192),
    (4, 32, 8, 128, 128),
    (4, 32, 32, 64, 256),
    (16, 64, 8, 17, 8192),
    (4, 32, 8, 64, 8192),
    (8, 16, 16, 512, 4096),
    (32, 16, 16, 1, 4),
]


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("sizes", [*DECODES, *OTHERS], ids=lambda sizes: "-".join(map(str, sizes)))
def test_few_queries_of_many_keys_take_it_by_themselves(mask: Mask, sizes: tuple[int, ...]) -> None:
    problem, workload = dataclasses.replace(PROBLEM, mask=mask), Workload(*sizes)
    spec = next(model_picks(problem, workload, H200))
    assert spec.family.name == ("attention_decode_sm90" if sizes in DECODES else "attention_forward_sm90")
    assert next(model_picks(problem, bucket(workload), H200)) == spec
    others = next(model_picks(problem, workload, H200, frozenset({FAMILY.name})))
    few = sizes in DECODES and sizes[1] // sizes[2] * sizes[3] <= 64
    assert others.family.name == ("attention_decode" if few else "attention_forward_sm90"), "where it cannot take a call"
    assert next(model_picks(problem, workload, H200, family=FAMILY.name)).family is FAMILY


@pytest.mark.parametrize("sequences", [Sequences.DENSE, Sequences.CACHED])
@pytest.mark.parametrize("name", [*FAMILY.modifiers, "prefix_len"])
def test_it_is_taken_with_the_modifiers_that_it_has(name: str, sequences: Sequences) -> None:
    pages = PAGES if sequences is Sequences.CACHED else {}
    problem = dataclasses.replace(PROBLEM, mask=Mask.CAUSAL, modifiers=(name,), sequences=sequences)
    local = {"chunk": {"chunk": 1024}, "window": {"window_left": 1024, "window_right": 0}}.get(name, {})
    workload = Workload(4, 32, 8, 8, 8192, **local, **pages)
    able = next(model_picks(problem, workload, H200)).family.name
    assert able == ("attention_decode" if name == "prefix_len" else "attention_decode_sm90")
    assert name == "prefix_len" or next(model_picks(problem, workload, H200, family=FAMILY.name)).family is FAMILY


@pytest.mark.parametrize(
    ("batch", "len_q", "pages", "name"),
    [
        (1, 8, {}, "attention_decode_sm90"),
        (4, 8, {}, "attention_decode_sm90"),
        (1, 16, {}, "attention_decode"),
        (4, 16, {}, "attention_forward_sm90"),
        (4, 16, PAGES, "attention_decode"),
        (1, 32, {}, "attention_forward_sm90"),
    ],
)
def test_with_a_window_it_is_for_few_rows(batch: int, len_q: int, pages: dict[str, int], name: str) -> None:
    """And with more of them the generic one is for pages, or for few sequences: dense, the forward kernel is faster with many."""
    sequences = Sequences.CACHED if pages else Sequences.DENSE
    problem = dataclasses.replace(PROBLEM, mask=Mask.CAUSAL, modifiers=("window",), sequences=sequences)
    workload = Workload(batch, 32, 8, len_q, 8192, window_left=1023, window_right=0, **pages)
    assert next(model_picks(problem, workload, H200)).family.name == name


def test_a_second_row_group_is_for_more_rows() -> None:
    two = Config(2, 1, 64, 4)
    assert [FAMILY.not_dominated(two, Workload(1, 32, 8, len_q, 8192)) for len_q in (1, 16, 17)] == [False, False, True]


def test_two_heads_a_stage_are_for_an_even_number_of_them() -> None:
    two = Config(1, 1, 64, 4, 2)
    assert [FAMILY.not_dominated(two, Workload(1, 4 * heads, heads, 1, 8192)) for heads in (1, 2, 7, 8)] == [False, True, False, True]


def test_two_heads_a_stage_are_one_head_of_twice_the_bytes() -> None:
    """The last of an odd number, too; and their parts lie in one slot."""
    problem, config = Problem(Dtype.BF16, 64, 64), Config(1, 1, 64, 4, 2)
    planned = FAMILY.program(config, attention_call(problem, Workload(16, 28, 7, 1, 8192)), H200)
    (launch,) = planned.launches
    assert (launch.values["heads"], launch.values["key_tiles"], launch.grid) == (4, 128, 128)
    assert [buffer.bytes for buffer in planned.buffers] == [128 * 2 * 2 * 4 * (64 + 4) * 4, 128 * 2 * 4]
    assert FAMILY.traffic(problem, config, Workload(2, 28, 7, 1, 8192), H200).read >= 2 * 7 * 8192 * 128 * 2


@pytest.mark.parametrize("heads", [(64, 8), (32, 32)])
def test_short_rows_of_many_heads_are_read_two_by_two(heads: tuple[int, int]) -> None:
    problem = Problem(Dtype.BF16, 64, 64)
    short, usual = (next(model_picks(of, Workload(128, *heads, 1, 4096), H200)).config for of in (problem, PROBLEM))
    assert (short.to_json().get("heads", 1), usual.to_json().get("heads", 1)) == (2, 1)


def test_traffic_has_each_part_once() -> None:
    """Whole heads move q, k, v and out; a head of 16 parts moves their outputs, too, there and back."""
    config, element = Config(1, 2, 64, 4), 2
    whole = FAMILY.traffic(PROBLEM, config, Workload(16, 32, 8, 1, 8192), H200)
    keys = 16 * 8 * 8192 * 256 * element
    assert (whole.read, whole.written) == (keys + 16 * 32 * 128 * element, 16 * 32 * 128 * element)
    split = FAMILY.traffic(PROBLEM, config, Workload(1, 32, 8, 1, 8192), H200)
    partial = 8 * 16 * 4 * (128 + 4) * 4
    assert split.read == 8 * 8192 * 256 * element + 128 * 4 * 128 * element + partial
    assert split.written == 32 * 128 * element + partial
