"""The PyTorch operators: checks, plans and the launch. Planning happens once per signature.

`flashgen::attention_output` computes out, `flashgen::attention_forward` lse, too; `flashgen::attention` is that with autograd. They are
several because PyTorch's dispatcher charges every call of an operator with a Python autograd formula several microseconds, gradients or
not, and because a tensor that nobody wants costs a call two more.
A plan is kept per thread, so a call takes no lock: it looks the signature up, allocates, writes the addresses and launches. Where nobody
else has an interest in a call of a known signature, it does not go through the dispatcher (`plan_at_hand`).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad, profiler
from torch.utils.flop_counter import register_flop_formula

from flashgen.build.driver import Gpu, check, driver, gpu
from flashgen.build.kernel import Kernel, Launch
from flashgen.codegen.attention_launch import attention_call
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.problem import Dtype, Mask, Problem, Workload
from flashgen.codegen.program import BufferKind

from . import selection
from .arguments import ALIGNMENT, LAYOUTS, check_call, check_traced, problem_and_workload, require_memory, strides_of
from .scratch import tile_counters

F = TypeVar("F", bound=Callable[..., Any])

_MAX_PLANS = 4096  # a thread's; beyond that the oldest half is dropped

LIBRARY = torch.library.Library("flashgen", "DEF")
_ARGUMENTS = "(Tensor q, Tensor k, Tensor v, bool causal, float? scale, str layout)"
LIBRARY.define(f"attention_output{_ARGUMENTS} -> Tensor out")
LIBRARY.define(f"attention_forward{_ARGUMENTS} -> (Tensor out, Tensor lse)")
LIBRARY.define(f"attention{_ARGUMENTS} -> (Tensor out, Tensor lse)")


class CaptureError(FlashgenError, RuntimeError):
    """A kernel would have to be compiled or loaded while a CUDA graph is being captured."""


def untraced(function: F) -> F:
    """The function, marked: torch.compile looks neither into it nor into what it calls when it has left a call to Python.

    PyTorch marks so by private names, which may go: they cost a call nothing, and load no compiler as `torch.compiler.disable` does.
    """
    with suppress(AttributeError, TypeError):
        marks = torch._C._dynamo.eval_frame
        skip = marks._FrameAction.SKIP
        marks.set_code_exec_strategy(function.__code__, marks._FrameExecStrategy(skip, skip))
    return function


class Plan:
    """Everything about a call that its signature decides."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float | None,
        layout: str,
        kernel: Kernel | None = None,
    ) -> None:
        """Checks the arguments and binds a kernel: `kernel`, which must be able to take them, or else the selection's choice."""
        check_call(q, k, v, causal, scale, layout)
        if q.device.type != "cuda":
            raise ArgumentError(f"q must be on a CUDA device; got {q.device}")
        row, head = LAYOUTS[layout]
        problem, workload = problem_and_workload(q, k, v, causal, layout)
        on = gpu(q.device.index)
        selection.families_for(problem, on.device.target)
        self.index = q.device.index
        self.out_shape = (*q.shape[:3], v.shape[3])
        self.out_like_q = q.is_contiguous() and q.shape == self.out_shape
        self.lse_shape = (workload.batch, workload.heads_q, workload.len_q)
        self.launch: Launch | None = None
        if not math.prod(self.lse_shape):
            return
        out = torch.empty(self.out_shape, device="meta")
        strides = [strides_of(tensor, row, head) for tensor in (q, k, v, out)]
        if kernel is None:
            kernel = choose_kernel(problem, workload, on, selection.left_out(problem, workload, strides, on.device.target))
        family, config, device = kernel.spec.family, kernel.spec.config, kernel.gpu.device
        family.require_workload(config, workload)
        call = attention_call(problem, workload, strides, scale if scale is not None else problem.head_dim**-0.5)
        program = family.program(config, call, device)
        self.buffers = tuple((buffer.bytes, buffer.kind) for buffer in program.buffers)
        self.launch = kernel.bind(program)
        _require_context(self.index)

    @untraced
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Allocates out, and lse if it is wanted, and enqueues the kernel on the current stream."""
        if _current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(q, k, v, with_lse)
        out = torch.empty_like(q) if self.out_like_q else q.new_empty(self.out_shape)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32) if with_lse else None
        self.into(q, k, v, out, lse)
        return out, lse

    def into(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Enqueues the kernel on the current stream of its device, which must be the current one. out and lse are dense."""
        if self.launch is not None:
            pointers = q.data_ptr(), k.data_ptr(), v.data_ptr()
            if (pointers[0] | pointers[1] | pointers[2]) % ALIGNMENT or not (pointers[0] and pointers[1] and pointers[2]):
                require_memory(q, k, v)
            stream = _current_stream(self.index)
            operands = *pointers, out.data_ptr(), 0 if lse is None else lse.data_ptr()
            if not self.buffers:
                self.launch(stream, *operands)
                return
            # Memory that PyTorch's allocator takes back once this returns goes to nobody else before the stream is done with it.
            held = [self._buffer(size, kind, stream) for size, kind in self.buffers]
            self.launch(stream, *operands, *(memory if isinstance(memory, int) else memory.data_ptr() for memory in held))

    def _buffer(self, size: int, kind: BufferKind, stream: int) -> int | torch.Tensor:
        """The memory of one of the program's buffers, or its address where it is nobody's to give back."""
        if kind is BufferKind.STREAM_COUNTER:
            return tile_counters.address(self.index, stream)
        make = torch.zeros if kind is BufferKind.CALL_ZEROED else torch.empty
        return make(size, dtype=torch.uint8, device=torch.device("cuda", self.index))


def choose_kernel(problem: Problem, workload: Workload, on: Gpu, without: frozenset[str], any_length: bool = False) -> Kernel:
    """The selection's kernel; `without`: names of the families that the call leaves out; `any_length`: see `selection.picks`.

    Raises CaptureError if it would have to be made while a CUDA graph is being captured.
    """
    if torch.cuda.is_current_stream_capturing() and not selection.kernels.is_chosen(problem, workload, on, without, any_length):
        raise CaptureError(
            f"flashgen.attention has no kernel yet for {problem.name} {workload.name}, and none can be made during a CUDA graph's capture: "
            "call flashgen.warm(...), or the same attention once, before the capture"
        )
    return selection.kernels.choose(problem, workload, on, without, any_length)


def _require_context(ordinal: int) -> None:
    """A thread that has not used CUDA yet has no context; a launch needs the device's primary one."""
    cu = driver()
    with torch.cuda.device(ordinal):
        if not int(check(cu.cuCtxGetCurrent(), "finding the context")):
            torch.cuda.synchronize()  # the runtime makes the primary context current in this thread


_LOCAL = threading.local()


def _signature(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str) -> tuple[Any, ...]:
    """What decides a plan."""
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        causal,
        scale,
        layout,
        selection.kernels.generation,
    )


def _listeners() -> Callable[[], bool]:
    """What tells that nobody but the kernel has an interest in a call: no mode, transform, tracer, profiler or forward-mode gradient.

    PyTorch tells by private names, which may go. Without one of them the answer is always no: the dispatcher asks by itself.
    """
    try:
        dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._is_torch_function_mode_enabled
        transforms, tracer = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state

        def nobody() -> bool:
            return (
                not dispatch_modes()
                and not function_modes()
                and transforms() is None
                and tracer() is None
                and forward_ad._current_level < 0
                and not profiler._is_profiler_enabled
            )

        nobody()
    except (AttributeError, TypeError):
        return lambda: False
    return nobody


nobody_listens = _listeners()
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)


@untraced
def plan_at_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str) -> Plan | None:
    """This thread's plan for a signature that it has called before, if the dispatcher would do nothing but call it.

    So it is where nothing wants to see the call: no subclass, mode, transform, tracer or profiler, and no gradient. The way through the
    dispatcher costs a fifth of a call.
    """
    if (
        type(q) is type(k) is type(v) is torch.Tensor
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and nobody_listens()
        and not (q.is_neg() or k.is_neg() or v.is_neg())  # the dispatcher negates them first
    ):
        try:
            return _LOCAL.plans.get(_signature(q, k, v, causal, scale, layout))  # type: ignore[no-any-return]
        except (AttributeError, TypeError, RuntimeError):  # this thread's first call; an argument that `check_types` will speak of
            return None
    return None


def _plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str) -> Plan:
    """This thread's plan for the call's signature."""
    plans: dict[tuple[Any, ...], Plan] = _LOCAL.__dict__.setdefault("plans", {})
    key = _signature(q, k, v, causal, scale, layout)
    plan = plans.get(key)
    if plan is None:
        plan = Plan(q, k, v, causal, scale, layout)
        if len(plans) >= _MAX_PLANS:
            for old in list(plans)[: _MAX_PLANS // 2]:
                del plans[old]
        plans[key] = plan
    return plan


@untraced
def _forward_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _plan(q, k, v, causal, scale, layout)(q, k, v, True)


@untraced
def _output_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str) -> torch.Tensor:
    return _plan(q, k, v, causal, scale, layout)(q, k, v, False)[0]


@untraced
def _forward_elsewhere(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check_call(q, k, v, causal, scale, layout)
    if q.device.type != "cpu":
        raise ArgumentError(f"q must be on a CUDA device; got {q.device}")
    if os.environ.get("FLASHGEN_CPU") != "1":
        raise ArgumentError(
            f"q must be on a CUDA device; got {q.device}. FLASHGEN_CPU=1 in the environment lets kernels run on the CPU, thread for "
            "thread: right, and slow"
        )
    from . import host

    return host.attention(q, k, v, causal, scale, layout)


def _forward_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check_traced(q, k, v, causal, scale, layout)
    row, head = LAYOUTS[layout]
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[head], q.shape[row]), dtype=torch.float32)


@untraced
def _output_elsewhere(*arguments: Any) -> torch.Tensor:
    return _forward_elsewhere(*arguments)[0]


def _output_fake(*arguments: Any) -> torch.Tensor:
    return _forward_fake(*arguments)[0]


for _name, _cuda, _elsewhere, _fake in (
    ("attention_output", _output_cuda, _output_elsewhere, _output_fake),
    ("attention_forward", _forward_cuda, _forward_elsewhere, _forward_fake),
    ("attention", _forward_cuda, _forward_elsewhere, _forward_fake),
):
    LIBRARY.impl(_name, _cuda, "CUDA")
    for _key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"):
        LIBRARY.impl(_name, _elsewhere, _key)  # everything that has no kernel of its own
    torch.library.register_fake(f"flashgen::{_name}", _fake, lib=LIBRARY)


@register_flop_formula([torch.ops.flashgen.attention_output, torch.ops.flashgen.attention_forward, torch.ops.flashgen.attention])
def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool, scale: float | None, layout: str, **_: Any) -> int:
    """For `torch.utils.flop_counter`; shapes in place of tensors."""
    row, head = LAYOUTS[layout]
    problem = Problem(Dtype.BF16, q[3], v[3], Mask.CAUSAL if causal else Mask.FULL)  # the dtype does not matter
    return int(Workload(q[0], q[head], k[head], q[row], k[row]).flops(problem))


attention_output = torch.ops.flashgen.attention_output.default
attention_forward = torch.ops.flashgen.attention_forward.default
