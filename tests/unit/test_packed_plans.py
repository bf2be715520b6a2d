"""Plans of packed sequences without a GPU: which calls share one, what a plan is made from, and what it gives its kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.operands import Call
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.launch import gpu, packed_arguments
from flashgen.launch.packed_arguments import PackedTokens
from flashgen.launch.packed_gradients import PackedGradientPlan
from flashgen.launch.packed_plan import PackedPlan, PackedTensors
from flashgen.launch.private_names import knows_tensors
from flashgen.operators import packed, plans
from flashgen.operators.packed import PackedOptions, packed_run_at_hand
from flashgen.operators.packed_gradients import differentiable_varlen
from flashgen.selection import loaded
from tools.call_overhead import ON, OnGpu

ROOT = Path(__file__).parents[2]
GPU = Gpu(0, find_device("h200"), "uuid", "580.1")
Arguments = tuple[PackedTensors, PackedOptions]
USED = {"seqused_q": (True, False), "seqused_kv": (False, True)}


def given(kind: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor, **changes: Any) -> Arguments:
    """All tensors, and the options."""
    a: dict[str, Any] = {
        "tokens_q": 20,
        "tokens_kv": 30,
        "tokens_v": 0,
        "heads": 4,
        "heads_kv": 2,
        "d": 16,
        "d_v": 24,
        "batch": 3,
        **changes,
    }
    dtype, scale, causal = a.get("dtype", torch.bfloat16), a.get("scale"), a.get("causal", False)

    def tensor(tokens: int, heads: int, width: int) -> torch.Tensor:
        return torch.zeros(tokens, heads, width + a.get("gap", 0), dtype=dtype)[..., :width]

    of_kv = tensor(a["tokens_v"] or a["tokens_kv"], a["heads_kv"], a["d_v"])
    tensors = [tensor(a["tokens_q"], a["heads"], a["d"]), tensor(a["tokens_kv"], a["heads_kv"], a["d"]), of_kv]
    ends = torch.tensor([0, *[5] * (a["batch"] - 1), 20][: a["batch"] + 1], dtype=torch.int32)
    used = [ends[1:].clone() if has else None for has in USED.get(a.get("used", ""), (False, False))]
    options = PackedOptions(causal, scale, a.get("max_q"), a.get("max_kv"), a.get("modifiers", NO_MODIFIERS))
    return tuple(one if one is None else kind(one) for one in (*tensors, ends, ends.clone(), *used, *a.get("others", ()))), options


DIFFERENT: dict[str, dict[str, Any]] = {
    "q's tokens": {"tokens_q": 21},
    "k's tokens": {"tokens_kv": 31},
    "heads": {"heads": 6},
    "k's heads": {"heads_kv": 4},
    "width": {"d": 24},
    "v's width": {"d_v": 16},
    "strides": {"gap": 8},
    "the element type": {"dtype": torch.float16},
    "sequences": {"batch": 2},
    "used queries": {"used": "seqused_q"},
    "used keys": {"used": "seqused_kv"},
    "the mask": {"causal": True},
    "a scale": {"scale": 0.5},
    "expected queries": {"max_q": 7},
    "expected keys": {"max_kv": 7},
    "a modifier": {"modifiers": Given(("softcap",), (), (("softcap", 3.0),))},
    "a tensor of one": {"modifiers": Given(("sinks",)), "others": (torch.zeros(4),)},
}


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has called nothing yet."""
    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are objects of no use."""
    monkeypatch.setattr(packed, "PackedPlan", lambda *_: SimpleNamespace(run=object(), bound=None, met=True, before=None))


def plan_of(tensors: PackedTensors, options: PackedOptions) -> Any:
    """This thread's."""
    key = packed._signature(tensors, options)
    return packed._plans().get(key) or packed._new_plan(key, tensors, options)


def at_hand(tensors: PackedTensors, options: PackedOptions) -> Any:
    """What runs the call past the dispatcher."""
    return packed_run_at_hand(tensors, *options)


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
def test_a_call_like_the_one_before_is_known_by_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(*given())
    assert at_hand(*given()) is plan.run
    monkeypatch.setattr(packed, "_signature", None)
    assert at_hand(*given()) is plan.run
    assert at_hand(*given(tokens_q=21)) is None
    tensors, options = given()
    assert at_hand(tensors, options._replace(causal=1)) is None, "no bool"  # type: ignore[arg-type]


@pytest.mark.usefixtures("made_up")
@pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")
def test_keys_may_have_the_boundaries_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors: as in self-attention, which must not take the longer way for that."""
    tensors, options = given(used="seqused_q")
    apart = (*tensors[:6], tensors[5].clone())
    same = (*tensors[:4], tensors[3], tensors[5], tensors[5])
    plan = plan_of(apart, options)
    assert plan_of(same, options) is plan
    signature = packed._signature
    for known, other in ((apart, same), (same, apart)):
        monkeypatch.setattr(packed, "_signature", signature)
        plan.before = None
        assert at_hand(known, options) is plan.run
        assert at_hand(other, options) is plan.run, "by the longer way"
        plan.before = None
        assert at_hand(known, options) is plan.run
        monkeypatch.setattr(packed, "_signature", None)
        assert at_hand(known, options) is plan.run


class Logging(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("made_up")
def test_others_who_listen_get_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(*given())
    tensors, options = given()
    for listening in (Logging, FakeTensorMode, lambda: torch.device("meta")):
        assert at_hand(tensors, options) is plan.run
        with listening():
            assert at_hand(tensors, options) is None
    for at in range(3):
        changed = [*tensors]
        changed[at] = torch._neg_view(tensors[at])
        assert at_hand(tuple(changed), options) is None, "a negated view"
        changed[at] = torch.nn.Parameter(tensors[at], requires_grad=False)
        assert at_hand(tuple(changed), options) is None, "a subclass"
        changed[at] = tensors[at].clone().requires_grad_()
        assert at_hand(tuple(changed), options) is None, "one that needs a gradient"
        with torch.no_grad():
            assert at_hand(tuple(changed), options) is plan.run
    assert at_hand(tensors, options) is plan.run
    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    assert at_hand(*given(tokens_q=21)) is None


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
    return found


def test_a_kernel_gets_addresses_in_the_order_of_its_operands(bound: list[Bound]) -> None:
    for used in ("", "seqused_q", "seqused_kv"):
        tensors, options = given(OnGpu, used=used, modifiers=Given(("sinks",)), others=(torch.zeros(4),))
        for with_lse in (False, True):
            out, lse = plan_of(tensors, options).run(with_lse, *tensors)
            stream, *addresses = bound[-1].given[-1]
            names = [operand.name for operand in operation_of(bound[-1].call.problem).operands(bound[-1].call.problem)]
            found = dict(zip(names, addresses, strict=True))
            tokens = options.tokens(tensors)
            wanted = {"q": tensors[0], "k": tensors[1], "v": tensors[2], "out": out, "lse": lse, "sinks": tensors[-1]}
            wanted |= dict(zip(PackedTokens._fields[:4], tokens[:4], strict=True))
            assert found == {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in wanted.items()}
            assert stream == 77
            assert (out.shape, out.dtype, out.is_contiguous()) == ((20, 4, 24), torch.bfloat16, True)
            assert lse is None if not with_lse else lse.shape == (4, 20)


@pytest.mark.parametrize("of_tensors", [False, True])
def test_the_backward_pass_gets_addresses_in_the_order_of_its_operands(bound: list[Bound], of_tensors: bool) -> None:
    """With a modifier whose tensor has a gradient, for which nobody or somebody asks."""
    problem = Problem(Dtype.BF16, 16, 24, Mask.CAUSAL, "backward", False, ("sinks",), Sequences.PACKED)
    (q, k, v, of_q, of_kv, *_), _ = given(OnGpu, causal=True)
    out, lse, sinks = (OnGpu(torch.zeros(shape)) for shape in ((20, 4, 24), (4, 20), (4,)))
    out = OnGpu(out.bfloat16())
    for d_lse in (None, OnGpu(torch.zeros(4, 20))):
        for used in (None, OnGpu(torch.zeros(3, dtype=torch.int32))):
            tokens = PackedTokens(of_q, of_kv, None, used, 7)
            saved = q, k, v, out, lse, OnGpu(torch.zeros(20, 4, 24, dtype=torch.bfloat16)), d_lse
            plan = PackedGradientPlan(*saved, tokens, True, 0.3, False, Given(("sinks",)), (sinks,), of_tensors)
            gradients: Any = plan.run(*saved, tokens, sinks)
            d_sinks = gradients[3] if of_tensors else None
            assert len(gradients) == 3 + of_tensors
            stream, *addresses = bound[-1].given[-1]
            call = bound[-1].call
            names = [operand.name for operand in operation_of(problem).operands(problem)]
            found = dict(zip(names, addresses, strict=True))
            wanted = dict(zip(("q", "k", "v", "out", "lse", "d_out", "d_lse"), saved, strict=True))
            wanted |= dict(zip(("d_q", "d_k", "d_v"), gradients, strict=False))
            wanted |= dict(zip(PackedTokens._fields[:4], tokens[:4], strict=True))
            wanted |= {"sinks": sinks, "d_sinks": d_sinks}
            assert found == {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in wanted.items()}
            assert stream == 77
            assert [(gradient.shape, gradient.is_contiguous()) for gradient in gradients[:3]] == [(one.shape, True) for one in (q, k, v)]
            assert (call.workload.len_q, call.workload.tokens_q, call.scalars["scale"]) == (7, 20, 0.3)
            assert ("d_sinks" in call.views) == of_tensors
            assert d_sinks is None or (d_sinks.shape, d_sinks.dtype) == ((4,), torch.float32)


@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_go_past_the_dispatcher(with_lse: bool, bound: list[Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with what the forward pass had; only for derivatives of tensors that need them."""
    monkeypatch.setattr(plans, "only_the_kernel", lambda *_: True)
    monkeypatch.setattr(torch.Tensor, "device", ON)
    (q, k, v, of_q, of_kv, _, used), _ = given(OnGpu, causal=True, used="seqused_kv", max_kv=9)
    q.requires_grad_()
    v.requires_grad_()
    arguments = (q, k, v, of_q, of_kv, None, used, None, 9, True, 0.3, False)
    out, lse = differentiable_varlen(*arguments, "window", [4, 2], [], None)
    assert [(one.call.problem.operation, one.call.problem.modifiers) for one in bound] == [("forward", ("window",))]
    into = [(out, torch.ones(20, 4, 24, dtype=torch.bfloat16))] + [(lse, torch.ones(4, 20))] * with_lse
    d_q, d_v = torch.autograd.grad([one for one, _ in into], (q, v), [one for _, one in into])
    assert (d_q.shape, d_v.shape) == (q.shape, v.shape)
    call = bound[1].call
    assert (call.problem.operation, call.problem.modifiers, call.scalars["scale"]) == ("backward", ("window",), 0.3)
    assert (call.workload.len_kv, call.workload.window_left) == (9, 4)
    names = [operand.name for operand in operation_of(call.problem).operands(call.problem)]
    found = dict(zip(names, bound[1].given[0][1:], strict=True))
    assert (found["q"], found["seqused_q"], found["seqused_kv"]) == (q.data_ptr(), 0, used.data_ptr())
    assert bool(found["d_lse"]) is with_lse


def test_a_batch_of_one_is_of_results_alone(bound: list[Bound], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "device", ON)
    tensors, options = given(used="seqused_q")
    within = (*[one[None] for one in tensors[:3]], *tensors[3:])
    for with_lse in (False, True):
        out, lse = plan_of(tensors, options).run(with_lse, *tensors)
        found, found_lse = plan_of(within, options).run(with_lse, *within)
        assert (found.shape, found.is_contiguous()) == ((1, *out.shape), True)
        assert lse is None if not with_lse else found_lse.shape == (1, *lse.shape)
    one, other = bound
    assert one.call == other.call
    assert [addresses[:4] + addresses[6:] for addresses in one.given] == [addresses[:4] + addresses[6:] for addresses in other.given]
    nothing: list[dict[str, Any]] = [{"batch": 0}, {"tokens_q": 0}]
    for batch in nothing:
        tensors, options = given(**batch)
        within = (*[one[None] for one in tensors[:3]], *tensors[3:])
        out, _ = plan_of(within, options).run(False, *within)
        assert (out.shape, out.any().item()) == ((1, *tensors[0].shape[:2], 24), False)
    with pytest.raises(ArgumentError, match=r"^q must have 3 dimensions"):
        packed._checked(*within, None, None, False, None)


def test_without_sequences_no_kernel_runs(bound: list[Bound]) -> None:
    for changes in ({"batch": 0}, {"tokens_q": 0}, {"heads": 0}):
        tensors, options = given(OnGpu, **changes)
        out, lse = plan_of(tensors, options).run(True, *tensors)
        assert not out.any()
        assert (lse == -torch.inf).all()
    assert bound == []


@pytest.mark.parametrize("changes", [{"tokens_q": 33, "tokens_kv": 7}, {"tokens_kv": 51, "max_q": 9}, {"tokens_q": 50, "max_q": 1000}])
def test_tensors_of_scores_keep_their_keys_whatever_the_tokens(bound: list[Bound], changes: dict[str, Any]) -> None:
    """Here for all queries, whose expected number may change."""
    mask = torch.zeros(3, 1, 1, 40, dtype=torch.bool)
    modified: dict[str, Any] = {"modifiers": Given(("boolean_mask",)), "others": (OnGpu(mask),), "max_kv": 40}
    plan_of(*given(OnGpu, **modified))
    plan_of(*given(OnGpu, **modified, **changes))
    plans._LOCAL.__dict__.clear()
    plan_of(*given(OnGpu, **modified, **changes))
    assert len(bound) == 3
    assert bound[1].call == bound[2].call
    assert bound[0].call.views["mask"].sizes[3] == bound[1].call.views["mask"].sizes[3] == 40


def test_other_tokens_are_still_checked(bound: list[Bound]) -> None:
    for tokens in (20, 33, 34, 35):
        plan_of(*given(OnGpu, tokens_q=tokens, tokens_kv=tokens + 1, max_q=tokens))
    for changes, message in (
        ({"tokens_kv": 40, "tokens_v": 41}, r"^v must have k's tokens 40; got 41"),
        ({"max_q": -1}, r"^max_seqlen_q must be an integer from 0"),
        ({"max_kv": 2**31}, r"^max_seqlen_kv must be an integer from 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            plan_of(*given(OnGpu, **changes))
    assert isinstance(plan_of(*given(OnGpu)), PackedPlan)


def python_calls(call: Callable[[], object]) -> list[str]:
    """Counted, as times depend on the machine; what the family and the binding take is not in it."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, argument: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[1:]


@pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")
def test_a_known_call_makes_no_calls_of_python_but_for_what_it_does(bound: list[Bound]) -> None:
    tensors, options = given(used="seqused_q")
    run = plan_of(*given(OnGpu, used="seqused_q")).run
    plans.kept(packed._plans(), packed._signature(tensors, options), SimpleNamespace(run=run, bound=None, met=True, before=None))  # type: ignore[misc]
    assert at_hand(tensors, options) is run
    arguments = (*options,)
    assert python_calls(lambda: packed_run_at_hand(tensors, *arguments)) == ["packed_run_at_hand", "no_modes"]
    made_up = ["<lambda>"] * 4  # the device's index, memory for out and for lse, the stream
    assert python_calls(lambda: run(True, *tensors)) == ["run", *made_up, "enqueue"]


def test_memory_that_is_gone_is_refused(bound: list[Bound]) -> None:
    tensors, options = given(OnGpu)
    plan = plan_of(tensors, options)
    ends = torch.zeros(4, dtype=torch.int32)
    ends.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"^cu_seqlens, seqused and tensors of modifiers must have storages"):
        plan.run(False, *tensors[:3], ends, *tensors[4:])
    odd = torch.zeros(20 * 4 * 16 + 1, dtype=torch.bfloat16)[1:].view(20, 4, 16)
    with pytest.raises(ArgumentError, match=r"^q must begin at an address that is a multiple of 16 bytes; got one 2 past it"):
        plan.run(False, odd, *tensors[1:])


@pytest.mark.slow
def test_the_tool_measures_calls_without_a_gpu() -> None:
    """In a process of its own, as it makes PyTorch say that tensors are on one."""
    command = [sys.executable, "-m", "tools.packed_overhead", "--rounds", "1", "--calls", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    names = re.findall(r"^(.+?) +median +[\d.]+  least +[\d.]+$", done.stdout, re.MULTILINE)
    assert names[:3] == ["dense", "packed", "packed with hints"]
    assert len(names) == len(done.stdout.splitlines()) == 11
