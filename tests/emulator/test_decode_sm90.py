"""The decode kernel for Hopper: heads whose keys several blocks share, the same bits whoever comes last, and planted faults."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulationOrder, Schedule
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.attention_decode_sm90.config import AttentionDecodeSm90Config
from flashgen.codegen.families.attention_decode_sm90.family import FAMILY
from flashgen.codegen.problem import Dtype, Mask
from tests.support.caught import TARGET, caught_by, compile_planted, control, faulty_text, listed, sound_kernel
from tests.support.fault import Fault, setting
from tests.support.runs import LIMITS, emulated_kernel, launch, poisoned, why_rejected

ORDERS = (EmulationOrder(), EmulationOrder(Schedule.REVERSED, late_copies=False), EmulationOrder(Schedule.AHEAD))
SMS = 7  # so few that blocks have several heads, and heads several blocks
TWO_KEY_GROUPS = AttentionDecodeSm90Config(row_groups=1, key_groups=2, block_kv=32, stages=4)
TWO_ROW_GROUPS = AttentionDecodeSm90Config(row_groups=2, key_groups=1, block_kv=32, stages=3)
ONE = AttentionDecodeSm90Config(row_groups=1, key_groups=1, block_kv=64, stages=2)
TWO_HEADS = AttentionDecodeSm90Config(row_groups=1, key_groups=1, block_kv=32, stages=3, heads=2)
given = partial(setting, config=TWO_KEY_GROUPS, batch=3)

# Groups of 5 and 3 heads: 20 rows, which are no power of two, and 3.
FULL = given((4, 300), (1, 333), heads=(15, 3))
CAUSAL = given((4, 290), mask=Mask.CAUSAL, heads=(9, 3))
UNSEEN = given((9, 5), mask=Mask.CAUSAL, heads=(9, 3))
WIDE = given((2, 100), heads=(9, 3), width=(128, 256))
RISING = given((3, 600), heads=(9, 3), rising=-40.0)
# The last keys, which alone count, are 2^63 above the row max of the first ones.
LOW = given((31, 640), heads=(2, 1), batch=1, rising=-44.0, width=(144, 144), dtype=Dtype.BF16, magnitude=1.0)
# Rounding a scaled maximum is worth more than an exponent's range.
HUGE = given((2, 200), heads=(9, 3), dtype=Dtype.BF16, magnitude=1e12)
# 120 rows, of so many keys that heads have several parts: of two row groups the second has fewer than 64; and 131 of 71 heads, which take
# several tiles.
ROWS = given((24, 600), heads=(10, 2), batch=2, mask=Mask.CAUSAL, config=TWO_ROW_GROUPS)
TILES = given((2, 100), heads=(71, 1), batch=2, config=ONE)
# A part is one tile, so that one of two key groups has none of it.
ONE_TILE = given((3, 20), heads=(30, 15))
# Of five key/value heads the last one has no neighbour; of four, both of two are cut among blocks.
PAIRS = given((3, 300), (1, 333), heads=(15, 5), config=TWO_HEADS, mask=Mask.CAUSAL)
SETTINGS = {
    "pairs": PAIRS,
    "one-tile": ONE_TILE,
    "full": FULL,
    "causal": CAUSAL,
    "unseen": UNSEEN,
    "wide": WIDE,
    "rising": RISING,
    "low": LOW,
    "huge": HUGE,
    "rows": ROWS,
    "tiles": TILES,
}

ROWS_AND_KEYS = [
    Fault("decode-one-head-for-all-rows", "return first_head + row - divide", "return first_head + 0 * row - 0 * divide", FULL),
    Fault("decode-one-query-for-all-rows", "return first_query + divide", "return first_query + 0 * divide", CAUSAL),
    Fault("decode-heads-of-the-first-set", "head_kv * group + head_set * tiles.heads, head_kv", "head_kv * group, head_kv", TILES),
    Fault("decode-rows-past-the-group", "&& head(tiles, row) < end_head", "", TILES),
    Fault("decode-queries-of-the-first-batch", "first_head, rows.first_query, rows.batch);", "first_head, 0, 0);", FULL),
    Fault("decode-keys-of-the-first-head", "const int head = rows_of<Traits>(p, part.head).head_kv,", "const int head = 0,", FULL),
    Fault("decode-rows-of-the-first-neighbour", "rows.first_head += tile_head * p.group;", "", PAIRS),
    Fault(
        "decode-neighbour-past-the-last-head", "min(rows.head_kv * p.group + p.group, p.heads_q)", "rows.head_kv * p.group + p.group", PAIRS
    ),
    Fault(
        "decode-keys-of-the-first-neighbour",
        ", p.k_map, full, tile * Traits::kBlockKv, head + i",
        ", p.k_map, full, tile * Traits::kBlockKv, head",
        PAIRS,
    ),
    Fault("decode-values-of-the-first-neighbour", "smem.value_tile(stage, tile_head));", "smem.value_tile(stage, 0));", PAIRS),
    Fault("decode-queries-of-the-first-neighbour", "rows.first_head + i * p.group;", "rows.first_head;", PAIRS),
    Fault("decode-tail-not-masked", "        if (masked) mask(tile);\n", "", FULL),
    Fault("decode-mask-one-key-too-many", ">= ends_of_keys[e / 2]", "> ends_of_keys[e / 2]", CAUSAL),
    Fault("decode-masked-tile-too-late", "chain.keys(rows.first_query).end) / kBlockKv", "p.len_kv) / kBlockKv", CAUSAL),
    Fault(
        "decode-rows-of-the-first-group",
        "(S, smem.q_tile(q_state.stage, tile_head), row_group * 64,",
        "(S, smem.q_tile(q_state.stage, tile_head), 0,",
        ROWS,
    ),
    Fault("decode-row-max-too-low", "return 0x1p12f", "return 0x1p72f", LOW),
    Fault("decode-output-not-rescaled", "if (has_rows && softmax.needs_rescale) softmax.rescale(O);", "", RISING),
    Fault("decode-values-of-the-next-tile", "issue_pv(P, stage);", "issue_pv(P, own_stage());", ROWS),
    Fault("decode-last-tile-without-values", "return drain(P[1]);", "return;", ROWS),
    Fault("decode-softmax-of-the-part-before", "        softmax.restart();\n", "", FULL),
]
PARTS = [
    Fault(
        "decode-queries-released-too-early",
        "            smem.q_pipeline.consumer_wait(q_state);\n",
        "            barrier_warp_sync();\n            smem.q_pipeline.consumer_release(q_state.stage, lane_index() == 0);\n"
        "            smem.q_pipeline.consumer_wait(q_state);\n",
        ONE_TILE,
    ),
    Fault("decode-last-tile-of-a-share-skipped", "(shares.first_tile(block + 1)),", "(shares.first_tile(block + 1) - 1),", FULL),
    Fault("decode-tile-on-the-border-twice", "begin(shares.first_tile(block)),", "begin(max(0, shares.first_tile(block) - 1)),", FULL),
    Fault("decode-other-key-group-not-added", " + __uint_as_float(given[e]) * factors[e / 2][1]", "", FULL),
    Fault("decode-sum-of-one-key-group", "totals[h] = common.total(totals[h], fabsf(other[h].total));", "", FULL),
    Fault("decode-key-groups-without-factors", "O[j][e] * factors[e / 2][0]", "O[j][e]", RISING),
    Fault(
        "decode-huge-parts-compared-by-row-max", "fmaf(a.shift - b.shift, scale_log2, a.row_max - b.row_max)", "a.row_max - b.row_max", HUGE
    ),
    Fault("decode-part-left-in-memory", "O, statistics, parts.count - first,", "O, statistics, parts.count - 1 - first,", FULL),
    Fault("decode-one-slot-a-block", "slot_of(own_share(p), is_first)", "slot_of(own_share(p), true)", FULL),
    Fault("decode-one-counter-for-row-groups", "* Traits::kSharers + sharer,", "* Traits::kSharers,", ROWS),
    Fault("decode-neighbours-in-one-slot", "return tile_head * tiles.rows();", "return 0;", PAIRS),
    Fault("decode-counter-not-reset", "    *counter = 0;", "    ", FULL),
    Fault(
        "decode-statistics-of-the-other-row",
        "totals[h], origins[h]);\n        }\n        bar_sync",
        "totals[1 - h], origins[h]);\n        }\n        bar_sync",
        FULL,
    ),
    Fault("decode-lse-of-one-part", "merged.origin, merged.total);", "merged.origin, 0.5f * merged.total);", FULL),
    Fault("decode-unseen-rows-not-empty", "return total == 0.0f ? 0.0f : y;", "return total == 0.0f ? 1.0f / 0.0f : y;", UNSEEN),
]
_NO_WAIT = "read of what a tensor copy wrote, with no wait for its mbarrier"
_NOT_WRITTEN = "read of shared memory that nobody wrote"
# Each with what its check says.
RACES = [
    (_NO_WAIT, Fault("decode-wait-for-keys-removed", "        wait(smem.pipeline.full(stage), state.parity);\n", "", FULL)),
    (
        "read under an asynchronous copy that was not waited for",
        Fault("decode-wait-for-queries-removed", "            smem.q_pipeline.consumer_wait(q_state);\n", "", FULL),
    ),
    ("all 1 have arrived already", Fault("decode-keys-overwritten", "            smem.pipeline.producer_acquire(state);\n", "", FULL)),
    (
        "arrivals and 0 bytes",
        Fault("decode-keys-not-released", "smem.pipeline.consumer_release(stage, thread_index() % 128 == 0);", "", FULL),
    ),
    (
        "missing proxy fence",
        Fault(
            "decode-zeros-without-a-fence",
            "        fence_proxy_async();\n    }\n    // Of the stage's",
            "    }\n    // Of the stage's",
            FULL,
        ),
    ),
    (
        _NOT_WRITTEN,
        Fault("decode-rows-not-zeroed", "int i = q_rows * 8 + thread;", "int i = Traits::kRows * 8;", FULL),
    ),
    (_NOT_WRITTEN, Fault("decode-handed-over-unseen", "            bar_sync(kFilled, kPair);\n", "", FULL)),
    ("no wgmma_fence", Fault("decode-no-wgmma-fence", "        wgmma_fence();\n        gemm_output", "        gemm_output", FULL)),
    (
        "touched while a product was under way",
        Fault("decode-scores-not-waited-for", "wgmma_wait_group<0>();\n        make_p(P, tile", "make_p(P, tile", FULL),
    ),
    (
        "touched while a product was under way",
        Fault("decode-scores-of-the-next-tile-not-waited-for", "        wgmma_wait_group<1>();\n", "", ROWS),
    ),
    (
        "under a matrix product",
        Fault("decode-output-not-waited-for", "        wgmma_wait_group<0>();\n        launder(O);\n        smem", "        smem", FULL),
    ),
]
NO_LAUNCH_WAIT = Fault("decode-launch-before-not-waited-for", "    griddepcontrol_wait();", "    ", FULL)
FAULTS = [*ROWS_AND_KEYS, *PARTS, *(fault for _, fault in RACES)]
KINDS = {fault.name: kind for kind, faults in enumerate((ROWS_AND_KEYS, PARTS)) for fault in faults}


def of_part(fault: Fault) -> list[object]:
    return [KINDS.get(fault.name)]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_planted(request)


@pytest.mark.parametrize("name", SETTINGS)
def test_heads_in_several_blocks(name: str) -> None:
    """On as few SMs, and in all: 132, of which each has one tile or none."""
    for case in SETTINGS[name].cases:
        spec = SETTINGS[name].spec(TARGET)
        assert not control(spec, case, ORDERS, SMS)
        assert not why_rejected(sound_kernel(spec), case, ORDERS[:1])


@pytest.mark.parametrize("name", ["full", "rows"])
def test_bits_do_not_depend_on_who_comes_last(name: str) -> None:
    case, kernel = SETTINGS[name].cases[0], sound_kernel(SETTINGS[name].spec(TARGET))
    tensors, found = case.make("cpu"), set()
    for order in (*ORDERS, *(EmulationOrder(Schedule.RANDOM, seed=seed) for seed in range(4))):
        launch(kernel, case, tensors, order, sm_count=SMS, resident=SMS)
        found.add((tensors.out.view.numpy(force=True).tobytes(), tensors.lse.view.numpy(force=True).tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_a_launch_waits_for_the_one_that_it_overlaps(order: EmulationOrder) -> None:
    """The same call twice: the second launch finds the counters as the first one leaves them."""
    spec, (case, *_) = FULL.spec(TARGET), FULL.cases
    tensors = case.make("cpu")
    sound, faulty = sound_kernel(spec), emulated_kernel(spec, faulty_text(NO_LAUNCH_WAIT))
    program = case.program(FAMILY, spec.config, dataclasses.replace(device_of_target(TARGET), sm_count=SMS))
    (only,) = program.launches
    twice = dataclasses.replace(program, launches=(only._replace(overlaps=False), only._replace(overlaps=True)))
    sound.launch(twice, poisoned(tensors), order, limits=LIMITS)
    assert not case.rejections(tensors)
    with pytest.raises(EmulatorFaultError, match="has not waited for the launch that this one overlaps"):
        faulty.launch(twice, poisoned(tensors), order, limits=LIMITS)


def test_blocks_share_heads_where_the_tests_say_so() -> None:
    """Else the faults of parts would be caught by nothing but luck."""
    device = device_of_target(TARGET)
    for of in (FULL, ROWS):
        for case in of.cases:
            assert case.program(FAMILY, of.config, dataclasses.replace(device, sm_count=SMS)).buffers
    assert FULL.cases[0].program(FAMILY, FULL.config, device).buffers


@pytest.mark.parametrize("fault", listed([*ROWS_AND_KEYS, *PARTS], 2, of_part))
def test_caught(fault: Fault) -> None:
    assert caught_by(fault, ORDERS, SMS), f"fault {fault.name} was accepted"


@pytest.mark.parametrize("fault", listed([fault for _, fault in RACES], 1, of_part))
def test_a_race_is_caught_by_the_check_for_it(fault: Fault) -> None:
    (says,) = (says for says, planted in RACES if planted is fault)
    assert says in caught_by(fault, ORDERS, SMS)


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
