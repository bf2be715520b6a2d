"""Keys in pages of a cache in the decode family for Hopper: how tensor copies bring them, and which calls they cannot take."""

from __future__ import annotations

import itertools

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.cached import ATOM_ROWS, box_keys
from flashgen.codegen.devices import find_device
from flashgen.codegen.families.attention_decode_sm90.config import AttentionDecodeSm90Config as Config
from flashgen.codegen.families.attention_decode_sm90.family import FAMILY
from flashgen.codegen.families.attention_decode_sm90.storage import query_stages
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.program import KernelLaunch
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload

H200 = find_device("h200")
PROBLEM = Problem(Dtype.BF16, 128, 128, sequences=Sequences.CACHED)
TARGET = find_target("sm_90a")


def workload(page_size: int, table_pages: int, pages: int = 1000, batch: int = 16) -> Workload:
    return Workload(batch, 32, 8, 1, page_size * table_pages, pages=pages, page_size=page_size, table_pages=table_pages)


def launched(given: Workload, config: Config) -> KernelLaunch:
    call = attention_call(PROBLEM, given)
    FAMILY.require_call(call, config)
    (launch,) = FAMILY.program(config, call, H200).launches
    return launch


@pytest.mark.parametrize(
    ("page_size", "table_pages", "block_kv", "keys"),
    [
        (16, 9, 64, 16),
        (48, 9, 64, 16),
        (48, 9, 96, 48),
        (64, 9, 64, 64),
        (256, 9, 64, 64),
        (8, 9, 128, 8),
        (40, 9, 128, 8),
        (1000, 1, 64, 64),  # one page: a tile, wherever it begins
        (3, 1, 64, 64),
    ],
)
def test_a_box_is_within_a_page(page_size: int, table_pages: int, block_kv: int, keys: int) -> None:
    given = workload(page_size, table_pages)
    assert box_keys(given, block_kv) == keys
    launch = launched(given, Config(1, 2, block_kv, 2))
    assert launch.maps["k"].box == launch.maps["v"].box == (64, keys, 1, 1)
    assert launch.maps["k"].sizes == (128, page_size, 8, 1000)
    boxes = block_kv // keys
    values = launch.values
    assert (values["tile_boxes"], values["batch_tiles"]) == (boxes, 32 // boxes)
    assert values["border"] == (keys if table_pages > 1 else 1)


def test_whatever_pages_tensor_copies_take_there_is_a_box_for_every_tile() -> None:
    """Whose rows begin where the pattern of a swizzle does, and as many as a warp finds at a time."""
    for pages, block_kv in itertools.product(range(8, 400, 8), (32, 48, 64, 96, 128)):
        keys = box_keys(workload(pages, 3), block_kv)
        assert keys % ATOM_ROWS == 0
        assert block_kv // keys <= 32


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        (workload(20, 3), ["page_size must be a multiple of 8 for tensor copies where a sequence has several pages; got 20"]),
        (workload(1, 1000), ["page_size must be a multiple of 8 for tensor copies where a sequence has several pages; got 1"]),
        (workload(20, 1), []),
        (workload(24, 5), []),
        (workload(16, 4, pages=0), ["pages must be at least 1 for tensor copies; got 0"]),
        (workload(16, 0), ["len_kv must be at least 1 for tensor copies; got 0"]),
    ],
)
def test_what_is_refused(given: Workload, reasons: list[str]) -> None:
    assert FAMILY.call_refusals(attention_call(PROBLEM, given)) == reasons


def test_partial_outputs_wherever_lengths_may_differ() -> None:
    """Dense sequences of these sizes have whole heads: 128 of them."""
    program = FAMILY.program(Config(1, 2, 64, 4), attention_call(PROBLEM, workload(64, 128)), H200)
    partials, _ = program.buffers
    assert partials.bytes == 2 * 128 * 4 * (128 + 4) * 4


def test_tiles_that_begin_before_the_first_key_are_counted() -> None:
    launch = launched(workload(16, 4), Config(1, 2, 64, 4))
    assert launch.values["key_tiles"] == 2
    assert launched(workload(64, 1), Config(1, 2, 64, 4)).values["key_tiles"] == 1


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
def test_the_default_fits_beside_what_a_cache_needs(head_dim: int, mask: Mask) -> None:
    problem = Problem(Dtype.BF16, head_dim, mask=mask, sequences=Sequences.CACHED)
    config = FAMILY.default(problem, TARGET)
    assert not FAMILY.check(problem, config, TARGET)
    dense = Problem(Dtype.BF16, head_dim, mask=mask)
    assert FAMILY.shared_bytes(problem, config) > FAMILY.shared_bytes(dense, config)


def test_a_config_of_dense_sequences_is_made_to_fit() -> None:
    """A second tile of Q comes with a cache where it fits; stages go where even one does not. Tiles are small for one row group."""
    dense, deep = Problem(Dtype.BF16, 128), Config(1, 2, 64, 4)
    assert FAMILY.adapted(dense, deep) == deep
    assert FAMILY.adapted(PROBLEM, deep) == Config(1, 2, 32, 6)
    assert FAMILY.adapted(PROBLEM, Config(2, 1, 64, 5)) == Config(2, 1, 64, 5)
    narrow = Problem(Dtype.BF16, 64, sequences=Sequences.CACHED)
    assert FAMILY.adapted(narrow, Config(1, 2, 128, 4)) == Config(1, 2, 128, 4)
    assert FAMILY.adapted(dense, Config(1, 1, 32, 12)) == Config(1, 1, 32, 12)
    full = Config(1, 1, 32, 13)  # 208 KB
    assert not FAMILY.check(dense, full, TARGET)
    assert FAMILY.check(PROBLEM, full, TARGET)
    assert FAMILY.adapted(PROBLEM, full) == Config(1, 1, 32, 12)
    assert not FAMILY.check(PROBLEM, Config(1, 1, 32, 12), TARGET)
    assert query_stages(PROBLEM, Config(1, 1, 32, 12)) == 1
    assert query_stages(PROBLEM, deep) == 2
    assert query_stages(dense, deep) == 1


def test_tiles_that_stand_for_parts_are_counted() -> None:
    given = Workload(2**20, 8, 8, 1, 2**8 * 32, pages=2**20, page_size=32, table_pages=2**8)
    (reason,) = FAMILY.call_refusals(attention_call(PROBLEM, given))
    assert reason.endswith(f"got {2**20 * 8 * (2**8 + 3)}")
