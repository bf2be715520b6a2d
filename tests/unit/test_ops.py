"""The operators on machines without a GPU: what is refused, and what tracing sees."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, profiler
from torch.masked import masked_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flashgen
from flashgen import api
from flashgen.build.gpu.driver import DriverError
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.launch import arguments
from flashgen.launch.asked import asked
from flashgen.operators import plans
from flashgen.operators.plans import run_at_hand


def tensors(layout: str = "bshd", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    q, k, v = torch.randn(2, 5, 4, 64, dtype=dtype), torch.randn(2, 7, 2, 64, dtype=dtype), torch.randn(2, 7, 2, 32, dtype=dtype)
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return {"q": q, "k": k, "v": v, "layout": layout}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(q=None), r"^q must be of type Tensor; got None"),
        (lambda a: a.update(k=a["k"].float().numpy()), r"^k must be of type Tensor; got a value of type numpy\.ndarray"),
        (lambda a: a.update(v=[a["v"]]), r"^v must be of type Tensor; got "),
        (lambda a: a.update(k=a["k"].to_sparse()), r"^k must be dense \(torch\.strided\); got torch\.sparse_coo"),
        (lambda a: a.update(q=a["q"].float().to_mkldnn()), r"^q must be dense \(torch\.strided\); got torch\._mkldnn"),
        (lambda a: a.update(q=torch.nested.nested_tensor(list(a["q"]))), r"^q must be one dense tensor; got a nested one"),
        (
            lambda a: a.update(q=torch.nested.nested_tensor(list(a["q"]), layout=torch.jagged)),
            r"^q must be one dense tensor; got a nested one",
        ),
        (lambda a: a.update(causal="yes"), r"^causal must be True, False or 'top_left'; got 'yes'"),
        (lambda a: a.update(causal=None), r"^causal must be of type bool; got None"),
        (lambda a: a.update(return_lse=1), r"^return_lse must be of type bool; got 1"),
        (lambda a: a.update(scale="0.5"), r"^scale must be of type float or None; got '0\.5'"),
        (lambda a: a.update(scale=True), r"^scale must be of type float or None; got True"),
        (lambda a: a.update(scale=torch.tensor(0.5)), r"^scale must be of type float or None; got a value of type torch\.Tensor"),
        (lambda a: a.update(layout=5), r"^layout must be of type str; got 5"),
        (lambda a: a.update(layout=None), r"^layout must be of type str; got None"),
        (lambda a: a.update(layout="bsd"), r"^layout must be one of bshd, bhsd; got 'bsd'"),
        (lambda a: a.update(q=a["q"][0]), r"^q must have 4 dimensions \(b, s, h, d\); got 3"),
        (lambda a: a.update(v=a["v"][..., None]), r"^v must have 4 dimensions \(b, s, h, d\); got 5"),
        (lambda a: a.update(q=a["q"].float()), r"^q must be torch\.bfloat16 or torch\.float16; got torch\.float32"),
        (lambda a: a.update(k=a["k"].half()), r"^k must have q's dtype torch\.bfloat16; got torch\.float16"),
        (lambda a: a.update(k=a["k"].to("meta")), r"^k must be on q's device cpu; got meta"),
        (lambda a: a.update(k=a["k"][:1]), r"^k must have q's batch size 2; got 1"),
        (lambda a: a.update(k=a["k"][..., :32]), r"^k must have q's head_dim 64; got 32"),
        (lambda a: a.update(v=a["v"][:, :6]), r"^v must have k's length 7; got 6"),
        (lambda a: a.update(v=a["v"][:, :, :1]), r"^v must have k's number of heads 2; got 1"),
        (lambda a: a.update(q=a["q"][:, :, :3]), r"^q must have a number of heads that is a multiple of k's 2; got 3"),
        *(
            (lambda a, scale=scale: a.update(scale=scale), rf"^scale must be from 1\.1755e-38 to 2\.3587e\+38, .*; got {re.escape(told)}")
            for scale, told in (
                (0.0, "0.0"),
                (-1.0, "-1.0"),
                (-3, "-3"),
                (math.inf, "inf"),
                (math.nan, "nan"),
                (1e-46, "1e-46"),
                (math.nextafter(2.0**-126, 0), "1.1754943508222874e-38"),
                (2.36e38, "2.36e+38"),
                (3e38, "3e+38"),
                (10**400, "1" + 99 * "0"),
                (np.float64(0), "0.0"),
            )
        ),
        (lambda a: None, r"^q must be on a CUDA device; got cpu"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_bad_arguments_are_named(change: Callable[[dict[str, Any]], None], message: str, grad: bool) -> None:
    arguments = tensors()
    change(arguments)
    with pytest.raises(ArgumentError, match=message), torch.set_grad_enabled(grad):
        flashgen.attention(**arguments)


def test_a_v_without_width_is_refused_before_a_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    q, k, v = (tensors()[name] for name in "qkv")
    with pytest.raises(ArgumentError, match=r"head_dim_v must be .*; got 0"):
        flashgen.attention(q, k, v[..., :0])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_fake_tensors_get_the_shapes(layout: str) -> None:
    with FakeTensorMode():
        out, lse = flashgen.attention(**tensors(layout), return_lse=True)
    assert out.shape == ((2, 5, 4, 32) if layout == "bshd" else (2, 4, 5, 32))
    assert (out if layout == "bshd" else out.transpose(1, 2)).is_contiguous(), "as q is"
    assert out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 5)
    assert lse.dtype == torch.float32


def test_a_fake_may_be_a_view_that_is_laid_out_anew() -> None:
    """Where a view of an intermediate begins is for Inductor to choose."""
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 24, dtype=torch.bfloat16)[..., 4:20]
        assert flashgen.attention(q, q, q).shape == q.shape


class Logging(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.parametrize(
    "listening",
    [
        Logging,
        FakeTensorMode,
        lambda: torch.device("meta"),  # a mode of torch functions
        forward_ad.dual_level,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
)
def test_a_call_goes_past_the_dispatcher_only_if_nobody_listens(listening: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (tensors()[name] for name in "qkv")
    arguments: tuple[Any, ...] = (q, k, v, True, None, "bshd")
    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
    assert run_at_hand(*arguments) is None, "the first call of a thread"
    plan: Any = SimpleNamespace(before=None, met=True, run=object())
    plans._LOCAL.plans = {plans._signature(*arguments): plan}
    assert run_at_hand(*arguments) is plan.run
    assert run_at_hand(q, k, v, False, None, "bshd") is None, "another signature"
    assert run_at_hand(q, k, v, [], None, "bshd") is None, "nothing that a signature could have"  # type: ignore[arg-type]
    assert run_at_hand(torch.nn.Parameter(q, requires_grad=False), *arguments[1:]) is None, "a subclass"
    with listening():
        assert run_at_hand(*arguments) is None
    assert run_at_hand(*arguments) is plan.run
    seen = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(run_at_hand(x, *arguments[1:]))
        return x

    torch.vmap(call)(torch.stack([q, q]))
    torch.jit.trace(call, q, check_trace=False)
    torch.func.grad(lambda x: (call(q), x.sum())[1])(torch.ones(3))
    torch.func.jvp(lambda x: (call(q), x)[1], (torch.ones(3),), (torch.ones(3),))
    assert seen == [None] * 4
    assert run_at_hand(*arguments) is plan.run


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_counter_counts_flops_as_the_field_does(layout: str, causal: bool) -> None:
    with torch.device("meta"):
        arguments = tensors(layout)
    expected = 2 * 2 * 4 * 5 * 7 * (64 + 32) // (2 if causal else 1)
    for return_lse in (False, True):
        with FlopCounterMode(display=False) as counter:
            flashgen.attention(**arguments, causal=causal, return_lse=return_lse)
        assert counter.get_total_flops() == expected
    with FlopCounterMode(display=False) as counter:
        flashgen.attention(arguments["q"].requires_grad_(), arguments["k"], arguments["v"], layout=layout, causal=causal)
    assert counter.get_total_flops() == expected


PRIVATE = (
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_is_torch_function_mode_enabled"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (torch._C, "_get_tracing_state"),
    (forward_ad, "_current_level"),
    (profiler, "_is_profiler_enabled"),
)


@pytest.mark.parametrize(("owner", "name"), PRIVATE)
def test_without_a_private_name_of_pytorch_every_call_goes_to_the_dispatcher(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plans._listeners()()
    monkeypatch.delattr(owner, name)
    assert not plans._listeners()()


@pytest.mark.slow
def test_attention_works_without_any_of_them(tmp_path: Path) -> None:
    code = """
import torch
from torch.autograd import forward_ad, profiler
from torch.masked import masked_tensor
for owner, name in ((torch._C, "_len_torch_dispatch_stack"), (torch._C, "_is_torch_function_mode_enabled"),
                    (torch._C._functorch, "peek_interpreter_stack"), (torch._C, "_get_tracing_state"),
                    (forward_ad, "_current_level"), (profiler, "_is_profiler_enabled")):
    delattr(owner, name)
for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):  # not there in builds without CUDA
    if hasattr(torch._C, name):
        delattr(torch._C, name)
forward_ad.unpack_dual = lambda tensor: forward_ad.UnpackedDualTensor(tensor, None)  # which asks for the level
import flashgen
q = torch.empty(1, 4, 2, 64, dtype=torch.bfloat16)
try:
    flashgen.attention(q, q, q)
except flashgen.ArgumentError as error:
    print(error)
print(flashgen.attention(*3 * [q.to("meta")]).shape)
"""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(Path(flashgen.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("q must be on a CUDA device; got cpu"), done.stderr
    assert done.stdout.endswith("torch.Size([1, 4, 2, 64])\n"), done.stderr


def test_fake_tensors_are_checked_too() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
        with pytest.raises(ArgumentError, match=r"^scale must be"):
            flashgen.attention(q, q, q, scale=0.0)


def test_tangents_are_not_dropped() -> None:
    q, k, v = (tensors()[name] for name in "qkv")
    with forward_ad.dual_level(), pytest.raises(FlashgenError, match=r"^flashgen\.attention has no forward-mode derivative"):
        flashgen.attention(q, k, forward_ad.make_dual(v, v))


def made(*shape: int, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    return tensor if stride is None else torch.empty(4096, dtype=torch.bfloat16).as_strided(shape, stride)


UNFIT = [
    (lambda: 3 * [made(1, 4, 2, 12)], r"^head_dim must be a multiple of 8 from 8 to 256; got 12 \(nearest: 16\)"),
    (lambda: 3 * [made(1, 4, 2, 264)], r"^head_dim must be a multiple of 8 from 8 to 256; got 264 \(nearest: 256\)"),
    (lambda: [made(1, 4, 2, 64), made(1, 4, 2, 64), made(1, 4, 2, 12)], r"^head_dim_v must be a multiple of 8 from 8 to 256; got 12"),
    (lambda: [made(1, 4, 2, 64), made(1, 4, 2, 64), made(1, 4, 2, 0)], r"^head_dim_v must be an integer from 1 to 2147483647; got 0"),
    (lambda: 3 * [made(1, 4, 2, 0)], r"^head_dim must be an integer from 1 to 2147483647; got 0"),
    (lambda: 3 * [made(0, 4, 2, 264)], r"^head_dim must be a multiple of 8 from 8 to 256; got 264"),
    (lambda: [made(1, 0, 2, 12), made(1, 4, 2, 12), made(1, 4, 2, 12)], r"^head_dim must be a multiple of 8 from 8 to 256; got 12"),
    (lambda: [made(1, 4, 2, 64), *2 * [made(1, 4, 2, 128)[..., ::2]]], r"^k must be contiguous in its last dimension .*; got stride 2"),
    (
        lambda: [made(1, 4, 2, 64), made(1, 4, 2, 64), made(1, 4, 2, 68)[..., :64]],
        r"^v must have rows aligned to 16 bytes .*; got stride 68 in dimension 2",
    ),
]


@pytest.mark.parametrize("how", ["real", "fake", "meta", "compiled"])
@pytest.mark.parametrize(("make", "message"), UNFIT)
def test_real_empty_fake_and_traced_tensors_get_the_same_refusals(
    make: Callable[[], list[torch.Tensor]], message: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    if how == "compiled":
        torch.compiler.reset()
        with pytest.raises(Exception, match=message.removeprefix("^")):
            torch.compile(flashgen.attention, fullgraph=True, backend="eager")(*make())
        return
    where: Any = {"real": contextlib.nullcontext, "fake": FakeTensorMode, "meta": lambda: torch.device("meta")}[how]
    with where(), pytest.raises(ArgumentError, match=message):
        flashgen.attention(*make())


@pytest.mark.parametrize(("make", "message"), UNFIT)
def test_torch_compile_lets_refusals_through_as_they_are(make: Callable[[], list[torch.Tensor]], message: str) -> None:
    torch.compiler.reset()
    with pytest.raises(ArgumentError, match=message):
        torch.compile(flashgen.attention, backend="aot_eager")(*make())


@pytest.mark.parametrize("operator", ["attention_output", "attention_forward", "attention"])
@pytest.mark.parametrize("grad", [False, True])
def test_the_operators_refuse_what_is_not_dense(operator: str, grad: bool) -> None:
    call = getattr(torch.ops.flashgen, operator)
    q = tensors()["q"]
    parts = [*q.requires_grad_(grad)]
    for odd, message in (
        (torch.nested.nested_tensor(parts), r"^k must be one dense tensor; got a nested one"),
        (torch.nested.nested_tensor(parts, layout=torch.jagged), r"^k must be one dense tensor; got a nested one"),
        (q.detach().to_sparse(), r"^k must be dense \(torch\.strided\); got torch\.sparse_coo"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(q, odd, q, False, None, "bshd")


class Aloof(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        return NotImplemented


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no function of mine")


class Hiding(TorchDispatchMode):
    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        return NotImplemented


def leaked(q: torch.Tensor) -> torch.Tensor:
    """A tensor that has left its vmap."""
    seen: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    torch.vmap(keep)(torch.stack([q, q]))
    return seen[0]


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return tensors()["q"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "mode", "types"),
    [
        (lambda q: [masked_tensor(q.half(), q > 0)] * 3, contextlib.nullcontext, "MaskedTensor, MaskedTensor, MaskedTensor: "),
        (lambda q: [q.half(), q.half(), masked_tensor(q.half(), q > 0)], contextlib.nullcontext, "Tensor, Tensor, MaskedTensor: "),
        (lambda q: [q, q.as_subclass(Aloof), q], contextlib.nullcontext, "Tensor, Aloof, Tensor: Multiple dispatch failed"),
        (lambda q: [q, q.as_subclass(Refusing), q], contextlib.nullcontext, "Tensor, Refusing, Tensor: no function of mine"),
        (lambda q: [q, q, leaked(q)], contextlib.nullcontext, "Tensor, Tensor, Tensor: "),
        (lambda q: [q, q, q], Hiding, "Tensor, Tensor, Tensor: Multiple dispatch failed"),
        (lambda q: [q, q, q], FakeTensorMode, "Tensor, Tensor, Tensor: Please convert all Tensors to FakeTensors"),
        (lambda q: [fake(), q, q], contextlib.nullcontext, "FakeTensor, Tensor, Tensor: Please convert all Tensors to FakeTensors"),
        (lambda q: [fake(), fake(), q], FakeTensorMode, "FakeTensor, FakeTensor, Tensor: Mixing fake modes"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_what_pytorch_does_not_take_together(make: Callable[[Any], Any], mode: Callable[[], Any], types: str, grad: bool) -> None:
    given = make(tensors()["q"].requires_grad_(grad))
    with mode(), pytest.raises(ArgumentError, match=f"^q, k and v must be tensors that PyTorch takes together; got {types}"):
        flashgen.attention(*given)


def test_an_error_of_our_own_is_not_taken_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise errors.pop()

    errors = [TypeError("ours"), torch.OutOfMemoryError("ours")]
    monkeypatch.setattr(api, "attention_output", fail)
    for given in (torch.nn.Parameter(tensors()["q"], requires_grad=False).as_subclass(type("Sub", (torch.Tensor,), {})), tensors()["q"]):
        with pytest.raises(type(errors[-1]), match=r"^ours$"):
            flashgen.attention(given, given, given)


@pytest.mark.parametrize(("asked", "operator"), [({}, "attention_output"), ({"return_lse": True}, "attention_forward")])
def test_a_compiled_call_computes_no_more_than_is_asked_for(asked: dict[str, bool], operator: str) -> None:
    torch.compiler.reset()
    called: list[object] = []

    def note(module: Any, inputs: Any) -> Any:
        called.extend(node.target for node in module.graph.nodes if node.op == "call_function" and "flashgen" in str(node.target))
        return module

    q = torch.empty(2, 3, 2, 16, dtype=torch.bfloat16, device="meta")
    torch.compile(partial(flashgen.attention, **asked), fullgraph=True, backend=note)(q, q, q)
    assert called == [getattr(torch.ops.flashgen, operator).default]


def test_strides_that_are_never_used_do_not_matter() -> None:
    strange = made(1, 1, 1, 64, stride=(3, 5, 7, 1))
    empty = made(1, 0, 2, 64, stride=(3, 5, 7, 2))
    with torch.device("meta"):
        q = made(1, 5, 2, 64)
    flashgen.attention(*(t.to("meta") for t in (strange, strange, strange)))
    arguments.check_call(strange, strange, strange, False, None, "bshd")
    arguments.check_call(q.new_empty(q.shape, device="cpu"), empty, empty, False, None, "bshd")


def test_a_traced_call_may_have_other_sizes_and_scales() -> None:
    torch.compiler.reset()
    graphs = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    call = torch.compile(flashgen.attention, fullgraph=True, dynamic=True, backend=count)
    for batch, length in ((3, 4), (4, 5), (5, 9)):
        q = torch.empty(batch, length, 2, 16, dtype=torch.bfloat16, device="meta")
        assert call(q, q, q).shape == q.shape
    assert len(graphs) == 1
    for head_dim, scale in ((24, None), (32, 0.3), (32, 0.4), (32, 2)):
        q = torch.empty(2, 3, 2, head_dim, dtype=torch.bfloat16, device="meta")
        assert call(q, q, q, scale=scale).shape == q.shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU: PyTorch finds one")
@pytest.mark.parametrize(
    "call",
    [
        lambda: flashgen.compile(flashgen.Problem(flashgen.Dtype.BF16, 64)),
        lambda: flashgen.load("nowhere"),
        lambda: flashgen.warm(head_dim=64, batch=1, heads=4, len_q=128),
        lambda: flashgen.verify(flashgen.Problem(flashgen.Dtype.BF16, 64)),
    ],
)
def test_without_a_gpu_the_driver_is_what_is_missing(call: Callable[[], object]) -> None:
    with pytest.raises(DriverError, match=r"^driver must be 580 or newer"):
        call()


def test_packages_of_aotinductor_give_none_for_an_empty_list() -> None:
    slopes = torch.ones(2)
    assert asked("alibi", None, None, [slopes])[0] == asked("alibi", [], [], [slopes])[0]
    assert asked("window", [5, 0], None, None) == asked("window", [5, 0], [], [])
    assert asked("", None, None, None) == asked()
