"""`GradientPlan` on a GPU that is made up: which kernel a call is bound to, what it launches, and with which addresses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.launch import bound, gradients
from flashgen.launch import gpu as launch_gpu
from flashgen.launch.gradients import GradientPlan, usable
from flashgen.operators import autograd as of_operators
from flashgen.operators import plans
from flashgen.operators.gradient_plans import gradient_plan_for
from tools import call_overhead
from tools.call_overhead import OnGpu


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that calls ask PyTorch's allocator for, beside gradients."""
    call_overhead.pretend("h200", tmp_path, monkeypatch.setattr)
    for name in ("gpu", "require_context", "empty_strided", "current_device", "current_stream"):
        monkeypatch.setattr(gradients, name, getattr(launch_gpu, name))
    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
    asked: list[int] = []

    def give(size: int) -> Any:
        asked.append(size)
        return SimpleNamespace(data_ptr=lambda: 1 << 20)

    monkeypatch.setattr(bound, "_zeros", lambda size, device: give(size))
    monkeypatch.setattr(bound, "empty_strided", lambda shape, strides, dtype: give(*shape))
    return asked


def call(len_q: int = 100, len_kv: int = 200, d: int = 64, deterministic: bool = False, **change: Any) -> list[Any]:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return OnGpu(torch.zeros(shape, dtype=dtype))

    given = {
        "q": tensor(2, len_q, 4, d),
        "k": tensor(2, len_kv, 2, d),
        "v": tensor(2, len_kv, 2, d),
        "out": tensor(2, len_q, 4, d),
        "lse": tensor(2, 4, len_q, dtype=torch.float32),
        "d_out": tensor(2, len_q, 4, d),
        "d_lse": None,
    }
    return [*{**given, **change}.values(), True, None, "bshd", deterministic]


@pytest.mark.parametrize(
    ("d", "family"), [(64, "attention_backward_persistent_sm90"), (256, "attention_backward_pair_sm90"), (136, "attention_backward_sm90")]
)
def test_a_call_is_bound_to_a_kernel_and_has_its_buffers(d: int, family: str, memory: list[int]) -> None:
    arguments = call(d=d)
    plan = gradient_plan_for(*arguments)
    assert plan.bound is not None
    spec = plan.bound.launch.kernel.spec
    assert (spec.problem.name, spec.family.name) == (f"backward_bf16_d{d}_causal", family)
    launched: list[tuple[Any, ...]] = []
    enqueue = plan.bound.launch.enqueue

    def noted(*given: Any) -> None:
        launched.append(given)
        enqueue(*given)

    plan.bound.launch.enqueue = noted
    found = plan.run(*arguments[:7])
    ((_, _, *addresses),) = launched
    q, k, v, out, lse, d_out, _ = arguments[:7]
    wanted = [q, k, v, out, lse, d_out]
    assert addresses[:7] == [*(tensor.data_ptr() for tensor in wanted), 0]
    assert addresses[7:10] == [gradient.data_ptr() for gradient in found]
    assert [gradient.shape for gradient in found] == [q.shape, k.shape, v.shape]
    assert len(memory) == 1, "one allocation for all buffers"
    assert gradient_plan_for(*arguments) is plan


@pytest.mark.parametrize("len_kv", [200, 0])  # with a kernel, and where all gradients are 0
def test_under_heads_first_each_gradient_lies_in_memory_as_its_tensor_does(len_kv: int, memory: list[int]) -> None:
    def first(tensor: Any) -> Any:
        return OnGpu(torch.Tensor.transpose(tensor, 1, 2))

    q, _, v, out, lse, d_out, d_lse, causal, scale, _, deterministic = call(len_kv=len_kv)  # rows first
    heads_first = OnGpu(torch.zeros(2, 2, len_kv, 64, dtype=torch.bfloat16))  # as a cache has keys
    saved = first(q), heads_first, first(v), first(out), lse, first(d_out), d_lse
    found = gradient_plan_for(*saved, causal, scale, "bhsd", deterministic).run(*saved)
    for gradient, tensor in zip(found, saved, strict=False):
        assert gradient.shape == tensor.shape
        assert gradient.stride() == tensor.stride() or not gradient.numel()


def test_what_differs_has_a_plan_of_its_own(memory: list[int]) -> None:
    first = gradient_plan_for(*call())
    changes: tuple[dict[str, Any], ...] = (
        {"d_out": OnGpu(torch.zeros(2, 4, 100, 64, dtype=torch.bfloat16).transpose(1, 2))},
        {"d_lse": OnGpu(torch.zeros(2, 4, 100))},
    )
    for change in changes:
        assert gradient_plan_for(*call(**change)) is not first
    deterministic = gradient_plan_for(*call(deterministic=True))
    assert deterministic.bound is not None
    assert deterministic.bound.launch.kernel.spec.problem.deterministic
    assert gradient_plan_for(*call()) is gradient_plan_for(*call())


def test_where_nothing_meets_no_kernel_is_bound(memory: list[int]) -> None:
    assert gradient_plan_for(*call(len_q=0)).bound is None
    assert gradient_plan_for(*call(len_kv=0)).bound is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"out": OnGpu(torch.zeros(2, 99, 4, 64, dtype=torch.bfloat16))},
            r"^out must have the shape \(2, 100, 4, 64\); got \(2, 99, 4, 64\)$",
        ),
        (
            {"d_out": OnGpu(torch.zeros(100, 4, 64, dtype=torch.bfloat16))},
            r"^d_out must have the shape \(2, 100, 4, 64\); got \(100, 4, 64\)$",
        ),
        ({"lse": OnGpu(torch.zeros(2, 4, 100, dtype=torch.float64))}, r"^lse must be torch\.float32; got torch\.float64$"),
        ({"d_out": torch.zeros(2, 100, 4, 64, dtype=torch.bfloat16)}, r"^d_out must be on q's device cuda:0; got cpu$"),
        (
            {"q": OnGpu(torch.zeros(2, 100, 3, 64, dtype=torch.bfloat16))},
            r"^q must have a number of heads that is a multiple of k's 2; got 3$",
        ),
    ],
)
def test_bad_tensors_are_named(change: dict[str, Any], message: str, memory: list[int]) -> None:
    with pytest.raises(ArgumentError, match=message):
        GradientPlan(*call(**change))


def test_what_kernels_cannot_take_is_copied_and_the_rest_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_said", set())
    dense = torch.randn(2, 5, 4, 64, dtype=torch.bfloat16)
    assert usable("d_out", dense) is dense
    assert usable("d_out", view := dense.transpose(1, 2)) is view
    for odd in (dense[:1, :1, :1, :1].expand(2, 5, 4, 64), dense[..., 1:57], dense.mT.contiguous().mT):
        copy = usable("d_out", odd)
        assert copy is not odd
        assert copy.is_contiguous()
        assert torch.equal(copy, odd)
    assert usable("d_out", wrong := dense[0]) is wrong, "which is refused by name"
    assert usable("d_out", sparse := dense.to_sparse()) is sparse


@pytest.mark.parametrize("negated", [False, True])
def test_a_negated_gradient_goes_through_the_dispatcher(negated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which negates it: memory holds the numbers with the other sign."""
    taken: list[str] = []

    def note(name: str, *arguments: Any, of_tensors: bool = False) -> tuple[Any, ...]:
        taken.append(name)
        return arguments[:3]

    for name in ("backward_on_gpu", "attention_backward"):
        monkeypatch.setattr(of_operators, name, partial(note, name))
    tensors = [torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16) for _ in range(5)]
    context = SimpleNamespace(saved_tensors=tensors, options=(False, None, "bshd", None, "", (), ()), needs_input_grad=(True,) * 10)
    d_out = torch._neg_view(tensors[0]) if negated else tensors[0]
    with torch.no_grad():
        of_operators._PastDispatcher.backward(context, d_out, None)
    assert taken == ["attention_backward" if negated else "backward_on_gpu"]
