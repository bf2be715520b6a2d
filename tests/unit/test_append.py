"""Appending to a cache on machines without a GPU: what is refused, the operator, plans, and what these give their kernel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.families.append_rows import MAX_CHUNKS, AppendRowsConfig
from flashgen.codegen.family import find_family
from flashgen.codegen.operands import Call, Role
from flashgen.codegen.operation import find_operation, operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.launch import gpu
from flashgen.launch.append_arguments import AppendTensors, append_call, check_append
from flashgen.launch.tensors import Tensors
from flashgen.operators import append, plans
from flashgen.operators.append import append_plan_for, append_to_cache
from flashgen.selection import loaded
from flashgen.selection.picks import picked_spec
from flashgen.verification.screen import Screen
from tests.support.plain_kernels import plain_in_place_of_kernels
from tools.call_overhead import OnGpu

FAMILY, H200 = find_family("append_rows"), find_device("h200")
PROBLEM = Problem(Dtype.BF16, 16, 24, operation="append", sequences=Sequences.CACHED)
WORKLOAD = Workload(2, 4, 2, 5, 24, pages=7, page_size=8, table_pages=3, new_keys=5)
GPU = Gpu(0, H200, "uuid", "580.1")
FLAGS = {"rotary_interleaved": False, "by_query": True}


def given(kind: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor, **changes: Any) -> Any:
    """All tensors; of `changes`, sizes are others, and None takes a tensor away."""
    a: dict[str, Any] = {
        "batch": 2,
        "new": 5,
        "len_q": 5,
        "heads": 4,
        "heads_kv": 2,
        "pages": 7,
        "page": 8,
        "columns": 3,
        "width": 8,
        "d": 16,
        "d_v": 24,
        **changes,
    }
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(a.get("dtype", torch.bfloat16))

    of_tables = a.get("tables", torch.bfloat16)
    tensors: Any = AppendTensors(
        drawn(a["pages"], a["page"], a["heads_kv"], a["d"]),
        drawn(a["pages"], a["page"], a["heads_kv"], a["d_v"]),
        drawn(a["batch"], a["new"], a["heads_kv"], a["d"]),
        drawn(a["batch"], a["new"], a["heads_kv"], a["d_v"]),
        torch.tensor([3, 11, 0, 2][: a["batch"]], dtype=torch.int32),
        torch.randperm(max(a["pages"], a["batch"] * a["columns"]), generator=generator, device=generator.device)[
            : a["batch"] * a["columns"]
        ]
        .view(a["batch"], a["columns"])
        .int(),
        drawn(a["batch"], a["len_q"], a["heads"], a["d"]),
        *(drawn(40, a["width"] // 2).to(of_tables) for _ in range(2)),
    )
    without = {name: None for name in AppendTensors._fields if name in changes and changes[name] is None}
    return AppendTensors._make(None if one is None else kind(one) for one in tensors._replace(**without))


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has called nothing yet."""
    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda a: a._replace(k=None), r"^k must be given where v is; got none"),
    (lambda a: a._replace(v=None), r"^v must be given where k is; got none"),
    (lambda a: a._replace(rotary_sin=None), r"^rotary_sin must be given where rotary_cos is; got none"),
    (lambda a: a._replace(k_cache=a.k_cache[0]), r"^k_cache must have 4 dimensions \(pages, page_size, heads_kv, head_dim\); got 3"),
    (lambda a: a._replace(k=a.k[0]), r"^k must have 4 dimensions \(batch, length, heads, head_dim\); got 3"),
    (
        lambda a: a._replace(k_cache=a.k_cache.float()),
        r"^k_cache must be torch\.bfloat16 or torch\.float16, or torch\.float8_e4m3fn; got torch\.float32",
    ),
    (lambda a: a._replace(v_cache=a.v_cache.half()), r"^v_cache must have k_cache's dtype torch\.bfloat16; got torch\.float16"),
    (lambda a: a._replace(q=a.q.half()), r"^q must have k_cache's dtype torch\.bfloat16; got torch\.float16"),
    (lambda a: a._replace(k=a.k.to("meta")), r"^k must be on k_cache's device cpu; got meta"),
    (
        lambda a: a._replace(k_cache=a.k_cache[:1].expand(a.k_cache.shape)),
        r"^k_cache must have memory for each key that is added; got stride 0 in dimension 0, as expanded",
    ),
    (lambda a: a._replace(v_cache=a.v_cache[:6]), r"^v_cache must have k_cache's pages, page_size and heads \(7, 8, 2\); got \(6, 8, 2\)"),
    (lambda a: a._replace(k=a.k[:, :, :1]), r"^k must have k_cache's heads and head_dim \(2, 16\); got \(1, 16\)"),
    (lambda a: a._replace(v=a.v[..., :16]), r"^v must have v_cache's heads and head_dim \(2, 24\); got \(2, 16\)"),
    (lambda a: a._replace(k=a.k[:1]), r"^k must have a batch size of 2, the sequences of cache_seqlens; got 1"),
    (lambda a: a._replace(v=a.v[:, :4]), r"^v must have k's length 5; got 4"),
    (lambda a: a._replace(q=a.q[:1]), r"^q must have a batch size of 2, the sequences of cache_seqlens; got 1"),
    (lambda a: a._replace(q=a.q[..., :8]), r"^q must have k_cache's head_dim 16; got 8"),
    (lambda a: a._replace(q=a.q[:, :, :3]), r"^q must have a number of heads that is a multiple of k_cache's 2; got 3"),
    (lambda a: a._replace(k=a.k.mT.contiguous().mT), r"^k must be contiguous in its last dimension \(stride 1\); got stride 2"),
    (
        lambda a: a._replace(v=torch.zeros(2, 5, 2, 28).to(a.v)[..., :24]),
        r"^v must have rows aligned to 16 bytes .*; got stride 28 in dim.* 2",
    ),
    (lambda a: a._replace(cache_seqlens=a.cache_seqlens.long()), r"^cache_seqlens must be torch\.int32; got torch\.int64"),
    (lambda a: a._replace(cache_seqlens=a.cache_seqlens[None]), r"^cache_seqlens must have 1 dimension; got 2"),
    (lambda a: a._replace(cache_seqlens=torch.zeros(4).int()[::2]), r"^cache_seqlens must be contiguous in its last .*; got stride 2"),
    (lambda a: a._replace(block_table=a.block_table.long()), r"^block_table must be torch\.int32; got torch\.int64"),
    (lambda a: a._replace(block_table=a.block_table[0]), r"^block_table must have 2 dimensions; got 1"),
    (lambda a: a._replace(block_table=a.block_table[:1]), r"^block_table must have a row for each of 2 sequences; got 1"),
    (lambda a: a._replace(block_table=torch.zeros(2, 6).int()[:, ::2]), r"^block_table must be contiguous in its last .*; got stride 2"),
    (
        lambda a: a._replace(block_table=torch.zeros(1, 1).int().expand(2, 2**28)[:, : 2**28]),
        r"^block_table must be contiguous in its last .*; got stride 0",
    ),
    (
        lambda a: a._replace(block_table=None, k_cache=a.k_cache[:1], v_cache=a.v_cache[:1]),
        r"^k_cache must have a page for each of 2 sequences, as there is no block_table; got 1",
    ),
    (lambda a: a._replace(rotary_cos=a.rotary_cos.half()), r"^rotary_cos must be torch\.bfloat16 or torch\.float32; got torch\.float16"),
    (
        lambda a: a._replace(rotary_sin=a.rotary_sin.float()),
        r"^rotary_sin must have rotary_cos's dtype torch\.bfloat16; got torch\.float32",
    ),
    (lambda a: a._replace(rotary_sin=a.rotary_sin[:39]), r"^rotary_sin must have rotary_cos's shape \(40, 4\); got \(39, 4\)"),
    (lambda a: a._replace(rotary_cos=a.rotary_cos[0]), r"^rotary_cos must have 2 dimensions \(positions, rotary_dim / 2\); got 1"),
    (lambda a: a._replace(rotary_cos=a.rotary_cos[:, :2]), r"^rotary_cos must be contiguous; got strides \(4, 1\)"),
    (
        lambda a: a._replace(rotary_cos=a.rotary_cos[:0], rotary_sin=a.rotary_sin[:0]),
        r"^rotary_cos must have a row for each of 24 positions, as a sequence has room for 24 keys; got 0",
    ),
    (
        lambda a: a._replace(rotary_cos=torch.zeros(40, 9).to(a.q), rotary_sin=torch.zeros(40, 9).to(a.q)),
        r"^rotary_cos must have from 1 to 8 columns, half of those that are rotated; got 9",
    ),
    (lambda a: a._replace(k=a.k.clone().requires_grad_()), r"^k must not require grad, as it has no gradient here"),
    (lambda a: a._replace(v_cache=a.v_cache.clone().requires_grad_()), r"^v_cache must not require grad, as it has no gradient here"),
    (lambda a: a._replace(k=a.k.to_sparse()), r"^k must be dense \(torch\.strided\); got torch\.sparse_coo"),
    (lambda a: a, r"^k_cache must be on a CUDA device; got cpu\. FLASHGEN_CPU=1 "),
]
REAL = ("sparse", "FLASHGEN_CPU")  # what fake tensors have in another way


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_bad_arguments_are_named(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        append_to_cache(*change(given()), **FLAGS)


@pytest.mark.parametrize(("change", "message"), [case for case in REFUSED if not any(word in case[1] for word in REAL)])
def test_fake_tensors_are_checked_too(change: Callable[[Any], Any], message: str) -> None:
    with FakeTensorMode(), pytest.raises(ArgumentError, match=message):
        append_to_cache(*change(given()), **FLAGS)


def test_types_are_named() -> None:
    """The operator's schema has its own words for these; other ways in have ours."""
    for changes, flags, message in (
        ({"q": 3}, FLAGS, r"^q must be of type Tensor or None; got 3"),
        ({"k_cache": None}, FLAGS, r"^k_cache must be of type Tensor; got None"),
        ({}, {**FLAGS, "by_query": 1}, r"^by_query must be of type bool; got 1"),
        ({}, {**FLAGS, "rotary_interleaved": None}, r"^rotary_interleaved must be of type bool; got None"),
    ):
        with pytest.raises(ArgumentError, match=message):
            check_append(given()._replace(**changes), **flags)


def test_memory_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    shifted = torch.zeros(2 * 5 * 2 * 16 + 8).bfloat16()[1:-7].view(2, 5, 2, 16)
    with pytest.raises(ArgumentError, match=r"^k must begin at an address that is a multiple of 16 bytes; got one 2 past it"):
        append_to_cache(*given()._replace(k=shifted), **FLAGS)
    tables = [torch.zeros(40 * 8 + 8).bfloat16()[1:-7].view(40, 8) for _ in range(2)]
    with pytest.raises(ArgumentError, match=r"^rotary_cos must begin at an address"):
        append_to_cache(*given()._replace(rotary_cos=tables[0], rotary_sin=tables[1]), **FLAGS)


@pytest.mark.parametrize(
    ("needed", "by_query", "changes", "keys"),
    [
        (24, True, {}, "24 keys"),
        (8, True, {"block_table": None}, "8 keys"),
        (24, True, {"q": None}, "24 keys"),
        (24, False, {"new": 3}, "24 keys"),
        (26, True, {"new": 3}, "24 keys and queries may have positions up to 25"),
        (29, True, {"k": None, "v": None}, "24 keys and queries may have positions up to 28"),
        (25, False, {"k": None, "v": None}, "24 keys and queries may have positions up to 24"),
        (1, True, {"columns": 0}, "0 keys"),
    ],
)
def test_rotary_tables_have_a_row_for_each_position(needed: int, by_query: bool, changes: dict[str, Any], keys: str) -> None:
    """Whatever lengths say: a sequence may become as long as there is room."""
    tensors = given(**changes)
    for rows in (needed, needed - 1):
        of_rows = tensors._replace(rotary_cos=tensors.rotary_cos[:rows], rotary_sin=tensors.rotary_sin[:rows])
        message = f"^rotary_cos must have a row for each of {needed} positions, as a sequence has room for {keys}; got {needed - 1}$"
        with nullcontext() if rows == needed else pytest.raises(ArgumentError, match=message):
            check_append(of_rows, rotary_interleaved=False, by_query=by_query)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    return plain_in_place_of_kernels(monkeypatch)


def test_a_call_is_what_its_tensors_say(on_cpu: list[Tensors]) -> None:
    tensors, before = given(), given()
    lengths, q_rotated = append_to_cache(*tensors, **FLAGS)
    (found,) = on_cpu
    assert (found.problem, found.workload) == (PROBLEM, WORKLOAD)
    assert lengths.tolist() == [8, 16]
    assert (q_rotated.shape, q_rotated.dtype) == (tensors.q.shape, torch.bfloat16)
    for b, length in enumerate((3, 11)):
        for i in range(5):
            page, row = tensors.block_table[b, (length + i) // 8], (length + i) % 8
            assert tensors.v_cache[page, row].equal(tensors.v[b, i])
            cosine, sine = (table[length + i] for table in (tensors.rotary_cos, tensors.rotary_sin))
            for x, rotated in ((tensors.k[b, i], tensors.k_cache[page, row]), (tensors.q[b, i], q_rotated[b, i])):
                first, second = x[:, :4], x[:, 4:8]
                torch.testing.assert_close(rotated[:, :4], first * cosine - second * sine, atol=0.05, rtol=0.02)
                torch.testing.assert_close(rotated[:, 4:8], second * cosine + first * sine, atol=0.05, rtol=0.02)
                assert rotated[:, 8:].equal(x[:, 8:])
    assert (tensors.v_cache != before.v_cache).flatten(2).any(-1).sum() == 10


def test_what_may_be_left_out(on_cpu: list[Tensors]) -> None:
    lengths, q_rotated = append_to_cache(*given(rotary_cos=None, rotary_sin=None), **FLAGS)
    assert q_rotated.shape == (0,), "nobody rotates them"
    assert on_cpu[-1].workload == replace(WORKLOAD, heads_q=2, len_q=0)
    lengths, q_rotated = append_to_cache(*given(k=None, v=None, block_table=None), rotary_interleaved=True, by_query=False)
    assert on_cpu[-1].workload == Workload(2, 4, 2, 5, 8, pages=7, page_size=8, table_pages=1)
    assert lengths.tolist() == [3, 8], "as long as they were, as far as there is room"
    assert q_rotated.shape == (2, 5, 4, 16)
    lengths, _ = append_to_cache(*given(batch=0), **FLAGS)
    assert lengths.shape == (0,)
    assert len(on_cpu) == 2


def test_a_kernel_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys go where a slow loop puts them. It is a kernel of tests/emulator/test_examples.py, which is compiled once."""
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    tensors = given(rotary_cos=None, rotary_sin=None, d=64, d_v=64)
    expected = tensors.k_cache.clone()
    for b, length in enumerate((3, 11)):
        for i in range(5):
            expected[tensors.block_table[b, (length + i) // 8], (length + i) % 8] = tensors.k[b, i]
    version = tensors.k_cache._version
    lengths, _ = append_to_cache(*tensors, **FLAGS)
    assert tensors.k_cache.equal(expected)
    assert lengths.tolist() == [8, 16]
    assert tensors.k_cache._version > version, "autograd hears of it"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("changes", [{}, {"rotary_cos": None, "rotary_sin": None}, {"k": None, "v": None, "block_table": None}])
def test_opcheck(changes: dict[str, Any]) -> None:
    torch.library.opcheck(append_to_cache, (*given(**changes), True, False))


@pytest.mark.usefixtures("on_cpu")
def test_compiled_graphs_know_what_is_changed() -> None:
    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        before = tensors[0] + 0
        lengths, q_rotated = append_to_cache(*tensors, True, True)
        return lengths + 1, q_rotated, tensors[0] - before

    plain, compiled = given(), given()
    expected = step(*plain)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    assert compiled.k_cache.equal(plain.k_cache)
    assert expected[2].any()


def test_transforms_are_refused() -> None:
    tensors = given()
    with pytest.raises(FlashgenError, match=r"caches have no derivatives, and no rules for the transforms"):
        torch.vmap(lambda cache: append_to_cache(*tensors._replace(k_cache=cache), **FLAGS))(torch.zeros(2, 7, 8, 2, 16).bfloat16())


def test_flops_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        append_to_cache(*given(lambda tensor: tensor.to("meta")), **FLAGS)
    assert counter.get_total_flops() == operation_of(PROBLEM).flops(PROBLEM, WORKLOAD) == 3 * 2 * 5 * (2 + 4) * 16


class Bound:
    """What a call is bound to: it keeps the call, and what it is given."""

    numbers = None

    def __init__(self, call: Call) -> None:
        self.call, self.given = call, list[tuple[int, ...]]()

    def enqueue(self, _: None, *given: int) -> None:
        self.given.append(given)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """Calls that were bound, on a GPU that is made up."""
    found: list[Bound] = []

    def bind(call: Call, on: Gpu) -> Bound:
        found.append(Bound(call))
        return found[-1]

    monkeypatch.setattr(gpu, "gpu", lambda index: GPU)
    monkeypatch.setattr(gpu, "bind_chosen", bind)
    monkeypatch.setattr(gpu, "require_context", lambda index: None)
    monkeypatch.setattr(gpu, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "current_stream", lambda index: 77)
    monkeypatch.setattr(gpu, "empty_strided", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype))
    monkeypatch.setattr(plans, "are_plain", lambda tensors: not any(t.is_neg() or t.requires_grad for t in tensors))
    return found


def plan_of(tensors: AppendTensors, flags: tuple[bool, bool] = (False, True)) -> Any:
    """This thread's."""
    key = append._signature(tensors, flags)
    return append._plans().get(key) or append._new_plan(key, tensors, flags)


ABSENT = [
    {},
    {"tables": torch.float32},
    {"block_table": None},
    {"k": None, "v": None},
    {"rotary_cos": None, "rotary_sin": None},
    {"q": None},
]


@pytest.mark.parametrize("changes", ABSENT)
def test_a_kernel_gets_addresses_in_the_order_of_its_operands(bound: list[Bound], changes: dict[str, Any]) -> None:
    tensors = given(OnGpu, **changes)
    lengths, q_rotated = plan_of(tensors).run(*tensors)
    stream, *addresses = bound[-1].given[-1]
    call = bound[-1].call
    names = [operand.name for operand in operation_of(call.problem).operands(call.problem)]
    wanted = {**tensors.by_operand, "lengths": lengths, "q_rotated": q_rotated}
    assert dict(zip(names, addresses, strict=True)) == {name: wanted[name].data_ptr() if name in wanted else 0 for name in names}
    assert stream == 77
    assert (lengths.shape, lengths.dtype) == ((2,), torch.int32)
    assert q_rotated.shape == ((0,) if tensors.rotated is None else tensors.q.shape)
    for name, tensor in tensors.by_operand.items():
        if name in call.views and call.views[name].sizes:
            assert call.views[name].sizes == tuple(tensor.shape)


def test_without_sequences_no_kernel_runs(bound: list[Bound]) -> None:
    tensors = given(OnGpu, batch=0)
    lengths, q_rotated = plan_of(tensors).run(*tensors)
    assert (lengths.shape, q_rotated.shape) == ((0,), (0, 5, 4, 16))
    assert bound == []


SIZES: list[dict[str, Any]] = [
    {"new": 9, "len_q": 9},
    {"len_q": 2},
    {"new": 1},
    {"batch": 1},
    {"batch": 3, "columns": 2},
    {"columns": 1},
    {"columns": 0},
    {"new": 0, "len_q": 0},
]


DIFFERENT: dict[str, dict[str, Any]] = {
    "heads": {"heads": 6},
    "heads of keys": {"heads_kv": 4},
    "pages": {"pages": 8},
    "keys of a page": {"page": 12},
    "columns that are rotated": {"width": 4},
    "the tables' type": {"tables": torch.float32},
    "the element type": {"dtype": torch.float16, "tables": torch.float16},
    "no table": {"block_table": None},
    "no keys": {"k": None, "v": None},
    "no queries": {"q": None},
}


@pytest.mark.parametrize("changes", list(DIFFERENT.values()), ids=list(DIFFERENT))
def test_other_signatures_have_plans_of_their_own(bound: list[Bound], changes: dict[str, Any]) -> None:
    first = given(OnGpu)
    plan = append_plan_for(first, False, True)
    assert append_plan_for(first, False, True) is plan
    other = given(OnGpu, **changes)
    assert append_plan_for(other, False, True) is not plan
    assert bound[-1].call == append_call(check_append(other, False, True), other, False, True)
    assert append_plan_for(first, True, True) is not plan
    assert append_plan_for(first, False, False) is not plan


def test_new_kernels_need_new_plans(bound: list[Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = given(OnGpu)
    plan = append_plan_for(tensors, False, True)
    monkeypatch.setattr(loaded, "kernels", loaded.Kernels())
    loaded.kernels.generation = 12345
    assert append_plan_for(tensors, False, True) is not plan, "another kernel may be the right one"


def test_what_a_family_refuses() -> None:
    target = H200.target
    for problem, reason in (
        (replace(PROBLEM, dtype=Dtype.FP32), "dtype must be bf16 or fp16; got fp32"),
        (replace(PROBLEM, head_dim=20), "head_dim must be a multiple of 8 from 8 to 256; got 20 (nearest: 24)"),
        (replace(PROBLEM, mask=Mask.CAUSAL), "mask must be full for append, which has none; got causal"),
        (replace(PROBLEM, sequences=Sequences.DENSE), "sequences must be cached for append; got dense"),
        (Problem(Dtype.BF16, 64), "pass must be append; got forward"),
    ):
        assert reason in FAMILY.refusals(problem, target)
    assert "heads must be a power of two from 1 to 8; got 3 (nearest: 2)" in FAMILY.check(PROBLEM, AppendRowsConfig(heads=3), target)
    for layout, operation in ((Sequences.PACKED, "append"), (Sequences.CACHED, "softmax")):
        with pytest.raises(ArgumentError, match=r"^sequences must be dense.* for (append|softmax), which is not attention; got "):
            Problem(Dtype.BF16, operation=operation, sequences=layout)
    huge = replace(WORKLOAD, batch=2**16, new_keys=2**14)
    (reason,) = FAMILY.call_refusals(operation_of(PROBLEM).call(PROBLEM, huge))
    assert reason == f"k, v and q must have at most {8 * MAX_CHUNKS} elements in all; got {2**16 * (2**14 * 2 * 40 + 5 * 4 * 16)}"


def test_threads_have_more_heads_where_they_fill_the_gpu() -> None:
    def threads_and_heads(**sizes: int) -> tuple[int, int]:
        call = operation_of(PROBLEM).call(PROBLEM, replace(WORKLOAD, heads_q=32, heads_kv=8, **sizes))
        (launch,) = FAMILY.program(AppendRowsConfig(heads=4), call, H200).launches
        return sum(int(launch.values[f"{name}_threads"]) for name in ("key", "value", "query")), int(launch.values["thread_heads"])

    found = [threads_and_heads(new_keys=n, len_q=n) for n in (1, 1000, 10**5)]
    assert [heads for _, heads in found] == [1, 2, 4]
    assert all(threads <= 1024 * H200.sm_count for threads, heads in found if heads < 4)


def test_it_is_chosen_as_any_other() -> None:
    """With as many heads for a thread as were best on an H200: sizes of its measurements."""
    problem, usual = replace(PROBLEM, head_dim=128, head_dim_v=128), Workload(1, 32, 8, 1, 8192, pages=9999, page_size=64, table_pages=128)
    for batch, length, heads in ((1, 1, 1), (64, 1, 1), (128, 1, 1), (1, 256, 2), (1, 1024, 4), (1, 4096, 4)):
        spec = picked_spec(problem, replace(usual, batch=batch, len_q=length, new_keys=length), H200, ("13.0", "13.0"), None)
        assert (spec.family, spec.config) == (FAMILY, AppendRowsConfig(heads=heads)), (batch, length)
    assert find_operation("append").io_bytes(PROBLEM, WORKLOAD) == 2 * (2 * 2 * (5 * 2 * 40 + 5 * 4 * 16) + 8)


def test_a_screen_undoes_what_a_kernel_changed() -> None:
    """So that the next one is not judged by it."""
    case = Screen(PROBLEM, "cpu").cases(1)[0]
    changed = [operand.name for operand in case.tensors.operands if operand.role is Role.INOUT]
    assert changed == ["k_cache", "v_cache"]
    before = {name: case.tensors[name].clone() for name in changed}
    for name in changed:
        case.tensors[name].zero_()
    assert not any(case.tensors[name].equal(before[name]) for name in changed)
    case.restore()
    assert all(case.tensors[name].equal(before[name]) for name in changed)
    assert case.workload.new_keys == case.workload.len_q > 0
