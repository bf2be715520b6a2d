"""A call of the backward pass: what its tensors must be, and `GradientPlan`, everything that its signature decides on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flashgen.build.gpu.driver import gpu
from flashgen.codegen.attention import attention_call
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import NO_MODIFIERS, Given, modifier_gradients
from flashgen.codegen.operands import Call
from flashgen.codegen.operation import dense
from flashgen.codegen.problem import Pass

from .allocation import empty_strided
from .arguments import (
    ALIGNMENT,
    LAYOUTS,
    axis_strides,
    check_call,
    check_strides,
    ordered_strides,
    problem_and_workload,
    require_dense,
    require_memory,
)
from .asked import addresses_of_tensors, gradient_strides, have_gradients, tensor_strides
from .bound import BoundCall
from .gpu import bind_chosen, chosen_numbers, current_device, current_stream, require_context
from .kept_tiles import kept_tiles
from .laid_out import dense_strides
from .sized_plan import SizedPlan
from .untraced import untraced

logger = logging.getLogger("flashgen")
_said: set[str] = set()

Gradients = tuple[torch.Tensor, ...]  # d_q, d_k, d_v; where they are asked for, those of modifiers' tensors behind them


def check_gradient_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    layout: str,
    deterministic: bool | None = None,
    modifiers: Given = NO_MODIFIERS,
    tensors: Sequence[torch.Tensor] = (),
) -> None:
    """Raises ArgumentError unless these go together, and a kernel for some GPU could take them. Works on fake tensors."""
    check_call(q, k, v, causal, scale, layout, modifiers, tensors)
    row, head = LAYOUTS[layout]
    require_results_of(q, (out, d_out), (*q.shape[:3], v.shape[3]), (lse, d_lse), (q.shape[0], q.shape[head], q.shape[row]))


def require_results_of(
    q: torch.Tensor,
    outs: tuple[torch.Tensor, torch.Tensor],
    of_out: tuple[int, ...],
    lses: tuple[torch.Tensor, torch.Tensor | None],
    of_lse: tuple[int, ...],
) -> None:
    """Raises ArgumentError unless (out, d_out) and (lse, d_lse) have these shapes and go with q."""
    (out, d_out), (lse, d_lse) = outs, lses
    for name, tensor, shape, dtype in (
        ("out", out, of_out, q.dtype),
        ("d_out", d_out, of_out, q.dtype),
        ("lse", lse, of_lse, torch.float32),
        ("d_lse", d_lse, of_lse, torch.float32),
    ):
        if tensor is None:
            continue
        require_dense(name, tensor)
        if tuple(tensor.shape) != tuple(shape):
            raise ArgumentError(f"{name} must have the shape {tuple(shape)}; got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise ArgumentError(f"{name} must be {dtype}; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(f"{name} must be on q's device {q.device}; got {tensor.device}")


def usable(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a dense copy where kernels cannot take it: gradients may come expanded, transposed or not aligned."""
    if tensor.ndim not in (3, 4) or tensor.is_nested or tensor.layout is not torch.strided:
        return tensor  # checks of the call say what is wrong
    try:
        check_strides(name, tensor)
        if tensor.data_ptr() % ALIGNMENT == 0:
            return tensor
        why = f"{name} begins {tensor.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
    except ArgumentError as error:
        why = str(error)
    if name not in _said:
        _said.add(name)
        logger.info("the backward pass copies %s, which kernels cannot take as it is: %s", name, why)
    return tensor.clone(memory_format=torch.contiguous_format)


def gradient_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    causal: bool,
    scale: float | None,
    layout: str,
    deterministic: bool,
    modifiers: Given = NO_MODIFIERS,
    tensors: Sequence[torch.Tensor] = (),
    of_tensors: bool = False,
) -> Call:
    """The call of these tensors, which have passed `check_gradient_call`; gradients lie by `dense_strides`.

    of_tensors: whether it has gradients of modifiers' tensors, too
    """
    problem, workload = problem_and_workload(q, k, v, causal, layout, Pass.BACKWARD.value, deterministic, modifiers)
    given = {"q": q, "k": k, "v": v, "out": out, "d_out": d_out}
    strides = {name: axis_strides(tensor, layout) for name, tensor in given.items()}
    for name in ("q", "k", "v"):
        sizes = tuple(given[name].shape)
        strides[f"d_{name}"] = ordered_strides(sizes, dense_strides(sizes, given[name], layout), layout)
    strides |= tensor_strides(problem, tensors) | gradient_strides(problem, tensors)
    call = attention_call(problem, workload, strides, scale, modifiers.numbers)
    if of_tensors or not tensors:
        return call
    absent = {operand.name for operand in modifier_gradients(problem)}
    return call._replace(views={name: view for name, view in call.views.items() if name not in absent})


def is_trivial(call: Call) -> bool:
    """Whether all gradients are 0, because no query meets a key, or anything else that has a gradient."""
    w = call.workload
    return not (w.batch and w.heads_q and w.len_q and (w.len_kv or modifier_gradients(call.problem)))


def _planned(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    d_lse: Any,
    causal: bool,
    scale: float | None,
    layout: str,
    deterministic: bool,
    modifiers: Given,
    tensors: Sequence[Any],
    of_tensors: bool,
) -> tuple[tuple[tuple[Any, ...], ...], int, Call | None]:
    """Of tensors, which are checked, or `SizedTensor`s: shapes, strides and dtypes of gradients, how many are not wanted, and the call.

    No call where all gradients are 0.
    """
    check_gradient_call(q, k, v, out, lse, d_out, d_lse, causal, scale, layout, deterministic, modifiers, tensors)
    call = gradient_call(q, k, v, out, d_out, causal, scale, layout, deterministic, modifiers, tensors, of_tensors)
    return *shapes_of_gradients((q, k, v), modifiers, tensors, of_tensors, layout), None if is_trivial(call) else call


def shapes_of_gradients(
    qkv: Sequence[Any], modifiers: Given, tensors: Sequence[Any], of_tensors: bool, layout: str | None = None
) -> tuple[tuple[tuple[Any, ...], ...], int]:
    """Shapes, strides and dtypes of the gradients, and how many there are that nobody wants. layout: None for packed sequences."""
    having = [tensor for tensor, has in zip(tensors, have_gradients(modifiers.names), strict=True) if has]
    found = [(tuple(t.shape), dense(tuple(t.shape)) if layout is None else dense_strides(tuple(t.shape), t, layout), t.dtype) for t in qkv]
    if of_tensors:
        found += [(tuple(t.shape), dense(tuple(t.shape)), t.dtype) for t in having]
    return tuple(found), 0 if of_tensors else len(having)


class GradientPlan(SizedPlan):
    """Of a call of the backward pass, whose tensors are `usable`: see SizedPlan.

    run: given q, k, v, out, lse, d_out, d_lse or None, and the modifiers' tensors, allocates the gradients, dense, and enqueues the kernels
    on the current stream
    """

    __slots__ = ()
    run: Callable[..., Gradients]

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        causal: bool,
        scale: float | None,
        layout: str,
        deterministic: bool,
        modifiers: Given = NO_MODIFIERS,
        tensors: Sequence[torch.Tensor] = (),
        of_tensors: bool = False,
    ) -> None:
        """Checks the arguments and binds the selection's kernel."""
        shapes, absent, call = _planned(
            q, k, v, out, lse, d_out, d_lse, causal, scale, layout, deterministic, modifiers, tensors, of_tensors
        )
        if q.device.type != "cuda":
            raise ArgumentError(f"q must be on a CUDA device; got {q.device}")
        index, bound = q.device.index, None
        if call is not None:
            bound = bind_chosen(call, gpu(index))
            require_context(index)
        super().__init__(partial(_run, index, absent, bound), (shapes, bound and bound.numbers), bound)

    def numbers_of(self, *arguments: Any) -> tuple[Any, ...]:
        """`numbers` of another call: of the arguments of `GradientPlan`, with `SizedTensor`s."""
        shapes, _, call = _planned(*arguments)
        return shapes, chosen_numbers(call, self.bound)


@untraced
def _run(
    index: int,
    absent: int,
    bound: BoundCall | None,
    numbers: tuple[Any, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    *tensors: torch.Tensor,
) -> Gradients:
    """`GradientPlan.run` on this device. absent: how many gradients are not wanted; bound: None where all gradients are 0."""
    if current_device() != index:
        with torch.cuda.device(index):
            return _run(index, absent, bound, numbers, q, k, v, out, lse, d_out, d_lse, *tensors)
    shapes, of_bound = numbers
    if bound is None:
        return tuple(empty_strided(*each).zero_() for each in shapes)
    d_q, d_k, d_v, *others = found = tuple(empty_strided(*each) for each in shapes)
    at_others = [other.data_ptr() for other in others] or [0] * absent
    addresses = [t.data_ptr() for t in (q, k, v, out, d_out)]
    if any(address % ALIGNMENT or not address for address in addresses):
        require_memory(q, k, v, out=out, d_out=d_out)
    at_q, at_k, at_v, at_out, at_d_out = addresses
    kept = kept_tiles(tensors) if bound.enqueue_kept is not None else None
    enqueue = bound.enqueue if kept is None or bound.enqueue_kept is None else partial(bound.enqueue_kept, kept, tensors)
    enqueue(
        of_bound,
        current_stream(index),
        *(at_q, at_k, at_v, at_out, lse.data_ptr(), at_d_out, 0 if d_lse is None else d_lse.data_ptr()),
        *(d_q.data_ptr(), d_k.data_ptr(), d_v.data_ptr(), *addresses_of_tensors(tensors), *at_others),
    )
    return found
