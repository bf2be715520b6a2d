"""Appending to a cache in the emulator: where new keys go, bit by bit, every way to rotate, wrong tables and lengths, planted faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.families import append_rows
from flashgen.codegen.families.append_rows import AppendRowsConfig
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import CacheDtype, Dtype, Problem, Sequences
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.append import drawn_tables
from tests.support.plan import few_of, planned, to_run
from tests.support.planted import Planted, rejected
from tests.support.runs import COMPILE_SECONDS, compile_ahead, emulated_kernel, emulated_text

FAMILY = find_family("append_rows")
WORKLOAD = Workload(3, 10, 5, 5, 48, pages=12, page_size=16, table_pages=3, new_keys=7)
TABLES = ("rotary_cos", "rotary_sin")
IN_FP32 = tuple(f"{name}_fp32" for name in TABLES)
LEAST, MOST = -(2**31), 2**31 - 1
ODD_BITS = (0x7FC1, 0xFFC1, 0x7F80, 0x8000, 0x0001, 0x3F80)  # of bf16: NaN with a payload, one with a sign, inf, -0, a denormal one, 1


def spec_of(head_dim: int = 64, head_dim_v: int = 64, dtype: Dtype = Dtype.BF16, target: str = "sm_90a") -> KernelSpec:
    problem = Problem(dtype, head_dim, head_dim_v, operation="append", sequences=Sequences.CACHED)
    found = find_target(target)
    return KernelSpec(FAMILY, problem, AppendRowsConfig(heads=4), found)


USUAL, WIDE, NARROW = spec_of(), spec_of(192, 128, Dtype.FP16), spec_of(72, 8)
E4M3 = replace(USUAL, problem=replace(USUAL.problem, dtype_kv=CacheDtype.E4M3))


@cache
def kernel_of(spec: KernelSpec) -> EmulatedKernel:
    return emulated_kernel(spec)


def drawn(spec: KernelSpec = USUAL, workload: Workload = WORKLOAD, width: int = 0) -> Tensors:
    """width: columns that are rotated, where these are not as usual."""
    tensors = Tensors.random(spec.problem, workload, generator := torch.Generator().manual_seed(3))
    if not width:
        return tensors
    found = drawn_tables(len(tensors["rotary_cos"]), width, generator)
    others = {name: table.to(tensors["q"].dtype) for name, table in zip(TABLES, found, strict=True)}
    return tensors.replacing(**others, **dict(zip(IN_FP32, found, strict=True)))


def without(tensors: Tensors, *names: str) -> Tensors:
    """Without operands that a call may leave out."""
    return Tensors(tensors.problem, tensors.workload, {name: tensor for name, tensor in tensors.items() if name not in names})


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    """All texts, on all cores."""
    texts = [params["fault"].text() for params in to_run(request) if "fault" in params]
    texts += [emulated_text(spec) for spec in (USUAL, *(params["spec"] for params in to_run(request) if "spec" in params))]
    compile_ahead(texts)


@pytest.fixture(autouse=True)
def many_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have as many heads as they may, as those of long prompts on a GPU."""
    monkeypatch.setattr(append_rows, "_SM_THREADS", 0)


WAYS = list(itertools.product((2, 6, 16, 18, 34, 64), (0, 1), (0, 1), (TABLES, IN_FP32), (0, 1)))


@pytest.mark.parametrize(("width", "interleaved", "by_query", "absent", "threads"), few_of(WAYS, *WAYS[::9]))
def test_every_way_to_rotate(
    width: int, interleaved: int, by_query: int, absent: Sequence[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths of which half is a multiple of 8, even, odd and 1; tables in the elements' type and in fp32; threads of some heads, or one."""
    monkeypatch.setattr(append_rows, "_SM_THREADS", 1024 * threads)
    scalars = {"rotary_dim": width, "rotary_interleaved": interleaved, "rotary_by_query": by_query}
    tensors = without(drawn(width=width), *absent).apart()
    assert not rejected(kernel_of(USUAL), tensors, scalars)


@pytest.mark.parametrize("spec", few_of([WIDE, NARROW]), ids=["wide", "narrow"])
def test_other_head_dims(spec: KernelSpec) -> None:
    for scalars in ({}, {"rotary_interleaved": 1}):
        assert not rejected(kernel_of(spec), drawn(spec).apart(), scalars)


SIZES = [
    replace(WORKLOAD, batch=1, len_q=1, new_keys=1),
    replace(WORKLOAD, page_size=1, table_pages=48, pages=150),
    replace(WORKLOAD, page_size=3, table_pages=16, pages=50),
    replace(WORKLOAD, batch=300, len_q=1, new_keys=1, heads_q=1, heads_kv=1, pages=900),  # more sequences than a block has threads
    replace(WORKLOAD, table_pages=0, len_kv=0),
    replace(WORKLOAD, new_keys=0),
    replace(WORKLOAD, len_q=0),
    replace(WORKLOAD, len_q=0, new_keys=0),
    replace(WORKLOAD, batch=0),
    replace(WORKLOAD, pages=0, page_size=0, len_kv=0),
    replace(WORKLOAD, heads_q=0, heads_kv=0),
]


@pytest.mark.parametrize("workload", SIZES, ids=lambda workload: workload.name)
def test_other_sizes(workload: Workload) -> None:
    assert not rejected(kernel_of(USUAL), drawn(workload=workload))


def test_tensors_past_32_bits() -> None:
    assert not rejected(kernel_of(USUAL), drawn(workload=replace(WORKLOAD, heads_q=5)).far())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def with_odd_bits(tensors: Tensors) -> Tensors:
    """New keys, values and queries of any bits at all."""
    generator = torch.Generator().manual_seed(1)
    for name in ("k_new", "v_new", "q"):
        of = bits(tensors[name])
        of.copy_(torch.randint(-(2**15), 2**15, of.shape, generator=generator, dtype=torch.int16))
        of.flatten()[: len(ODD_BITS)] = torch.tensor([n - 2**16 * (n >= 2**15) for n in ODD_BITS], dtype=torch.int16)
    return tensors


def appended(tensors: Tensors) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The caches' bits as they must be where nothing is rotated, and which of their rows are written: by a loop over all new keys."""
    caches, lengths = {name: bits(tensors[name]).clone() for name in ("k_cache", "v_cache")}, tensors["cache_seqlens"].tolist()
    pages, page_size = tensors["k_cache"].shape[:2]
    written = torch.zeros(pages, page_size, dtype=torch.bool)
    for b, length in enumerate(lengths):
        table = tensors["block_table"][b].tolist() if "block_table" in tensors else [b]
        for i in range(tensors["k_new"].shape[1]):
            entry, row = divmod(max(length, 0) + i, page_size)
            if 0 <= entry < len(table) and 0 <= table[entry] < pages:
                for name, new in (("k_cache", "k_new"), ("v_cache", "v_new")):
                    caches[name][table[entry], row] = bits(tensors[new])[b, i]
                written[table[entry], row] = True
    return caches, written


@pytest.mark.parametrize("table", [True, False])
def test_what_is_not_rotated_keeps_its_bits(table: bool) -> None:
    """Whatever they are: all of it without tables."""
    tensors = without(with_odd_bits(drawn()), *TABLES, *IN_FP32, *([] if table else ["block_table"])).apart()
    caches, written = appended(tensors)
    assert written.any()
    run_on_cpu(kernel_of(USUAL), tensors)
    for name, expected in caches.items():
        assert torch.equal(bits(tensors[name]), expected)
    assert torch.equal(bits(tensors["q_rotated"]), bits(tensors["q"]))


@pytest.mark.parametrize(("width", "interleaved"), list(itertools.product((6, 16, 34), (0, 1))))
def test_columns_behind_the_rotated_ones_keep_their_bits(width: int, interleaved: int) -> None:
    tensors = with_odd_bits(drawn(width=width))
    caches, written = appended(tensors)
    run_on_cpu(kernel_of(USUAL), tensors, {"rotary_dim": width, "rotary_interleaved": interleaved})
    found = bits(tensors["k_cache"])
    assert torch.equal(found[..., width:], caches["k_cache"][..., width:])
    assert torch.equal(found[~written], caches["k_cache"][~written])
    assert torch.equal(bits(tensors["v_cache"]), caches["v_cache"])
    assert torch.equal(bits(tensors["q_rotated"])[..., width:], bits(tensors["q"])[..., width:])


WRONG_LENGTHS = [[-3, -7, 0], [LEAST, -1, 47], [MOST, 48, 42], [41, MOST - 3, 15]]
WRONG_ENTRIES = [[-1, 0, 12], [LEAST, MOST, 3], [11, 13, -12]]


@pytest.mark.parametrize("lengths", [[0, 14, 40], *WRONG_LENGTHS])
@pytest.mark.parametrize("entries", [[4, 5, 6], *WRONG_ENTRIES])
def test_what_the_device_says_wrong_reaches_nothing(lengths: list[int], entries: list[int]) -> None:
    """All rows that are there are written, and no others: the emulator sees what is read and written outside of tensors."""
    tensors = without(drawn(), *TABLES, *IN_FP32)
    tensors["cache_seqlens"].copy_(torch.tensor(lengths))
    tensors["block_table"][1].copy_(torch.tensor(entries))
    caches, _ = appended(tensors)
    run_on_cpu(kernel_of(USUAL), tensors)
    for name, expected in caches.items():
        assert torch.equal(bits(tensors[name]), expected)
    assert tensors["lengths"].tolist() == [min(max(length, 0) + 7, 48) for length in lengths]


def usual() -> Tensors:
    return drawn().apart()


def odd() -> Tensors:
    """Half of the rotated columns is 18."""
    return drawn(NARROW).apart()


def in_fp32() -> Tensors:
    return without(drawn(), *TABLES)


def crowded() -> Tensors:
    """Sequences that begin before the first key, or have no room; and pages that are not there."""
    tensors = drawn()
    tensors["cache_seqlens"].copy_(torch.tensor([-3, 45, MOST - 3]))
    tensors["block_table"][1, 2] = 12
    return tensors


def full() -> Tensors:
    """The last of three sequences is of the last pages, and has no room."""
    tensors = drawn()
    tensors["block_table"].copy_(torch.arange(9).view(3, 3) + 3)
    tensors["cache_seqlens"].copy_(torch.tensor([4, 5, 48]))
    return tensors


def of_e4m3() -> Tensors:
    """With descales of all heads and sequences, and some values that are too large for an element."""
    tensors = drawn(E4M3)
    tensors["v_new"][:, ::3] *= 2000.0
    return tensors.apart()


def without_table() -> Tensors:
    return without(drawn(), "block_table")


def planted(
    name: str, find: str, replace_by: str, make: Callable[[], Tensors] = usual, spec: KernelSpec = USUAL, **scalars: float
) -> Planted:
    return Planted(name, spec, find, replace_by, make, tuple(scalars.items()))


K_ROW, V_ROW = "of.token;\n        Element* to = cache.row(p.k_cache", "of.token;\n        Element* to = cache.row(p.v_cache"
FAULTS = [
    planted("key-one-position-on", K_ROW, K_ROW.replace(";", " + 1;", 1)),
    planted("value-one-position-back", V_ROW, V_ROW.replace(";", " - 1;", 1)),
    planted("key-of-the-first-token", "of.token * p.k_new_row", "0 * p.k_new_row"),
    planted("e4m3-multiplied", "x[2 * i] / descale", "x[2 * i] * descale", of_e4m3, E4M3),
    planted("e4m3-descale-of-the-first-head", "descales[h * descale_stride]", "descales[0]", of_e4m3, E4M3),
    planted("e4m3-descale-of-the-first-sequence", "p.v_descale + of.batch * p.v_descale_batch", "p.v_descale", of_e4m3, E4M3),
    planted("e4m3-descale-of-keys", "p.v_descale == nullptr ? nullptr : p.v_descale +", "p.k_descale +", of_e4m3, E4M3),
    planted("e4m3-columns-not-in-pairs", "h * stride + column / 2)", "h * stride + column)", of_e4m3, E4M3),
    planted("value-by-strides-of-keys", "of.head * p.v_new_head", "of.head * p.k_new_head"),
    planted("values-in-the-keys-cache", "cache.row(p.v_cache, ", "cache.row(p.k_cache, "),
    planted("key-of-the-first-head", "to + of.head * p.k_cache_head", "to"),
    planted("rows-by-the-page's-stride", "page_size) * row_stride", "page_size) * page_stride"),
    planted("first-page-of-the-table", "table[batch * table_batch + of_table]", "table[batch * table_batch]"),
    planted("table-one-off", "table_batch + of_table]", "table_batch + max(of_table - 1, 0)]"),
    planted("table-of-the-first-sequence", "table[batch * table_batch + of_table]", "table[of_table]"),
    planted("page-of-another-sequence", "table == nullptr ? batch", "table == nullptr ? batch + 1", without_table),
    planted("pages-where-there-is-one", "p.block_table == nullptr ? min(p.table_pages, 1) : p.table_pages", "p.table_pages", without_table),
    planted("page-that-is-not-there", "if (page < 0 || page >= pages) return nullptr;", "", crowded),
    planted("page-before-the-first-one", "page < 0 || page >= pages", "page > pages", crowded),
    planted(
        "position-before-the-first-one",
        "i64{max(p.cache_seqlens[of.batch], 0)} + of.token;\n        Element* to = cache.row(p.k_cache",
        "max(i64{p.cache_seqlens[of.batch]} + of.token, i64{0});\n        Element* to = cache.row(p.k_cache",
        crowded,
    ),
    planted("position-behind-the-last-one", "position >= most()", "position > most()", full),
    planted(
        "position-in-32-bits",
        "position = i64{max(p.cache_seqlens[of.batch], 0)} + of.token;\n        Element* to = cache.row(p.v_cache",
        "position = static_cast<int>(u32(p.cache_seqlens[of.batch]) + of.token) & 31;\n        Element* to = cache.row(p.v_cache",
        crowded,
    ),
    planted("rotated-to-the-other-side", "if (!is_second)", "if (is_second)"),
    planted("rotated-without-a-sign", "if (!is_second) found.sine[e] = -found.sine[e];", ""),
    planted("halves-for-interleaved", "p.rotary_interleaved != 0}", "false}", usual, rotary_interleaved=1),
    planted("interleaved-for-halves", "p.rotary_interleaved != 0}", "true}"),
    planted("pairs-of-columns-with-themselves", "own.pairs[i] << 16 | own.pairs[i] >> 16", "own.pairs[i]", usual, rotary_interleaved=1),
    planted(
        "pairs-of-columns-with-the-next", "interleaved ? column / 2 :", "interleaved ? (column + 1) / 2 :", usual, rotary_interleaved=1
    ),
    planted("other-half-of-the-head", "half = columns / 2;\n        if (in", "half = columns;\n        if (in"),
    planted("other-column-itself", "first < half ? first + half : first - half", "first"),
    planted("other-of-the-first-head", "from + h * stride, column)", "from, column)"),
    planted("angles-of-the-first-half", "first < half ? first : first - half", "first"),
    planted("cosine-for-sine", "sines.load_chunk(found.sine,", "cosines.load_chunk(found.sine,"),
    planted("sine-for-cosine-of-odd-halves", "found.cosine[e] = cosines.load(", "found.cosine[e] = sines.load(", odd, NARROW),
    planted("chunks-of-odd-halves", "!interleaved && columns % 16 == 0", "!interleaved", odd, NARROW),
    planted("angle-of-the-column", ": column < half ? column : column - half);", ": column / 2);", odd, NARROW),
    planted("rotated-beyond-the-width", "if (first + 2 * i < columns) chunk", "chunk", odd, NARROW),
    planted("tables-beyond-their-end", "min(position, i64{positions} - 1)", "position"),
    planted(
        "angles-before-the-first-one",
        "i64{max(p.cache_seqlens[of.batch], 0)} + (p.rotary",
        "i64{max(-p.cache_seqlens[of.batch], 0)} + (p.rotary",
        crowded,
    ),
    planted(
        "fp32-tables-as-elements",
        "if (fp32 == nullptr) return Chunk::load(elements + at).unpack(x);",
        "return Chunk::load(fp32 + at / 2).unpack(x);",
        in_fp32,
    ),
    planted("second-half-of-fp32-tables", "Chunk::load(fp32 + at + i * 4)", "Chunk::load(fp32 + at)", in_fp32),
    planted("queries-by-number-all-the-same", "(p.rotary_by_query != 0 ? of.token : 0)", "of.token", usual, rotary_by_query=0),
    planted("queries-at-one-position", "(p.rotary_by_query != 0 ? of.token : 0)", "0"),
    planted("queries-as-keys-have-heads", "p.len_q, p.heads_q,", "p.len_q, p.heads_kv,"),
    planted("queries-where-they-came-from", "of.head * p.q_rotated_head", "of.head * p.q_head"),
    planted("lengths-before", "} + p.new_keys", "}"),
    planted("lengths-below-0", "max(p.cache_seqlens[batch], 0)", "p.cache_seqlens[batch]", crowded),
    planted("lengths-beyond-the-cache", "+ p.new_keys, cache.most())", "+ p.new_keys, i64{1} << 30)", crowded),
    planted("lengths-of-a-block", "batch += kThreads", "batch += p.batch", lambda: drawn(workload=SIZES[3])),
    planted("last-chunk-of-keys", "index < p.key_threads", "index < p.key_threads - 1"),
    planted("heads-that-are-not-there", "min(thread_heads, counts.heads - head)", "thread_heads"),
    planted("heads-of-the-first-group", "* counts.groups) * thread_heads", "* counts.groups)"),
    planted("heads-of-one-row", "to + h * stride + column", "to + column"),
    planted("rows-without-the-block", "(block_index() - 1) * kThreads + thread_index()", "thread_index()"),
]
QUICK = 1


@pytest.mark.parametrize(
    "fault",
    planned(
        FAULTS,
        QUICK,
        family=lambda fault: fault.spec.family.name,
        kinds=lambda fault: (fault.name.split("-")[0], fault.make.__name__),
        name=lambda fault: fault.name,
        seconds=lambda fault: COMPILE_SECONDS,
        fault=True,
    ),
)
def test_caught(fault: Planted) -> None:
    assert fault.caught_by(), f"fault {fault.name} was accepted"


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
