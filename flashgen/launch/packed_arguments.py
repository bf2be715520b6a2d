"""What the arguments of a call of packed sequences must be: the checks for tensors on a GPU, on the CPU, fake and empty ones.

What boundaries are is only on the device. Kernels clamp them, so that wrong ones reach nothing outside of the tensors; whoever wants to be
told of them sets FLASHGEN_CHECK_SEQUENCES=1, which makes each call wait for the device.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Any, NamedTuple

import torch

from flashgen.codegen.attention import require_scale
from flashgen.codegen.errors import ArgumentError, require_int, shown
from flashgen.codegen.modifier import NO_MODIFIERS, Given, modifier_named
from flashgen.codegen.problem import Problem, Sequences
from flashgen.codegen.typed import require_type
from flashgen.codegen.workload import Workload

from .arguments import DTYPES, TracedArgumentError, check_options, check_strides, problem_of, require_dense, require_initialized
from .asked import check_tensors, tensor_names

logger = logging.getLogger("flashgen")

MOST_TOKENS = 2**31 - 1
CHECK = "FLASHGEN_CHECK_SEQUENCES"
values_are_checked = os.environ.get(CHECK) == "1"  # each call asks
_INTEGERS = (int, NoneType, torch.SymInt)


class PackedTokens(NamedTuple):
    """Where sequences begin and end, and how long they are expected to be: what a call says of them beside q, k and v."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    seqused_q: torch.Tensor | None = None
    seqused_kv: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that are there, in the order of their operands."""
        return tuple([tensor for tensor in self[:4] if tensor is not None])


def check_packed_types(
    q: Any, k: Any, v: Any, tokens: PackedTokens, causal: Any, scale: Any, return_lse: Any, deterministic: Any = None
) -> None:
    """Raises ArgumentError unless these have the types that `attention_varlen` takes, and tensors lie in memory by strides.

    torch.compile traces this.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v), *zip(PackedTokens._fields[:2], tokens[:2], strict=True)):
        if not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor)
    for name, tensor in zip(PackedTokens._fields[2:4], tokens[2:4], strict=True):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor | None)
    for name, length in zip(PackedTokens._fields[4:], tokens[4:], strict=True):
        if not isinstance(length, _INTEGERS) or isinstance(length, bool):
            require_type(name, length, int | None)
        if type(length) is int and not 0 <= length <= MOST_TOKENS:  # the operators take 64 bits
            require_int(name, length, 0, MOST_TOKENS)
    require_plain_causal(causal)
    check_options(causal, scale, "bshd", return_lse, deterministic)
    for name, tensor in (("q", q), ("k", k), ("v", v), *zip(PackedTokens._fields[:4], tokens[:4], strict=True)):
        if tensor is not None:
            require_initialized(name, tensor)
            require_dense(name, tensor)


def require_plain_causal(causal: Any) -> None:
    """Raises ArgumentError for a causal mask that is aligned in another way than others: by lengths, which only the device knows."""
    if isinstance(causal, str):
        raise ArgumentError(f"causal must be True or False for packed sequences, of which no mask is aligned top-left; got {shown(causal)}")


def lengths_of_scores(max_seqlen_q: Any, max_seqlen_kv: Any, bias: Any, mask: Any) -> tuple[Any, Any]:
    """The expected lengths of a call with tensors of which each score has an element: how many queries and keys these have.

    Where both have 1, which is for all, the given ones. Raises ArgumentError. torch.compile traces this.
    """
    found = [max_seqlen_q, max_seqlen_kv]
    for dim, side in ((-2, "query"), (-1, "key")):
        sizes = {}
        for name, tensor in (("bias", bias), ("mask", mask)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim >= -dim and tensor.shape[dim] != 1:
                if tensor.shape[dim] == 0:
                    raise ArgumentError(f"{name} must have elements of at least one {side}; got the shape {tuple(tensor.shape)}")
                sizes[name] = tensor.shape[dim]
        if len(sizes) == 2 and sizes["bias"] != sizes["mask"]:
            raise ArgumentError(f"mask must have bias's elements of each {side}, {sizes['bias']}, or one; got {sizes['mask']}")
        for size in sizes.values():
            found[dim] = size
    return found[0], found[1]


def narrowed(name: str, tensor: Any) -> Any:
    """A bias or a mask with one element of each axis of queries or keys along which it is expanded: an axis of one has no end.

    Raises ArgumentError for one that has no axes yet, or no strides.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    require_initialized(name, tensor)
    require_dense(name, tensor)
    for dim in (-2, -1):
        if tensor.ndim >= -dim and tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def without_batch(q: Any, k: Any, v: Any) -> tuple[tuple[Any, Any, Any], bool]:
    """Tensors as [tokens, heads, head_dim], and whether they have been views of these with a batch of 1 in front.

    Any others are as they were: checks will speak of them. torch.compile traces this.
    """
    if q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0] == 1:
        return (q[0], k[0], v[0]), True
    return (q, k, v), False


def check_packed_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tokens: PackedTokens,
    causal: bool,
    scale: float | None,
    modifiers: Given = NO_MODIFIERS,
    tensors: Sequence[torch.Tensor] = (),
) -> Problem:
    """The call's problem. Raises ArgumentError unless a kernel for some GPU could take it. Works on fake tensors."""
    _check_tokens(q, k, v)
    _check_boundaries(q, tokens)
    if scale is not None:
        require_scale(scale)
    problem = problem_of(q, v, causal, modifiers=modifiers, sequences=Sequences.PACKED)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_strides(name, tensor)
    if tensors:
        len_q, len_kv = expected_lengths(q, k, tokens, modifiers)
        known = {"batch": tokens.cu_seqlens_q.shape[0] - 1, "heads_q": q.shape[1], "heads_kv": k.shape[1], "len_q": len_q, "len_kv": len_kv}
        check_tensors(problem, {**known, "tokens_q": q.shape[0], "tokens_kv": k.shape[0]}, q, tensors)
    return problem


def check_packed_traced(*arguments: Any) -> None:
    """As `check_packed_call`, for calls that PyTorch may be tracing: raises TracedArgumentError."""
    try:
        check_packed_call(*arguments)
    except ArgumentError as error:
        raise TracedArgumentError(str(error)) from error


def _check_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Ranks, dtypes, devices and sizes of q, k and v go together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_dense(name, tensor)
        if tensor.ndim != 3:
            more = "; with a batch of 1 in front, all of q, k and v must have it" if tensor.ndim == 4 else ""
            raise ArgumentError(f"{name} must have 3 dimensions (tokens, heads, head_dim); got {tensor.ndim}{more}")
        if tensor.dtype not in DTYPES:
            raise ArgumentError(f"{name} must be torch.bfloat16 or torch.float16; got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise ArgumentError(f"{name} must have q's dtype {q.dtype}; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(f"{name} must be on q's device {q.device}; got {tensor.device}")
        if tensor.shape[0] > MOST_TOKENS:
            raise ArgumentError(f"{name} must have at most {MOST_TOKENS} tokens; got {tensor.shape[0]}")
    if k.shape[2] != q.shape[2]:
        raise ArgumentError(f"k must have q's head_dim {q.shape[2]}; got {k.shape[2]}")
    if v.shape[0] != k.shape[0]:
        raise ArgumentError(f"v must have k's tokens {k.shape[0]}; got {v.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise ArgumentError(f"v must have k's number of heads {k.shape[1]}; got {v.shape[1]}")
    if q.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise ArgumentError(f"q must have a number of heads that is a multiple of k's {k.shape[1]}; got {q.shape[1]}")


def _check_boundaries(q: torch.Tensor, tokens: PackedTokens) -> None:
    """Ranks, dtypes, devices and sizes of what says where sequences are; the values are on the device."""
    for name, tensor in zip(PackedTokens._fields[:4], tokens[:4], strict=True):
        if tensor is None:
            continue
        require_dense(name, tensor)
        if tensor.ndim != 1:
            raise ArgumentError(f"{name} must have 1 dimension; got {tensor.ndim}")
        if tensor.dtype != torch.int32:
            raise ArgumentError(f"{name} must be torch.int32; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(f"{name} must be on q's device {q.device}; got {tensor.device}")
        if tensor.shape[0] > 1 and tensor.stride(0) != 1:
            raise ArgumentError(f"{name} must be contiguous; got stride {tensor.stride(0)}")
    entries = tokens.cu_seqlens_q.shape[0]
    if entries < 1:
        raise ArgumentError("cu_seqlens_q must have an entry more than there are sequences; got none")
    if tokens.cu_seqlens_kv.shape[0] != entries:
        raise ArgumentError(f"cu_seqlens_kv must have as many entries as cu_seqlens_q, {entries}; got {tokens.cu_seqlens_kv.shape[0]}")
    for name, used in zip(PackedTokens._fields[2:4], tokens[2:4], strict=True):
        if used is not None and used.shape[0] != entries - 1:
            raise ArgumentError(f"{name} must have an entry for each of {entries - 1} sequences; got {used.shape[0]}")
    for name, length in zip(PackedTokens._fields[4:], tokens[4:], strict=True):
        if length is not None and not 0 <= length <= MOST_TOKENS:
            require_int(name, int(length), 0, MOST_TOKENS)


def expected_lengths(q: torch.Tensor, k: torch.Tensor, tokens: PackedTokens, modifiers: Given = NO_MODIFIERS) -> tuple[int, int]:
    """Of the longest sequences: what the call expects, or else all tokens. No sequence has more than these.

    With tensors of which each score has an element, lengths are what these have: see `lengths_of_scores`.
    """
    if modifiers.names and any(modifier_named(name).packed_parameters for name in modifiers.names):
        return q.shape[0] if tokens[4] is None else tokens[4], k.shape[0] if tokens[5] is None else tokens[5]
    found = [length if most is None or most > length else most for length, most in ((q.shape[0], tokens[4]), (k.shape[0], tokens[5]))]
    return found[0], found[1]


def packed_workload(q: torch.Tensor, k: torch.Tensor, tokens: PackedTokens, modifiers: Given = NO_MODIFIERS) -> Workload:
    """The sizes of a call that has passed `check_packed_call`."""
    (tokens_q, heads_q, _), (tokens_kv, heads_kv, _), sizes = q.shape, k.shape, dict(modifiers.sizes)
    batch, lengths = tokens.cu_seqlens_q.shape[0] - 1, expected_lengths(q, k, tokens, modifiers)
    return Workload(batch, heads_q, heads_kv, *lengths, **sizes, tokens_q=tokens_q, tokens_kv=tokens_kv)


def require_right_values(
    q: torch.Tensor, k: torch.Tensor, tokens: PackedTokens, modifiers: Given = NO_MODIFIERS, tensors: Sequence[torch.Tensor] = ()
) -> None:
    """Raises ArgumentError for the first boundary, or used length, that is wrong. Waits for the device.

    So it does for a sequence that is longer than a tensor of which each score has an element. While a CUDA graph is being captured it
    cannot, and says so once.
    """
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return tell_of_capture()
    of_scores = _tensors_of_scores(modifiers, tensors)
    for dim, side, most in ((-2, "q", q.shape[0]), (-1, "kv", k.shape[0])):
        name, used = f"cu_seqlens_{side}", getattr(tokens, f"seqused_{side}")
        ends = getattr(tokens, name).tolist()
        for i, end in enumerate(ends):
            if not 0 <= end <= most:
                raise ArgumentError(f"{name} must be from 0 to the number of tokens, {most}; got {end} in entry {i}")
        for i, (begin, end) in enumerate(pairwise(ends)):
            if end < begin:
                raise ArgumentError(f"{name} must not fall; got {begin} in entry {i} and {end} in entry {i + 1}")
        for i, count in enumerate([] if used is None else used.tolist()):
            if not 0 <= count <= ends[i + 1] - ends[i]:
                raise ArgumentError(f"seqused_{side} must be from 0 to the length {ends[i + 1] - ends[i]} of sequence {i}; got {count}")
        lengths = [end - begin for begin, end in pairwise(ends)] if used is None else used.tolist()
        for name, tensor in of_scores.items():
            there = tensor.shape[dim] if tensor.ndim >= -dim else 1
            for i, length in enumerate(lengths):
                if there != 1 and length > there:
                    raise ArgumentError(f"{name} must have elements of all {length} tokens of sequence {i} along len_{side}; got {there}")


def _tensors_of_scores(modifiers: Given, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of which each score has an element, by name."""
    reading = [modifier_named(name).packed_parameters for name in modifiers.names for _ in modifier_named(name).tensors]
    return {name: tensor for name, tensor, reads in zip(tensor_names(modifiers.names), tensors, reading, strict=True) if reads}


@cache
def tell_of_capture() -> None:
    """Says, once, that values are not looked at."""
    logger.warning("%s: nothing is checked while a CUDA graph is being captured", CHECK)
