"""Keys in pages of a cache in the decode kernel for Hopper: by the numerics rule, with NaN in all that no sequence uses; planted faults."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulationOrder, Schedule
from flashgen.build.emulator.memory import MemoryView
from flashgen.codegen.cached import ENTRIES
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.families.attention_decode_sm90.boxes import PART_COST
from flashgen.codegen.families.attention_decode_sm90.config import AttentionDecodeSm90Config
from flashgen.codegen.modifier import with_sizes_to_verify
from flashgen.codegen.operands import Role
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.program import Program
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import view_of
from flashgen.launch.tensors import Tensors
from flashgen.numerics.caches import poison_unused
from flashgen.numerics.rule import Verdict
from flashgen.verification.expected import Expected
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, planned_cases, planned_faults, why_caught
from tests.support.plan import few_of, of_family
from tests.support.runs import LIMITS, emulated_kernel, emulated_text

SMS = 7  # so few that blocks have several heads, and heads several blocks
ORDERS = (EmulationOrder(), EmulationOrder(Schedule.REVERSED, late_copies=False), EmulationOrder(Schedule.AHEAD))


def kernel_of(head_dim: int, mask: Mask, config: AttentionDecodeSm90Config, dtype: Dtype = Dtype.FP16, *modifiers: str) -> NamedKernel:
    return NamedKernel("attention_decode_sm90", head_dim, mask, False, modifiers, config, dtype, Sequences.CACHED)


TWO_KEY_GROUPS = AttentionDecodeSm90Config(row_groups=1, key_groups=2, block_kv=32, stages=4)
TWO_ROW_GROUPS = AttentionDecodeSm90Config(row_groups=2, key_groups=1, block_kv=48, stages=3)


KERNELS = {
    "keys": kernel_of(64, Mask.FULL, TWO_KEY_GROUPS),
    "rows": kernel_of(64, Mask.CAUSAL, TWO_ROW_GROUPS, Dtype.BF16),
    "wide": kernel_of(128, Mask.CAUSAL, AttentionDecodeSm90Config(row_groups=1, key_groups=2, block_kv=64, stages=4), Dtype.BF16),
    "one": kernel_of(72, Mask.FULL, AttentionDecodeSm90Config(row_groups=1, key_groups=1, block_kv=96, stages=2)),
    "tree": kernel_of(64, Mask.FULL, TWO_KEY_GROUPS, Dtype.FP16, "tree_mask"),
    "tree-rows": kernel_of(64, Mask.CAUSAL, TWO_ROW_GROUPS, Dtype.BF16, "boolean_mask", "sinks", "tree_mask"),
    "mask": kernel_of(64, Mask.CAUSAL, TWO_KEY_GROUPS, Dtype.BF16, "boolean_mask"),
    "bias": kernel_of(64, Mask.FULL, TWO_ROW_GROUPS, Dtype.FP16, "bias_fp32", "softcap"),
    "alibi": kernel_of(64, Mask.CAUSAL, TWO_KEY_GROUPS, Dtype.FP16, "alibi", "sinks"),
    "window": kernel_of(64, Mask.CAUSAL, TWO_KEY_GROUPS, Dtype.BF16, "sinks", "window"),
    "window-rows": kernel_of(64, Mask.FULL, TWO_ROW_GROUPS, Dtype.FP16, "boolean_mask", "softcap", "window"),
    "chunk": kernel_of(64, Mask.CAUSAL, TWO_KEY_GROUPS, Dtype.FP16, "chunk", "tree_mask"),
}
QUERIES = {
    **{"keys": 2, "rows": 20, "wide": 4, "one": 1, "tree": 11, "tree-rows": 33, "mask": 9, "bias": 40, "alibi": 7},
    **{"window": 5, "window-rows": 35, "chunk": 9},
}


@dataclass(frozen=True)
class Cache:
    """page: keys of a page; pages: of a sequence; padding: None without it. shared: whether sequences share three pages.

    table: whether there is one; local: number of the window, and of the chunks, that a kernel with such has
    """

    page: int
    pages: int
    lengths: tuple[int, ...]
    padding: tuple[int, ...] | None = None
    shared: bool = False
    table: bool = True
    sm_count: int = SMS
    local: int = 1

    def make(self, kernel: str) -> Tensors:
        """The tensors of a call of the kernel of that name; what no sequence uses is NaN."""
        return self.of(KERNELS[kernel].spec().problem, QUERIES[kernel])

    def of(self, problem: Problem, len_q: int, heads: tuple[int, int] = (6, 2)) -> Tensors:
        """The same of any kernel of a problem, with so many queries of each sequence."""
        batch = len(self.lengths)
        pages = 3 if self.shared else batch * self.pages + 1
        size = {"page_size": self.page, "table_pages": self.pages, "pages": pages}
        workload = with_sizes_to_verify(problem, Workload(batch, *heads, len_q, self.page * self.pages, **size), self.local)
        tensors = Tensors.random(problem, workload, torch.Generator().manual_seed(5))
        tensors["cache_seqlens"].copy_(torch.tensor(self.lengths))
        tensors["cache_leftpad"].copy_(torch.tensor(self.padding or [0] * batch))
        if not self.table:
            tensors = Tensors(problem, workload, {name: one for name, one in tensors.items() if name != "block_table"})
        if self.padding is None:
            tensors = Tensors(problem, workload, {name: one for name, one in tensors.items() if name != "cache_leftpad"})
        return poisoned(tensors)


def poisoned(tensors: Tensors) -> Tensors:
    poison_unused(tensors)
    return tensors


CACHES = {
    "small-pages": Cache(16, 30, (480, 0, 33, 200, 1)),
    "least-pages": Cache(8, 50, (400, 97, 7), (0, 50, 1)),
    "odd-pages": Cache(48, 9, (432, 31, 95, 97, 64), (100, 0, 0, 33, 64)),
    "pages": Cache(64, 6, (384, 65, 63, 0), (63, 0, 5, 3)),
    "large-pages": Cache(128, 4, (512, 129, 127), (200, 128, 127)),
    "one-page": Cache(300, 1, (300, 33, 299, 0), (0, 1, 250, 7)),
    "no-table": Cache(300, 1, (300, 1, 129), table=False),
    "no-table-but-pages": Cache(64, 6, (64, 1, 400), (0, 0, 17), table=False),
    "short": Cache(64, 40, (3, 1), (0, 0)),  # fewer tiles than blocks
    "shared": Cache(16, 30, (480, 77, 300), shared=True),
    "equal": Cache(16, 12, (190,) * 7),  # whole heads
    "nearly-equal": Cache(16, 12, (*(190,) * 6, 120)),
    "alone": Cache(16, 60, (950,)),
}


def judged(spec: KernelSpec, text: Source, tensors: Tensors, orders: Iterable[EmulationOrder] = ORDERS[:1], sm_count: int = SMS) -> Verdict:
    """What the rule says of the kernel with that text on a GPU of few SMs: of the first order in which it rejects, or the last one."""
    expected, verdict = Expected.of(tensors), None
    for order in orders:
        run(spec, text, tensors, order, sm_count)
        verdict = expected.judge(tensors)
        if not verdict.ok:
            break
    assert verdict is not None
    return verdict


def run(spec: KernelSpec, text: Source, tensors: Tensors, order: EmulationOrder, sm_count: int = SMS) -> None:
    emulated_kernel(spec, text).launch(program_of(spec, tensors, sm_count), given_to(tensors), order, limits=LIMITS)


def program_of(spec: KernelSpec, tensors: Tensors, sm_count: int = SMS) -> Program:
    call = tensors.call()
    spec.family.require_call(call, spec.config)
    return spec.family.program(spec.config, call, replace(device_of_target(spec.target), sm_count=sm_count))


def given_to(tensors: Tensors) -> dict[str, MemoryView]:
    """With results of NaN."""
    tensors.poison()
    return {operand.name: view_of(operand.name, tensors[operand.name], operand.role is not Role.IN) for operand in tensors.operands}


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


def planned(cases: Iterable[tuple[str, ...]], seconds: float = 1.0) -> list[object]:
    return planned_cases(cases, KERNELS, seconds, ("attention_decode_sm90",))


@pytest.mark.parametrize("cache", few_of(CACHES, "small-pages", "pages", "one-page", "no-table", "equal"))
def test_each_sequence_has_its_own_keys(cache: str) -> None:
    spec = KERNELS["keys"].spec()
    verdict = judged(spec, emulated_text(spec), CACHES[cache].make("keys"))
    assert verdict.ok, verdict.message


# With modifiers those caches that differ in how key tiles begin and end.
MODIFIED = ("small-pages", "odd-pages", "one-page", "short", "equal", "alone")
ALL_ORDERS = [(name, cache) for name, kernel in KERNELS.items() for cache in (MODIFIED if kernel.modifiers else CACHES)]


@pytest.mark.parametrize(("kernel", "cache"), planned(ALL_ORDERS, 2.0))
def test_in_all_orders(kernel: str, cache: str) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), CACHES[cache].make(kernel), ORDERS)
    assert verdict.ok, verdict.message


WRONG: dict[str, tuple[Sequence[int], Sequence[int], Sequence[int]]] = {  # lengths, padding, entries of the table
    "negative": ([480, -(2**31), 33, -1, 1], [-(2**31), -1, -3, 0, 0], [-1, 3, -(2**31)]),
    "far": ([2**31 - 1, 481, 33, 480, 1], [5, 2**31 - 1, 33, 481, 0], [2**31 - 1, 151, 150]),
}


@pytest.mark.parametrize(("kernel", "wrong"), planned((kernel, wrong) for kernel in ("keys", "rows") for wrong in WRONG))
def test_what_the_device_says_wrongly_touches_nothing_outside(kernel: str, wrong: str) -> None:
    """The emulator has pages that nobody may touch around every tensor."""
    spec, tensors = KERNELS[kernel].spec(), CACHES["small-pages"].make(kernel)
    for name in ("k", "v"):
        tensors[name].nan_to_num_(0.25)
    lengths, padding, entries = WRONG[wrong]
    tensors["cache_seqlens"].copy_(torch.tensor(lengths))
    tensors = tensors.replacing(cache_leftpad=torch.tensor(padding, dtype=torch.int32))
    tensors["block_table"].view(-1, 3)[:] = torch.tensor(entries, dtype=torch.int32)
    verdict = judged(spec, emulated_text(spec), poisoned(tensors))
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("kernel", planned((kernel,) for kernel in ("keys", "rows")))
def test_bits_do_not_depend_on_pages(kernel: str) -> None:
    """Nor on who comes last."""
    spec, found = KERNELS[kernel].spec(), set()
    of = Cache(384, 1, (384, 300, 1, 47)).make(kernel)
    for page in (384, 128, 64, 16):
        pages = torch.randperm(4 * 384 // page, generator=torch.Generator().manual_seed(page)).int()
        table, workload = pages.view(4, -1), replace(of.workload, page_size=page, table_pages=384 // page, pages=len(pages))
        tensors = replace(of, workload=workload).replacing(block_table=table)
        for name in ("k", "v"):
            paged = torch.empty(len(pages), page, *of[name].shape[2:], dtype=of[name].dtype)
            paged[table.reshape(-1).long()] = of[name][of["block_table"].reshape(-1).long()].reshape(paged.shape)
            tensors = tensors.replacing(**{name: paged})
        for order in ORDERS:
            run(spec, emulated_text(spec), tensors, order)
            found.add(tuple(tensors[name].view(torch.int16).numpy(force=True).tobytes() for name in ("out", "lse")))
    assert len(found) == 1


@pytest.mark.parametrize("order", few_of(ORDERS, ORDERS[0]))
def test_a_launch_waits_for_the_one_that_it_overlaps(order: EmulationOrder) -> None:
    """The same call twice: the second launch finds the counters as the first one leaves them."""
    spec, tensors = KERNELS["keys"].spec(), CACHES["small-pages"].make("keys")
    program = program_of(spec, tensors)
    (only,) = program.launches
    twice = replace(program, launches=(only._replace(overlaps=False), only))
    assert only.overlaps
    emulated_kernel(spec).launch(twice, given_to(tensors), order, limits=LIMITS)
    assert Expected.of(tensors).judge(tensors).ok
    text, waits = emulated_text(spec), "ahead) griddepcontrol_wait();"
    assert text.text.count(waits) == 2
    text = Source(text.entry, text.text.replace(waits, "ahead) {}"))
    with pytest.raises(EmulatorFaultError, match="has not waited for the launch that this one overlaps"):
        emulated_kernel(spec, text).launch(twice, given_to(tensors), order, limits=LIMITS)


AHEAD = "KeySpan own = own_span(key_tiles);"  # of FirstKeys: a block's look at lengths ahead of the launch before's end
OTHERS_AHEAD = {"fewer": "own.end -= own.length() / 3", "more": "own.end = key_tiles.sequences.room", "none": "own.end = own.begin"}


@pytest.mark.parametrize(
    ("cache", "others"), few_of(itertools.product(("small-pages", "pages", "alone"), OTHERS_AHEAD), ("pages", "fewer"))
)
def test_lengths_that_change_while_the_launch_before_ends(cache: str, others: str) -> None:
    """A block sees others ahead than behind it, and what it found by these must not stand."""
    spec, tensors = KERNELS["keys"].spec(), CACHES[cache].make("keys")
    text = emulated_text(spec)
    assert text.text.count(AHEAD) == 1
    changed = Source(text.entry, text.text.replace(AHEAD, f"{AHEAD} if (ahead) {OTHERS_AHEAD[others]};"))
    verdict = judged(spec, changed, tensors, ORDERS)
    assert verdict.ok, verdict.message
    noticed = "return found != 0;"
    assert changed.text.count(noticed) == 1
    if others != "more":  # tiles without keys change nothing
        with contextlib.suppress(EmulatorFaultError):
            assert not judged(spec, Source(text.entry, changed.text.replace(noticed, "return false;")), tensors).ok


@pytest.mark.parametrize(
    ("cache", "cost"), few_of(itertools.product(("small-pages", "odd-pages", "short", "nearly-equal"), (0, 3)), ("odd-pages", 3))
)
def test_whatever_a_part_costs(cache: str, cost: int) -> None:
    """Shares may end among the tiles that stand for it: then a part has no key."""
    spec = KERNELS["keys"].spec()
    text, given = emulated_text(spec), f"{ENTRIES}, {PART_COST}>;"
    assert text.text.count(given) == 1
    other = Source(text.entry, text.text.replace(given, f"{ENTRIES}, {cost}>;"))
    verdict = judged(spec, other, CACHES[cache].make("keys"), ORDERS)
    assert verdict.ok, verdict.message


@pytest.mark.slow
@of_family("attention_decode_sm90", 6.0)
def test_more_sequences_than_shared_memory_has_entries_for() -> None:
    spec = KERNELS["keys"].spec()
    lengths = tuple(n % 9 if n % 200 else 50 for n in range(ENTRIES + 5))
    verdict = judged(spec, emulated_text(spec), Cache(16, 4, lengths).make("keys"))
    assert verdict.ok, verdict.message


FAULTS = [
    ("small-pages", fault_of("entry-one-off", "table_row + at.page;", "table_row + max(0, at.page - 1);", "keys")),
    ("small-pages", fault_of("pages-of-the-neighbour", "sequences.entry(head.batch, at)}", "sequences.entry(0, at)}", "keys")),
    ("small-pages", fault_of("pages-not-looked-up", "page = sequences.page_of(*entry);", "{}", "keys")),
    ("no-table", fault_of("first-page-alone", "sequences.page_of(head.batch), true}", "sequences.page_of(0), true}", "keys")),
    (
        "small-pages",
        fault_of(
            "boxes-of-the-tile-before",
            "span_of(head.batch), tile, box)",
            "span_of(head.batch), max(head.first, tile - 1), box)",
            "keys",
        ),
    ),
    ("odd-pages", fault_of("one-box-again", "span_of(head.batch), tile, box);", "span_of(head.batch), tile, 0);", "keys")),
    ("odd-pages", fault_of("boxes-in-one-place", "first * 128, map, barrier", "0 * first, map, barrier", "keys")),
    ("pages", fault_of("row-of-the-page-lost", "{at.row, head_kv, 0, true, sequences", "{0, head_kv, 0, true, sequences", "keys")),
    ("pages", fault_of("padding-read-as-keys", "padding == nullptr ? 0 : padding[batch]", "0", "wide")),
    ("pages", fault_of("padding-not-hidden", "row < keys.front || row >=", "row >=", "wide")),
    ("pages", fault_of("padding-not-masked", " || keys.begin_in(tile);", ";", "wide")),
    ("large-pages", fault_of("padding-of-V-stays", "values.clear_rows(0, front - first, thread, row_groups * 128);", "", "wide")),
    ("pages", fault_of("stale-tail-of-V", "values.clear_rows(max(end - first, 0), kBlockKv, thread, row_groups * 128);", "", "keys")),
    (
        "pages",
        fault_of(
            "half-of-the-tail-cleared", "const int thread = row_group * 128 + thread_index()", "const int thread = thread_index()", "rows"
        ),
    ),
    ("small-pages", fault_of("length-of-the-neighbour", "span(part.head.batch));", "span(max(0, part.head.batch - 1)));", "keys")),
    ("small-pages", fault_of("tiles-of-heads-before-lost", "number = tile - head * all;", "number = tile % count_of(0);", "keys")),
    ("odd-pages", fault_of("tiles-without-the-front", "(front(span) + span.length()", "(span.length()", "keys")),
    (
        "small-pages",
        fault_of("keys-in-what-a-part-costs", "max(begin - head.first - head.part_cost, 0); }", "begin - head.first; }", "keys"),
    ),
    ("small-pages", fault_of("copies-in-what-a-part-costs", "if (tile < head.first + head.part_cost) return {};", "", "keys")),
    ("small-pages", fault_of("tree-mask-of-earlier-keys", "column + j * 8 + e >= 0 && !seen[j][e]", "!seen[j][e]", "tree")),
    ("pages", fault_of("tree-mask-of-another-tile", "modified.look(tile);", "modified.look(tile + 1);", "tree")),
    ("pages", fault_of("tree-mask-of-another-query", "position.row(0, h), len_q - 1)", "position.row(0, 0), len_q - 1)", "tree")),
    (
        "pages",
        fault_of(
            "tree-mask-of-another-head", "own_row(row_group, 1)));\n        first", "own_row(row_group, 0)));\n        first", "chunk"
        ),
    ),
    ("pages", fault_of("mask-of-the-tile-before", "modified.load_ahead(tile + kKeyGroups);", "modified.load_ahead(tile);", "mask")),
    ("pages", fault_of("mask-of-the-other-key-group", "turn == key_group ? first :", "turn != key_group ? first :", "mask")),
    ("odd-pages", fault_of("mask-counted-from-the-box", "tile * kBlockKv - front}; }", "tile * kBlockKv}; }", "mask")),
    ("alone", fault_of("no-sink-in-the-sum-of-parts", "normaliser_with_sink(merged.total, height)", "normaliser(merged.total)", "alibi")),
    ("alone", fault_of("sink-of-another-head", "p.sinks[head], merged.origin", "p.sinks[0], merged.origin", "alibi")),
    ("equal", fault_of("no-sink-in-lse", "lse_with_sink(lse, p.sinks[head])", "lse", "alibi")),
    ("small-pages", fault_of("tiles-before-the-window", "head.part_cost + first_tile) *", "head.part_cost) *", "window")),
    ("small-pages", fault_of("keys-before-the-window", "row < begins_of_keys[e / 2] || row >=", "row >=", "window")),
    ("small-pages", fault_of("window-not-masked", " || modified.may_begin_in(tile);", ";", "window")),
    ("nearly-equal", fault_of("sequences-behind-the-last", "is_last = head.batch + 1 == sequences.batch;", "is_last = false;", "keys")),
]
_UNORDERED, _NOT_WRITTEN, _STILL_READ = "with no barrier between", "that nobody wrote", "over what another warp may still read"
# Each with what its check says.
RACES = [
    (
        "missing proxy fence",
        fault_of("zeros-without-a-fence", "        fence_proxy_async();\n        bar_sync(barrier", "        bar_sync(barrier", "keys"),
    ),
    (_UNORDERED, fault_of("zeros-of-others-not-waited-for", "        bar_sync(barrier, row_groups * 128);\n", "", "rows")),
    (_NOT_WRITTEN, fault_of("boxes-not-waited-for", "        if (number == 0) smem.box_pipeline.consumer_wait(batch);\n", "", "keys")),
    (_STILL_READ, fault_of("boxes-overwritten", "        smem.box_pipeline.producer_acquire(state);\n", "", "keys")),
    ("arrivals", fault_of("boxes-not-released", "        smem.box_pipeline.consumer_release(batch.stage, true);\n", "", "keys")),
]


def shows(kernel: str, planted: Fault, cache: Cache) -> str:
    """What rejects what a kernel with the fault does; empty if nothing does."""
    spec, tensors = KERNELS[kernel].spec(), cache.make(kernel)
    assert judged(spec, emulated_text(spec), tensors, ORDERS, cache.sm_count).ok
    return why_caught(KERNELS[kernel], planted, lambda text: judged(spec, text, tensors, ORDERS, cache.sm_count))


@pytest.mark.parametrize(("kernel", "planted"), planned_faults((of for _, of in FAULTS), KERNELS))
def test_a_fault_shows(kernel: str, planted: Fault) -> None:
    (cache,) = (cache for cache, (_, one) in FAULTS if one is planted)
    assert shows(kernel, planted, CACHES[cache])


@pytest.mark.parametrize(("kernel", "planted"), planned_faults((of for _, of in RACES), KERNELS))
def test_a_race_is_caught_by_the_check_for_it(kernel: str, planted: Fault) -> None:
    (says,) = (says for says, (_, one) in RACES if one is planted)
    assert says in shows(kernel, planted, Cache(8, 50, (400, 400, 390), sm_count=2))
