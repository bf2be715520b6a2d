"""Keys in pages of a cache in the forward family for Hopper: what is refused, what a launch is told, and when the family is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, Scheduler
from flashgen.codegen.families.attention_forward_sm90.family import FAMILY
from flashgen.codegen.families.attention_forward_sm90.pages import MODIFIERS
from flashgen.codegen.modifiers import TAKEN_BY_MOST
from flashgen.codegen.problem import CacheDtype, Dtype, Mask, Problem, Sequences
from flashgen.codegen.program import KernelLaunch
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.selection.families import excluded_families
from flashgen.selection.picks import model_picks

H200, TARGET = find_device("h200"), find_target("sm_90a")
PROBLEM = Problem(Dtype.BF16, 128, mask=Mask.CAUSAL, sequences=Sequences.CACHED)
CONFIG = AttentionForwardSm90Config(2, 128, scheduler=Scheduler.DYNAMIC)


def workload(page_size: int, table_pages: int, pages: int = 1000, batch: int = 4, len_q: int = 512) -> Workload:
    return Workload(batch, 32, 8, len_q, page_size * table_pages, pages=pages, page_size=page_size, table_pages=table_pages)


def launched(given: Workload, config: AttentionForwardSm90Config = CONFIG) -> KernelLaunch:
    call = attention_call(PROBLEM, given)
    FAMILY.require_call(call, config)
    (launch,) = FAMILY.program(config, call, H200).launches
    return launch


@pytest.mark.parametrize(
    ("page_size", "table_pages", "boxes"), [(16, 512, 8), (64, 128, 2), (48, 9, 8), (256, 32, 1), (8192, 1, 1), (1000, 1, 1)]
)
def test_a_key_tile_is_boxes_within_pages(page_size: int, table_pages: int, boxes: int) -> None:
    launch = launched(workload(page_size, table_pages))
    keys = CONFIG.block_kv // boxes
    assert (launch.values["tile_boxes"], launch.values["box_keys"]) == (boxes, keys)
    assert launch.values["border"] == (keys if table_pages > 1 else 1)
    assert launch.maps["k"].box == launch.maps["v"].box == (64, keys, 1, 1)
    assert launch.maps["k"].sizes == (128, page_size, 8, 1000)
    assert launch.maps["q"].sizes == (128, 512, 32, 4)


def test_there_is_a_lane_for_each_box() -> None:
    for block_kv in range(32, 257, 16):
        assert block_kv // 8 <= 32


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        (workload(20, 3), ["page_size must be a multiple of 8 for tensor copies where a sequence has several pages; got 20"]),
        (workload(20, 1), []),
        (workload(24, 5), []),
        (workload(16, 4, pages=0), ["pages must be at least 1 for tensor copies; got 0"]),
    ],
)
def test_pages_that_copies_do_not_take(given: Workload, reasons: list[str]) -> None:
    call = attention_call(PROBLEM, given)
    assert FAMILY.call_refusals(call) == reasons
    assert ("attention_forward_sm90" in excluded_families(call, TARGET)) == bool(reasons)


@pytest.mark.parametrize("name", sorted(set(TAKEN_BY_MOST) - {"traced"}))
def test_modifiers_that_count_keys_from_the_first_one_are_refused(name: str) -> None:
    reasons = FAMILY.refusals(replace(PROBLEM, modifiers=(name,)), TARGET)
    assert bool(reasons) == (name not in MODIFIERS)
    assert all("sequences in a cache" in reason and reason.endswith(f"got {name}") for reason in reasons)


def test_what_it_leaves_to_decoding() -> None:
    assert FAMILY.refusals(replace(PROBLEM, dtype_kv=CacheDtype.E4M3), TARGET)
    assert FAMILY.refusals(replace(PROBLEM, batch_invariant=True), TARGET)


@pytest.mark.parametrize("others", [{"scheduler": Scheduler.STATIC}, {"warpgroups": 3, "block_kv": 64, "ping_pong": False}])
def test_configs_that_have_no_kernel(others: dict[str, object]) -> None:
    (reason,) = FAMILY.check(PROBLEM, replace(CONFIG, **others), TARGET)  # type: ignore[arg-type]
    assert "with sequences in a cache" in reason


def test_configs_of_dense_sequences_are_made_to_fit() -> None:
    """And boxes of usual pages are not too small."""
    assert FAMILY.adapted(PROBLEM, replace(CONFIG, scheduler=Scheduler.STATIC)) == CONFIG
    for block_kv, other in ((176, 160), (160, 160), (144, 128), (112, 96), (64, 64), (48, 48)):
        assert FAMILY.adapted(PROBLEM, replace(CONFIG, block_kv=block_kv)).block_kv == other


def test_small_boxes_take_their_time() -> None:
    of_pages = {size: FAMILY.predict(PROBLEM, CONFIG, workload(size, 8192 // size), H200).seconds for size in (16, 64, 8192)}
    dense = FAMILY.predict(replace(PROBLEM, sequences=Sequences.DENSE), CONFIG, Workload(4, 32, 8, 512, 8192), H200).seconds
    assert of_pages[16] > 1.05 * of_pages[64]
    assert of_pages[8192] == pytest.approx(dense, rel=0.01)


@pytest.mark.parametrize(
    ("batch", "len_q", "family"), [(1, 1, "decode"), (1, 128, "decode"), (4, 32, "decode"), (4, 64, "forward"), (1, 4096, "forward")]
)
def test_prompts_take_it_by_themselves(batch: int, len_q: int, family: str) -> None:
    """Where tiles fill the GPU: with fewer, blocks that share keys are faster."""
    given = workload(64, 128, batch=batch, len_q=len_q)
    assert next(model_picks(PROBLEM, given, H200)).family.name == f"attention_{family}_sm90"
