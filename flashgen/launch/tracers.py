"""Whether what PyTorch computes now may be kept for later calls, or is a part of somebody's graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def _tracers() -> Callable[[], bool]:
    """What tells that nobody makes another graph of what PyTorch computes now: no mode, transform or tracer.

    PyTorch tells by private names, which may go. Without one of them there may be somebody.
    """
    try:
        modes, transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
        tracer = torch._C._get_tracing_state

        def nobody() -> bool:
            return not modes() and transforms() is None and tracer() is None

        nobody()
    except (AttributeError, TypeError):
        return lambda: False
    return nobody


nobody_traces = _tracers()


def may_be_kept(device: torch.device) -> bool:
    """Whether what is computed on the device now stays what it is: not where somebody traces, or captures a CUDA graph."""
    return nobody_traces() and not (is_gpu(device) and torch.cuda.is_current_stream_capturing())


@cache
def is_gpu(device: torch.device) -> bool:
    """Remembered, as PyTorch makes a device's type a text anew each time it is asked."""
    return device.type == "cuda"
