"""What tests of the sdpa integration share: fixtures, with plain PyTorch in place of kernels, tensors, and PyTorch's fused operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flashgen.integrations import sdpa
from flashgen.integrations.sdpa import activation, states
from flashgen.integrations.sdpa.face import pytorch_sdpa
from flashgen.launch import cpu as launch_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.oracle import oracle_of
from flashgen.operators import cpu

Q, K = (2, 4, 6, 8), (2, 4, 10, 8)
attend: Any = sdpa.scaled_dot_product_attention
SDPA = "scaled_dot_product_attention"
FUSED = ("flash", "efficient", "cudnn")


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    sdpa.report(reset=True)
    yield
    sdpa.deactivate()
    left, functional.scaled_dot_product_attention = functional.scaled_dot_product_attention, pytorch_sdpa
    assert left is pytorch_sdpa


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    """Plain PyTorch in place of kernels on the CPU, and what calls gave them."""
    found: list[Tensors] = []

    def run(kernel: object, tensors: Tensors, scalars: dict[str, float]) -> None:
        computed = oracle_of(tensors.problem).plain(tensors.problem, tensors, tensors.call(scalars).scalars)
        for name, tensor in tensors.outputs.items():
            _copy(tensor, computed[name])
        found.append(tensors)

    monkeypatch.setattr(launch_cpu, "run_on_cpu", run)
    monkeypatch.setattr(cpu, "_default_kernel", lambda *_: None)
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    return found


def _copy(tensor: Tensor, computed: Tensor) -> None:
    """What each score has, into a tensor that is expanded where scores share an element."""
    shared = [d for d, step in enumerate(tensor.stride()) if step == 0 and tensor.shape[d] > 1]
    for d in shared:
        tensor, computed = tensor.narrow(d, 0, 1), computed.sum(d, keepdim=True)
    tensor.copy_(computed)


@pytest.fixture
def activated() -> Iterator[tuple[activation.Activation, list[str]]]:
    """PyTorch's fused operators have kernels on the CPU: those of `activation`, before which were ones that only say that they ran."""
    library, passed = torch.library.Library("aten", "IMPL"), []

    def before(name: str) -> Callable[..., Any]:
        def kernel(query: Tensor, *others: Any, **options: Any) -> Any:
            passed.append(name)
            returns = getattr(torch.ops.aten, name).default._schema.returns
            return tuple(query if str(given.type) == "Tensor" else 1 for given in returns)

        return kernel

    for name in (*activation.FORWARD, *activation.BACKWARD):
        library.impl(name, before(name), "CPU")
    active = activation.Activation("CPU")
    yield active, passed
    active.remove()
    activation._staying.pop("CPU")._destroy()
    library._destroy()


@pytest.fixture
def operators(activated: tuple[activation.Activation, list[str]]) -> list[str]:
    """The names of those of PyTorch's fused operators that `activation` has passed on."""
    return activated[1]


def numbers(*shape: int, grad: bool = True, dtype: torch.dtype = torch.bfloat16, rows: bool = False) -> Tensor:
    """rows: whether [batch, heads, len, head_dim] lies in memory with heads behind lengths."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return (made.transpose(1, 2).contiguous().transpose(1, 2) if rows else made).requires_grad_(grad)


def with_gradients(call: Callable[..., Tensor], tensors: list[Tensor | None], **options: Any) -> list[Tensor]:
    out = call(*tensors, **options)
    d_out = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, [t for t in tensors if t is not None and t.requires_grad], d_out)]


def in_fp32(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.detach().float().requires_grad_(tensor.requires_grad)


def operator_of(name: str) -> Any:
    return getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default


def arguments_of(name: str, tensors: list[Tensor], bias: Tensor | None, is_causal: bool) -> tuple[Any, ...]:
    return (*tensors, 0.0, is_causal) if name == "flash" else (*tensors, bias, True, 0.0, is_causal)


def on_meta(given: Any) -> Any:
    if not isinstance(given, Tensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")


def require_form(found: Any, operator: Any, arguments: Any) -> None:
    """Shapes, strides and dtypes are those of PyTorch's fakes, but for the dtype of the state of random numbers."""
    for own, fake in zip(found, operator(*map(on_meta, arguments)), strict=True):
        if isinstance(fake, Tensor) and own is not None:
            assert (own.shape, own.stride(), own.itemsize) == (fake.shape, fake.stride(), fake.itemsize)
            assert own.dtype == fake.dtype or states.is_own(own)
        elif own is not None:
            assert own == fake
