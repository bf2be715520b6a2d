"""Plans of calls on KV caches without a GPU: which calls share one, what a plan is made from, and what it gives its kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen import ahead, kvcache
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.operands import Call
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import CacheDtype, Dtype, Mask, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.launch import filled_lengths, gpu, packed_arguments
from flashgen.launch.asked import signature_of
from flashgen.launch.private_names import knows_tensors
from flashgen.operators import cached_plans, plans
from flashgen.operators.append import append_plan_for
from flashgen.operators.cached_plans import (
    APPENDED,
    BATCH_IDX,
    K_DESCALE,
    LEFTPAD,
    ROTARY,
    TABLE,
    V_DESCALE,
    CachedOptions,
    cached_run_at_hand,
)
from flashgen.selection import loaded
from tools.call_overhead import ON, OnGpu

ROOT = Path(__file__).parents[2]
GPU = Gpu(0, find_device("h200"), "uuid", "580.1")
Arguments = tuple[list[torch.Tensor], CachedOptions]


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def given(kind: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor, **changes: Any) -> Arguments:
    """All tensors, and the options; by default a table, and nothing else that may be left out."""
    a: dict[str, Any] = {
        "batch": 3,
        "len_q": 2,
        "heads": 4,
        "heads_kv": 2,
        "d": 16,
        "d_v": 24,
        "pages": 9,
        "page_size": 8,
        "table": 3,
        "there": TABLE,
        **changes,
    }
    dtype, there, modifiers = a.get("dtype", torch.bfloat16), a["there"], a.get("modifiers", NO_MODIFIERS)

    def tensor(*shape: int, gap: int = a.get("gap", 0), dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*shape[:-1], shape[-1] + gap, dtype=dtype)[..., : shape[-1]]

    batch, of_page = a["batch"], (a["pages"], a["page_size"], a["heads_kv"])
    own = {"dtype": a.get("dtype_kv", dtype)}
    caches = [tensor(*of_page, a["d"], **own), tensor(*of_page, a.get("d_of_v", a["d_v"]), **own)]
    tensors = [tensor(batch, a["len_q"], a["heads"], a["d"]), *caches]
    tensors.append(ints(batch))
    optional = ((TABLE, ints(batch, a["table"] + a.get("more", 0))[:, : a["table"]]), (BATCH_IDX, ints(batch)), (LEFTPAD, ints(batch)))
    tensors += [one for bit, one in optional if there & bit]
    tensors += [torch.zeros(batch, a["heads_kv"]) for bit in (K_DESCALE, V_DESCALE) if there & bit]
    tensors += a.get("others", ())
    if there & APPENDED:
        tensors += [tensor(batch, a.get("new", 1), a["heads_kv"], width) for width in (a["d"], a["d_v"])]
    if there & ROTARY:
        tensors += [tensor(40, 4, gap=0, dtype=torch.float32) for _ in "cs"]
    of_rotary = (a.get("interleaved", True), a.get("by_query", True)) if there & ROTARY else (False, False)
    chosen = (a.get("causal", False), a.get("scale"), modifiers, a.get("invariant", False))
    return [kind(one) for one in tensors], CachedOptions(there, *chosen, *of_rotary)


E4M3: dict[str, Any] = {"dtype_kv": torch.float8_e4m3fn, "d_v": 32}
DIFFERENT: dict[str, dict[str, Any]] = {
    "sequences": {"batch": 2},
    "queries": {"len_q": 3},
    "heads": {"heads": 6},
    "k's heads": {"heads_kv": 4},
    "width": {"d": 24},
    "v's width": {"d_v": 16},
    "pages": {"pages": 10},
    "keys of a page": {"page_size": 16},
    "the table's width": {"table": 2},
    "the table's strides": {"more": 1},
    "strides": {"gap": 8},
    "the element type": {"dtype": torch.float16},
    "the cache's element type": E4M3,
    "descales": {**E4M3, "there": TABLE | K_DESCALE | V_DESCALE},
    "a descale of values": {**E4M3, "there": TABLE | V_DESCALE},
    "no table": {"there": 0},
    "entries of the cache": {"there": BATCH_IDX},
    "padding": {"there": TABLE | LEFTPAD},
    "new keys": {"there": TABLE | APPENDED},
    "rotation": {"there": TABLE | ROTARY},
    "new keys, rotated": {"there": TABLE | APPENDED | ROTARY},
    "rotation in halves": {"there": TABLE | ROTARY, "interleaved": False},
    "rotation at one position": {"there": TABLE | ROTARY, "by_query": False},
    "the mask": {"causal": True},
    "a scale": {"scale": 0.5},
    "the same bits in any batch": {"invariant": True},
    "a modifier": {"modifiers": Given(("softcap",), (), (("softcap", 3.0),))},
    "a tensor of one": {"modifiers": Given(("sinks",)), "others": (torch.zeros(4),)},
}


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has called nothing yet."""
    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
    monkeypatch.setattr(filled_lengths, "_LOCAL", filled_lengths._OfThread())


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are objects of no use."""
    monkeypatch.setattr(cached_plans, "CachedPlan", lambda *_: SimpleNamespace(run=object(), bound=None, met=True, before=None))
    monkeypatch.setattr(cached_plans, "append_plan_for", lambda *_: SimpleNamespace(run=object(), bound=None, tables=None))


def plan_of(tensors: list[torch.Tensor], options: CachedOptions) -> Any:
    """This thread's."""
    key = (signature_of(tensors), tuple(options), loaded.kernels.generation)
    return cached_plans._plans().get(key) or cached_plans._new_plan(key, tensors, options)


def at_hand(tensors: list[torch.Tensor], options: CachedOptions) -> Any:
    return cached_run_at_hand(tensors, tuple(options))


@pytest.mark.usefixtures("made_up")
def test_a_call_that_differs_in_anything_has_a_plan_of_its_own() -> None:
    first = plan_of(*given())
    assert at_hand(*given()) is first.run, "other tensors of the same signature"
    made = [first]
    for what, changes in DIFFERENT.items():
        assert at_hand(*given(**changes)) is None, what
        plan = plan_of(*given(**changes))
        assert all(plan is not other for other in made), what
        assert at_hand(*given(**changes)) is plan.run, what
        assert at_hand(*given(**changes)) is plan.run, f"{what}, the call before"
        made.append(plan)
    assert at_hand(*given()) is first.run
    assert at_hand(*given(batch=2)) is not first.run


@pytest.mark.usefixtures("made_up")
@pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")
def test_calls_of_several_options_are_known_by_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers with a window, and without, take turns."""
    kinds: list[dict[str, Any]] = [
        {},
        {"modifiers": Given(("window",), (("window_left", 4), ("window_right", 0)))},
        {"there": TABLE | APPENDED},
    ]
    runs = [plan_of(*given(**changes)).run for changes in kinds]
    assert [at_hand(*given(**changes)) for changes in kinds] == runs
    monkeypatch.setattr(cached_plans, "signature_of", None)
    for _ in range(2):
        assert [at_hand(*given(**changes)) for changes in kinds] == runs
    assert at_hand(*given(len_q=21)) is None
    tensors, options = given()
    assert at_hand(tensors, options._replace(causal=0)) is None, "no bool"  # type: ignore[arg-type]


@pytest.mark.usefixtures("made_up")
def test_a_thread_remembers_so_many_options_at_once() -> None:
    for i in range(3 * cached_plans._MOST_BEFORE):
        plan = plan_of(*given(scale=0.5 + i))
        assert at_hand(*given(scale=0.5 + i)) is plan.run
        assert len(plans._LOCAL.__dict__["before_cached"]) <= cached_plans._MOST_BEFORE


class Logging(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("there", [TABLE, TABLE | APPENDED])
def test_others_who_listen_get_the_call(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(*given(there=there))
    tensors, options = given(there=there)
    for listening in (Logging, FakeTensorMode, lambda: torch.device("meta")):
        assert at_hand(tensors, options) is plan.run
        with listening():
            assert at_hand(tensors, options) is None
    for at in (0, 1, 2, *((5,) if there & APPENDED else ())):
        changed = [*tensors]
        changed[at] = torch._neg_view(tensors[at])
        assert at_hand(changed, options) is None, "a negated view"
        changed[at] = torch.nn.Parameter(tensors[at], requires_grad=False)
        assert at_hand(changed, options) is None, "a subclass"
        changed[at] = tensors[at].clone().requires_grad_()
        assert at_hand(changed, options) is None, "one that needs a gradient"
        with torch.no_grad():
            assert at_hand(changed, options) is plan.run
    assert at_hand(tensors, options) is plan.run
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    assert at_hand(*given(len_q=21)) is None


@pytest.mark.usefixtures("made_up")
def test_a_plan_is_made_anew_once_another_kernel_may_be_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = loaded.Kernels()
    monkeypatch.setattr(loaded, "kernels", kernels)
    first = plan_of(*given())
    assert at_hand(*given()) is first.run
    kernels.forget()
    assert at_hand(*given()) is None
    assert plan_of(*given()) is not first


class Bound:
    """What a call is bound to: it keeps the call, and what it is given."""

    numbers = None

    def __init__(self, call: Call) -> None:
        self.call, self.given = call, list[tuple[int, ...]]()

    def enqueue(self, _: None, *given: int) -> None:
        self.given.append(given)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("more", [0, APPENDED, ROTARY])
def test_both_kinds_of_tables_are_left_to_the_checks(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert at_hand(*given(there=TABLE | more)) is not None
    assert at_hand(*given(there=TABLE | BATCH_IDX | more)) is None


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """Calls of attention that were bound, on a GPU that is made up."""
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
    monkeypatch.setattr(cached_plans, "_dense_like", lambda q: OnGpu(torch.empty(q.shape, dtype=q.dtype)))
    return found


@pytest.mark.parametrize("there", [0, TABLE, BATCH_IDX, LEFTPAD, TABLE | LEFTPAD, BATCH_IDX | LEFTPAD])
@pytest.mark.parametrize("with_lse", [False, True])
def test_a_kernel_gets_addresses_in_the_order_of_its_operands(there: int, with_lse: bool, bound: list[Bound]) -> None:
    tensors, options = given(OnGpu, there=there, modifiers=Given(("sinks",)), others=(torch.zeros(4),))
    out, lse = plan_of(tensors, options).run(with_lse, *tensors)
    stream, *addresses = bound[-1].given[-1]
    call = bound[-1].call
    names = [operand.name for operand in operation_of(call.problem).operands(call.problem)]
    found = dict(zip(names, addresses, strict=True))
    where = options.where(tensors)
    wanted = {"q": tensors[0], "k": tensors[1], "v": tensors[2], "out": out, "lse": lse, "sinks": tensors[-1]}
    wanted |= {"cache_seqlens": where.cache_seqlens, "block_table": where.table, "cache_leftpad": where.cache_leftpad}
    assert found == {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in wanted.items()}
    assert stream == 77
    assert (out.shape, out.dtype, out.is_contiguous()) == ((3, 2, 4, 24), torch.bfloat16, True)
    assert lse is None if not with_lse else lse.shape == (3, 4, 2)
    w, pages = call.workload, 3 if there & TABLE else 1
    assert (w.pages, w.page_size, w.table_pages, w.len_kv) == (9, 8, pages, 8 * pages)
    if there & BATCH_IDX:
        assert call.views["block_table"].strides == (1, 0)


@pytest.mark.parametrize("there", [0, TABLE | K_DESCALE, LEFTPAD | V_DESCALE, BATCH_IDX | K_DESCALE | V_DESCALE])
def test_descales_have_their_places_where_elements_are_e4m3(there: int, bound: list[Bound]) -> None:
    tensors, options = given(OnGpu, there=there, modifiers=Given(("sinks",)), others=(torch.zeros(4),), **E4M3)
    plan_of(tensors, options).run(False, *tensors)
    call, where = bound[-1].call, options.where(tensors)
    names = [operand.name for operand in operation_of(call.problem).operands(call.problem)]
    found = dict(zip(names, bound[-1].given[-1][1:], strict=True))
    wanted = {"cache_leftpad": where.cache_leftpad, "k_descale": where.k_descale, "v_descale": where.v_descale, "sinks": tensors[-1]}
    assert {name: found[name] for name in wanted} == {name: 0 if one is None else one.data_ptr() for name, one in wanted.items()}
    assert call.problem.dtype_kv is CacheDtype.E4M3


@pytest.mark.parametrize("there", [K_DESCALE | APPENDED, TABLE | LEFTPAD | V_DESCALE | APPENDED | ROTARY, K_DESCALE | V_DESCALE | ROTARY])
def test_what_appends_has_the_descales_too(there: int, bound: list[Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "device", ON)  # of views, too
    tensors, options = given(OnGpu, there=there, modifiers=Given(("sinks",)), others=(torch.zeros(4),), **E4M3)
    plan_of(tensors, options).run(False, *tensors)
    where, calls = options.where(tensors), {one.call.problem.operation: one for one in bound}
    assert calls.keys() == {"append", "forward"}
    for one in calls.values():
        names = [operand.name for operand in operation_of(one.call.problem).operands(one.call.problem)]
        found = dict(zip(names, one.given[-1][1:], strict=True))
        for name, descale in (("k_descale", where.k_descale), ("v_descale", where.v_descale)):
            assert found[name] == (0 if descale is None else descale.data_ptr())
        assert one.call.problem.dtype_kv is CacheDtype.E4M3


def test_a_plan_for_other_sizes_has_their_descales(bound: list[Bound]) -> None:
    there = {"there": TABLE | K_DESCALE | V_DESCALE, **E4M3}
    for pages, sequences in ((9, 3), (11, 4)):
        tensors, options = given(OnGpu, pages=pages, batch=sequences, **there)
        plan_of(tensors, options).run(False, *tensors)
    assert bound[1].call.views["k_descale"] == ((4, 2), (2, 1))


@pytest.mark.parametrize("there", [APPENDED, ROTARY, TABLE | APPENDED | ROTARY, BATCH_IDX | LEFTPAD | APPENDED | ROTARY])
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_appending_comes_first_and_gives_lengths_and_queries(
    there: int, in_fp32: bool, with_lse: bool, bound: list[Bound], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "device", ON)  # of views, too
    tensors, options = given(OnGpu, there=there, gap=8, modifiers=Given(("sinks",)), others=(torch.zeros(4),), by_query=False)
    if there & ROTARY and not in_fp32:
        tensors[-2:] = [OnGpu(table.to(torch.bfloat16)) for table in tensors[-2:]]
    where, added = options.where(tensors), iter(tensors[options.first_of_modifiers + 1 :])
    k, v, cos, sin = (next(added) if there & bit else None for bit in (APPENDED, APPENDED, ROTARY, ROTARY))
    versions = tensors[1]._version, tensors[2]._version
    run = plan_of(tensors, options).run
    attention, append = bound
    assert (attention.given, append.given) == ([], [])
    out, lse = run(with_lse, *tensors)
    names = [operand.name for operand in operation_of(append.call.problem).operands(append.call.problem)]
    first = dict(zip(names, append.given[0][1:], strict=True))
    at_lengths, at_rotated = first.pop("lengths"), first.pop("q_rotated")
    wanted = {"k_cache": tensors[1], "v_cache": tensors[2], "k_new": k, "v_new": v, "cache_seqlens": tensors[3], "block_table": where.table}
    wanted |= {"q": tensors[0] if there & ROTARY else None, "rotary_cos": None, "rotary_sin": None}
    wanted |= {"rotary_cos_fp32": None, "rotary_sin_fp32": None}
    wanted |= {"rotary_cos_fp32": cos, "rotary_sin_fp32": sin} if in_fp32 else {"rotary_cos": cos, "rotary_sin": sin}
    assert first == {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in wanted.items()}
    assert (append.call.scalars["rotary_interleaved"], append.call.scalars["rotary_by_query"]) == options[5:7]
    assert append.call.views["block_table"].sizes == (3, 3 if there & TABLE else 1)
    names = [operand.name for operand in operation_of(attention.call.problem).operands(attention.call.problem)]
    second = dict(zip(names, attention.given[0][1:], strict=True))
    assert second["q"] == (at_rotated if there & ROTARY else tensors[0].data_ptr())
    assert second["cache_seqlens"] == at_lengths != tensors[3].data_ptr()
    assert at_lengths + 12 <= at_rotated
    assert at_rotated % 16 == 0
    given_to_both = {"k": tensors[1], "v": tensors[2], "block_table": where.table, "cache_leftpad": where.cache_leftpad}
    given_to_both |= {"out": out, "lse": lse, "sinks": tensors[options.first_of_modifiers]}
    for name, tensor in given_to_both.items():
        assert second[name] == (0 if tensor is None else tensor.data_ptr()), name
    assert attention.call.views["q"].strides == ((128, 64, 16, 1) if there & ROTARY else (192, 96, 24, 1))
    assert out.shape == (3, 2, 4, 24)
    assert append.given[0][0] == attention.given[0][0] == 77
    assert tensors[1]._version > versions[0], "autograd must hear of it"
    assert tensors[2]._version > versions[1]


def test_nothing_is_appended_where_attention_cannot_be_computed(bound: list[Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(cached_plans, "append_plan_for", lambda *given: asked.append(given))
    tensors, options = given(OnGpu, there=TABLE | APPENDED, heads=3)
    with pytest.raises(ArgumentError, match=r"^q must have a number of heads that is a multiple of k_cache's 2; got 3"):
        plan_of(tensors, options)
    assert asked == []


def test_memory_that_is_gone_is_appended_to_by_nobody(bound: list[Bound]) -> None:
    tensors, options = given(OnGpu, there=TABLE | APPENDED | ROTARY)
    run = plan_of(tensors, options).run
    for at, name in ((3, "cache_seqlens"), (4, "block_table"), (8, "rotary_sin")):
        gone = [*tensors]
        gone[at] = OnGpu(tensors[at].clone())
        gone[at].untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match=rf"^{name} must have a storage"):
            run(False, *gone)
    odd = [*tensors]
    odd[5] = torch.zeros(tensors[5].numel() + 1, dtype=torch.bfloat16)[1:].view(tensors[5].shape)
    with pytest.raises(ArgumentError, match=r"^k must begin at an address that is a multiple of 16 bytes; got one 2 past it"):
        run(False, *odd)
    assert all(one.given == [] for one in bound)


def test_the_operator_that_appends_looks_at_all_memory_first(bound: list[Bound]) -> None:
    tensors, options = given(OnGpu, there=TABLE | APPENDED | ROTARY)
    of_append = options.appended(len(tensors)).of_append(tensors)
    run = append_plan_for(of_append, True, True).run
    run(*of_append)
    for name in ("k", "v", "cache_seqlens", "block_table", "q", "rotary_cos", "rotary_sin"):
        gone = OnGpu(getattr(of_append, name).clone())
        gone.untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match=rf"^{name} must have a storage"):
            run(*of_append._replace(**{name: gone}))
    odd = torch.zeros(tensors[0].numel() + 1, dtype=torch.bfloat16)[1:].view(tensors[0].shape)
    plain = of_append._replace(rotary_cos=None, rotary_sin=None)
    with pytest.raises(ArgumentError, match=r"^q must begin at an address that is a multiple of 16 bytes; got one 2 past it"):
        append_plan_for(plain, False, False).run(*plain._replace(q=odd))
    assert [len(one.given) for one in bound] == [1, 0], "attention would refuse it, when the cache has changed"


@pytest.mark.usefixtures("made_up")
@pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")
def test_a_tensor_that_is_there_twice_is_never_known_by_one_look() -> None:
    """PyTorch's check does not know it; others of these options are not forgotten for it."""
    plan = plan_of(*given(d_v=16))
    assert at_hand(*given(d_v=16)) is plan.run
    known = plans._LOCAL.__dict__["before_cached"].copy()
    tensors, options = given(d_v=16, pages=10)
    tensors[2] = tensors[1]
    other = plan_of(tensors, options)
    for _ in range(3):
        assert at_hand(tensors, options) is other.run
    assert plans._LOCAL.__dict__["before_cached"] == known


def test_one_of_both_may_have_nothing_to_do(bound: list[Bound]) -> None:
    """New keys without queries are appended."""
    tensors, options = given(OnGpu, there=TABLE | APPENDED, len_q=0)
    out, _ = plan_of(tensors, options).run(False, *tensors)
    assert out.shape == (3, 0, 4, 24)
    (append,) = bound
    assert append.call.problem.operation == "append"
    assert len(append.given) == 1


def test_without_queries_no_kernel_runs(bound: list[Bound]) -> None:
    for changes in ({"batch": 0}, {"len_q": 0}, {"heads": 0}):
        tensors, options = given(OnGpu, **changes)
        out, _ = plan_of(tensors, options).run(True, *tensors)
        assert not out.numel()
    assert bound == []


CHANGES: list[dict[str, Any]] = [
    {"table": 7},
    {"table": 7, "more": 2},
    {"table": 0},
    {"table": 1},
    {"len_q": 5},
    {"len_q": 1, "table": 2},
    {"batch": 1},
    {"batch": 8, "len_q": 7},
    {"pages": 3},
    {"pages": 40, "page_size": 16},
    {"page_size": 1},
    {"gap": 16},
]


def test_other_sizes_are_still_checked(bound: list[Bound]) -> None:
    for changes in ({}, *CHANGES):
        plan_of(*given(OnGpu, **changes))
    for wrong, message in (
        ({"d_of_v": 32, "d_v": 24, "pages": 3}, None),
        ({"gap": 4}, r"^q must have rows aligned to 16 bytes"),
        ({"pages": 0}, r"^k_cache must have a page where sequences may have keys; got none"),
    ):
        if message is None:
            plan_of(*given(OnGpu, **wrong))  # another width: a plan of its own
            continue
        with pytest.raises(ArgumentError, match=message):
            plan_of(*given(OnGpu, **wrong))
    tensors, options = given(OnGpu, len_q=9)
    tensors[3] = OnGpu(ints(4))
    with pytest.raises(ArgumentError, match=r"^cache_seqlens must have an entry for each of 3 sequences of q; got 4"):
        plan_of(tensors, options)


def test_tensors_of_modifiers_must_fit_another_batch(bound: list[Bound]) -> None:
    slopes = Given(("alibi",))
    plan_of(*given(OnGpu, modifiers=slopes, others=(OnGpu(torch.zeros(3, 4)),)))
    with pytest.raises(ArgumentError, match=r"^alibi_slopes must have the shape .* = \(2, 4\)"):
        plan_of(*given(OnGpu, batch=2, modifiers=slopes, others=(OnGpu(torch.zeros(3, 4)),)))


def with_masks(**changes: Any) -> Arguments:
    """A mask of all keys that there is room for, and one of the last keys."""
    a: dict[str, Any] = {"batch": 3, "len_q": 2, "page_size": 8, "table": 3, **changes}
    masks = torch.ones(a["batch"], 1, a["len_q"], a["table"] * a["page_size"]), torch.ones(a["len_q"], a["len_q"])
    return given(OnGpu, modifiers=Given(("boolean_mask", "tree_mask")), others=tuple(OnGpu(mask.bool()) for mask in masks), **changes)


@pytest.mark.parametrize("changes", CHANGES)
def test_tensors_of_scores_are_those_of_other_sizes(bound: list[Bound], changes: dict[str, Any]) -> None:
    plan_of(*with_masks())
    plan_of(*with_masks(**changes))
    plans._LOCAL.__dict__.clear()
    plan_of(*with_masks(**changes))
    assert bound[-2].call == bound[-1].call


@pytest.mark.parametrize(
    ("changes", "at", "name"), [({"table": 7}, -2, "mask"), ({"len_q": 5}, -2, "mask"), ({"len_q": 5}, -1, "tree_mask")]
)
def test_tensors_of_scores_must_fit_other_sizes(bound: list[Bound], changes: dict[str, Any], at: int, name: str) -> None:
    first, options = with_masks()
    plan_of(first, options)
    tensors, _ = with_masks(**changes)
    tensors[at] = first[at]
    with pytest.raises(ArgumentError, match=rf"^{name} must have the shape "):
        plan_of(tensors, options)


def test_memory_that_is_gone_is_refused(bound: list[Bound]) -> None:
    tensors, options = given(OnGpu)
    plan = plan_of(tensors, options)
    lengths = ints(3)
    lengths.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"^cache_seqlens, block_table, .* must have storages"):
        plan.run(False, *tensors[:3], lengths, tensors[4])
    odd = torch.zeros(9 * 8 * 2 * 16 + 1, dtype=torch.bfloat16)[1:].view(9, 8, 2, 16)
    with pytest.raises(ArgumentError, match=r"^k_cache must begin at an address that is a multiple of 16 bytes; got one 2 past it"):
        plan.run(False, tensors[0], odd, *tensors[2:])


def test_lengths_that_are_one_number_are_made_once_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """But anew for a graph that is being captured, which reads them later."""
    stream, capturing = [1], [False]
    monkeypatch.setattr(gpu, "current_stream", lambda index: stream[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    q = OnGpu(torch.zeros(3, 1, 1, 8))
    first = filled_lengths.filled_lengths(q, 5)
    assert first.tolist() == [5, 5, 5]
    assert filled_lengths.filled_lengths(q, 5) is first
    capturing[0] = True
    assert filled_lengths.filled_lengths(q, 5) is not first
    capturing[0] = False
    assert filled_lengths.filled_lengths(q, 5) is first
    stream[0] = 2
    second = filled_lengths.filled_lengths(q, 5)
    assert second is not first
    assert filled_lengths.filled_lengths(q, 6).tolist() == [6, 6, 6]
    assert filled_lengths.filled_lengths(q, 6) is not second
    with torch.inference_mode():
        assert filled_lengths.filled_lengths(q, 6).is_inference()


@pytest.mark.usefixtures("made_up")
def test_the_face_asks_for_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in their order, and options that tell them apart."""
    asked: list[tuple[list[torch.Tensor], tuple[Any, ...]]] = []

    def run_for(tensors: list[torch.Tensor], options: tuple[Any, ...]) -> Any:
        asked.append((tensors, options))
        return lambda with_lse, *tensors: ("out", "lse")

    monkeypatch.setattr(kvcache, "cached_run_at_hand", run_for)
    (q, k_cache, v_cache, lengths, table), _ = given()
    (k, v, cos, sin), sinks = given(there=APPENDED | ROTARY)[0][4:], torch.zeros(4)
    call = kvcache.attention_with_kvcache
    base: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths}
    rotary: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin}
    of_sinks, of_window = Given(("sinks",)), Given(("window",), (("window_left", 4), ("window_right", 4)))
    cases: tuple[tuple[dict[str, Any], list[torch.Tensor], tuple[Any, ...]], ...] = (
        ({}, [], (0, False, None, NO_MODIFIERS, False, False, False, ())),
        ({"block_table": table, "causal": True}, [table], (TABLE, True, None, NO_MODIFIERS, False, False, False, ())),
        ({"cache_batch_idx": lengths, "scale": 0.5}, [lengths], (BATCH_IDX, False, 0.5, NO_MODIFIERS, False, False, False, ())),
        (
            {"cache_leftpad": lengths, "sinks": sinks, "k": k, "v": v},
            [lengths, sinks, k, v],
            (LEFTPAD | APPENDED, False, None, of_sinks, False, False, False, ()),
        ),
        ({**rotary, "causal": True}, [cos, sin], (ROTARY, True, None, NO_MODIFIERS, False, True, True, ())),
        (
            {**rotary, "k": k, "v": v, "window": (4, 4)},
            [k, v, cos, sin],
            (APPENDED | ROTARY, False, None, of_window, False, True, True, ()),
        ),
        (
            {**rotary, "rotary_interleaved": False, "window": (None, None)},
            [cos, sin],
            (ROTARY, False, None, NO_MODIFIERS, False, False, False, ()),
        ),
    )
    for more, tensors, options in cases:
        assert call(**base, **more, return_lse=True) == ("out", "lse")
        assert call(**base, **more) == "out"
        found, told = asked[-1]
        assert [id(tensor) for tensor in found] == [id(tensor) for tensor in (q, k_cache, v_cache, lengths, *tensors)]
        assert told == options
        assert told == (*CachedOptions(*told),), "none left out, by which plans of other sizes are found"


def test_warm_makes_ready_what_appends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[Problem, Workload, bool]] = []

    def choose(problem: Problem, workload: Workload, on: Gpu, excluded: frozenset[str], any_length: bool = False) -> str:
        chosen.append((problem, workload, any_length))
        return problem.operation

    monkeypatch.setattr(ahead, "choose_kernel", choose)
    monkeypatch.setattr(ahead, "_gpu", lambda device: GPU)
    sizes: dict[str, Any] = {"head_dim": 64, "head_dim_v": 72, "batch": 2, "heads": 4, "kv_heads": 2, "len_q": 1, "len_kv": 100}
    found: Any = ahead.warm(**sizes, causal=True, page_size=16, batch_invariant=True)
    assert found == "forward"
    of_append = Problem(Dtype.BF16, 64, 72, operation="append", sequences=Sequences.CACHED)
    of_attention = Problem(Dtype.BF16, 64, 72, Mask.CAUSAL, sequences=Sequences.CACHED, batch_invariant=True)
    plain = Workload(2, 2, 2, 0, 112, pages=14, page_size=16, table_pages=7, new_keys=1)  # nothing is rotated
    workload = Workload(2, 4, 2, 1, 112, pages=14, page_size=16, table_pages=7)
    added = replace(workload, new_keys=1)
    wanted = (of_append, plain), (of_append, added), (of_attention, workload)
    assert chosen == [(*one, any_length) for one in wanted for any_length in (True, False)]


@pytest.mark.slow
def test_the_tool_measures_calls_without_a_gpu() -> None:
    """In a process of its own, as it makes PyTorch say that tensors are on one."""
    command = [sys.executable, "-m", "tools.cache_overhead", "--rounds", "1", "--calls", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    names = re.findall(r"^(.+?) +median +[\d.]+  least +[\d.]+$", done.stdout, re.MULTILINE)
    assert names[:3] == ["dense cache", "pages", "pages, appended and rotated"]
    assert len(names) == len(done.stdout.splitlines())
