"""The generic decode kernel: heads whose keys several blocks share, the same bits whoever comes last, and planted faults."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from flashgen.build.emulator.kernel import EmulationOrder, Schedule
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.attention_decode.config import AttentionDecodeConfig
from flashgen.codegen.families.attention_decode.family import FAMILY
from flashgen.codegen.families.attention_forward.config import QueryPlace
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import view_of
from flashgen.launch.tensors import Tensors
from tests.support.cases import Layout
from tests.support.caught import TARGET, caught_by, compile_planted, control, listed, sound_kernel
from tests.support.fault import Fault, setting
from tests.support.runs import emulated_kernel, launch, why_rejected

ORDERS = (EmulationOrder(Schedule.ROUND_ROBIN, late_copies=True), EmulationOrder(Schedule.REVERSED, late_copies=False))
SMS = 7  # so few that blocks have several heads, and heads several blocks
WARPS = AttentionDecodeConfig(16, 16, 32, 2, 3, QueryPlace.REGISTERS)  # two, each with keys of its own
ROW_GROUPS = AttentionDecodeConfig(32, 16, 32, 4, 2, QueryPlace.SHARED)  # two, of two key groups
WIDE_WARPS = AttentionDecodeConfig(64, 32, 32, 4, 2, QueryPlace.SHARED)
given = partial(setting, config=WARPS, batch=3)

# Groups of 3, 5 and 2 heads. Keys end within a tile and within a warp's keys; and behind the first warp's.
FULL = given((4, 300), (1, 333), (2, 18), heads=(9, 3))
CAUSAL = given((5, 290), mask=Mask.CAUSAL, heads=(9, 3))
UNSEEN = given((9, 5), mask=Mask.CAUSAL, heads=(6, 3))
# In two slices of columns, of which the second is narrower. The next 16 bytes behind a tensor's row are no zeros.
WIDE = given((2, 100), heads=(9, 3), width=(72, 104), layout=Layout.PADDED)
RISING = given((3, 600), heads=(9, 3), rising=-40.0)
# Rounding a scaled maximum is worth more than an exponent's range.
HUGE = given((2, 200), heads=(9, 3), dtype=Dtype.BF16, magnitude=1e12)
# 20 rows and 45, of which the last tile has 13.
ROWS = given((4, 300), (9, 130), heads=(10, 2), batch=4, mask=Mask.CAUSAL, config=ROW_GROUPS)
TILES = given((40, 100), heads=(10, 2), batch=4, mask=Mask.CAUSAL, config=WIDE_WARPS)
EMPTY = given((3, 0), heads=(9, 3))
SETTINGS = {
    **{"full": FULL, "causal": CAUSAL, "unseen": UNSEEN, "wide": WIDE, "rising": RISING, "huge": HUGE},
    **{"rows": ROWS, "tiles": TILES, "empty": EMPTY},
}
QUICK = ("full", "rows")  # in every run; --slow has all

ROWS_AND_KEYS = [
    Fault("split-one-query-for-all-rows", "return divide(first_row + row, p.group_reciprocal);", "return 0 * row;", CAUSAL),
    Fault("split-heads-of-the-first-group", "{of_row, head_kv * p.group + first_row", "{of_row, first_row", FULL),
    Fault("split-rows-of-the-first-tile", "first_row((item.head - head_kv * p.row_tiles) * kRows)", "first_row(0)", ROWS),
    Fault("split-rows-past-the-last", "rows(min(kRows, p.len_q * p.group - first_row))", "rows(kRows)", FULL),
    Fault(
        "split-keys-of-the-first-head",
        "work.rows.batch, work.rows.head_kv, key);\n    }\n    __device__ __forceinline__ const Element* value_row",
        "work.rows.batch, 0 * key, key);\n    }\n    __device__ __forceinline__ const Element* value_row",
        FULL,
    ),
    Fault(
        "split-warps-read-the-same-keys",
        "len_kv = work.len_kv, first_key = tile * kBlockKv + key_group * kGroupKv;",
        "len_kv = work.len_kv, first_key = tile * kBlockKv;",
        FULL,
    ),
    Fault("split-tail-not-masked", "if (tile >= work.full_end ||", "if (false ||", FULL),
    Fault(
        "split-tail-of-the-first-warp",
        "work.rows.mask(S, first_row, first_key, chain)",
        "work.rows.mask(S, first_row, tile * kBlockKv, chain)",
        FULL,
    ),
    Fault("split-mask-one-key-too-many", "key >= seen.end ||", "key > seen.end ||", CAUSAL),
    Fault("split-masked-tile-too-late", "max(0, of_first.end) / kBlockKv", "max(0, of_last.end) / kBlockKv", CAUSAL),
    Fault("split-end-of-the-first-query", "max(0, of_last.end) + kBlockKv", "max(0, of_first.end) + kBlockKv", CAUSAL),
    Fault("split-values-behind-the-end", "items.p.v_row, keys);", "items.p.v_row, kGroupKv);", WIDE),
    Fault("split-last-columns-of-queries", "chunk * 8 < kColumnsValid", "chunk * 8 + 8 < kColumnsValid", WIDE),
    Fault("split-rows-of-the-first-warp", "query_tile.base + first_row * QueryTile::kRowBytes", "query_tile.base", ROWS),
    Fault("split-output-not-rescaled", "softmax.rescale(S, O);", "softmax.start(S);", RISING),
    Fault("split-step-lost-between-heads", "            free_slot = slot;\n", "            free_slot = slot, ++tile;\n", FULL),
]
PARTS = [
    Fault("split-last-tile-of-a-share-skipped", "(shares.first_tile(block + 1)),", "(shares.first_tile(block + 1) - 1),", FULL),
    Fault("split-tile-on-the-border-twice", "begin(shares.first_tile(block)),", "begin(max(0, shares.first_tile(block) - 1)),", FULL),
    Fault(
        "split-last-group-not-added",
        "for (int group = 0; group < kGroups; ++group)",
        "for (int group = 0; group < kGroups - 1; ++group)",
        FULL,
    ),
    Fault("split-groups-by-row-max", "__float_as_uint(softmax.shift[i][h])", "__float_as_uint(0.0f)", HUGE),
    Fault("split-slice-of-the-first", "store(row, slice * kSliceColumns + column,", "store(row, column,", WIDE),
    Fault(
        "split-sums-of-the-last-tiles",
        "        softmax.add_partial();\n#pragma unroll\n        for (int slice",
        "#pragma unroll\n        for (int slice",
        FULL,
    ),
    Fault("split-one-slot-a-block", "slot_of(own_share(p), part.is_first)", "slot_of(own_share(p), true)", FULL),
    Fault("split-counter-not-reset", "    *counter = 0;", "    //", FULL),
    Fault("split-part-taken-for-the-head", "if (part.is_whole()) {", "if (part.count() > 0) {", FULL),
    Fault(
        "split-statistics-of-the-next-row",
        "if (column == 0) partials.store_statistics(to,",
        "if (column == 0) partials.store_statistics(partials.row(own_slot, row ^ 1),",
        FULL,
    ),
    Fault("split-lse-of-one-part", "float total = merged.total;", "float total = 0.5f * merged.total;", FULL),
    Fault("split-unseen-rows-not-empty", "return total == 0.0f ? 0.0f : y;", "return total == 0.0f ? 1.0f / 0.0f : y;", UNSEEN),
]
_IN_FLIGHT = "read under an asynchronous copy that was not waited for"
_NOT_WRITTEN = "read of shared memory that nobody wrote"
_NO_BARRIER = "read of what another thread wrote, with no barrier between"
_OVERWRITE = "write over what another warp may still read, with no barrier between"
_WAIT = "cp_async_wait_group<kStages - 2>();"
# Each with what its check says.
RACES = [
    (_IN_FLIGHT, Fault("split-wait-for-keys-removed", _WAIT, "", FULL)),
    (_IN_FLIGHT, Fault("split-wait-one-group-short", _WAIT, "cp_async_wait_group<kStages - 1>();", FULL)),
    (_NOT_WRITTEN, Fault("split-barrier-after-queries", "barrier_sync();  // Q is here", "//", FULL)),
    (_NO_BARRIER, Fault("split-barrier-before-the-sum", "barrier_sync();  // what all groups have is here", "//", FULL)),
    (_OVERWRITE, Fault("split-barrier-before-the-next-sum", "barrier_sync();  // nobody reads what lay here, or Q, any more", "//", WIDE)),
    (_NO_BARRIER, Fault("split-barrier-of-a-key-group", "bar_sync(1 + key_group, kGroupThreads);", "barrier_warp_sync();", ROWS)),
    (
        _NOT_WRITTEN,
        Fault(
            "split-barrier-before-the-flag-is-read",
            "store_shared(flag, is_last_part(p.part_counters + parts.first_block, parts));\n        barrier_sync();",
            "store_shared(flag, is_last_part(p.part_counters + parts.first_block, parts));",
            FULL,
        ),
    ),
]
FAULTS = [*ROWS_AND_KEYS, *PARTS, *(fault for _, fault in RACES)]
KINDS = {fault.name: kind for kind, faults in enumerate((ROWS_AND_KEYS, PARTS)) for fault in faults}


def of_part(fault: Fault) -> list[object]:
    return [KINDS.get(fault.name)]


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_planted(request)


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS])
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


@pytest.mark.parametrize("family", ["attention_decode", "attention_decode_sm90"])
def test_low_scores_are_not_taken_for_no_keys(family: str) -> None:
    """Scaled scores below the origin of a row without keys, of a head in several blocks."""
    problem, workload, scalars = Problem(Dtype.BF16, 64), Workload(1, 2, 1, 1, 300), {"scale": 1.0}
    tensors = Tensors.random(problem, workload, torch.Generator().manual_seed(0))
    for name, value in (("q", -1.6e19), ("k", 1.6e19)):
        tensors[name].zero_()[..., 0] = value
    tensors.poison()
    found = find_family(family)
    kernel = emulated_kernel(KernelSpec(found, problem, found.default(problem, TARGET), TARGET))
    device = dataclasses.replace(device_of_target(TARGET), sm_count=SMS)
    views = {name: view_of(name, tensors[name], writable=name in tensors.outputs) for name in tensors}
    kernel.launch(found.program(kernel.spec.config, tensors.call(scalars), device), views)
    assert tensors["lse"].unique().tolist() == pytest.approx([-(1.6e19**2)], rel=0.02)
    wanted = tensors["v"].float().mean(1, keepdim=True).expand_as(tensors["out"])
    torch.testing.assert_close(tensors["out"].float(), wanted, atol=2**-8, rtol=0)


def test_blocks_share_heads_where_the_tests_say_so() -> None:
    """Else the faults of parts would be caught by nothing but luck."""
    device = dataclasses.replace(device_of_target(TARGET), sm_count=SMS)
    for of in (FULL, WIDE, ROWS, TILES):
        assert all(case.program(FAMILY, of.config, device).buffers for case in of.cases)


@pytest.mark.parametrize("fault", listed([*ROWS_AND_KEYS, *PARTS], 1, of_part))
def test_caught(fault: Fault) -> None:
    assert caught_by(fault, ORDERS, SMS), f"fault {fault.name} was accepted"


@pytest.mark.parametrize("fault", listed([fault for _, fault in RACES], 1, of_part))
def test_a_race_is_caught_by_the_check_for_it(fault: Fault) -> None:
    (says,) = (says for says, planted in RACES if planted is fault)
    assert says in caught_by(fault, ORDERS, SMS)


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
