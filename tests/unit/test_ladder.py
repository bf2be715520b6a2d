"""The ladder's families: how little their texts differ, what they refuse, what they launch, and what their models expect."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.families.flash1_forward.config import Flash1ForwardConfig, ParallelOver
from flashgen.codegen.families.flash1_forward.family import FAMILY as FLASH1
from flashgen.codegen.families.flash2_forward.config import Flash2ForwardConfig
from flashgen.codegen.families.flash2_forward.family import FAMILY as FLASH2
from flashgen.codegen.families.memory_efficient_attention.family import FAMILY as MEMORY_EFFICIENT
from flashgen.codegen.family import Family, Traffic, families, find_family
from flashgen.codegen.ladder import GridOrder, LadderFamily, WarpSplit
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import Buffer
from flashgen.codegen.target import find_target, targets
from flashgen.codegen.workload import Workload
from tests.support.programs import H200, program_of
from tools.rung_differences import PAIRS, TILES, differing, lines_of

FAMILIES = (MEMORY_EFFICIENT, FLASH1, FLASH2)
PROBLEM = Problem(Dtype.FP16, 64)
SM_90 = find_target("sm_90a")
KEYS = Flash2ForwardConfig(block_q=16, warp_split=WarpSplit.KEYS)
LONG = Workload(4, 16, 16, 8192, 8192)
MOST_LINES = 40  # by which two texts may differ


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0][0]}-{pair[1][0]}")
def test_an_idea_is_a_few_lines(pair: Any, mask: Mask) -> None:
    """And what only the launch decides leaves the text alone."""
    (_, *one), (name, *other) = pair
    lines = differing(lines_of(*one, mask), lines_of(*other, mask))  # type: ignore[call-arg]
    assert lines == 0 if "grid order" in name else 5 < lines <= MOST_LINES


def test_blocks_of_a_head_are_not_in_the_text() -> None:
    queries, heads = ({**TILES, "parallel_over": over} for over in ("queries", "heads"))
    assert lines_of("flash1_forward", queries) == lines_of("flash1_forward", heads)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/ladder.md").read_text(encoding="utf-8")
    for (name, *one), (other_name, *other) in PAIRS:
        assert f"| `{name}` | `{other_name}` | {differing(lines_of(*one), lines_of(*other))} |" in page  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_it_runs_by_name_only(family: LadderFamily) -> None:
    assert not family.automatic
    assert family.preference < 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_the_space_is_small_and_has_the_default(family: LadderFamily) -> None:
    for target, width in itertools.product(targets().values(), ((32, 32), (64, 64), (128, 128), (40, 128), (128, 40))):
        problem = Problem(Dtype.BF16, *width)
        legal = family.legal_configs(problem, target)
        assert 4 <= len(legal) <= 24, f"{target.name} {width}"
        assert family.default(problem, target) in legal


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_problems_that_it_cannot_compute(family: LadderFamily) -> None:
    assert family.refusals(PROBLEM, SM_90) == []
    assert family.refusals(Problem(Dtype.BF16, 60, 192), SM_90) == [
        "head_dim must be a multiple of 8 from 8 to 256; got 60 (nearest: 64)",
        f"head_dim_v must be at most 128 in {family.name}; got 192 (nearest: 128)",
    ]


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (Flash1ForwardConfig(), {"warps": 1, "block_q": 32}, "warps must be from 2 to 16; got 1 (nearest: 2)"),
        (Flash1ForwardConfig(), {"block_kv": 40}, "block_kv must be a multiple of 16 from 16 to 256; got 40 (nearest: 48)"),
        (
            Flash1ForwardConfig(),
            {"block_q": 96},
            "block_q must give each warp 16 or 32 rows, so 64 or 128 with warps 4; got 96 (nearest: 64)",
        ),
        (KEYS, {"block_q": 64}, "block_q must be 16 or 32 where warps divide the keys; got 64 (nearest: 32)"),
        (
            KEYS,
            {"block_kv": 96},
            "block_kv must be a multiple of 64, 16 keys for each of the warps that divide them; got 96 (nearest: 128)",
        ),
        (KEYS, {"warps": 8, "block_kv": 256}, ""),
    ],
)
def test_fields(config: Any, changes: dict[str, Any], reason: str) -> None:
    family = FLASH1 if isinstance(config, Flash1ForwardConfig) else FLASH2
    assert family.check(PROBLEM, config, SM_90) == []
    assert family.check(PROBLEM, dataclasses.replace(config, **changes), SM_90) == ([reason] if reason else [])


def test_the_rows_of_warps_that_divide_the_keys_must_fit_the_stages() -> None:
    (reason,) = FLASH2.check(Problem(Dtype.BF16, 8, 64), dataclasses.replace(KEYS, block_q=32, block_kv=64), SM_90)
    needed, ring = 4 * 32 * (4 + 64) * 4, 2 * 64 * (16 + 64) * 2
    assert reason == f"O of 4 warps needs {needed} B of the stages, which have {ring} B: raise block_kv or stages"


def test_the_grids_orders() -> None:
    workload = Workload(2, 6, 2, 300, 333)
    for grid_order, heads in ((GridOrder.TILE_BATCH_HEAD, 1), (GridOrder.BATCH_HEAD_TILE, 12)):
        (launch,) = program_of(FLASH2, PROBLEM, Flash2ForwardConfig(grid_order=grid_order), workload).launches
        assert launch.grid == 5 * 6 * 2
        assert launch.values["l2_group_heads"] == heads
        assert launch.values["l2_group_tiles"] == heads * 5


class TestSplits:
    """How many blocks share a head in FlashAttention's first version."""

    def splits(self, workload: Workload, over: ParallelOver = ParallelOver.QUERIES, **device: Any) -> int:
        return FLASH1.splits(
            PROBLEM, Flash1ForwardConfig(blocks_per_sm=2, parallel_over=over), workload, dataclasses.replace(H200, **device)
        )

    def test_one_where_heads_fill_the_gpu(self) -> None:
        resident = H200.target.blocks_resident(128, FLASH1.registers_cap(Flash1ForwardConfig(blocks_per_sm=2), SM_90), 32768)
        assert resident == 2
        assert self.splits(Workload(8, 33, 33, 4096, 4096)) == 1  # one whole wave of 264 blocks

    def test_many_where_heads_are_few(self) -> None:
        assert self.splits(Workload(1, 8, 8, 4096, 4096)) == 29  # 232 of the 264 blocks of a wave; the best, 30, has 240
        assert self.splits(Workload(1, 8, 8, 64 * 5, 4096)) == 5  # no more than query tiles

    def test_the_fewest_of_those_that_are_good_enough(self) -> None:
        heads = Workload(1, 88, 88, 4096, 4096)
        assert self.splits(heads) == 3  # 264 blocks
        assert self.splits(Workload(1, 90, 90, 4096, 4096)) == min(
            n
            for n in range(1, 31)
            if (w := 90 * n / 264) / -(-w // 1) >= 0.95 * max((v := 90 * m / 264) / -(-v // 1) for m in range(1, 31))
        )

    def test_one_where_it_is_asked_for(self) -> None:
        assert self.splits(Workload(1, 8, 8, 4096, 4096), ParallelOver.HEADS) == 1

    def test_launch_and_buffer(self) -> None:
        workload = Workload(1, 4, 2, 300, 333)
        program = program_of(FLASH1, PROBLEM, Flash1ForwardConfig(), workload)
        (launch,) = program.launches
        assert launch.grid == 4 * launch.values["splits"]
        assert launch.values["query_tiles"] == 5
        assert program.buffers == (Buffer("running_rows", 4 * 5 * 64 * (64 * 4 + 16)),)

    def test_nothing_is_launched_for_no_queries(self) -> None:
        program = program_of(FLASH1, PROBLEM, Flash1ForwardConfig(), Workload(1, 4, 2, 0, 333))
        assert program.launches[0].grid == program.buffers[0].bytes == 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_call_of_any_sizes_is_taken(family: LadderFamily) -> None:
    for sizes in ((1, 1), (0, 5), (5, 0), (4096, 1)):
        assert family.call_refusals(attention_call(PROBLEM, Workload(1, 2, 1, *sizes))) == []


class TestModel:
    """What each step of the ladder saves."""

    def seconds(self, family: LadderFamily, workload: Workload = LONG, **changes: Any) -> float:
        config = dataclasses.replace(family.default(PROBLEM, SM_90), **changes)
        return family.predict(PROBLEM, config, workload, H200).seconds

    def test_computing_scores_twice_takes_half_as_long_again(self) -> None:
        assert self.seconds(MEMORY_EFFICIENT) == pytest.approx(1.5 * self.seconds(FLASH2), rel=0.4)

    def test_output_in_memory_bounds_the_first_version(self) -> None:
        assert self.seconds(FLASH1) > 1.5 * self.seconds(FLASH2)
        assert self.seconds(FLASH1) < self.seconds(FLASH1, block_kv=64)

    def test_one_block_a_head_leaves_a_gpu_idle(self) -> None:
        few = Workload(1, 8, 8, 4096, 4096)
        assert self.seconds(FLASH1, few, parallel_over=ParallelOver.HEADS) > 3 * self.seconds(FLASH1, few)


# ---- traffic ----

FASTEST = tuple(find_family(f"attention_forward{name}") for name in ("", "_sm90"))
ALL = (find_family("standard_attention"), *FAMILIES, *FASTEST)
WHOLE = Workload(2, 8, 4, 1024, 2048)  # of whole tiles


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_traffic_is_what_the_papers_loops_say(family: Any) -> None:
    """Written out for whole tiles and no mask: N queries, M keys, T_r query tiles and T_c key tiles of a head, 2 bytes a number."""
    config = family.default(PROBLEM, SM_90)
    n, m, d, heads = WHOLE.len_q, WHOLE.len_kv, PROBLEM.head_dim, WHOLE.batch * WHOLE.heads_q
    rows, columns = n // config.block_q, m // config.block_kv
    keys = 2 * m * d  # bytes of all keys, or of all values
    found = family.traffic(PROBLEM, config, WHOLE, H200)
    assert found.reduced == 0
    if family is MEMORY_EFFICIENT:
        assert (found.read, found.written) == (heads * (2 * n * d + rows * 3 * keys), heads * 2 * n * d)
    elif family is FLASH2 or family in FASTEST:
        assert (found.read, found.written) == (heads * (2 * n * d + rows * 2 * keys), heads * 2 * n * d)
    elif family is FLASH1:
        running = (columns - 1) * n * (4 * d + 16)
        blocks = FLASH1.splits(PROBLEM, config, WHOLE, H200)
        assert (found.read, found.written) == (heads * (blocks * 2 * keys + columns * 2 * n * d + running), heads * (2 * n * d + running))
    else:
        assert found.read == heads * (2 * n * d + rows * 2 * keys + n * m * (4 + 2))
        assert found.written == heads * (2 * n * d + n * m * (4 + 2))


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_traffic_of_odd_sizes(family: Any, mask: Mask) -> None:
    """None without rows; without keys only the output; under a causal mask less, and never less than each operand once."""
    problem = dataclasses.replace(PROBLEM, mask=mask)
    config = family.default(problem, SM_90)
    assert family.traffic(problem, config, Workload(2, 4, 4, 0, 100), H200) == Traffic(0, 0)
    nothing = family.traffic(problem, config, Workload(2, 4, 4, 100, 0), H200)
    assert nothing.written == 2 * 4 * 100 * 64 * 2
    odd = Workload(2, 4, 4, 1001, 777)
    found, full = family.traffic(problem, config, odd, H200), family.traffic(PROBLEM, config, odd, H200)
    assert (found.read < full.read) is (mask is Mask.CAUSAL)
    assert found.read + found.written >= operation_of(problem).io_bytes(problem, odd)


@pytest.mark.parametrize(("mask", "keys"), [(Mask.FULL, (101,) * 7), (Mask.CAUSAL, (95, 96, 97, 98, 99, 100, 101))])
def test_standard_attention_reads_rows_of_scores_in_chunks(mask: Mask, keys: tuple[int, ...]) -> None:
    """S 16 bytes at a time, so 4 scores, and P 8: 7 queries of 101 keys, of which each sees as many as are listed."""
    family: Any = find_family("standard_attention")
    problem = dataclasses.replace(PROBLEM, mask=mask)
    d, found = problem.head_dim, family.traffic(problem, family.default(problem, SM_90), Workload(1, 1, 1, 7, 101), H200)
    read_of_s = sum(-(-seen // 4) * 4 for seen in keys) * 4
    assert found.read == (7 * d + 2 * 101 * d + 7 * 104) * 2 + read_of_s
    assert found.written == 7 * (104 * 4 + 104 * 2) + 7 * d * 2


def test_softmax_reads_a_row_in_each_pass() -> None:
    problem, workload = Problem(Dtype.FP32, operation="softmax"), Workload(2, 3, 3, 10, 50)
    moved = 2 * 3 * 10 * 50 * 4
    for name, passes in (("softmax_safe", 3), ("softmax_online", 2)):
        family = find_family(name)
        assert family.traffic(problem, family.default(problem, SM_90), workload, H200) == Traffic(passes * moved, moved)


def test_packed_heads_read_their_keys_once() -> None:
    family: Any = FASTEST[1]
    sets = WHOLE.batch * WHOLE.heads_q // 2
    config = dataclasses.replace(family.default(PROBLEM, SM_90), pack_gqa=2)
    found, n, d = family.traffic(PROBLEM, config, WHOLE, H200), WHOLE.len_q, PROBLEM.head_dim
    assert found.read == sets * 2 * (2 * n * d + n // config.queries * 2 * WHOLE.len_kv * d)
    assert found.written == sets * 2 * 2 * n * d


def test_a_family_whose_traffic_nobody_has_written_down_says_none() -> None:
    """Each that comes with the package says something: this is what another one has by itself."""
    assert all(type(family).traffic is not Family.traffic for family in families().values())
    assert Family.traffic(FLASH2, PROBLEM, FLASH2.default(PROBLEM, SM_90), WHOLE, H200) is None
