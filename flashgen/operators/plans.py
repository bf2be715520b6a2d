"""A thread's plans by signature, and the way past PyTorch's dispatcher for a call that nobody else has an interest in.

A plan is kept per thread, so a call takes no lock: it looks the signature up, allocates, writes the addresses and launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad, profiler

from ..launch.gpu import Plan, untraced
from ..selection import loaded

_MAX_PLANS = 4096  # a thread's; beyond that the oldest half is dropped
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
        loaded.kernels.generation,
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


def plan_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, layout: str) -> Plan:
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
