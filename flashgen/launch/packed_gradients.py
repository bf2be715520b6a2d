"""A call of the backward pass of packed sequences: what its tensors must be, and `PackedGradientPlan`, all that its signature decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flashgen.codegen.attention import attention_call
from flashgen.codegen.modifier import NO_MODIFIERS, Given, modifier_gradients
from flashgen.codegen.operands import Call
from flashgen.codegen.operation import dense
from flashgen.codegen.problem import Pass, Sequences

from . import gpu
from .arguments import ALIGNMENT, problem_of, require_memory
from .asked import gradient_strides, tensor_strides
from .bound import BoundCall
from .gradients import Gradients, require_results_of, shapes_of_gradients
from .packed_arguments import PackedTokens, check_packed_call, packed_workload
from .packed_plan import token_strides
from .sized_plan import SizedPlan
from .untraced import untraced


def check_packed_gradient_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tokens: PackedTokens,
    causal: bool,
    scale: float | None,
    deterministic: bool = False,
    modifiers: Given = NO_MODIFIERS,
    tensors: Sequence[torch.Tensor] = (),
) -> None:
    """Raises ArgumentError unless these go together, and a kernel for some GPU could take them. Works on fake tensors."""
    check_packed_call(q, k, v, tokens, causal, scale, modifiers, tensors)
    require_results_of(q, (out, d_out), (*q.shape[:2], v.shape[2]), (lse, d_lse), (q.shape[1], q.shape[0]))
    problem_of(q, v, causal, Pass.BACKWARD.value, deterministic, modifiers, Sequences.PACKED)


def packed_gradient_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    tokens: PackedTokens,
    causal: bool,
    scale: float | None,
    deterministic: bool,
    modifiers: Given = NO_MODIFIERS,
    tensors: Sequence[torch.Tensor] = (),
    of_tensors: bool = False,
) -> Call:
    """The call of these tensors, which have passed `check_packed_gradient_call`; gradients are dense.

    of_tensors: whether it has gradients of modifiers' tensors, too
    """
    problem = problem_of(q, v, causal, Pass.BACKWARD.value, deterministic, modifiers, Sequences.PACKED)
    given = {"q": q, "k": k, "v": v, "out": out, "d_out": d_out}
    strides: dict[str, tuple[int, ...]] = {name: token_strides(tensor.shape, tensor.stride()) for name, tensor in given.items()}
    strides |= {f"d_{name}": token_strides(given[name].shape, dense(tuple(given[name].shape))) for name in ("q", "k", "v")}
    strides |= tensor_strides(problem, tensors) | gradient_strides(problem, tensors) if tensors else {}
    call = attention_call(problem, packed_workload(q, k, tokens, modifiers), strides, scale, modifiers.numbers)
    if of_tensors:
        return call
    absent = {operand.name for operand in modifier_gradients(problem)}
    return call._replace(views={name: view for name, view in call.views.items() if name not in absent})


def all_are_zero(call: Call) -> bool:
    """Whether all gradients are 0, because there is no sequence, no query, or no key or anything else that has a gradient."""
    w = call.workload
    return not (w.batch and w.heads_q and w.tokens_q and (w.tokens_kv or modifier_gradients(call.problem)))


def _planned(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    d_lse: Any,
    tokens: PackedTokens,
    causal: bool,
    scale: float | None,
    deterministic: bool,
    modifiers: Given,
    tensors: Sequence[Any],
    of_tensors: bool,
) -> tuple[tuple[tuple[Any, ...], ...], int, Call | None]:
    """As of the backward pass of dense sequences: see gradients.py."""
    check_packed_gradient_call(q, k, v, out, lse, d_out, d_lse, tokens, causal, scale, deterministic, modifiers, tensors)
    call = packed_gradient_call(q, k, v, out, d_out, tokens, causal, scale, deterministic, modifiers, tensors, of_tensors)
    return *shapes_of_gradients((q, k, v), modifiers, tensors, of_tensors), None if all_are_zero(call) else call


class PackedGradientPlan(SizedPlan):
    """Of a call of the backward pass, whose tensors are `usable`: see SizedPlan.

    run: given q, k, v, out, lse, d_out, d_lse or None, tokens, and the modifiers' tensors, allocates the gradients, dense, and enqueues the
    kernels on the current stream
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
        tokens: PackedTokens,
        causal: bool,
        scale: float | None,
        deterministic: bool,
        modifiers: Given = NO_MODIFIERS,
        tensors: Sequence[torch.Tensor] = (),
        of_tensors: bool = False,
    ) -> None:
        """Checks the arguments and binds the selection's kernel. of_tensors: whether gradients of modifiers' tensors are given, too."""
        shapes, unwanted, call = _planned(
            q, k, v, out, lse, d_out, d_lse, tokens, causal, scale, deterministic, modifiers, tensors, of_tensors
        )
        on = gpu.gpu_of(q)
        index, bound = q.device.index, None
        if call is not None:
            bound = gpu.bind_chosen(call, on)
            gpu.require_context(index)
        super().__init__(partial(_run, index, unwanted, bound), (shapes, bound and bound.numbers), bound)

    def numbers_of(self, *arguments: Any) -> tuple[Any, ...]:
        """`numbers` of another call: of the arguments of `PackedGradientPlan`, with `SizedTensor`s."""
        shapes, _, call = _planned(*arguments)
        return shapes, gpu.chosen_numbers(call, self.bound)


@untraced
def _run(
    index: int,
    unwanted: int,
    bound: BoundCall | None,
    numbers: tuple[Any, Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tokens: PackedTokens,
    *tensors: torch.Tensor,
) -> Gradients:
    """`PackedGradientPlan.run` on this device. unwanted: how many gradients are; bound: None where all gradients are 0."""
    if gpu.current_device() != index:
        with torch.cuda.device(index):
            return _run(index, unwanted, bound, numbers, q, k, v, out, lse, d_out, d_lse, tokens, *tensors)
    shapes, of_bound = numbers
    if bound is None:
        return tuple(torch.zeros(shape, dtype=dtype, device=q.device) for shape, _, dtype in shapes)
    found = tuple(gpu.empty_strided(*each) for each in shapes)
    if any(t.data_ptr() % ALIGNMENT or not t.data_ptr() for t in (q, k, v, out, d_out)):
        require_memory(q, k, v, out=out, d_out=d_out)
    given = (q, k, v, out, lse, d_out, d_lse, *found[:3], *tokens[:4], *tensors, *found[3:])
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in given]
    bound.enqueue(of_bound, gpu.current_stream(index), *addresses, *(0,) * unwanted)
    return found
