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
from .gpu import Shapes
from .packed_arguments import PackedTokens, check_packed_call, packed_workload, without_batch
from .sized_plan import SizedPlan
from .untraced import untraced

PackedTensors = tuple[
    Any, ...
]  # q, k, v, all with a batch of 1 in front or none of them, those of `PackedTokens`, None for one that is not there, then of modifiers
OF_MODIFIERS = 7  # the first of them that is of a modifier
PackedRun = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # whether to give lse; `PackedTensors`
_address = torch.Tensor.data_ptr  # each call asks


class PackedPlan(SizedPlan):
    """See SizedPlan.

    run: given whether lse is wanted, and all tensors, allocates out, and lse, both dense, and enqueues the kernel on the current stream
    """

    __slots__ = ()
    run: PackedRun

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
        """Checks the arguments and binds the kernel that the selection chooses.

        q, k and v may have a batch of 1 in front, which out and lse then have, too.
        """
        shapes, call, problem = _planned(q, k, v, tokens, causal, scale, modifiers, tensors)
        on = gpu.gpu_of(q)
        families_for(problem, on.device.target)
        bound = None if call is None else gpu.bind_chosen(call, on)
        super().__init__(_runner(q.device.index, q.dtype, bound), (shapes, bound and bound.numbers), bound)
        gpu.require_context(q.device.index)

    def numbers_of(self, *arguments: Any) -> tuple[Any, ...]:
        """`numbers` of another call: of the arguments of `PackedPlan`, with `SizedTensor`s."""
        shapes, call, _ = _planned(*arguments)
        return shapes, gpu.chosen_numbers(call, self.bound)


def _planned(
    q: Any, k: Any, v: Any, tokens: PackedTokens, causal: bool, scale: float | None, modifiers: Given, tensors: Sequence[Any]
) -> tuple[Shapes, Call | None, Problem]:
    """Of tensors, which are checked, or `SizedTensor`s: shapes, the call, None without sequences, and its problem."""
    (q, k, v), in_batch = without_batch(q, k, v)
    problem = check_packed_call(q, k, v, tokens, causal, scale, modifiers, tensors)
    out, lse, batch = (*q.shape[:2], v.shape[2]), (q.shape[1], q.shape[0]), (1,) if in_batch else ()
    outputs = (*batch, *out), dense((*batch, *out)), (*batch, *lse), dense((*batch, *lse))
    if not (q.shape[0] and q.shape[1] and tokens.cu_seqlens_q.shape[0] > 1):
        return outputs, None, problem
    shapes = {"q": (q.shape, q.stride()), "k": (k.shape, k.stride()), "v": (v.shape, v.stride()), "out": (out, dense(out))}
    strides: dict[str, tuple[int, ...]] = {name: token_strides(*both) for name, both in shapes.items()}
    strides |= tensor_strides(problem, tensors) if tensors else {}
    return outputs, attention_call(problem, packed_workload(q, k, tokens, modifiers), strides, scale, modifiers.numbers), problem


def token_strides(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """Strides in elements along (token, head, column) of a tensor that has passed `check_packed_call`: 0 where the size is 1."""
    return strides[0] if sizes[0] > 1 else 0, strides[1] if sizes[1] > 1 else 0, 1


def _runner(index: int, dtype: torch.dtype, bound: BoundCall | None) -> PackedRun:
    """`PackedPlan.run`, which takes numbers first. bound: None where there is no sequence."""
    enqueue = None if bound is None else bound.enqueue
    empty_strided, current_device, current_stream = gpu.empty_strided, gpu.current_device, gpu.current_stream

    def run(
        numbers: tuple[Shapes, Any],
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
                return _runner(index, dtype, bound)(numbers, with_lse, q, k, v, of_q, of_kv, used_q, used_kv, *of_modifiers)
        (out_shape, out_strides, lse_shape, lse_strides), of_bound = numbers
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
        of_tokens, stream = (at_of_q, at_of_kv, at_used_q, at_used_kv), current_stream(index)
        enqueue(of_bound, stream, at_q, at_k, at_v, out.data_ptr(), at_lse, *of_tokens, *others)
        return out, lse

    return run


untraced(_runner(0, torch.bfloat16, None))  # marks the code, which all that it returns share
