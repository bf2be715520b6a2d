"""The PyTorch operators: schemas, implementations, fakes and FLOPs.

`flashgen::attention_output` computes out, `flashgen::attention_forward` lse, too; `flashgen::attention` is that with autograd. They are
several because PyTorch's dispatcher charges every call of an operator with a Python autograd formula several microseconds, gradients or
not, and because a tensor that nobody wants costs a call two more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload

from ..launch.arguments import LAYOUTS, check_call, check_traced
from ..launch.asked import asked
from ..launch.laid_out import empty
from ..launch.untraced import untraced
from . import plans

LIBRARY = torch.library.Library("flashgen", "DEF")
_ARGUMENTS = "(Tensor q, Tensor k, Tensor v, bool causal, float? scale, str layout"
_MODIFIERS = ', str modifiers="", SymInt[] sizes=[], float[] numbers=[], Tensor[]? tensors=None)'  # see launch/asked.py
_LEFT_OUT: tuple[Any, ...] = ("", (), (), None)  # what stands for modifiers where there are none
LIBRARY.define(f"attention_output{_ARGUMENTS}{_MODIFIERS} -> Tensor out")
LIBRARY.define(f"attention_forward{_ARGUMENTS}{_MODIFIERS} -> (Tensor out, Tensor lse)")
LIBRARY.define(f"attention{_ARGUMENTS}, bool? deterministic=None{_MODIFIERS} -> (Tensor out, Tensor lse)")


@untraced
def forward_on_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str, *modified: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The operator `attention_forward` on a GPU, without PyTorch's dispatcher."""
    given, tensors = asked(*modified)
    return plans.plan_for(q, k, v, causal, scale, layout, given, tensors).run(q, k, v, True, *tensors)


@untraced
def _output_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str, *modified: Any
) -> torch.Tensor:
    given, tensors = asked(*modified)
    return plans.plan_for(q, k, v, causal, scale, layout, given, tensors).run(q, k, v, False, *tensors)[0]


@untraced
def _forward_elsewhere(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str, *modified: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check_call(q, k, v, causal, scale, layout, *asked(*modified))
    cpu_is_allowed(q)
    from . import cpu

    return cpu.attention_on_cpu(q, k, v, causal, scale, layout, *asked(*modified))


def cpu_is_allowed(tensor: torch.Tensor, name: str = "q") -> None:
    """Raises ArgumentError unless a tensor is on the CPU, and kernels may run there."""
    if tensor.device.type != "cpu":
        raise ArgumentError(f"{name} must be on a CUDA device; got {tensor.device}")
    if os.environ.get("FLASHGEN_CPU") != "1":
        raise ArgumentError(
            f"{name} must be on a CUDA device; got {tensor.device}. FLASHGEN_CPU=1 in the environment lets kernels run on the CPU, "
            "thread for thread: right, and slow"
        )


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str, *modified: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check_traced(q, k, v, causal, scale, layout, *asked(*modified))
    row, head = LAYOUTS[layout]
    out = empty((*q.shape[:3], v.shape[3]), q, layout)
    return out, q.new_empty((q.shape[0], q.shape[head], q.shape[row]), dtype=torch.float32)


@untraced
def _output_elsewhere(*arguments: Any) -> torch.Tensor:
    return _forward_elsewhere(*arguments)[0]


def _output_fake(*arguments: Any) -> torch.Tensor:
    return _forward_fake(*arguments)[0]


def without_deterministic(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of `attention` by that of `attention_forward`: `deterministic` says nothing about the forward pass."""

    @untraced
    def run(*arguments: Any) -> Any:
        return implementation(*arguments[:6], *arguments[7:])

    return run


def register_for_all_others(name: str, implementation: Callable[..., Any]) -> None:
    """Of an operator what runs where it has no implementation of its own."""
    for key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"):
        LIBRARY.impl(name, implementation, key)


for _name, _cuda, _elsewhere, _fake in (
    ("attention_output", _output_cuda, _output_elsewhere, _output_fake),
    ("attention_forward", forward_on_gpu, _forward_elsewhere, _forward_fake),
    (
        "attention",
        without_deterministic(forward_on_gpu),
        without_deterministic(_forward_elsewhere),
        without_deterministic(_forward_fake),
    ),
):
    LIBRARY.impl(_name, _cuda, "CUDA")
    register_for_all_others(_name, _elsewhere)
    torch.library.register_fake(f"flashgen::{_name}", _fake, lib=LIBRARY)


@register_flop_formula([torch.ops.flashgen.attention_output, torch.ops.flashgen.attention_forward])
def _flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool, scale: float | None, layout: str, *modified: Any, **_: Any
) -> int:
    """For `torch.utils.flop_counter`; shapes in place of tensors."""
    return flops_of("forward", q, k, v, causal, layout, *modified)


@register_flop_formula(torch.ops.flashgen.attention)
def _flops_with_autograd(*arguments: Any, **_: Any) -> int:
    return _flops(*arguments[:6], *arguments[7:])


def flops_of(operation: str, q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool, layout: str, *modified: Any) -> int:
    """Floating-point operations of an operation on tensors of these shapes."""
    row, head = LAYOUTS[layout]
    names, sizes, numbers, shapes = (*modified, *_LEFT_OUT[len(modified) :])
    given, _ = asked(names, sizes, numbers, [torch.empty(shape, device="meta") for shape in shapes or ()])
    mask = Mask.CAUSAL if causal else Mask.FULL
    problem = Problem(Dtype.BF16, q[3], v[3], mask, operation, modifiers=given.names)  # the dtype does not matter
    return int(operation_of(problem).flops(problem, Workload(q[0], q[head], k[head], q[row], k[row], **dict(given.sizes))))


attention_output = torch.ops.flashgen.attention_output.default
attention_forward = torch.ops.flashgen.attention_forward.default
