"""A call on a GPU: `Plan` holds everything that its signature decides, with the kernel bound to it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from flashgen.build.gpu.driver import Gpu, check, driver, gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.attention import attention_call
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.operands import Call
from flashgen.codegen.operation import dense
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from ..selection import loaded
from ..selection.families import NO_FAMILY, excluded_families, families_for
from .allocation import empty_strided as empty_strided  # others allocate by this module's, too
from .arguments import ALIGNMENT, LAYOUTS, axis_strides, check_call, ordered_strides, require_memory, workload_of
from .asked import addresses_of_tensors, seed_position, tensor_strides, with_seed
from .bound import BoundCall
from .kept_tiles import kept_tiles
from .laid_out import dense_strides
from .seeds import next_seed
from .sized_plan import SizedPlan
from .untraced import untraced

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # sizes and strides of out, and those of lse
Run = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # q, k, v, whether to give lse, the modifiers' tensors
_LOCAL = threading.local()


class CaptureError(FlashgenError, RuntimeError):
    """A kernel would have to be compiled or loaded while a CUDA graph is being captured."""


class Plan(SizedPlan):
    """See SizedPlan.

    run: given q, k, v, whether lse is wanted, and the modifiers' tensors, allocates out, and lse, both dense, and enqueues the kernel on
    the current stream. Where UNDRAWN is among the modifiers' names it draws the seed
    """

    __slots__ = ()
    run: Run

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float | None,
        layout: str,
        modifiers: Given = NO_MODIFIERS,
        tensors: Sequence[torch.Tensor] = (),
        kernel: Kernel | None = None,
    ) -> None:
        """Checks the arguments and binds a kernel: `kernel`, which must be able to take them, or else the selection's choice."""
        position = seed_position(modifiers.names)
        shapes, call, problem = _planned(q, k, v, causal, scale, layout, modifiers, tensors)
        on, bound = gpu_of(q), None
        if call is None:
            families_for(problem, on.device.target)
        else:
            bound = bind_chosen(call, on) if kernel is None else BoundCall(kernel, call)
            require_context(q.device.index)
        super().__init__(_runner(q.device.index, q.dtype, bound, position), (shapes, bound and bound.numbers), bound)

    def numbers_of(self, *arguments: Any) -> tuple[Any, ...]:
        """`numbers` of another call: of the arguments of `Plan`, with `SizedTensor`s."""
        shapes, call, _ = _planned(*arguments)
        return shapes, chosen_numbers(call, self.bound)


def _planned(
    q: Any, k: Any, v: Any, causal: bool, scale: float | None, layout: str, modifiers: Given, tensors: Sequence[Any]
) -> tuple[Shapes, Call | None, Problem]:
    """Of tensors, which are checked, or `SizedTensor`s; no call where there is nothing to compute."""
    if seed_position(modifiers.names) is not None:
        modifiers, tensors = with_seed(modifiers, tensors, q.new_empty((), dtype=torch.int64))
    problem = check_call(q, k, v, causal, scale, layout, modifiers, tensors)
    row, head = LAYOUTS[layout]
    out, lse = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[head], q.shape[row])
    shapes = out, dense_strides(out, q, layout), lse, dense(lse)
    if not math.prod(lse):
        return shapes, None, problem
    strides = {"q": axis_strides(q, layout), "k": axis_strides(k, layout), "v": axis_strides(v, layout)}
    strides |= {"out": ordered_strides(out, shapes[1], layout), "lse": shapes[3]}
    if tensors:
        strides |= tensor_strides(problem, tensors)
    return shapes, attention_call(problem, workload_of(q, k, layout, modifiers), strides, scale, modifiers.numbers), problem


def _runner(index: int, dtype: torch.dtype, bound: BoundCall | None, seed_position: int | None = None) -> Run:
    """`Plan.run` on this device, which takes numbers first.

    bound: None where there is nothing to compute; seed_position: where it draws one, see `Plan`
    A function that holds what it needs: to call an object and look up what that holds costs each call some tenths of a microsecond.
    """
    enqueue, enqueue_kept = (None, None) if bound is None else (bound.enqueue, bound.enqueue_kept)

    def run(
        numbers: tuple[Shapes, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if current_device() != index:
            with torch.cuda.device(index):
                return _runner(index, dtype, bound, seed_position)(numbers, q, k, v, with_lse, *tensors)
        (shape, strides, lse_shape, lse_strides), of_bound = numbers
        out = empty_strided(shape, strides, dtype)
        lse = empty_strided(lse_shape, lse_strides, torch.float32) if with_lse else None
        if enqueue is not None:
            at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if (at_q | at_k | at_v) % ALIGNMENT or not (at_q and at_k and at_v):
                require_memory(q, k, v)
            at_lse, stream = 0 if lse is None else lse.data_ptr(), current_stream(index)
            if seed_position is not None:
                others = addresses_of_tensors(tensors) if tensors else None
                _seeds, _, at_seed = next_seed(index, stream)  # the name keeps the memory until the kernel is in the stream
                if others is not None:
                    others.insert(seed_position, at_seed)
                    enqueue(of_bound, stream, at_q, at_k, at_v, out.data_ptr(), at_lse, *others)
                else:
                    enqueue(of_bound, stream, at_q, at_k, at_v, out.data_ptr(), at_lse, at_seed)
            elif enqueue_kept is not None and (kept := kept_tiles(tensors)) is not None:
                given = at_q, at_k, at_v, out.data_ptr(), at_lse, *addresses_of_tensors(tensors)
                enqueue_kept(kept, tensors, of_bound, stream, *given)
            elif tensors:
                enqueue(of_bound, stream, at_q, at_k, at_v, out.data_ptr(), at_lse, *addresses_of_tensors(tensors))
            else:
                enqueue(of_bound, stream, at_q, at_k, at_v, out.data_ptr(), at_lse)
        elif seed_position is not None:
            next_seed(index, current_stream(index))  # as calls with gradients do: else a checkpoint's second run would have other seeds
        return out, lse

    return run


untraced(_runner(0, torch.bfloat16, None))  # marks the code, which all that it returns share


def gpu_of(tensor: torch.Tensor, name: str = "q") -> Gpu:
    """The GPU that holds a tensor. Raises ArgumentError if none does."""
    if tensor.device.type != "cuda":
        raise ArgumentError(f"{name} must be on a CUDA device; got {tensor.device}")
    return gpu(tensor.device.index)


def bind_chosen(call: Call, on: Gpu) -> BoundCall:
    """The call bound to the selection's kernel. Raises as `choose_kernel`, and ArgumentError if no family can take the call."""
    kernel = loaded.kernels.cached(call.problem, call.workload, on, NO_FAMILY, any_length=False)
    if kernel is not None:
        # Who is the best of all is so without some of the others: if it takes the call, nobody needs to ask which families cannot.
        with suppress(ArgumentError):
            return BoundCall(kernel, call)
    return BoundCall(choose_kernel(call.problem, call.workload, on, excluded_families(call, on.device.target)), call)


def chosen_numbers(call: Call | None, bound: BoundCall | None) -> Any:
    """`BoundCall.numbers` of a call of `Size`s. Raises TypeError where the selection need not choose the kernel for other ones."""
    assert call is not None
    assert bound is not None
    if not loaded.kernels.chooses_alike(bound.launch.kernel, call.problem, bound.workload, call.workload):
        raise TypeError(f"kernel of {bound.workload.name} does not follow from the bucket")
    return bound.numbers_of(call)


def choose_kernel(problem: Problem, workload: Workload, on: Gpu, excluded: frozenset[str], any_length: bool = False) -> Kernel:
    """The selection's kernel; `excluded`: names of the families that cannot take the call; `any_length`: see `selection.picks`.

    Raises CaptureError if it would have to be made while a CUDA graph is being captured.
    """
    if (cached := loaded.kernels.cached(problem, workload, on, excluded, any_length)) is not None:
        return cached
    if torch.cuda.is_current_stream_capturing() and not loaded.kernels.is_chosen(problem, workload, on, excluded, any_length):
        raise CaptureError(
            f"flashgen.attention has no kernel yet for {problem.name} {workload.name}, and none can be made during a CUDA graph's capture: "
            "call flashgen.warm(...), or the same attention once, before the capture"
        )
    return loaded.kernels.choose(problem, workload, on, excluded, any_length)


def require_context(ordinal: int) -> None:
    """A thread that has not used CUDA yet has no context; a launch needs the device's primary one, which stays once it is there."""
    there: set[int] = _LOCAL.__dict__.setdefault("contexts", set())
    if ordinal in there:
        return
    cu = driver()
    with torch.cuda.device(ordinal):
        if not int(check(cu.cuCtxGetCurrent(), "finding the context")):
            torch.cuda.synchronize()  # the runtime makes the primary context current in this thread
    there.add(ordinal)


current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
