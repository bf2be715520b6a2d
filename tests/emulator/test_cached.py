"""Sequences in a cache: decode kernels in the emulator, by the numerics rule. What no sequence uses of the cache is NaN, and what the
device says of lengths and pages may be wrong; faults that show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from flashgen.build.emulator.kernel import ORDERS, EmulationOrder, Schedule
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.attention_decode import shares
from flashgen.codegen.families.attention_decode.config import AttentionDecodeConfig
from flashgen.codegen.families.attention_forward.config import QueryPlace
from flashgen.codegen.family import find_family
from flashgen.codegen.modifier import with_sizes_to_verify
from flashgen.codegen.operands import Role
from flashgen.codegen.problem import Mask, Sequences
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import view_of
from flashgen.launch.tensors import Tensors
from flashgen.numerics.caches import cached_keys, poison_unused
from flashgen.numerics.rule import Verdict
from flashgen.verification.expected import Expected
from tests.support.cached_cases import TRACED, CachedCase, random_cached_cases, with_wrong_values
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, planned_cases, planned_faults, why_caught
from tests.support.plan import every_case, few_of
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

Cached = partial(NamedKernel, sequences=Sequences.CACHED)
WARPS = AttentionDecodeConfig(16, 16, 32, 2, 3, QueryPlace.REGISTERS)  # two, each with keys of its own
ROW_GROUPS = AttentionDecodeConfig(32, 16, 32, 4, 2, QueryPlace.SHARED)  # two, of two key groups
# Family, head dim, mask, whether gradients are deterministic, modifiers, a config other than the default.
KERNELS = {
    "warps": Cached("attention_decode", 64, Mask.CAUSAL, False, (), WARPS),
    "row-groups": Cached("attention_decode", 64, Mask.FULL, False, (), ROW_GROUPS),
    "wide": Cached("attention_decode", 72, Mask.CAUSAL, False, ()),
    "window": Cached("attention_decode", 64, Mask.CAUSAL, False, ("alibi", "sinks", "softcap", "window"), WARPS),
    "dense-of-any-batch": NamedKernel("attention_decode", 64, Mask.CAUSAL, False, (), batch_invariant=True),
    "of-any-batch": Cached("attention_decode", 64, Mask.CAUSAL, False, (), batch_invariant=True),
    "chunk": Cached("attention_decode", 64, Mask.FULL, False, ("chunk",), WARPS),
    "tree-mask": Cached("attention_decode", 64, Mask.FULL, False, ("tree_mask",), WARPS),
    "mask": Cached("attention_decode", 64, Mask.CAUSAL, False, ("boolean_mask",), WARPS),
    "prefix": Cached("attention_decode", 64, Mask.CAUSAL, False, ("prefix_len", "window"), ROW_GROUPS),
    "functions": Cached("attention_decode", 64, Mask.FULL, False, (TRACED,), WARPS),
    "all": Cached(
        "attention_decode", 64, Mask.CAUSAL, False, ("bias", "boolean_mask", "chunk", "prefix_len", "sinks", "tree_mask"), ROW_GROUPS
    ),
}
CACHED = tuple(name for name, kernel in KERNELS.items() if kernel.sequences is Sequences.CACHED)
FAMILIES = ("attention_decode",)
SM_COUNT = 7  # so few that blocks have several heads, and heads several blocks
LATE, EARLY = EmulationOrder(Schedule.ROUND_ROBIN, late_copies=True), EmulationOrder(Schedule.REVERSED, late_copies=False)


@dataclass(frozen=True)
class Shape:
    """lengths: with padding; page: keys of a page; padding: of every other sequence; shared: pages that all sequences begin with"""

    lengths: tuple[int, ...]
    page: int
    table_pages: int
    padding: int = 0
    shared: int = 0
    sms: int = SM_COUNT
    heads: tuple[int, int] = (6, 2)
    len_q: int = 3


# Keys end within a tile, with one, and a key before and behind its end, and so do the keys of each warp. Some sequences have none.
ENDS = (150, 0, 1, 31, 33, 64, 65, 16)
SHAPES = {
    "p16": Shape(ENDS, 16, 10),
    "p48": Shape(ENDS, 48, 4, padding=5),
    "p64": Shape(ENDS, 64, 3, shared=1),
    "p1": Shape((90, 0, 1, 33, 64), 1, 90, padding=1),
    "one-page": Shape((200, 3, 0, 199, 130), 200, 1, padding=17),
    "alone": Shape((333,), 16, 21),
    # Far fewer tiles than blocks, as most sequences are shorter than they may be.
    "short": Shape((3, 0, 40, 1), 16, 40, sms=132, heads=(4, 2)),
}
# More sequences than there are entries of sums, and than a block has threads.
MANY = Shape(tuple(n % 7 % 4 * 20 for n in range(1100)), 16, 4, heads=(1, 1), len_q=1)


def drawn(spec: KernelSpec, shape: Shape) -> Tensors:
    """The sequences of a shape, in pages of which the first one is no sequence's."""
    page, own = shape.page, [-(-length // shape.page) for length in shape.lengths]
    pages = sum(own) + 2
    sizes = len(shape.lengths), *shape.heads, shape.len_q, shape.table_pages * page
    workload = Workload(*sizes, pages=pages, page_size=page, table_pages=shape.table_pages)
    tensors = Tensors.random(spec.problem, with_sizes_to_verify(spec.problem, workload, 1), torch.Generator().manual_seed(5))
    order = (torch.randperm(pages - 2, generator=torch.Generator().manual_seed(6)) + 1).tolist()
    table = torch.full((len(own), shape.table_pages), -1, dtype=torch.int32)
    for row, count in zip(table, own, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)])
        row[: min(count, shape.shared)] = table[0, : min(count, shape.shared)]
    tensors["block_table"].copy_(table)
    tensors["cache_seqlens"].copy_(torch.tensor(shape.lengths))
    padding = [min(shape.padding, length) if i % 2 == 0 else 0 for i, length in enumerate(shape.lengths)]
    tensors["cache_leftpad"].copy_(torch.tensor(padding))
    poison_unused(tensors)
    return tensors


def launch(
    spec: KernelSpec, text: Source, tensors: Tensors, order: EmulationOrder = LATE, sms: int = SM_COUNT, scale: float | None = None
) -> None:
    """Runs the kernel with that text on poisoned results, as on a GPU of few SMs."""
    tensors.poison()
    call = tensors.call(None if scale is None else {"scale": scale})
    assert not spec.family.call_refusals(call, spec.config)
    given = {operand.name: view_of(operand.name, tensors[operand.name], operand.role is not Role.IN) for operand in tensors.operands}
    program = spec.family.program(spec.config, call, replace(device_of_target(spec.target), sm_count=sms))
    resident = program.launches[0].grid if order.schedule is Schedule.RANDOM else 1
    emulated_kernel(spec, text).launch(program, given, order, resident=resident, limits=LIMITS)


def judged(spec: KernelSpec, text: Source, tensors: Tensors, order: EmulationOrder = LATE, sms: int = SM_COUNT) -> Verdict:
    """What the rule says of it."""
    launch(spec, text, tensors, order, sms)
    return Expected.of(tensors).judge(tensors)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(("kernel", "shape"), planned_cases(itertools.product(CACHED, SHAPES), KERNELS, 1.5, FAMILIES))
def test_each_sequence_is_attention_of_its_own_keys(kernel: str, shape: str) -> None:
    spec = KERNELS[kernel].spec()
    tensors = drawn(spec, SHAPES[shape])
    for order in (LATE, EARLY):
        verdict = judged(spec, emulated_text(spec), tensors, order, SHAPES[shape].sms)
        assert verdict.ok, verdict.message


@pytest.mark.parametrize("kernel", planned_cases([("warps",), ("row-groups",)], KERNELS, 4.0, FAMILIES))
def test_bits_do_not_depend_on_who_comes_last(kernel: str, pytestconfig: pytest.Config) -> None:
    spec, found = KERNELS[kernel].spec(), set()
    tensors = drawn(spec, SHAPES["p16"])
    seeds = range(4 if every_case(pytestconfig) else 1)
    for order in (LATE, EARLY, *(EmulationOrder(Schedule.RANDOM, seed=seed) for seed in seeds)):
        assert judged(spec, emulated_text(spec), tensors, order).ok
        found.add((tensors["out"].view(torch.int16).numpy().tobytes(), tensors["lse"].numpy().tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("kernel", planned_cases([("warps",), ("row-groups",)], KERNELS, 2.0, ()))
def test_several_tiles_count_as_one_where_ints_would_not_count_all(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, shape = KERNELS[kernel].spec(), SHAPES["p16"]
    tensors = drawn(spec, shape)
    monkeypatch.setattr(shares, "MOST_TILES", 16 * 4)  # of 16 items
    program = spec.family.program(spec.config, tensors.call(), device_of_target(spec.target))
    assert program.launches[0].values["unit"] == 3
    for order in (LATE, EARLY):
        launch(spec, emulated_text(spec), tensors, order)
        verdict = Expected.of(tensors).judge(tensors)
        assert verdict.ok, verdict.message


def bits(tensors: Tensors, number: int) -> list[torch.Tensor]:
    """What was written for a sequence."""
    return [tensors["out"][number].view(torch.int16), tensors["lse"][number].view(torch.int32)]


@pytest.mark.parametrize("kernel", planned_cases([("of-any-batch",)], KERNELS, 8.0, ()))
def test_bits_do_not_depend_on_the_batch(kernel: str) -> None:
    """Each sequence alone and dense, of another size of cache, on another GPU; of no split, one, and several."""
    spec, alone = KERNELS[kernel].spec(), KERNELS["dense-of-any-batch"].spec()
    shape = Shape((4300, 0, 2048, 2049, 60), 48, 90, padding=7, heads=(3, 1))
    found = {order: drawn(spec, shape) for order in (LATE, EARLY)}
    for order, sms in ((LATE, 5), (EARLY, 132)):
        assert judged(spec, emulated_text(spec), found[order], order, sms).ok
    tensors = found[LATE]
    for number, (page, row) in enumerate(cached_keys(tensors)):
        one = {name: tensors[name][number : number + 1] for name in ("q", "out", "lse")}
        keys = {name: tensors[name][page, row][None].contiguous() for name in ("k", "v")}
        workload = Workload(1, *shape.heads, shape.len_q, len(page))
        dense = Tensors(alone.problem, workload, {**one, **keys, "out": one["out"].clone(), "lse": one["lse"].clone()})
        launch(alone, emulated_text(alone), dense, LATE, 3)
        for others in (bits(found[EARLY], number), bits(dense, 0)):
            assert all(map(torch.equal, bits(tensors, number), others)), number


@pytest.mark.parametrize("kernel", planned_cases([("warps",), ("row-groups",)], KERNELS, 1.0, ()))
def test_what_a_call_may_leave_out(kernel: str) -> None:
    """Without a table sequence b has page b alone, as many as there are, whatever the table's width."""
    spec = KERNELS[kernel].spec()
    workload = Workload(4, 6, 2, 3, 3 * 48, pages=3, page_size=48, table_pages=3)
    tensors = Tensors.random(spec.problem, workload, torch.Generator().manual_seed(5)).without_optional_inputs()
    assert "block_table" not in tensors
    poison_unused(tensors)
    for order in ORDERS:
        assert judged(spec, emulated_text(spec), tensors, order).ok, order


@pytest.mark.parametrize("kernel", planned_cases([("warps",), ("row-groups",)], KERNELS, 6.0, ()))
def test_more_sequences_than_entries(kernel: str) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(spec, MANY))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(
    ("kernel", "shape", "seed"), planned_cases(itertools.product(("warps", "window"), ("p16", "p1", "one-page"), (1, 2)), KERNELS, 1.0, ())
)
def test_what_the_device_says_wrongly_touches_nothing_outside(kernel: str, shape: str, seed: int) -> None:
    """The emulator has pages that nobody may touch around every tensor, and looks for writes beside outputs."""
    spec = KERNELS[kernel].spec()
    tensors = with_wrong_values(drawn(spec, SHAPES[shape]), seed)
    tensors.derive()
    verdict = judged(spec, emulated_text(spec), tensors)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize(("pages", "table_pages"), [(0, 6), (4, 0)], ids=["pages", "table"])
@pytest.mark.slow
def test_nothing_is_there(pages: int, table_pages: int) -> None:
    spec = KERNELS["warps"].spec()
    workload = Workload(3, 6, 2, 3, table_pages * 16, pages=pages, page_size=16, table_pages=table_pages)
    tensors = Tensors.random(spec.problem, workload, torch.Generator().manual_seed(5))
    tensors["cache_seqlens"].fill_(7)
    launch(spec, emulated_text(spec), tensors)
    assert not tensors["out"].any()
    assert (tensors["lse"] == -torch.inf).all()


CASES = random_cached_cases(12, seed=9, longest=250, pairs=2**18)


@pytest.mark.parametrize("case", few_of(CASES, CASES[3]), ids=lambda case: case.name)
def test_random_cases(case: CachedCase) -> None:
    family, target = find_family("attention_decode"), find_target("sm_90a")
    spec = KernelSpec(family, case.problem, family.default(case.problem, target), target)
    tensors = case.make("cpu")
    launch(spec, emulated_text(spec), tensors, scale=case.scale)
    assert case.rejections(tensors) == []


_TABLE = "return table + batch * table_row + at.page;"
_WHOLE = "if (keys >= kGroupKv)"
_WAIT = "cp_async_wait_group<0>();\n        group_barrier();"
FAULTS = [
    fault_of("entry-one-off", _TABLE, "return table + batch * table_row + max(at.page - 1, 0);", "warps"),
    fault_of("table-of-the-first-sequence", _TABLE, "return table + at.page;", "warps"),
    fault_of("row-of-page-one-off", "row_of_page(row), at.row);", "row_of_page(row), at.row ^ 1);", "row-groups"),
    fault_of("page-of-the-position", "return {page, position - page * page_size};", "return {page, position & 15};", "wide"),
    fault_of("stale-tail", _WHOLE, "if (keys != Entries::kNoTile)", "warps"),
    fault_of("stale-tail", _WHOLE, "if (keys != Entries::kNoTile)", "window"),
    fault_of("length-of-the-neighbour", "clamped(lengths[batch],", "clamped(lengths[max(batch - 1, 0)],", "warps"),
    fault_of("padding-ignored", "padding == nullptr ? 0 :", "true ? 0 :", "warps"),
    fault_of("padding-of-tiles-alone", "position = span.begin + work.begin", "position = work.begin", "row-groups"),
    fault_of(
        "last-tile-of-a-share-lost",
        "end_of_share(shares.first_tile(block + 1)),",
        "end_of_share(shares.first_tile(block + 1) - 1),",
        "warps",
    ),
    fault_of("next-sequence-of-the-first-head", "return {batch, head.head + is_last,", "return {batch, 0,", "row-groups"),
    fault_of("head-of-the-part", "return {batch, head, head * all + before,", "return {batch, 0, head * all + before,", "warps"),
    fault_of("entries-of-the-tile-before", "look_up_next(entries_of(before));", "look_up_next(entries_of(next));", "warps"),
    fault_of("entries-not-waited-for", _WAIT, "group_barrier();", "warps"),
    fault_of("rows-of-the-tile-before", "find_rows(entries_of(next));", "find_rows(known);", "warps"),
    fault_of("rows-without-barrier", "group_barrier();  // rows are here", "// rows are here", "row-groups"),
    fault_of("keys-without-barrier", "group_barrier();  // how many keys", "// how many keys", "row-groups"),
    fault_of(
        "values-of-the-keys",
        "u64 v = bits_of_row(items.sequences.key_row(p.v,",
        "u64 v = bits_of_row(items.sequences.key_row(p.k,",
        "warps",
    ),
    fault_of("tiles-not-waited-for", "barrier_sync();  // how many tiles", "// how many tiles", "warps"),
    fault_of(
        "head-of-the-first",
        "tensor + page_of(entry) * strides.batch + head * strides.head",
        "tensor + page_of(entry) * strides.batch",
        "warps",
    ),
    fault_of("one-part-fewer", "block_of(head.end() - 1) - first_block + 1,", "block_of(head.end() - 1) - first_block,", "warps"),
]
SHORT = [
    fault_of("blocks-without-tiles", "if (tiles < blocks) this->blocks", "if (false) this->blocks", "warps"),
    fault_of("tiles-behind-the-last-block", "block = min(block, blocks);", "", "row-groups"),
]
OF_MANY = [
    fault_of("sums-of-earlier-threads-lost", "before += all;", "", "warps"),
    fault_of("first-of-an-entry", "for (; number - before >= count;", "for (; false;", "warps"),
    fault_of("one-of-an-entry-not-counted", "min(first + entry_sequences, sequences.batch); ++batch)", "first; ++batch)", "row-groups"),
]
SPLITS = [
    fault_of("splits-of-a-tile", "part.first_in_head() * p.unit", "part.first_in_head()", "of-any-batch"),
    fault_of(
        "splits-of-twice-the-keys",
        "end_of_share(splits.first_tile(block + 1))",
        "end_of_share(splits.first_tile(block + 1) - 1)",
        "of-any-batch",
    ),
    fault_of("split-of-the-head-before", "split == head.end()) head =", "split > head.end()) head =", "of-any-batch"),
    fault_of("slots-of-one-split", "partials.slot_of(part.split, true)", "partials.slot_of(part.head.first, true)", "of-any-batch"),
    fault_of(
        "parts-of-one-split-fewer", "return {head.first, head.count, true}", "return {head.first, head.count - 1, true}", "of-any-batch"
    ),
]
_FIRST_COLUMN = "position.first_column + lane_index() % 4 * 2, columns"
MODIFIED = [
    fault_of(
        "mask-of-the-first-head", "of_row[1] = of_batch + second_head * head_step", "of_row[1] = of_batch + first_head * head_step", "mask"
    ),
    fault_of("mask-of-the-first-query", "min(position.row(0, h), len_q - 1)", "min(position.row(0, 0), len_q - 1)", "mask"),
    fault_of("mask-of-the-first-sequence", "first + batch * batch_step", "first + 0 * batch_step", "mask"),
    fault_of("mask-by-positions-with-padding", _FIRST_COLUMN, f"5 + {_FIRST_COLUMN}", "mask"),
    fault_of("mask-of-the-tile-before", "first_row, first_key + kBlockKv}", "first_row, first_key}", "mask"),
    fault_of("mask-of-the-first-tile", "first_row, work.begin * kBlockKv + key", "first_row, key", "mask"),
    fault_of("tree-mask-from-the-first-key", "                len_kv - len_q};", "                0};", "tree-mask"),
    fault_of("tree-mask-one-off", "                len_kv - len_q};", "                len_kv - len_q - 1};", "tree-mask"),
    fault_of("tree-mask-tile-left-out", "kTiles * 8 <= first_key", "kTiles * 8 <= first_key + 8", "tree-mask"),
    fault_of("tree-mask-of-the-first-head", "own = of_row[h] + ", "own = of_row[0] + ", "tree-mask"),
    fault_of("prefix-of-the-first-sequence", "lengths[batch], len_kv", "lengths[0], len_kv", "prefix"),
    fault_of("prefix-hidden-by-the-window", "key < seen.begin && key >= chain.prefix", "key < seen.begin", "prefix"),
    fault_of("tiles-of-the-window-alone", "chain.prefix > 0 ? 0 : of_first.begin", "of_first.begin", "prefix"),
    fault_of("functions-of-the-first-head", "heads[Position::kTwoHeads * (e / 2)]", "heads[0]", "functions"),
    fault_of("functions-of-the-first-sequence", "batch = entry, heads[0]", "batch = 0, heads[0]", "functions"),
]
WRONG = [
    fault_of("page-not-clamped", "min(max(entry, 0), pages - 1)", "max(entry, 0)", "warps"),
    fault_of("page-below-0", "min(max(entry, 0), pages - 1)", "min(entry, pages - 1)", "warps"),
    fault_of("length-not-clamped", "end = min(max(length, 0), room)", "end = max(length, 0)", "warps"),
    fault_of("padding-below-0", "min(max(padded, 0), end)", "min(padded, end)", "warps"),
]


def shows(kernel: str, planted: Fault, shapes: Sequence[tuple[Tensors, int]]) -> bool:
    """On any of these."""
    spec = KERNELS[kernel].spec()
    return any(why_caught(KERNELS[kernel], planted, partial(judged, spec, tensors=tensors, sms=sms)) for tensors, sms in shapes)


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(FAULTS, KERNELS))
def test_a_fault_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    assert shows(kernel, planted, [(drawn(spec, SHAPES[name]), SM_COUNT) for name in ("p48", "p16")])


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(SHORT, KERNELS))
def test_a_fault_of_short_sequences_shows(kernel: str, planted: Fault) -> None:
    assert shows(kernel, planted, [(drawn(KERNELS[kernel].spec(), SHAPES["short"]), SHAPES["short"].sms)])


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(OF_MANY, KERNELS, 6.0))
def test_a_fault_of_many_sequences_shows(kernel: str, planted: Fault) -> None:
    assert shows(kernel, planted, [(drawn(KERNELS[kernel].spec(), MANY), SM_COUNT)])


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(SPLITS, KERNELS, 4.0))
def test_a_fault_of_splits_shows(kernel: str, planted: Fault) -> None:
    shape = Shape((4300, 2048, 60), 48, 90, heads=(3, 1))
    assert shows(kernel, planted, [(drawn(KERNELS[kernel].spec(), shape), 2)])


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(MODIFIED, KERNELS))
def test_a_fault_of_modifiers_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    assert shows(kernel, planted, [(drawn(spec, SHAPES[name]), SM_COUNT) for name in ("p48", "p16", "one-page")])


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(WRONG, KERNELS))
def test_a_fault_of_wrong_values_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    made = [with_wrong_values(drawn(spec, SHAPES["p48"]), seed) for seed in (1, 2)]
    assert shows(kernel, planted, [(tensors, SM_COUNT) for tensors in made])
