"""Plans of sizes not met before, made by functions of sizes: what they launch is what planning anew would, for all operations."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # before anything is made up of tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen.build.gpu import kernel as gpu_kernel
from flashgen.codegen import sizes
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.workload import Workload
from flashgen.launch import bound, sized_plans
from flashgen.launch import gpu as launch_gpu
from flashgen.launch import gradients as launch_gradients
from flashgen.launch.append_arguments import AppendTensors
from flashgen.launch.packed_arguments import PackedTokens
from flashgen.launch.private_names import knows_tensors
from flashgen.operators import append, cached_plans, packed, packed_gradients, plans
from flashgen.operators.cached_plans import APPENDED, BATCH_IDX, K_DESCALE, LEFTPAD, ROTARY, TABLE, V_DESCALE, CachedOptions
from flashgen.operators.gradient_plans import gradient_plan_for
from flashgen.operators.packed import PackedOptions
from flashgen.selection import loaded
from tools import call_overhead

pytestmark = pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")
CALLS = 48  # of each kind, of which most differ in their sizes alone
AT = 2**20  # where all that a call allocates begins, as it does for planning anew
MEMORY = torch.zeros(2**28, dtype=torch.bfloat16)  # in which tensors of all sizes are
WINDOW = Given(("window",), (("window_left", 100), ("window_right", 0)))

Log = list[Any]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Log:
    """What was allocated and launched, on an H200 that is made up, and tensors in main memory that are said to be on it."""
    call_overhead.pretend("h200", tmp_path, monkeypatch.setattr)
    found: Log = []

    def noting(answer: Any, *facts: str) -> Callable[..., Any]:
        def note(*given: Any, count: int = 1) -> Any:
            found.append([getattr(given[0], fact) for fact in facts] if facts else (given, count))
            return answer

        return note

    memory, driver = SimpleNamespace(data_ptr=lambda: AT), gpu_kernel.driver()  # type: ignore[attr-defined]
    patches: tuple[tuple[Any, str, Any], ...] = (
        *((module, "empty_strided", noting(memory)) for module in (launch_gpu, bound, launch_gradients)),
        (bound, "_zeros", noting(memory)),
        (bound, "tile_counters", SimpleNamespace(address=lambda device, stream, count=1: noting(AT)(count=count))),
        (driver, "cuLaunchKernel", lambda *given: noting((0,))(*given[:-2])),  # without the address of parameters
        (driver, "cuLaunchKernelEx", noting((0,), "gridDimX", "blockDimX", "sharedMemBytes", "numAttrs")),
        (launch_gradients, "gpu", lambda ordinal: launch_gpu.gpu_of(MEMORY)),
        (launch_gradients, "require_context", lambda ordinal: None),
        (launch_gradients, "current_device", lambda: 0),
        (launch_gradients, "current_stream", lambda index: 0),
        (torch.autograd.graph, "increment_version", lambda tensors: None),
        (plans, "_LOCAL", plans._OfThread()),
        (torch.Tensor, "device", call_overhead.ON),
        (torch.Tensor, "is_cuda", True),
    )
    for owner, name, value in patches:
        monkeypatch.setattr(owner, name, value)
    return found


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, gap: int = 0, swapped: bool = False) -> torch.Tensor:
    """Of that shape, with so many elements behind each row; swapped: the two dimensions in the middle lie the other way round."""
    widths = [*shape[:-1], shape[-1] + gap]
    if swapped:
        widths[1], widths[2] = widths[2], widths[1]
    strides = [1] * len(widths)
    for dim in range(len(widths) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(1, widths[dim])
    if swapped:
        strides[1], strides[2] = strides[2], strides[1]
    return MEMORY.view(dtype)[:1].as_strided(shape, strides, 0)


def ints(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)


Called = Callable[[], Any]  # the plan of a call, which it runs


def dense(draw: random.Random, options: dict[str, Any], backward: bool) -> Called:
    """Of other sizes each time: `options` is what stays the same."""
    heads_kv, group, d, layout = options.get("heads_kv", 2), options.get("group", 2), options.get("d", 64), options.get("layout", "bshd")
    batch, len_q, len_kv = draw.choice([1, 2, 2, 3]), draw.choice([1, 2, draw.randint(300, 600)]), draw.randint(700, 1500)
    if options.get("long"):
        len_q, len_kv = draw.randint(1400, 1700), draw.randint(1400, 1700)
    heads, swapped, gap = heads_kv * group, layout == "bhsd" and draw.random() < 0.5, draw.choice([0, 0, 8])

    def laid(length: int, count: int) -> torch.Tensor:
        shape = (batch, length, count, d) if layout == "bshd" else (batch, count, length, d)
        return tensor(*shape, gap=gap, swapped=swapped)

    q, k, v = laid(len_q, heads), laid(len_kv, heads_kv), laid(len_kv, heads_kv)
    modifiers = options.get("modifiers", NO_MODIFIERS)
    made = {
        "alibi": lambda: tensor(heads, dtype=torch.float32),
        "bias": lambda: tensor(draw.choice([1, batch]), heads, len_q, len_kv + -len_kv % 8)[..., :len_kv],
        "boolean_mask": lambda: tensor(batch, 1, len_q, len_kv, dtype=torch.bool),
        "prefix_len": lambda: ints(batch),
        "sinks": lambda: tensor(heads, dtype=torch.float32),
    }
    tensors = tuple(made[name]() for name in modifiers.names if name in made)
    given: Any = options.get("causal", True), options.get("scale"), layout
    if not backward:

        def forward() -> Any:
            causal, scale, layout = given
            plan = plans.plan_for(q, k, v, causal, scale, layout, modifiers, tensors)
            plan.run(q, k, v, True, *tensors)
            return plan

        return forward
    out, d_out = tensor(*q.shape), tensor(*q.shape)[:]
    lse = tensor(batch, heads, len_q, dtype=torch.float32)
    d_lse = tensor(batch, heads, len_q, dtype=torch.float32) if options.get("d_lse") else None

    def gradients() -> Any:
        saved = q, k, v, out, lse, d_out, d_lse
        plan = gradient_plan_for(*saved, *given, options.get("deterministic", False), modifiers, tensors, False)
        plan.run(*saved, *tensors)
        return plan

    return gradients


def packed_call(draw: random.Random, options: dict[str, Any], backward: bool) -> Called:
    heads_kv, group, d = options.get("heads_kv", 2), options.get("group", 2), options.get("d", 64)
    batch, tokens_q, tokens_kv = (
        draw.choice([1, 16, draw.randint(9, 16)]),
        draw.choice([1, *[draw.randint(4000, 9000)] * 5]),
        draw.randint(6000, 16000),
    )
    gap, alike = draw.choice([0, 0, 8]), options.get("alike", False)
    tokens_kv = tokens_q if alike else tokens_kv
    q, k, v = (tensor(n, count, d, gap=gap) for n, count in ((tokens_q, heads_kv * group), (tokens_kv, heads_kv), (tokens_kv, heads_kv)))
    ends = ints(batch + 1)
    used = ints(batch) if options.get("used") else None
    lengths = (draw.randint(0, 3000), draw.randint(0, 3000)) if options.get("hints") else (None, None)
    modifiers = options.get("modifiers", NO_MODIFIERS)
    room = [max(1, one) for one in lengths if one is not None] or [draw.randint(1, 1200), draw.randint(1, 1200)]
    if options.get("of_scores"):
        lengths = room[0], room[1]  # as `lengths_of_scores` finds them
    made = {
        "alibi": lambda: tensor(heads_kv * group, dtype=torch.float32),
        "bias": lambda: tensor(draw.choice([1, batch]), heads_kv * group, *room),
        "boolean_mask": lambda: tensor(batch, 1, *room, dtype=torch.bool),
        "sinks": lambda: tensor(heads_kv * group, dtype=torch.float32),
    }
    tensors = tuple(made[name]() for name in modifiers.names if name in made)
    if options.get("in_batch"):
        q, k, v = q[None], k[None], v[None]
    every = (q, k, v, ends, ends if alike else ints(batch + 1), used, None, *tensors)
    told = PackedOptions(options.get("causal", True), options.get("scale"), lengths[0], lengths[1], modifiers)
    if not backward:

        def forward() -> Any:
            plan = packed.packed_plan_for(every, told)
            plan.run(True, *every)
            return plan

        return forward
    out, d_out = (tensor(tokens_q, heads_kv * group, d) for _ in "od")
    lse = tensor(heads_kv * group, tokens_q, dtype=torch.float32)

    def gradients() -> Any:
        saved = q, k, v, out, lse, d_out, None
        of_tokens: Any = every[3:7]
        tokens = PackedTokens(*of_tokens, *lengths)
        given = *saved, tokens, told.causal, told.scale, options.get("deterministic", False), modifiers, tensors
        plan = packed_gradients._plan_for(False, *given)
        plan.run(*saved, tokens, *tensors)
        return plan

    return gradients


def cached(draw: random.Random, options: dict[str, Any], backward: bool) -> Called:
    heads_kv, group, d, there = options.get("heads_kv", 2), options.get("group", 4), options.get("d", 64), options.get("there", TABLE)
    batch, len_q, new = (
        draw.choice([1, 900, *[draw.randint(5, 8)] * 4]),
        draw.choice([1, 1, 1, 2, draw.randint(1, 70)]),
        draw.choice([1, 5]),
    )
    page_size, width = draw.choice(options.get("page_sizes", [64])), draw.choice([1, *[draw.randint(17, 40)] * 5])
    pages = draw.choice([2000, 2000, 1100])
    kind = torch.float8_e4m3fn if there & (K_DESCALE | V_DESCALE) else torch.bfloat16
    gap = draw.choice([0, 0, 16])
    q = tensor(batch, len_q, heads_kv * group, d, gap=draw.choice([0, 8]))
    caches = [tensor(pages, page_size, heads_kv, d, dtype=kind, gap=gap) for _ in "kv"]
    modifiers = options.get("modifiers", NO_MODIFIERS)
    keys = width * page_size if there & TABLE else page_size
    made = {
        "alibi": lambda: tensor(heads_kv * group, dtype=torch.float32),
        "bias": lambda: tensor(draw.choice([1, batch]), heads_kv * group, len_q, keys),
        "boolean_mask": lambda: tensor(batch, 1, len_q, keys + draw.choice([0, 8]), dtype=torch.bool)[..., :keys],
        "prefix_len": lambda: ints(batch),
        "sinks": lambda: tensor(heads_kv * group, dtype=torch.float32),
        "tree_mask": lambda: tensor(draw.choice([1, batch]), heads_kv * group, len_q, len_q, dtype=torch.bool),
    }
    of_modifiers = [made[name]() for name in modifiers.names if name in made]
    table = ints(batch, 50)[:, :width] if draw.random() < 0.5 else ints(batch, width)
    found = [ints(batch)]
    for bit, one in ((TABLE, table), (BATCH_IDX, ints(batch)), (LEFTPAD, ints(batch))):
        found += [one] if there & bit else []
    for bit in (K_DESCALE, V_DESCALE):
        found += [tensor(batch, heads_kv, dtype=torch.float32)] if there & bit else []
    found += of_modifiers
    if there & APPENDED:
        found += [tensor(batch, new, heads_kv, d) for _ in "kv"]
    if there & ROTARY:
        found += [tensor(4096, d // 2, dtype=torch.float32) for _ in "cs"]
    told = CachedOptions(there, options.get("causal", True), None, modifiers, options.get("batch_invariant", False))
    told = told._replace(rotary_interleaved=bool(there & ROTARY), by_query=bool(there & ROTARY))
    tensors = [q, *caches, *found]
    if options.get("parts"):
        told = told._replace(parts=(len_q, page_size))
        tensors[:3] = [one.flatten(0, 1)[None] for one in tensors[:3]]

    def call() -> Any:
        plan = cached_plans.cached_plan_for(tensors, told)  # of what appends, too
        plan.run(True, *tensors)
        return plan

    return call


def appended(draw: random.Random, options: dict[str, Any], backward: bool) -> Called:
    batch, new, len_q, d = draw.randint(100, 300), draw.choice([1, draw.randint(5, 9)]), draw.randint(3, 5), 64
    width, rotates = draw.choice([1, draw.randint(10, 30)]), options.get("rotates", False)
    caches = [tensor(2000, 16, 2, d) for _ in "kv"]
    k, v = (tensor(batch, new, 2, d, gap=draw.choice([0, 8])) for _ in "kv")
    cos = tensor(512, 16, dtype=torch.float32) if rotates else None
    q = tensor(batch, len_q, 8, d) if rotates else None
    sin = tensor(512, 16, dtype=torch.float32) if rotates else None
    tensors = AppendTensors(caches[0], caches[1], k, v, ints(batch), ints(batch, width), q, cos, sin)

    def call() -> Any:
        plan = append.append_plan_for(tensors, True, rotates)
        plan.run(*tensors)
        return plan

    return call


KINDS: dict[str, tuple[Callable[..., Called], dict[str, Any], bool]] = {
    "dense": (dense, {}, False),
    "dense, one head": (dense, {"heads_kv": 1, "group": 1, "causal": False}, False),
    "dense, groups": (dense, {"group": 8, "d": 128, "scale": 0.3}, False),
    "dense, heads first": (dense, {"layout": "bhsd"}, False),
    "dense, a window": (dense, {"modifiers": WINDOW}, False),
    "dense, a chunk beyond all lengths": (dense, {"modifiers": Given(("chunk",), (("chunk", 8192),))}, False),
    "dense, slopes": (dense, {"modifiers": Given(("alibi",))}, False),
    "dense, slopes, far keys": (dense, {"modifiers": Given(("alibi",)), "long": True}, False),
    "dense, a bias": (dense, {"modifiers": Given(("bias",))}, False),
    "dense, a mask": (dense, {"modifiers": Given(("boolean_mask",)), "causal": False}, False),
    "dense, prefixes": (dense, {"modifiers": Given(("prefix_len",))}, False),
    "dense backward": (dense, {"group": 4}, True),
    "dense backward, deterministic": (dense, {"deterministic": True, "d_lse": True}, True),
    "dense backward, wide": (dense, {"d": 256, "causal": False}, True),
    "dense backward, heads first": (dense, {"layout": "bhsd"}, True),
    "dense backward, sinks": (dense, {"modifiers": Given(("sinks",)), "group": 1}, True),
    "packed": (packed_call, {}, False),
    "packed, groups": (packed_call, {"group": 8, "causal": False, "d": 128, "used": True}, False),
    "packed, hints": (packed_call, {"hints": True, "alike": True}, False),
    "packed, slopes in a window": (packed_call, {"modifiers": Given(("alibi", "window"), WINDOW.sizes)}, False),
    "packed, a mask": (packed_call, {"modifiers": Given(("boolean_mask",)), "of_scores": True, "causal": False}, False),
    "packed, a bias": (packed_call, {"modifiers": Given(("bias",)), "of_scores": True}, False),
    "packed, in a batch of one": (packed_call, {"in_batch": True, "hints": True}, False),
    "packed backward": (packed_call, {"hints": True}, True),
    "packed backward, a mask": (packed_call, {"modifiers": Given(("boolean_mask",)), "of_scores": True}, True),
    "packed backward, deterministic": (packed_call, {"deterministic": True, "alike": True, "d": 128, "group": 1}, True),
    "cached": (cached, {}, False),
    "cached, pages of several sizes": (cached, {"page_sizes": [1, 40, 48, 64, 64], "d": 128}, False),
    "cached, without a table": (cached, {"there": LEFTPAD, "page_sizes": [100, 500]}, False),
    "cached, an entry each": (cached, {"there": BATCH_IDX, "causal": False}, False),
    "cached, batch invariant": (cached, {"batch_invariant": True}, False),
    "cached, a window and sinks": (cached, {"modifiers": Given(("sinks", "window"), WINDOW.sizes)}, False),
    "cached, a mask": (cached, {"modifiers": Given(("boolean_mask",))}, False),
    "cached, a tree mask and a prefix": (cached, {"modifiers": Given(("prefix_len", "tree_mask"))}, False),
    "cached, a bias": (cached, {"modifiers": Given(("bias",)), "there": LEFTPAD, "page_sizes": [300, 500]}, False),
    "cached, one behind the other": (cached, {"parts": True}, False),
    "cached, one behind the other in entries": (cached, {"parts": True, "there": LEFTPAD, "page_sizes": [500]}, False),
    "cached, e4m3": (cached, {"there": TABLE | K_DESCALE | V_DESCALE}, False),
    "cached, appended": (cached, {"there": TABLE | APPENDED}, False),
    "cached, appended and rotated": (cached, {"there": TABLE | LEFTPAD | APPENDED | ROTARY}, False),
    "append": (appended, {}, False),
    "append and rotate": (appended, {"rotates": True}, False),
}


def launched(plan: Any) -> list[Any]:
    """Parameters to the byte, maps and blocks of a plan that has run."""
    every = plan.bound if isinstance(plan.bound, tuple) else (plan.bound,)
    kernels = [one.launch.kernel.spec.name for one in every]
    memories = [memory for program in every for memory in program.launch.memories]
    loaded = [memory.holds for memory in memories]
    return [
        kernels,
        [(memory.suffix, bytes(memory._buffer)) for memory in memories],
        [(grid, values, [one.shape for one in maps]) for grid, values, maps in loaded],
    ]


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_of_other_sizes_is_that_which_planning_makes(name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options, backward = KINDS[name]
    draw, by_ways = random.Random(name), 0
    known, made = plans._LOCAL, sized_plans._Form.keep
    ways: list[Any] = []

    def keep(form: Any, sizes: Any, plan: Any) -> Any:
        ways.append(plan)
        return made(form, sizes, plan)

    monkeypatch.setattr(sized_plans._Form, "keep", keep)
    recorded: list[Exception | None] = []

    def function_of(*given: Any) -> Any:
        try:
            found = sizes.function_of_sizes(*given)
        except Exception as error:
            recorded.append(error)
            raise
        recorded.append(None)
        return found

    monkeypatch.setattr(sized_plans, "function_of_sizes", function_of)
    for _ in range(CALLS):
        call = make(draw, options, backward)
        monkeypatch.setattr(plans, "_LOCAL", known)
        ways.clear()
        log.clear()
        plan = call()
        is_by_way = any(one is plan for one in ways) and not any(one is plan for one in everything_kept(known))
        found = [*log], launched(plan)
        monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
        log.clear()
        anew = call()
        assert anew is not plan
        assert found == ([*log], launched(anew))
        by_ways += is_by_way
    failed = [error for error in recorded if error is not None and "does not follow from the bucket" not in str(error)]
    assert not failed
    assert by_ways >= CALLS // 8, f"of {CALLS} calls {by_ways} were planned by a way"


def everything_kept(thread: Any) -> list[Any]:
    """Plans by their whole signature: those that were made in full."""
    of_names = ("plans", "packed_plans", "packed_gradient_plans", "cached_plans", "append_plans", "gradient_plans")
    return [plan for name in of_names for plan in thread.__dict__.get(name, {}).values()]


class Logging(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def of_tokens(tokens: int, options: tuple[Any, ...] = (True, None, None, None)) -> Called:
    """What asks for what runs a packed call of so many tokens past the dispatcher."""
    q, k, v = (tensor(tokens, 4, 64) for _ in "qkv")
    ends = ints(9)
    return lambda: packed.packed_run_at_hand((q, k, v, ends, ends, None, None), *options)


def of_width(width: int) -> Called:
    """The same of a call on a cache, whose table has so many pages for each sequence."""
    tensors = [tensor(8, 1, 8, 64), *[tensor(500, 64, 2, 64) for _ in "kv"], ints(8), ints(8, width)]
    return lambda: cached_plans.cached_run_at_hand(tensors, (TABLE, True, None, NO_MODIFIERS, False, False, False))


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("made", [of_tokens, of_width])
def test_others_who_listen_get_a_call_of_new_sizes(made: Callable[[int], Called]) -> None:
    calls = iter([made(size) for size in range(600, 620)])
    for _ in range(4):
        assert next(calls)() is not None
    for listening in (
        Logging,
        FakeTensorMode,
        lambda: torch.device("meta"),
        forward_ad.dual_level,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):
        call = next(calls)
        with listening():
            assert call() is None
        assert call() is not None
    seen, ones = [], torch.ones(3, 2)

    def ask(x: torch.Tensor) -> torch.Tensor:
        seen.append(next(calls)())
        return x

    torch.jit.trace(ask, ones, check_trace=False)
    torch.func.grad(lambda x: (ask(x), x.sum())[1])(ones)
    torch.vmap(ask)(ones)
    assert seen == [None] * 3


@pytest.mark.usefixtures("log")
def test_a_call_of_new_sizes_is_not_one_of_other_options() -> None:
    for tokens in (600, 601, 602):
        assert of_tokens(tokens)() is not None
    with pytest.raises(ArgumentError, match=r"^causal must be of type bool; got 1$"):
        of_tokens(603, (1, None, None, None))()
    found = of_tokens(604)()
    assert of_tokens(604)() is found
    assert of_tokens(604, (False, None, None, None))() is not found
    loaded.kernels.forget()
    assert of_tokens(604)() is not found


@pytest.mark.usefixtures("log")
def test_a_record_of_that_very_workload_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others of its bucket go another way; and records that change are heard."""
    asked: list[Workload] = []
    choose = loaded.kernels._choose

    def note(problem: Any, workload: Workload, *rest: Any) -> Any:
        asked.append(workload)
        return choose(problem, workload, *rest)

    monkeypatch.setattr(loaded.kernels, "_choose", note)
    recorded = Workload(8, 4, 4, 605, 605, tokens_q=605, tokens_kv=605)
    monkeypatch.setattr(loaded, "recorded_workloads", lambda *given: frozenset({recorded}))
    for tokens in (600, 601, 602, 603):
        of_tokens(tokens)()
    assert len(asked) == 1
    of_tokens(605)()
    assert asked[1:] == [recorded]
    of_tokens(606)()
    assert len(asked) == 2
    monkeypatch.setattr(loaded.kernels, "sources", lambda: ("others",))
    of_tokens(607)()
    assert [one.tokens_q for one in asked[2:]] == [607]


@pytest.mark.usefixtures("log")
def test_batches_and_queries_of_decoding_find_their_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a hundred, as each of both decides something: of few a tenth of these calls would be planned in full for ever."""
    draw, in_full = random.Random(3), [0, 0]
    cache, learn = tensor(64, 4096, 8, 128), sized_plans.SizedPlans.learn
    for late in (False, True):

        def counted(*given: Any, late: bool = late) -> None:
            in_full[late] += 1
            learn(*given)

        monkeypatch.setattr(sized_plans.SizedPlans, "learn", counted)
        for _ in range(700):
            batch, queries, keys = draw.randint(1, 64), draw.randint(1, 8), draw.randrange(2000, 4096)
            q, k = tensor(batch, queries, 32, 128), cache[:batch, :keys]
            plans.plan_for(q, k, k, True, None, "bshd")
    assert in_full[0] > 80
    assert in_full[1] < 35


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_calls_with_and_without_expected_lengths_are_of_two_kinds(backward: bool, first: bool) -> None:
    """By turns, and each first: none is planned by the way of the other, nor fails by it."""
    draw = random.Random(11)
    for turn in range(12):
        hints = first if turn < 6 else not first
        packed_call(draw, {"hints": hints}, backward)()
    for turn in range(6):
        packed_call(draw, {"hints": bool(turn % 2)}, backward)()


@pytest.mark.usefixtures("log")
def test_expected_lengths_that_are_no_ints_find_no_way() -> None:
    draw = random.Random(12)
    for _ in range(6):
        packed_call(draw, {"hints": True}, False)()
    q, k, v = (tensor(tokens, heads, 64) for tokens, heads in ((5000, 4), (6001, 2), (6001, 2)))
    odds: tuple[Any, ...] = (torch.tensor(77), 77.0, "77")
    for odd in odds:
        with pytest.raises((ArgumentError, TypeError), match=r"max_seqlen_q|len_q|int"):
            packed.packed_plan_for((q, k, v, ints(11), ints(11), None, None), PackedOptions(True, None, odd, 77))


class Listening(torch.Tensor):
    """Of a class that may listen to what PyTorch does."""


@pytest.mark.usefixtures("log")
def test_tensors_of_other_classes_never_pass_by_the_dispatcher() -> None:
    told = TABLE, True, None, NO_MODIFIERS, False, False, False
    for width in range(600, 606):
        tensors = [tensor(8, 1, 8, 64).as_subclass(Listening), *[tensor(2000, 64, 2, 64) for _ in "kv"], ints(8), ints(8, width)]
        cached_plans.cached_plan_for(tensors, CachedOptions(*told))
        assert cached_plans.cached_run_at_hand(tensors, told) is None


@pytest.mark.usefixtures("log")
def test_rotary_tables_without_dimensions_are_refused_by_name() -> None:
    caches, cos = [tensor(2000, 16, 2, 64) for _ in "kv"], tensor(1, dtype=torch.float32)[0]
    tensors = AppendTensors(caches[0], caches[1], None, None, ints(8), ints(8, 9), tensor(8, 1, 8, 64), cos, cos)
    with pytest.raises(ArgumentError, match=r"^rotary_cos must have 2 dimensions"):
        append.append_plan_for(tensors, True, True)


@pytest.mark.usefixtures("log")
def test_rotary_tables_are_too_short_for_a_wider_table_of_pages() -> None:
    """Whatever was learned from narrower ones."""
    cache, new, cos = tensor(2000, 16, 2, 64), tensor(8, 1, 2, 64), tensor(512, 16, dtype=torch.float32)
    for width in range(9, 34):
        tensors = AppendTensors(cache, cache, new, new, ints(8), ints(8, width), tensor(8, 1, 8, 64), cos, cos)
        message = r"^rotary_cos must have a row for each of 528 positions"
        with nullcontext() if width < 33 else pytest.raises(ArgumentError, match=message):
            append.append_plan_for(tensors, True, True)
