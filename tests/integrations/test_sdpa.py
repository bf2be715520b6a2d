"""PyTorch's scaled_dot_product_attention on flashgen: which calls it takes, what becomes of their arguments, activation, counts.

Plain PyTorch stands in for kernels, but for the tests marked slow, which run kernels in the emulator.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

from flashgen.api import CaptureError
from flashgen.build.artifact import CompileError
from flashgen.codegen.errors import FlashgenError
from flashgen.integrations import sdpa
from flashgen.integrations.sdpa import face, fused
from flashgen.integrations.sdpa.face import pytorch_sdpa
from flashgen.launch.tensors import Tensors
from tests.support.sdpa import SDPA, K, Q, attend, in_fp32, numbers, operator_of, with_gradients
from tests.support.sdpa import activated as activated
from tests.support.sdpa import counts as counts
from tests.support.sdpa import on_cpu as on_cpu
from tests.support.sdpa import operators as operators


def attend_by_name(*tensors: Any) -> Any:
    return functional.scaled_dot_product_attention(*tensors)


def check(tensors: list[Tensor | None], **options: Any) -> None:
    """A call by flashgen, with gradients, beside PyTorch's in fp32."""
    found = with_gradients(attend, tensors, **options)
    expected = with_gradients(pytorch_sdpa, [in_fp32(tensor) for tensor in tensors], **options)
    for own, other in zip(found, expected, strict=True):
        assert own.shape == other.shape
        torch.testing.assert_close(own.float(), other, atol=0.03, rtol=0.02)


def mask_of(*shape: int) -> Tensor:
    made = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4
    made[..., 0] = True
    return made


TAKEN: dict[str, Callable[[], tuple[list[Tensor | None], dict[str, Any]]]] = {
    "plain": lambda: ([numbers(*Q), numbers(*K), numbers(*K)], {}),
    "rows": lambda: ([numbers(*Q, rows=True), numbers(*K, rows=True), numbers(*K)], {"scale": 0.3}),
    "top-left": lambda: ([numbers(*Q), numbers(*K), numbers(*K)], {"is_causal": True}),
    "more queries": lambda: ([numbers(*K), numbers(*Q), numbers(*Q)], {"is_causal": True}),
    "head_dim_v": lambda: ([numbers(*Q), numbers(*K), numbers(2, 4, 10, 16)], {}),
    "grouped": lambda: ([numbers(*Q), *(numbers(2, 2, 10, 8) for _ in "kv")], {"enable_gqa": True}),
    "grouped, masked": lambda: ([numbers(*Q), *(numbers(2, 2, 10, 8) for _ in "kv"), mask_of(6, 10)], {"enable_gqa": True}),
    "padding": lambda: ([numbers(*Q), numbers(*K), numbers(*K), mask_of(2, 1, 1, 10)], {}),
    "bias of heads": lambda: ([numbers(*Q), numbers(*K), numbers(*K), numbers(4, 6, 10)], {}),
    "bias of fp32": lambda: ([numbers(*Q), numbers(*K), numbers(*K), numbers(4, 6, 10, dtype=torch.float32)], {}),
    "additive padding": lambda: ([numbers(*Q), numbers(*K), numbers(*K), numbers(2, 1, 1, 10)], {}),
    "3 dimensions": lambda: ([numbers(*Q[1:]), numbers(*K[1:]), numbers(*K[1:]), mask_of(4, 6, 10)], {}),
    "2 dimensions": lambda: ([numbers(*Q[2:]), numbers(*K[2:]), numbers(*K[2:])], {"is_causal": True}),
    "5 dimensions": lambda: ([numbers(3, *Q), numbers(3, *K), numbers(3, *K), numbers(1, 1, 4, 6, 10)], {}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(on_cpu: list[Tensors], name: str) -> None:
    tensors, options = TAKEN[name]()
    check(tensors, **options)
    assert sdpa.report() == ({SDPA: 1}, {})
    assert len(on_cpu) == 2


@pytest.mark.parametrize("value", [float("-inf"), False])
def test_a_row_that_sees_no_key_gives_0(on_cpu: list[Tensors], value: float) -> None:
    mask = mask_of(6, 10) if value is False else numbers(6, 10, grad=False)
    mask[3].fill_(value)
    found = attend(numbers(*Q), numbers(*K), numbers(*K), mask)
    assert found[:, :, 3].abs().max() == 0 == pytorch_sdpa(numbers(*Q), numbers(*K), numbers(*K), mask)[:, :, 3].abs().max()


def test_out_lies_in_memory_as_query_does(on_cpu: list[Tensors]) -> None:
    for rows in (False, True):
        tensors = [numbers(*Q, rows=rows, grad=False), numbers(*K, rows=rows), numbers(*K)]
        out = attend(*tensors)
        assert out.stride() == torch.empty_like(tensors[0]).stride()


def test_causal_biases(on_cpu: list[Tensors]) -> None:
    tensors = [numbers(*Q), numbers(*K), numbers(*K)]
    for bias, mask in ((causal_upper_left(6, 10), torch.ones(6, 10).tril()), (causal_lower_right(6, 10), torch.ones(6, 10).tril(4))):
        found = attend(*tensors, bias)
        torch.testing.assert_close(found, pytorch_sdpa(*tensors, mask.bool()), atol=0.03, rtol=0.02)
    assert sdpa.report() == ({SDPA: 2}, {})
    with sdpa.enabled():  # PyTorch asks for its function by identity
        face: Any = functional.scaled_dot_product_attention
        others = [tensor.float() for tensor in tensors]
        found = face(*others, causal_lower_right(6, 10))
        torch.testing.assert_close(found, pytorch_sdpa(*others, torch.ones(6, 10).tril(4).bool()))
        with pytest.raises(ValueError, match="CausalBias"):
            face(*tensors, causal_lower_right(6, 10), is_causal=True)


def test_a_causal_bias_of_other_lengths_is_passed_on(on_cpu: list[Tensors]) -> None:
    with suppress(RuntimeError):  # as PyTorch without its flash kernel has it
        attend(numbers(*Q), numbers(*K), numbers(*K), causal_lower_right(4, 5))
    assert on_cpu == []
    attend(numbers(*Q), numbers(*K), numbers(*K), causal_upper_left(4, 5))  # PyTorch asks no such bias for its lengths
    assert sdpa.report() == ({SDPA: 1}, {})


def test_numbers_that_are_none_are_pytorchs_with_nested_tensors(on_cpu: list[Tensors]) -> None:
    nested = torch.nested.nested_tensor_from_jagged(numbers(14, 4, 8), offsets=torch.tensor([0, 5, 14])).transpose(1, 2)
    for options in ({"dropout_p": None}, {"scale": "1"}, {"enable_gqa": None}):
        with pytest.raises(TypeError, match=f"{next(iter(options))}' .*must be"):
            attend(nested, nested, nested, **options)


def test_nested_tensors(on_cpu: list[Tensors]) -> None:
    lengths, made = (5, 0, 9), []
    offsets = torch.tensor([0, 5, 5, 14])
    for _ in range(3):
        values = numbers(14, 4, 8)
        made.append(torch.nested.nested_tensor_from_jagged(values, offsets=offsets).transpose(1, 2))
    out = attend(*made, is_causal=True)
    assert out.is_nested
    assert out.shape[:2] == made[0].shape[:2]
    rows = out.transpose(1, 2).values()
    whole = [tensor.transpose(1, 2).values().float() for tensor in made]
    for begin, length in zip((0, 5, 5), lengths, strict=True):
        if length:
            q, k, v = (tensor[begin : begin + length].transpose(0, 1) for tensor in whole)
            expected = pytorch_sdpa(q, k, v, is_causal=True).transpose(0, 1)
            torch.testing.assert_close(rows[begin : begin + length].float(), expected, atol=0.03, rtol=0.02)
    assert sdpa.report() == ({SDPA: 1}, {})


PASSED_ON: dict[str, tuple[Callable[[], tuple[list[Any], dict[str, Any]]], str]] = {
    "fp32": (lambda: ([numbers(*Q, dtype=torch.float32)] * 3, {}), "dtype torch.float32"),
    "head_dim": (lambda: ([numbers(2, 4, 6, 12)] * 3, {}), "a head_dim that is no multiple of 8 up to 256"),
    "broadcasts": (lambda: ([numbers(*Q), numbers(1, 4, 10, 8), numbers(1, 4, 10, 8)], {}), "batch or head dimensions that broadcast"),
    "one head, not grouped": (
        lambda: ([numbers(*Q), numbers(2, 1, 10, 8), numbers(2, 1, 10, 8)], {}),
        "batch or head dimensions that broadcast",
    ),
    "no keys": (lambda: ([numbers(*Q), numbers(2, 4, 0, 8), numbers(2, 4, 0, 8)], {}), "tensors without elements"),
    "negative scale": (lambda: ([numbers(*Q)] * 3, {"scale": -1.0}), "a scale that is not above 0"),
    "all dropped": (lambda: ([numbers(*Q)] * 3, {"dropout_p": 1.0}), "a dropout_p of 1, or beyond 0 and 1"),
    "strides": (
        lambda: ([numbers(2, 4, 6, 16)[..., ::2]] * 3, {}),
        "q must be contiguous in its last dimension (stride 1); got stride 2",
    ),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_is_passed_on(on_cpu: list[Tensors], name: str) -> None:
    made, reason = PASSED_ON[name]
    tensors, options = made()
    found = attend(*tensors, **options)
    assert found.equal(pytorch_sdpa(*tensors, **options)) or "dropout_p" in options
    (counted,) = sdpa.report().passed_on
    assert counted.startswith(reason)
    assert sdpa.report().run == {}
    assert on_cpu == []


@pytest.mark.parametrize("error", [CaptureError("not while\na graph"), CompileError("no kernel:\nits log")])
def test_kernels_that_cannot_be_had(on_cpu: list[Tensors], monkeypatch: pytest.MonkeyPatch, error: FlashgenError) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(face, "attention", refuse)
    tensors = [numbers(*Q), numbers(*K), numbers(*K)]
    assert attend(*tensors).equal(pytorch_sdpa(*tensors))
    assert sdpa.report() == ({}, {str(error).splitlines()[0]: 1})


def test_kernels_that_fused_operators_cannot_have(on_cpu: list[Tensors], operators: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise CaptureError("not while a graph")

    monkeypatch.setattr(fused, "attention_forward", refuse)
    q = numbers(*Q, grad=False)
    operator_of("flash")(q, q, q)
    assert operators == ["_scaled_dot_product_flash_attention"]
    assert sdpa.report() == ({}, {"not while a graph": 1})


def test_cpu_tensors_are_passed_on_without_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_CPU", raising=False)
    attend(numbers(*Q), numbers(*K), numbers(*K))
    assert sdpa.report() == ({}, {"tensors on cpu": 1})


def test_pytorch_refuses_what_it_refused(on_cpu: list[Tensors]) -> None:
    q, k, v = numbers(*Q), numbers(*K), numbers(*K)
    refused: list[tuple[Any, ...]] = [
        (q, k, v, mask_of(6, 11)),
        (q, numbers(2, 2, 10, 8), numbers(2, 2, 10, 8)),
        (q, k, v, torch.ones(6, 10, dtype=torch.int64)),
        (q, k, None),
        (q, k, v, None, 0.0, "lower_right"),
        (q, k, v, None, 0.0, 1),
        (q, k, v, None, -0.1),
        (q, k, v, None, None),
        (q, k, v, None, "0"),
    ]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(arguments, {}) for arguments in refused]
    calls += [((q, q, q), {name: given}) for name in ("scale", "enable_gqa") for given in ("1", torch.ones(2))]
    calls += [((q, q, q), {"enable_gqa": None}), ((q, q, q), {"enable_gqa": 1}), ((q[0, 0], q[0, 0], q[0, 0]), {"enable_gqa": True})]
    for arguments, options in calls:
        with pytest.raises((RuntimeError, TypeError, IndexError)) as expected:
            pytorch_sdpa(*arguments, **options)
        with pytest.raises(type(expected.value)) as found:
            attend(*arguments, **options)
        assert str(found.value) == str(expected.value)


def test_autocast(on_cpu: list[Tensors]) -> None:
    q, k, v = (numbers(*Q, dtype=torch.float32) for _ in "qkv")
    with sdpa.enabled(), torch.autocast("cpu", torch.bfloat16):
        out = functional.scaled_dot_product_attention(q, k, v, numbers(6, 6, dtype=torch.float32))
        out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    assert sdpa.report() == ({SDPA: 1}, {})


def test_modules_of_pytorch_unmodified(on_cpu: list[Tensors]) -> None:
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.bfloat16)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.bfloat16)
    x, padding = numbers(2, 6, 16), ~mask_of(2, 6)
    with sdpa.enabled():
        attention(x, x, x, key_padding_mask=padding, need_weights=False)[0].sum().backward()
        found = layer(x, src_key_padding_mask=padding)
    assert sdpa.report() == ({SDPA: 2}, {})
    torch.testing.assert_close(found, layer(x, src_key_padding_mask=padding), atol=0.05, rtol=0.05)


def test_checkpointing(on_cpu: list[Tensors]) -> None:
    q = numbers(*Q)

    def call(q: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    with sdpa.enabled():
        (plain,) = torch.autograd.grad(call(q).sum(), q)
        (again,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(call, q, use_reentrant=False).sum(), q)
    assert again.equal(plain)
    assert sdpa.report() in (({SDPA: 2}, {}), ({SDPA: 3}, {}))  # what is computed again ends when it has what autograd wants


def test_enabled_restores(on_cpu: list[Tensors]) -> None:
    registry = torch.nn.attention
    assert "flashgen" in registry.list_flash_attention_impls()
    removed: list[str] = []

    class Other:
        def remove(self) -> None:
            removed.append("other")

    registry.register_flash_attention_impl("other of a test", register_fn=Other)
    with sdpa.enabled(), sdpa.enabled():
        assert registry.current_flash_attention_impl() == "flashgen"
        sdpa.deactivate()
        assert functional.scaled_dot_product_attention is pytorch_sdpa
    assert registry.current_flash_attention_impl() is None
    registry.activate_flash_attention_impl("other of a test")
    with suppress(KeyError), sdpa.enabled():
        assert removed == ["other"]
        assert functional.scaled_dot_product_attention is not pytorch_sdpa
        raise KeyError
    assert registry.current_flash_attention_impl() == "other of a test"
    sdpa.deactivate()  # which is not flashgen's
    assert registry.current_flash_attention_impl() == "other of a test"
    registry.restore_flash_attention_impl()
    sdpa.activate()
    sdpa.activate()
    assert registry.current_flash_attention_impl() == "flashgen"
    registry.restore_flash_attention_impl()
    assert functional.scaled_dot_product_attention is pytorch_sdpa
    del registry._registry._FLASH_ATTENTION_IMPLS["other of a test"]


def test_the_name_is_pickled_while_it_is_active(on_cpu: list[Tensors]) -> None:
    with sdpa.enabled():
        assert pickle.loads(pickle.dumps(functional.scaled_dot_product_attention)) is functional.scaled_dot_product_attention


def test_a_later_patch_stays(on_cpu: list[Tensors]) -> None:
    with sdpa.enabled():
        ours = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = patched = lambda *given, **options: ours(*given, **options)
    assert functional.scaled_dot_product_attention is patched
    functional.scaled_dot_product_attention = pytorch_sdpa


def test_a_name_bound_or_wrapped_within_is_pytorchs_behind(on_cpu: list[Tensors]) -> None:
    with sdpa.enabled():
        bound: Any = functional.scaled_dot_product_attention
        wrapped: Any = lambda *given, **options: bound(*given, **options)  # noqa: E731
        functional.scaled_dot_product_attention = wrapped
    tensors = [numbers(*Q), numbers(*K), numbers(*K)]
    assert bound(*tensors).equal(pytorch_sdpa(*tensors))
    assert wrapped(*tensors).equal(pytorch_sdpa(*tensors))
    assert sdpa.report() == ({}, {})
    with sdpa.enabled():
        attend_by_name(*tensors)
    assert sdpa.report() == ({SDPA: 1}, {})
    functional.scaled_dot_product_attention = pytorch_sdpa


@pytest.mark.parametrize("first", [0, 1])
def test_blocks_of_threads_that_overlap(first: int) -> None:
    """first: which of the threads, as they entered, leaves first."""
    may_leave, entered = [threading.Event(), threading.Event()], threading.Semaphore(0)

    def block(i: int) -> None:
        with sdpa.enabled():
            entered.release()
            assert may_leave[i].wait(20)

    threads = [threading.Thread(target=block, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
        assert entered.acquire(timeout=20)
    for i in (first, 1 - first):
        assert torch.nn.attention.current_flash_attention_impl() == "flashgen"
        may_leave[i].set()
        threads[i].join()
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_modes(on_cpu: list[Tensors]) -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    tensors = [numbers(*Q), numbers(*K), numbers(*K)]
    with sdpa.enabled():
        with torch.device("cpu"):
            attend_by_name(*tensors).sum().backward()
        assert sdpa.report(reset=True) == ({SDPA: 1}, {})
        with torch.device("cpu"), Seen():
            attend_by_name(*tensors)
    assert pytorch_sdpa in seen
    assert sdpa.report() == ({}, {"a TorchFunctionMode, which is to see PyTorch's function": 1})


def test_a_choice_of_backends_is_kept(on_cpu: list[Tensors]) -> None:
    with sdpa.enabled(), sdpa_kernel(SDPBackend.MATH):
        functional.scaled_dot_product_attention(numbers(*Q), numbers(*K), numbers(*K))
    assert sdpa.report() == ({}, {"PyTorch is told which backend to take": 1})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_before_and_while_active(on_cpu: list[Tensors], operators: list[str], backend: str) -> None:
    q, bias = numbers(*Q), numbers(2, 4, 6, 6)

    @torch.compile(fullgraph=True, backend=backend)
    def flash(q: Tensor) -> Tensor:
        return operator_of("flash")(q, q, q, 0.0, True)[0] * 2  # type: ignore[no-any-return]

    @torch.compile(fullgraph=True, backend=backend)
    def efficient(q: Tensor, bias: Tensor) -> Tensor:
        return operator_of("efficient")(q, q, q, bias, True)[0] * 2  # type: ignore[no-any-return]

    @torch.compile(fullgraph=True, backend=backend)
    def dropped(q: Tensor, v: Tensor) -> Tensor:
        return operator_of("flash")(q, q, v, 0.5)[0]  # type: ignore[no-any-return]

    flash(q).sum().backward()
    efficient(q, bias).sum().backward()
    assert bias.grad is not None
    v = numbers(2, 4, 6, 8)
    out = dropped(q, v)
    (d_v,) = torch.autograd.grad(out.square().sum(), v)
    assert not out.equal(dropped(q, v))
    torch.testing.assert_close((d_v * v).sum(), 2 * out.square().sum(), atol=0, rtol=0.02)  # out is linear in v
    assert sum(sdpa.report().run.values()) == 4
    assert operators == []


@pytest.mark.slow
def test_compiled_by_name(on_cpu: list[Tensors]) -> None:
    q, bias = numbers(*Q), numbers(4, 6, 6)

    def call(q: Tensor, bias: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, q, q, bias)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    before = compiled(q, bias)
    with sdpa.enabled():
        torch.testing.assert_close(compiled(q, bias), before)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(q, bias), before)
    direct = torch.compile(sdpa.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(direct(q, q, q, bias), before, atol=0.03, rtol=0.02)
    assert len(on_cpu) == 1


COMPILED: dict[str, tuple[Callable[[], list[Tensor | None]], bool]] = {  # and whether flashgen takes them
    "rows": (lambda: [numbers(*Q, rows=True), numbers(*K, rows=True), numbers(*K)], True),
    "3 dimensions": (lambda: [numbers(*Q[1:]), numbers(*K[1:]), numbers(*K[1:]), mask_of(4, 1, 10)], True),
    "last stride": (lambda: [numbers(2, 4, 6, 16, grad=False)[..., ::2]] * 3, False),
    "unaligned rows": (lambda: [numbers(2, 4, 6, 12, grad=False)[..., :8]] * 3, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_what_compiled_calls_are_passed_on(on_cpu: list[Tensors], name: str, dynamic: bool) -> None:
    made, is_taken = COMPILED[name]
    tensors = made()
    torch._dynamo.reset()
    compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found = compiled(*tensors)
    torch.testing.assert_close(found, pytorch_sdpa(*tensors), atol=0.03, rtol=0.02)
    assert bool(on_cpu) == is_taken


@pytest.mark.slow
def test_pytorch_refuses_a_mask_in_a_graph(on_cpu: list[Tensors]) -> None:
    compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError) as error:
        compiled(numbers(*Q), numbers(*K), numbers(*K), mask_of(6, 9))
    assert "mask must" not in str(error.value)


@pytest.mark.slow
def test_compiled_autocast(on_cpu: list[Tensors]) -> None:
    tensors: list[Tensor | None] = [numbers(*Q, dtype=torch.float32), numbers(*K), numbers(*K), numbers(6, 10, dtype=torch.float32)]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            found = with_gradients(compiled, tensors)
            expected = with_gradients(attend, tensors)
        assert [each.dtype for each in found] == [each.dtype for each in expected] == [dtype, *(t.dtype for t in tensors if t is not None)]
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, atol=0.03, rtol=0.02)
    assert len(on_cpu) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["top-left", "grouped, masked", "bias of heads"])
def test_kernels_in_the_emulator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    tensors, options = TAKEN[name]()
    check(tensors, **options)
    assert sdpa.report() == ({SDPA: 1}, {})


@pytest.mark.slow
def test_nothing_is_active_after_importing() -> None:
    code = (
        "import torch; before = torch.nn.functional.scaled_dot_product_attention; from flashgen.integrations import sdpa; "
        "print(torch.nn.functional.scaled_dot_product_attention is before, torch.nn.attention.current_flash_attention_impl())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "FLASHGEN_CPU"}
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert found.stdout == "True None\n"
