"""A call of packed sequences on a GPU: `PackedPlan` holds everything that its signature decides, with the kernel bound to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.codegen.attention import attention_call
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.operands import Call
from flashgen.codegen.operation import dense
from flashgen.codegen.problem import Problem

from ..selection.families import families_for
from . import gpu
from .arguments import ALIGNMENT, require_memory
from .asked import tensor_strides
from .bound import BoundCall
from .packed_arguments import PackedTokens, check_packed_call, packed_workload
from .untraced import untraced

PackedTensors = tuple[Any, ...]  # q, k, v, those of `PackedTokens`, None for one that is not there, then of modifiers
OF_MODIFIERS = 7  # the first of them that is of a modifier
PackedRun = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # whether to give lse; `PackedTensors`
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # sizes and strides of out, and those of lse
_address = torch.Tensor.data_ptr  # each call asks


class PackedPlan:
    """Everything about a call that its signature decides.

    run: given whether lse is wanted, and all tensors, allocates out, and lse, both dense, and enqueues the kernel on the current stream
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tokens: PackedTokens,
        causal: bool,
        scale: float | None,
        modifiers: Given = NO_MODIFIERS,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Checks the arguments and binds the kernel that the selection chooses."""
        shapes, call, problem = _planned(q, k, v, tokens, causal, scale, modifiers, tensors)
        on = gpu.gpu_of(q)
        self._of_q = q.device.index, q.dtype
        self.before: Any = None  # what knows the next call of this signature at once: see operators/packed.py
        self.met = True  # whether it has run a call
        families_for(problem, on.device.target)
        self.bound = None if call is None else gpu.bind_chosen(call, on)
        self.run = _runner(*self._of_q, shapes, self.bound)
        gpu.require_context(q.device.index)

    def numbers(self, *arguments: Any) -> tuple[Any, ...]:
        """What `with_numbers` takes of another call: of the arguments of `PackedPlan`, with `SizedTensor`s."""
        shapes, call, _ = _planned(*arguments)
        assert call is not None
        assert self.bound is not None
        return shapes, *gpu.chosen_numbers(call, self.bound)

    def with_numbers(self, shapes: Shapes, *of_bound: Any) -> PackedPlan:
        """The plan of a call that differs from this plan's in `numbers` alone."""
        assert self.bound is not None
        other = object.__new__(PackedPlan)
        other._of_q, other.before, other.met, other.bound = self._of_q, None, False, self.bound.with_numbers(*of_bound)
        other.run = _runner(*self._of_q, shapes, other.bound)
        return other


def _planned(
    q: Any, k: Any, v: Any, tokens: PackedTokens, causal: bool, scale: float | None, modifiers: Given, tensors: Sequence[Any]
) -> tuple[Shapes, Call | None, Problem]:
    """Of tensors, which are checked, or `SizedTensor`s: shapes, the call, None without sequences, and its problem."""
    problem = check_packed_call(q, k, v, tokens, causal, scale, modifiers, tensors)
    out, lse = (*q.shape[:2], v.shape[2]), (q.shape[1], q.shape[0])
    outputs = out, dense(out), lse, dense(lse)
    if not (q.shape[0] and q.shape[1] and tokens.cu_seqlens_q.shape[0] > 1):
        return outputs, None, problem
    shapes = {"q": (q.shape, q.stride()), "k": (k.shape, k.stride()), "v": (v.shape, v.stride()), "out": outputs[:2]}
    strides: dict[str, tuple[int, ...]] = {name: token_strides(*both) for name, both in shapes.items()}
    strides |= tensor_strides(problem, tensors) if tensors else {}
    return outputs, attention_call(problem, packed_workload(q, k, tokens, modifiers), strides, scale, modifiers.numbers), problem


def token_strides(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """Strides in elements along (token, head, column) of a tensor that has passed `check_packed_call`: 0 where the size is 1."""
    return strides[0] if sizes[0] > 1 else 0, strides[1] if sizes[1] > 1 else 0, 1


def _runner(index: int, dtype: torch.dtype, shapes: Shapes, bound: BoundCall | None) -> PackedRun:
    """`PackedPlan.run`. bound: None where there is no sequence."""
    enqueue = None if bound is None else bound.enqueue
    out_shape, out_strides, lse_shape, lse_strides = shapes
    empty_strided, current_device, current_stream = gpu.empty_strided, gpu.current_device, gpu.current_stream

    def run(
        with_lse: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        of_q: torch.Tensor,
        of_kv: torch.Tensor,
        used_q: torch.Tensor | None,
        used_kv: torch.Tensor | None,
        *of_modifiers: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if current_device() != index:
            with torch.cuda.device(index):
                return _runner(index, dtype, shapes, bound)(with_lse, q, k, v, of_q, of_kv, used_q, used_kv, *of_modifiers)
        out = empty_strided(out_shape, out_strides, dtype)
        lse = empty_strided(lse_shape, lse_strides, torch.float32) if with_lse else None
        if enqueue is None:
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
            return out, lse
        at_q, at_k, at_v, at_of_q, at_of_kv = q.data_ptr(), k.data_ptr(), v.data_ptr(), of_q.data_ptr(), of_kv.data_ptr()
        at_used_q = 0 if used_q is None else used_q.data_ptr()
        at_used_kv = 0 if used_kv is None else used_kv.data_ptr()
        others = [*map(_address, of_modifiers)] if of_modifiers else ()
        if (at_q | at_k | at_v) % ALIGNMENT or not (at_q and at_k and at_v):
            require_memory(q, k, v)
        if not (at_of_q and at_of_kv and (at_used_q or used_q is None) and (at_used_kv or used_kv is None)) or 0 in others:
            raise ArgumentError("cu_seqlens, seqused and tensors of modifiers must have storages that hold their elements; got one without")
        at_lse = 0 if lse is None else lse.data_ptr()
        enqueue(current_stream(index), at_q, at_k, at_v, out.data_ptr(), at_lse, at_of_q, at_of_kv, at_used_q, at_used_kv, *others)
        return out, lse

    return run


untraced(_runner(0, torch.bfloat16, ((), (), (), ()), None))  # marks the code, which all that it returns share
