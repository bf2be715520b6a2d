"""Activating flashgen for a process: as an implementation of PyTorch's registry of flash attention, which knows one active one.

Activated, `torch.nn.functional.scaled_dot_product_attention` is one that calls flashgen, and PyTorch's fused operators have kernels that
do (fused.py). Restoring takes both back, but for backward kernels: they stay, and give PyTorch's what is not flashgen's.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.backends.cuda import flash_sdp_enabled, math_sdp_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import functional
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from . import counted, fused, packed, states
from .face import REFUSALS, attended_or_passed_on, is_causal_bias, of_causal_bias, reason_of

IMPLEMENTATION = "flashgen"
_has_function_mode = getattr(torch._C, "_is_torch_function_mode_enabled", bool)
_lock = threading.RLock()  # PyTorch's registry has none

# Operators of PyTorch: why flashgen does not take a call, and what runs it.
FORWARD: dict[str, tuple[Callable[..., str | None], Callable[..., Any]]] = {
    "_scaled_dot_product_flash_attention": (fused.against_flash, fused.flash),
    "_scaled_dot_product_efficient_attention": (fused.against_efficient, fused.efficient),
    "_scaled_dot_product_cudnn_attention": (fused.against_cudnn, fused.cudnn),
    "_flash_attention_forward": (packed.against_packed, packed.packed_flash),
}
# Their backward operators: where among the arguments the state of the forward pass is, and what runs them.
BACKWARD: dict[str, tuple[int, Callable[..., Any]]] = {
    "_scaled_dot_product_flash_attention_backward": (12, fused.flash_backward),
    "_scaled_dot_product_efficient_attention_backward": (7, fused.efficient_backward),
    "_scaled_dot_product_cudnn_attention_backward": (6, fused.cudnn_backward),
    "_flash_attention_backward": (12, packed.packed_flash_backward),
}


def activate() -> None:
    """Lets all calls of scaled_dot_product_attention in this process run flashgen where it can, until `deactivate`.

    The same as torch.nn.attention.activate_flash_attention_impl("flashgen"): another active implementation is restored first.
    """
    with _lock:
        if current_flash_attention_impl() != IMPLEMENTATION:
            activate_flash_attention_impl(IMPLEMENTATION)


def deactivate() -> None:
    """Takes `activate` back. Nothing happens where another implementation, or none, is active."""
    with _lock:
        if current_flash_attention_impl() == IMPLEMENTATION:
            restore_flash_attention_impl()


class _Block:
    """An `enabled` that is not left yet. before: what it is to restore."""

    def __init__(self, before: str | None) -> None:
        self.before = before


_blocks: list[_Block] = []  # in all threads, as they were entered


@contextmanager
def enabled() -> Iterator[None]:
    """`activate` within a with statement. What was active before is active again behind it, after an exception, too.

    For all threads: where blocks of several threads overlap, flashgen is active until the last of them is left.
    """
    with _lock:
        block = _Block(current_flash_attention_impl())
        activate()
        _blocks.append(block)
    try:
        yield
    finally:
        with _lock:
            i = _blocks.index(block)
            del _blocks[i]
            if i < len(_blocks):
                _blocks[i].before = block.before  # of a thread that entered later and is still within: it restores that
            else:
                _restore(block.before)


def _restore(before: str | None) -> None:
    if current_flash_attention_impl() != before:
        if before is not None:
            activate_flash_attention_impl(before)
        else:
            restore_flash_attention_impl()


class Activation:
    """What is in place of PyTorch's own while flashgen is active. Of `dispatch_key` those operators that have a kernel there."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self.is_active = True
        self._before = functional.scaled_dot_product_attention
        self._face = _face_before(self._before, self)
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, (reason_against, run) in FORWARD.items():
            _register(self._library, name, dispatch_key, functools.partial(_forward_kernel, name, reason_against, run))
        _register_backward(dispatch_key)
        functional.scaled_dot_product_attention = self._face

    def remove(self) -> None:
        """PyTorch's registry calls this to restore what was there before."""
        self.is_active = False
        if functional.scaled_dot_product_attention is self._face:
            functional.scaled_dot_product_attention = self._before
        self._library = None


_staying: dict[str, torch.library.Library] = {}  # by dispatch key


def _register_backward(dispatch_key: str) -> None:
    """Backward kernels, once and for all: a backward pass may run behind the activation in which its forward pass ran."""
    if dispatch_key in _staying:
        return
    library = torch.library.Library("aten", "IMPL")
    for name, (state, run) in BACKWARD.items():
        _register(library, name, dispatch_key, functools.partial(_backward_kernel, state, run))
    torch.library._impls.difference_update(library._op_impls)  # else PyTorch would refuse kernels of another implementation in their place
    _staying[dispatch_key] = library


def _register(library: torch.library.Library, name: str, dispatch_key: str, kernel_before: Callable[[Any], Callable[..., Any]]) -> None:
    """In place of an operator's kernel one that is made of it, if there is one."""
    try:
        before = torch.library.get_kernel(f"aten::{name}", dispatch_key)
    except RuntimeError:  # PyTorch without CUDA has none
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that a kernel is overridden, as is meant
        library.impl(name, kernel_before(before), dispatch_key, with_keyset=True, allow_override=True)


def _mode_sees_calls() -> bool:
    """Whether a TorchFunctionMode is to see PyTorch's function. That of torch.set_default_device, and of torch.device, is not."""
    return _has_function_mode() and any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


def _face_before(before: Callable[..., torch.Tensor], activation: Activation) -> Callable[..., torch.Tensor]:
    """What torch.nn.functional has under `before`'s name during an activation. Whoever binds or wraps it then has it behind that, too."""

    @functools.wraps(before)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if is_dynamo_compiling() and is_causal_bias(attn_mask):
            return of_causal_bias(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if is_dynamo_compiling() or not activation.is_active:
            return before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if not (flash_sdp_enabled() and math_sdp_enabled()):
            reason = "PyTorch is told which backend to take"
        elif _mode_sees_calls():
            reason = "a TorchFunctionMode, which is to see PyTorch's function"
        else:
            return attended_or_passed_on(before, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        calls = counted.calls_of_thread()
        found = before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if counted.calls_of_thread() == calls:  # else flashgen took what came to a fused operator, or has counted why not
            counted.passed_on(reason)
        return found

    scaled_dot_product_attention.__module__ = functional.__name__  # there pickle finds it, as it finds PyTorch's
    return scaled_dot_product_attention


def _forward_kernel(name: str, reason_against: Callable[..., str | None], run: Callable[..., Any], before: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        reason = reason_against(*arguments, **options)
        if reason is None:
            try:
                found = run(*arguments, **options)
            except REFUSALS as error:
                reason = reason_of(error)
            else:
                counted.ran(name)
                return found
        counted.passed_on(reason)
        return before.call_boxed(keys, *arguments, **options)

    return kernel


def _backward_kernel(state: int, run: Callable[..., Any], before: Any) -> Callable[..., Any]:
    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        if states.is_own(arguments[state]):
            return run(*arguments, **options)
        return before.call_boxed(keys, *arguments, **options)

    return kernel


register_flash_attention_impl(IMPLEMENTATION, register_fn=Activation)
