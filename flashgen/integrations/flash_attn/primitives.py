"""The functions below autograd that others take from flash_attn.flash_attn_interface: ring attention, context parallelism, xformers.

Forward and backward are apart there, and who calls them passes on what the one gives to the other: out, lse, and the state of the random
numbers, of which the first of two is the seed of the dropout here. Head dims are multiples of 8. The backward functions give no softmax_d,
which is a buffer between FlashAttention's kernels: None takes its place. What is asked of scores' tests (return_softmax) is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.compiler import is_compiling

from flashgen.codegen.errors import ArgumentError

from ...launch.asked import UNDRAWN, with_seed
from ...launch.keywords import modified_of_call
from ...launch.seeds import drawn_seed
from ...operators.gradients import attention_backward
from ...operators.packed import attention_varlen_forward
from ...operators.packed_gradients import attention_varlen_backward
from ...operators.registration import attention_forward
from .arguments import length_of, raise_as_theirs, refuse, softcap_of, window_of

_OF_BACKWARD = {"lse": "softmax_lse", "d_out": "dout"}  # our names of arguments to FlashAttention's
_REASONS = {
    "return_softmax": "flash_attn_func and flash_attn_varlen_func give it with return_attn_probs=True",
    "leftpad_k": "packed sequences have no padding",
    "block_table": "flash_attn_varlen_func takes it",
    "out": "flashgen makes out",
    "generator": "a seed comes from PyTorch's own generator of the device",
}


def _options(
    q: torch.Tensor,
    dropout_p: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    rng_state: torch.Tensor | None,
) -> tuple[bool, Any, torch.Tensor]:
    """Whether the mask is causal, what operators are told of modifiers, and the state of random numbers, int64 [2]."""
    window, cap = window_of((left, right), causal), softcap_of(softcap)
    with torch.no_grad():  # else the seed is drawn before it is known whether there is one
        is_causal, modified, given = modified_of_call(
            causal, window, cap, alibi_slopes, None, dropout_p=float(dropout_p), top_left=None, q=q, seed_waits=True
        )
    if not modified or given is None or UNDRAWN not in given.names:
        return is_causal, modified, q.new_empty(2, dtype=torch.int64)
    if rng_state is not None and (rng_state.dtype != torch.int64 or rng_state.shape != (2,)):
        found = f"{rng_state.dtype} of the shape {tuple(rng_state.shape)}"
        raise ArgumentError(f"rng_state must be what the forward function gave, torch.int64 of the shape (2,); got {found}")
    seed = drawn_seed(q.device) if rng_state is None else rng_state[0]
    return is_causal, (*modified[:3], with_seed(given, modified[3], seed)[1]), seed.reshape(1).expand(2)


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Out, lse, an empty tensor, the state of random numbers: see `flash_attn_func`."""
    refuse("_flash_attn_forward", _REASONS, return_softmax=return_softmax)
    try:
        is_causal, modified, state = _options(q, dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes, None)
        out, lse = attention_forward(q, k, v, is_causal, softmax_scale, "bshd", *modified)
    except Exception as error:
        if not is_compiling():
            raise_as_theirs(error, q=q, k=k, v=v)
        raise
    return out, lse, q.new_empty(0), state


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    rng_state: torch.Tensor | None = None,
) -> None:
    """Writes the gradients of a call to dq, dk and dv, as far as these are there."""
    _require_state(dropout_p, rng_state)
    try:
        is_causal, modified, _ = _options(q, dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes, rng_state)
        given = (q, k, v, out, softmax_lse, dout, None, is_causal, softmax_scale, "bshd", deterministic or None)
        found = attention_backward(*given, *modified)
    except Exception as error:
        if not is_compiling():
            raise_as_theirs(error, names=_OF_BACKWARD, q=q, k=k, v=v, out=out, lse=softmax_lse, d_out=dout)
        raise
    _write((dq, dk, dv), found)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of packed sequences. zero_tensors: tokens of no sequence have 0 in any case."""
    refuse("_flash_attn_varlen_forward", _REASONS, return_softmax=return_softmax, block_table=block_table, leftpad_k=leftpad_k)
    try:
        is_causal, modified, state = _options(q, dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes, None)
        of_tokens = (cu_seqlens_q, cu_seqlens_k, None, seqused_k, length_of(max_seqlen_q), length_of(max_seqlen_k))
        out, lse = attention_varlen_forward(q, k, v, *of_tokens, is_causal, softmax_scale, *modified)
    except Exception as error:
        if not is_compiling():
            raise_as_theirs(error, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        raise
    return out, lse, q.new_empty(0), state


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """The same of packed sequences."""
    _require_state(dropout_p, rng_state)
    try:
        is_causal, modified, _ = _options(q, dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes, rng_state)
        of_tokens = (cu_seqlens_q, cu_seqlens_k, None, None, length_of(max_seqlen_q), length_of(max_seqlen_k))
        given = (q, k, v, out, softmax_lse, dout, None, *of_tokens, is_causal, softmax_scale, deterministic or None)
        found = attention_varlen_backward(*given, *modified)
    except Exception as error:
        if not is_compiling():
            raise_as_theirs(error, names=_OF_BACKWARD, q=q, k=k, v=v, out=out, lse=softmax_lse, d_out=dout)
        raise
    _write((dq, dk, dv), found)


def _require_state(dropout_p: float, rng_state: torch.Tensor | None) -> None:
    """Raises ArgumentError for a dropout without the forward pass's state: gradients would be those of other elements."""
    if dropout_p and rng_state is None:
        raise ArgumentError(f"rng_state must be what the forward function gave, where dropout_p is {dropout_p}; got None")


def _write(into: tuple[torch.Tensor | None, ...], found: tuple[torch.Tensor, ...]) -> None:
    for name, tensor, gradient in zip(("dq", "dk", "dv"), into, found, strict=True):
        if tensor is not None:
            if tensor.shape != gradient.shape:  # else the gradient would be broadcast
                raise ArgumentError(f"{name} must have the shape {tuple(gradient.shape)}; got {tuple(tensor.shape)}")
            tensor.copy_(gradient)


# What stands in flash_attn_interface for FlashAttention's compiled module, all by position.
def _fwd(q: Any, k: Any, v: Any, out: Any, alibi_slopes: Any, *options: Any) -> Any:
    *usual, return_softmax, generator = options  # dropout_p, softmax_scale, causal, both ends of the window, softcap
    refuse("flash_attn_gpu.fwd", _REASONS, out=out, generator=generator)
    arguments: list[Any] = [q, k, v, *usual, alibi_slopes, return_softmax]
    return _flash_attn_forward(*arguments)


def _bwd(*given: Any) -> Any:
    gradients, alibi_slopes, (*usual, softcap, deterministic, generator, state) = given[6:9], given[9], given[10:]
    refuse("flash_attn_gpu.bwd", _REASONS, generator=generator)
    arguments: list[Any] = [*given[:9], *usual, softcap, alibi_slopes, deterministic, state]
    _flash_attn_backward(*arguments)
    return *gradients, None


def _varlen_fwd(q: Any, k: Any, v: Any, out: Any, *given: Any) -> Any:
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, *lengths = given[:8]
    dropout_p, softmax_scale, _, causal, left, right, softcap, return_softmax, generator = given[8:]
    refuse("flash_attn_gpu.varlen_fwd", _REASONS, out=out, generator=generator)
    usual = (dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax)
    arguments: list[Any] = [q, k, v, cu_seqlens_q, cu_seqlens_k, *lengths, *usual, block_table, leftpad_k, seqused_k]
    return _flash_attn_varlen_forward(*arguments)


def _varlen_bwd(*given: Any) -> Any:
    gradients, (cu_seqlens_q, cu_seqlens_k, alibi_slopes, *lengths) = given[6:9], given[9:14]
    dropout_p, softmax_scale, _, causal, left, right, softcap, deterministic, generator, state = given[14:]
    refuse("flash_attn_gpu.varlen_bwd", _REASONS, generator=generator)
    usual = (dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, deterministic, state)
    arguments: list[Any] = [*given[:9], cu_seqlens_q, cu_seqlens_k, *lengths, *usual]
    _flash_attn_varlen_backward(*arguments)
    return *gradients, None


flash_attn_gpu = SimpleNamespace(fwd=_fwd, bwd=_bwd, varlen_fwd=_varlen_fwd, varlen_bwd=_varlen_bwd)
