"""Plans without a GPU: which calls share one, and what a plan binds its kernel to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashgen.build.artifact import EntryReport, Report
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.config import Config
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, Scheduler
from flashgen.codegen.family import find_family
from flashgen.codegen.modifier import NO_MODIFIERS
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import Buffer, BufferKind, Program
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch import arguments, bound, gpu
from flashgen.launch.gpu import CaptureError, Plan, choose_kernel
from flashgen.launch.private_names import knows_tensors
from flashgen.operators import plans, registration
from flashgen.operators.plans import run_at_hand
from flashgen.records import sources
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Records
from flashgen.selection import loaded

H200 = find_device("h200")
GPU = Gpu(3, H200, "uuid", "580.1")
GENERIC, SM90 = find_family("attention_forward"), find_family("attention_forward_sm90")

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool, float | None, str]


def call(**changes: Any) -> Arguments:
    """The arguments of a call: q, k and v with sizes that all differ, and strides of their own."""
    sizes = {"batch": 2, "len_q": 5, "len_kv": 7, "heads_q": 6, "heads_kv": 3, "head_dim": 64, "head_dim_v": 32, "dtype": torch.bfloat16}
    given: dict[str, Any] = {
        **sizes,
        "layout": "bshd",
        "causal": True,
        "scale": None,
        "device": "cpu",
        "padding": (8, 16, 24),
        "step": 1,
        **changes,
    }

    def tensor(name: str, length: str, heads: str, width: str) -> torch.Tensor:
        padding = given["padding"]["qkv".index(name)]
        inner = [given[length], given[heads]] if given["layout"] == "bshd" else [given[heads], given[length]]
        row = given[width] + padding
        strides = (inner[0] * inner[1] * row, inner[1] * row, row, given["step"])
        if name == "q" and given.get("permuted"):
            strides = (strides[0], row, inner[0] * row, given["step"])
        return torch.empty_strided((given["batch"], *inner, given[width]), strides, dtype=given["dtype"], device=given["device"])

    q, k = tensor("q", "len_q", "heads_q", "head_dim"), tensor("k", "len_kv", "heads_kv", "head_dim")
    return q, k, tensor("v", "len_kv", "heads_kv", "head_dim_v"), given["causal"], given["scale"], given["layout"]


def with_another(at: int, **options: Any) -> Arguments:
    """The same call but for the element type or device of one tensor."""
    arguments: list[Any] = list(call())
    tensor = arguments[at]
    arguments[at] = torch.empty_strided(tensor.shape, tensor.stride(), **{"dtype": tensor.dtype, **options})
    q, k, v, *rest = arguments
    return q, k, v, *rest


DIFFERENT: dict[str, Callable[[], Arguments]] = {
    "q's batch": lambda: call(batch=3),
    "q's length": lambda: call(len_q=6),
    "k's length": lambda: call(len_kv=8),
    "q's heads": lambda: call(heads_q=9),
    "k's heads": lambda: call(heads_kv=2),
    "k's width": lambda: call(head_dim=72),
    "v's width": lambda: call(head_dim_v=40),
    "q's strides": lambda: call(padding=(16, 16, 24)),
    "k's strides": lambda: call(padding=(8, 24, 24)),
    "v's strides": lambda: call(padding=(8, 16, 32)),
    "the element type": lambda: call(dtype=torch.float16),
    "q's element type": lambda: with_another(0, dtype=torch.float16),
    "k's element type": lambda: with_another(1, dtype=torch.float16),
    "v's element type": lambda: with_another(2, dtype=torch.float16),
    "the device": lambda: call(device="meta"),
    "q's device": lambda: with_another(0, device="meta"),
    "k's device": lambda: with_another(1, device="meta"),
    "v's device": lambda: with_another(2, device="meta"),
    "the mask": lambda: call(causal=False),
    "a scale": lambda: call(scale=0.125),
    "another scale": lambda: call(scale=0.25),
    "the layout": lambda: (*call()[:5], "bhsd"),
}


@pytest.fixture
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has called nothing yet, and plans that are objects of no use."""

    def made(*arguments: Any) -> Any:
        return SimpleNamespace(arguments=arguments, run=object(), bound=None, met=True, before=None, before_differentiable=None)

    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
    monkeypatch.setattr(plans, "Plan", made)


@pytest.mark.usefixtures("no_plans")
def test_a_call_that_differs_in_anything_has_a_plan_of_its_own() -> None:
    first = plans.plan_for(*call())
    assert plans.plan_for(*call()) is first, "other tensors of the same signature"
    made: list[object] = [first]
    for what, different in DIFFERENT.items():
        assert run_at_hand(*different()) is None, what
        plan = plans.plan_for(*different())
        assert all(plan is not other for other in made), what
        assert plans.plan_for(*different()) is plan, what
        assert run_at_hand(*different()) is plan.run, what
        made.append(plan)
    assert plans.plan_for(*call()) is first


@pytest.mark.usefixtures("no_plans")
def test_a_number_is_no_causal_once_a_call_is_known() -> None:
    """Though 1 is equal to True, and so are signatures that have it: a call is refused the first time and ever after."""
    plan = plans.plan_for(*call(causal=True))
    for _ in range(3):
        assert run_at_hand(*call(causal=True)) is plan.run
        assert run_at_hand(*call(causal=1)) is None


def differentiable(given: Arguments, at: int = 0) -> Arguments:
    """The same arguments, of which one tensor needs a gradient."""
    arguments: list[Any] = list(given)
    arguments[at] = arguments[at].requires_grad_()
    q, k, v, *rest = arguments
    return q, k, v, *rest


def gradient_run(*_: Any) -> Any:
    """What would run a call with gradients."""


@pytest.mark.usefixtures("no_plans")
@pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")
def test_only_a_call_with_gradients_like_the_one_before_is_known_again() -> None:
    first = differentiable(call())
    assert run_at_hand(*first) is None
    plans.remember_differentiable(plans.plan_for(*first), gradient_run, first[:3], *first[3:], None)
    assert run_at_hand(*first) is gradient_run
    assert run_at_hand(*differentiable(call())) is gradient_run, "other tensors"
    assert run_at_hand(*differentiable(call(), 1)) is None, "another gradient"
    assert run_at_hand(*first, deterministic=True) is None
    with torch.no_grad():
        assert run_at_hand(*first) is not gradient_run
    plans.remember_differentiable(plans.plan_for(*first), gradient_run, first[:3], *first[3:], None)
    for what, different in DIFFERENT.items():
        assert run_at_hand(*differentiable(different())) is None, what
    assert run_at_hand(*differentiable(call())) is gradient_run
    assert run_at_hand(torch.nn.Parameter(first[0]), *first[1:]) is None, "a parameter, which the one before was not"
    with FakeTensorMode():
        assert run_at_hand(*differentiable(call())) is None
    assert run_at_hand(*call()) is not gradient_run, "no gradient"


@pytest.mark.usefixtures("no_plans")
def test_a_negated_view_goes_through_the_dispatcher() -> None:
    plans.plan_for(*call())
    for at in range(3):
        arguments: list[Any] = list(call())
        arguments[at] = torch._neg_view(arguments[at])  # the same signature, but not the same numbers
        assert run_at_hand(*arguments) is None


@pytest.mark.usefixtures("no_plans")
def test_a_plan_is_made_anew_once_another_kernel_may_be_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = loaded.Kernels()
    monkeypatch.setattr(loaded, "kernels", kernels)
    first = plans.plan_for(*call())
    kernels.forget()
    assert run_at_hand(*call()) is None
    assert plans.plan_for(*call()) is not first


@pytest.mark.usefixtures("no_plans")
def test_a_thread_keeps_so_many_plans_and_forgets_the_oldest_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MAX_PLANS", 4)
    made = [plans.plan_for(*call(len_q=n)) for n in range(1, 5)]
    assert [run_at_hand(*call(len_q=n)) for n in range(1, 5)] == [plan.run for plan in made]
    newest = plans.plan_for(*call(len_q=5))
    assert [run_at_hand(*call(len_q=n)) for n in range(1, 6)] == [None, None, *[plan.run for plan in (*made[2:], newest)]]


class Bound:
    """A kernel that keeps what it is bound to, by the names of the family's parameters."""

    def __init__(self, family: str, config: Config | None = None, **problem: Any) -> None:
        asked = Problem(Dtype.BF16, 64, 32, Mask.CAUSAL) if not problem else Problem(**problem)
        chosen = find_family(family)
        self.spec = KernelSpec(chosen, asked, config or chosen.default(asked, H200.target), H200.target)
        self.gpu = GPU
        self.launched: list[tuple[int, ...]] = []

    def bind(self, program: Program) -> Any:
        (launch,) = program.launches
        self.grid, self.values, self.maps, self.buffers = launch.grid, launch.values, launch.maps, program.buffers
        return SimpleNamespace(numbers=None, enqueue=lambda _, *addresses: self.launched.append(addresses))


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else fake tensors want a real GPU of their number
    monkeypatch.setattr(gpu, "gpu", lambda ordinal: GPU)
    monkeypatch.setattr(gpu, "require_context", lambda ordinal: None)
    monkeypatch.setattr(gpu, "empty_strided", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype))


def plan(arguments: dict[str, Any], kernel: Any) -> Plan:
    with FakeTensorMode():
        return Plan(*call(device="cuda:3", **arguments), kernel=kernel)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_plan_binds_sizes_strides_and_scale(layout: str) -> None:
    kernel = Bound("attention_forward")
    made = plan({"layout": layout}, kernel)
    rows, heads = ("row", "head") if layout == "bshd" else ("head", "row")  # which of them is the outer dimension
    widths = {"q": 72, "k": 80, "v": 56, "out": 32}
    inner = {"q": 6, "k": 3, "v": 3, "out": 6} if layout == "bshd" else {"q": 5, "k": 7, "v": 7, "out": 5}
    outer = {"q": 5, "k": 7, "v": 7, "out": 5} if layout == "bshd" else {"q": 6, "k": 3, "v": 3, "out": 6}
    for tensor, width in widths.items():
        assert kernel.values[f"{tensor}_{heads}"] == width
        assert kernel.values[f"{tensor}_{rows}"] == width * inner[tensor]
        assert kernel.values[f"{tensor}_batch"] == width * inner[tensor] * outer[tensor]
    assert [kernel.values[name] for name in ("heads_q", "len_q", "len_kv")] == [6, 5, 7]
    assert kernel.values["scale_log2"] == pytest.approx(64**-0.5 * 1.4426950408889634)
    assert kernel.grid == 12
    assert made.bound.index == 3
    assert made.numbers[0][0] == ((2, 5, 6, 32) if layout == "bshd" else (2, 6, 5, 32))
    assert made.numbers[0][2] == (2, 6, 5)
    plan({"layout": layout, "scale": 0.3}, kernel)
    assert kernel.values["scale_log2"] == pytest.approx(0.3 * 1.4426950408889634)


def test_a_plan_binds_the_maps_of_its_tensors() -> None:
    kernel = Bound("attention_forward_sm90")
    plan({}, kernel)
    assert list(kernel.maps) == ["q", "k", "v", "out"]
    assert [m.sizes for m in kernel.maps.values()] == [(64, 5, 6, 2), (64, 7, 3, 2), (32, 7, 3, 2), (32, 5, 6, 2)]
    rows = [m.strides for m in kernel.maps.values()]
    assert rows == [(864, 144, 4320), (480, 160, 3360), (336, 112, 2352), (384, 64, 1920)], "of rows, heads, batches in bytes"


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, which is the last of these."""
    devices = [3]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        devices.append(index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    for place, names in ((torch._C, ("_cuda_getDevice", "_cuda_getCurrentRawStream")), (gpu, ("current_device", "current_stream"))):
        monkeypatch.setattr(place, names[0], lambda: devices[-1], raising=False)
        monkeypatch.setattr(place, names[1], lambda index: 100 * devices[-1] + index, raising=False)
    return devices


Into = Callable[..., None]


@pytest.fixture
def into(monkeypatch: pytest.MonkeyPatch) -> Into:
    """Runs a plan on q, k and v, with `out` and `lse` for what it allocates; without lse if that is None."""

    def run(made: Plan, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        allocated = iter((out, lse))
        monkeypatch.setattr(gpu, "empty_strided", lambda *given: next(allocated))
        assert made.run(q, k, v, lse is not None) == (out, lse)

    return run


@pytest.mark.parametrize("scheduler", Scheduler)
@pytest.mark.usefixtures("current")
def test_a_plan_gives_a_tile_counter_to_those_that_count(scheduler: Scheduler, into: Into, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Bound("attention_forward_sm90", AttentionForwardSm90Config(2, 64, out_panels=1, scheduler=scheduler))
    made = plan({}, kernel)
    monkeypatch.setattr(bound, "tile_counters", SimpleNamespace(address=lambda device, stream: 1000 * device + stream))
    q, k, v, out, lse = (SimpleNamespace(data_ptr=lambda at=at: at) for at in (16, 32, 48, 64, 80))
    counter = (3303,) if scheduler is Scheduler.DYNAMIC else ()
    into(made, q, k, v, out, lse)
    into(made, q, k, v, out, None)
    assert kernel.launched == [(303, 16, 32, 48, 64, 80, *counter), (303, 16, 32, 48, 64, 0, *counter)]
    for at in range(3):
        tensors: list[Any] = [q, k, v, out, lse]
        tensors[at] = SimpleNamespace(data_ptr=lambda: 24)
        with pytest.raises(
            ArgumentError, match=rf"^{'qkv'[at]} must begin at an address that is a multiple of 16 bytes; got one 8 past it$"
        ):
            into(made, *tensors)
    assert len(kernel.launched) == 2


@pytest.mark.usefixtures("current")
def test_a_plan_gives_a_program_its_buffers(into: Into, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the call's own from PyTorch's allocator, zeroed where that is asked for; counters from the stream."""
    kernel = Bound("attention_forward")
    made = plan({}, kernel)
    assert made.bound is not None
    kinds = (BufferKind.CALL, BufferKind.STREAM_COUNTER, BufferKind.CALL_ZEROED, BufferKind.CALL)
    buffers = [Buffer(f"b{i}", size, kind) for i, (size, kind) in enumerate(zip((400, 12, 8, 600), kinds, strict=True))]
    numbers, made.bound.enqueue = bound._with_memory(made.bound.launch, made.bound.launch.numbers, made.bound.index, buffers)
    made.run = partial(gpu._runner(made.bound.index, torch.bfloat16, made.bound), (made.numbers[0], numbers))
    monkeypatch.setattr(
        bound, "tile_counters", SimpleNamespace(address=lambda device, stream, count: 1000 * device + 10 * count + stream - 30)
    )
    asked = []

    def memory(name: str, address: int) -> Callable[..., Any]:
        def make(*given: Any, **options: Any) -> Any:
            asked.append((name, *given, options))
            return SimpleNamespace(data_ptr=lambda: address)

        return make

    monkeypatch.setattr(bound, "empty_strided", memory("empty", 4096))
    monkeypatch.setattr(torch, "zeros", memory("zeros", 8192))
    tensors: list[Any] = [SimpleNamespace(data_ptr=lambda at=at: at) for at in (16, 32, 48, 64, 80)]
    into(made, *tensors)
    assert kernel.launched == [(303, 16, 32, 48, 64, 80, 4096, 3303, 8192, 4096 + 512)]
    options = {"dtype": torch.uint8, "device": torch.device("cuda", 3)}
    assert asked == [("zeros", 512, options), ("empty", (512 + 1024,), (1,), torch.uint8, {})], "one allocation a kind"


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize("at", range(3))
def test_a_plan_refuses_a_tensor_whose_storage_was_freed(at: int, into: Into) -> None:
    kernel = Bound("attention_forward_sm90", AttentionForwardSm90Config(2, 64, out_panels=1, scheduler=Scheduler.STATIC))
    made = plan({}, kernel)
    tensors = [torch.ones(2, 5, 4, 64, dtype=torch.bfloat16) for _ in range(5)]
    tensors[at].untyped_storage().resize_(0)
    with pytest.raises(
        ArgumentError, match=rf"^{'qkv'[at]} must have a storage that holds its elements, at least 5120 bytes; got one of 0$"
    ):
        into(made, *tensors)
    assert not kernel.launched
    tensors[at] = torch.ones(2, 0, 4, 64, dtype=torch.bfloat16)  # no keys: there is no memory to hold
    into(made, *tensors)
    assert len(kernel.launched) == 1


def test_a_plan_without_rows_launches_nothing() -> None:
    for empty in ({"batch": 0}, {"len_q": 0}, {"heads_q": 0}):
        made = plan(empty, None)
        assert made.bound is None


@pytest.mark.usefixtures("current")
@pytest.mark.parametrize("empty", ["batch", "len_q", "heads_q"])
def test_a_call_without_rows_gives_empty_outputs(empty: str) -> None:
    q, k, v, *_ = call(**{empty: 0})
    for with_lse in (True, False):
        out, lse = plan({empty: 0}, None).run(q, k, v, with_lse)
        assert (out.shape, out.dtype) == ((*q.shape[:3], v.shape[3]), q.dtype)
        assert (lse is not None) is with_lse
        if lse is not None:
            assert (lse.shape, lse.dtype) == ((q.shape[0], q.shape[2], q.shape[1]), torch.float32)


def test_a_plan_asks_for_a_kernel_that_takes_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(problem: Problem, workload: Workload, on: Gpu, excluded: frozenset[str]) -> Any:
        asked.append((problem, workload, on, excluded))
        return Bound("attention_forward")

    monkeypatch.setattr(gpu, "choose_kernel", choose)
    plan({}, None)
    plan({"len_kv": 0}, None)
    problem = Problem(Dtype.BF16, 64, 32, Mask.CAUSAL)
    assert asked[0] == (problem, Workload(2, 6, 3, 5, 7), GPU, frozenset())
    assert asked[1] == (problem, Workload(2, 6, 3, 5, 0), GPU, frozenset({"attention_decode_sm90", "attention_forward_sm90"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 2}, r"^q must be contiguous in its last dimension \(stride 1\); got stride 2$"),
        ({"padding": (4, 8, 8)}, r"^q must have rows aligned to 16 bytes .*; got stride 68 in dimension 2$"),
        ({"padding": (8, 4, 8)}, r"^k must have rows aligned to 16 bytes .*; got stride 1428 in dimension 0$"),
        ({"padding": (8, 8, 4)}, r"^v must have rows aligned to 16 bytes .*; got stride 756 in dimension 0$"),
        ({"heads_q": 4}, r"^q must have a number of heads that is a multiple of k's 3; got 4$"),
        ({"head_dim": 60, "padding": (4, 4, 8)}, r"head_dim must be a multiple of 8 from 8 to 256; got 60"),
    ],
)
def test_a_plan_refuses_what_no_kernel_can_take(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plan(changes, None)


def test_a_plan_refuses_a_kernel_whose_tiles_hold_too_many_heads() -> None:
    packed = AttentionForwardSm90Config(2, 64, out_panels=1, pack_gqa=4)
    with pytest.raises(ArgumentError, match="pack_gqa must divide the 2 query heads of a key/value head; got 4"):
        plan({}, Bound("attention_forward_sm90", packed))


def test_strides_that_are_never_used_are_0() -> None:
    """PyTorch lets them be anything: one past 2^31 of a dimension of size 1 must not reach a kernel."""
    tensor = torch.empty_strided((1, 5, 1, 8), (2**40, 8, 2**41, 1), device="meta")
    assert arguments.axis_strides(tensor, "bshd") == (0, 8, 0, 1)
    assert arguments.axis_strides(tensor, "bhsd") == (0, 0, 8, 1)
    kernel = Bound("attention_forward")
    plan({"batch": 1, "len_q": 1}, kernel)
    assert [kernel.values[f"{name}_batch"] for name in ("q", "k", "v", "out")] == [0] * 4
    assert [kernel.values[f"{name}_row"] for name in ("q", "k", "v", "out")] == [0, 240, 168, 0]


@pytest.mark.parametrize(("padding", "permuted"), [((8, 16, 24), False), ((0, 0, 0), False), ((0, 0, 0), True)])
@pytest.mark.parametrize("head_dim_v", [32, 64])
def test_a_call_allocates_dense_outputs_and_launches_on_its_device(
    padding: tuple[int, ...], permuted: bool, head_dim_v: int, current: list[int]
) -> None:
    sizes = {"padding": padding, "permuted": permuted, "head_dim_v": head_dim_v}
    kernel = Bound("attention_forward", dtype=Dtype.BF16, head_dim=64, head_dim_v=head_dim_v, mask=Mask.CAUSAL)
    made = plan(sizes, kernel)
    q, k, v, *_ = call(**sizes)  # a plan asks its tensors for no more than memory: it may as well be the CPU's
    for here in (3, 0):
        current[:] = [here]
        for with_lse in (True, False):
            out, lse = made.run(q, k, v, with_lse)
            assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 5, 6, head_dim_v), torch.bfloat16, True)
            assert (lse is not None) is with_lse
            if lse is not None:
                assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 6, 5), torch.float32, True)
            inputs = q.data_ptr(), k.data_ptr(), v.data_ptr()
            assert kernel.launched[-1] == (303, *inputs, out.data_ptr(), 0 if lse is None else lse.data_ptr())
        assert current == [here], "as it was"


@pytest.mark.parametrize("permuted", [False, True])
def test_under_heads_first_out_lies_in_memory_as_q_does(permuted: bool, current: list[int]) -> None:
    sizes = {"layout": "bhsd", "permuted": permuted}
    kernel = Bound("attention_forward")
    out, _ = plan(sizes, kernel).run(*call(**sizes)[:3], False)
    assert out.shape == (2, 6, 5, 32)
    assert (out.transpose(1, 2) if permuted else out).is_contiguous()
    assert (kernel.values["out_row"], kernel.values["out_head"]) == ((192, 32) if permuted else (32, 160))


def test_each_operator_gives_what_its_schema_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU. To a plan, a call that wants no lse is another one than a call that does."""
    asked = []

    class Told:
        def __init__(self, *arguments: Any) -> None:
            self.arguments = arguments

        def run(self, *given: Any) -> tuple[str, str | None]:
            asked.append((self.arguments, given[:3]))
            return "out", "lse" if given[3] else None

    monkeypatch.setattr(plans, "plan_for", Told)
    arguments = call()
    implementations: dict[str, Any] = {
        "attention_output": registration._output_cuda,
        "attention_forward": registration.forward_on_gpu,
        "attention": registration.without_deterministic(registration.forward_on_gpu),
    }
    for name, implementation in implementations.items():
        returns = getattr(torch.ops.flashgen, name).default._schema.returns
        wanted = ("out", "lse")[: len(returns)]
        assert implementation(*arguments) == (wanted if len(wanted) > 1 else wanted[0]), name
    wanted_of_each = (*arguments, NO_MODIFIERS, (), *arguments[:3])  # no modifiers
    assert all(told is given for call_ in asked for told, given in zip((*call_[0], *call_[1]), wanted_of_each, strict=True))
    assert len(asked) == len(implementations)


def test_no_kernel_is_made_while_a_graph_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Chosen(loaded.Kernels):
        def load(self, spec: KernelSpec, gpu: Gpu) -> Any:
            return SimpleNamespace(spec=spec, artifact=SimpleNamespace(report=Report({"kernel": EntryReport(128)})))

    problem, workload, excluded = Problem(Dtype.BF16, 64, 32, Mask.CAUSAL), Workload(2, 6, 3, 5, 7), frozenset({"attention_forward_sm90"})
    monkeypatch.setattr(loaded, "kernels", Chosen())
    own, shipped = Records(tmp_path / "records.sqlite3"), ShippedRecords(tmp_path)
    monkeypatch.setattr(sources, "own_records", lambda: own)
    monkeypatch.setattr(sources, "shipped_records", lambda: shipped)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with pytest.raises(CaptureError, match=r"call flashgen\.warm\(\.\.\.\), or the same attention once, before the capture$"):
        choose_kernel(problem, workload, GPU, excluded)
    capturing[0] = False
    made = choose_kernel(problem, workload, GPU, excluded)
    capturing[0] = True
    assert choose_kernel(problem, workload, GPU, excluded) is made
    with pytest.raises(CaptureError):
        choose_kernel(problem, workload, GPU, frozenset())
