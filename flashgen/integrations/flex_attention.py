"""FlexAttention's interface: what people import from torch.nn.attention.flex_attention, by flashgen's kernels.

    from flashgen.integrations.flex_attention import create_block_mask, flex_attention

What belongs here: names, layouts and returned values of PyTorch's module, as releases 2.11 to 2.13 have them. What becomes of functions
and block masks is in flashgen/launch/traced_call.py and block_masks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import is_
from typing import Any

import torch
from torch.compiler import allow_in_graph, is_compiling
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    FlexKernelOptions,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.nn.functional import pad

from flashgen.codegen.errors import ArgumentError, shown

from ..api import attention
from ..launch.made_block_masks import ALL, PART, block_mask
from ..launch.made_block_masks import BlockMask as MadeBlockMask
from .renaming import by_other_names

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

_attention: Callable[..., Any] = attention  # whose overloads know no bool that is not known
_NAMES = {"q": "query", "k": "key", "v": "value"}
_NAMES_OF_MASK = {"batch": "B", "heads": "H", "len_q": "Q_LEN", "len_kv": "KV_LEN", "block_size": "BLOCK_SIZE"}
_ALIGNED = 8  # elements, 16 bytes, to which rows are aligned
_OF_TRITON = {"num_warps", "num_stages", *FlexKernelOptions.__annotations__}


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | MadeBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """PyTorch's flex_attention, which needs no torch.compile here, and takes it.

    query: [batch, heads_q, len_q, head_dim], bf16 or fp16; key: [batch or 1, heads_kv, len_kv, head_dim]; value: as key, with head_dim_v.
       Sizes as `flashgen.attention` has them for layout "bhsd". Any strides: what kernels cannot read, as rows that are not aligned to
       16 bytes, is copied. Where tensors begin torch.compile sees when it traces: a graph made for aligned tensors refuses others by name
    score_mod, block_mask, scale: as `flashgen.attention` has them
    enable_gqa: whether heads_q may be a multiple of heads_kv
    return_lse: also return the natural log-sum-exp of scores, fp32 [batch, heads_q, len_q]
    kernel_options: options of PyTorch's own kernels, which change no result: their names are checked, and that is all
    return_aux: what to return beside out, as an AuxOutput. flashgen has no max_scores.
    Returns out [batch, heads_q, len_q, head_dim_v], dense, with heads and queries in memory as query has them.

    Raises ArgumentError, which is a ValueError, and what `flashgen.attention` raises.
    """
    if kernel_options is not None:
        _check_options(kernel_options)
    if return_aux is not None:
        if not isinstance(return_aux, AuxRequest):
            raise ArgumentError(f"return_aux must be an AuxRequest or None; got {shown(return_aux)}")
        if return_lse:
            raise ArgumentError("return_lse must be False beside return_aux, which has lse=True; got True")
        if return_aux.max_scores:
            raise ArgumentError("return_aux must not ask for max_scores, which flashgen's kernels do not keep; got max_scores=True")
    wants_lse = return_lse if return_aux is None else return_aux.lse
    given, is_shared = (query, key, value), False  # whether keys and values of one entry are those of all
    if isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and query.ndim == key.ndim == 4 and not query.is_nested:
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ArgumentError(f"key must have query's {query.shape[1]} heads, or enable_gqa must be True; got {key.shape[1]} heads")
        is_shared = key.shape[0] == 1 != query.shape[0]
    options = {"scale": scale, "layout": "bhsd", "return_lse": wants_lse, "score_mod": score_mod, "block_mask": block_mask}
    if is_compiling():  # a graph has one way for all calls, and a tracer knows errors by their class
        copies = [_readable(tensor) if isinstance(tensor, torch.Tensor) else tensor for tensor in given]
        found = _attention(*(_with_all_entries(*copies) if is_shared else copies), **options)
    else:
        try:
            found = _attention(*(_with_all_entries(*given) if is_shared else given), **options)
        except ArgumentError as error:
            found = _of_copies(given, is_shared, options, error)
    out, lse = found if wants_lse else (found, None)
    if return_aux is not None:
        return out, AuxOutput(lse=lse, max_scores=None)
    return (out, lse) if return_lse else out


def _with_all_entries(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Keys and values of one entry as those of all entries, as views."""
    return query, key.expand(query.shape[0], -1, -1, -1), value.expand(query.shape[0], -1, -1, -1)


def _of_copies(given: tuple[Any, Any, Any], is_shared: bool, options: dict[str, Any], error: ArgumentError) -> Any:
    """The call that an error has refused, of copies of what kernels cannot read. Raises the error where that is nothing."""
    copies = [_readable(tensor) if isinstance(tensor, torch.Tensor) else tensor for tensor in given]
    if all(map(is_, copies, given)):
        raise by_other_names(error, _NAMES) from error
    try:
        return _attention(*(_with_all_entries(*copies) if is_shared else copies), **options)
    except ArgumentError as another:
        raise by_other_names(another, _NAMES) from another


@allow_in_graph  # type: ignore[untyped-decorator]  # Dynamo cannot trace where a tensor begins: what traces its graph sees it
def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where kernels cannot read its rows, in which heads and rows lie in the same order. Others stay as they are."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.ndim != 4:
        return tensor
    *strides, last = tensor.stride()
    *sizes, _ = tensor.shape
    apart = last != 1 or any(stride % _ALIGNED and size > 1 for stride, size in zip(strides, sizes, strict=True))
    if not apart and not _begins_unaligned(tensor):
        return tensor
    rows_first = strides[1] < strides[2]
    dense = tensor.transpose(1, 2) if rows_first else tensor
    # Inductor takes away a copy that has the strides of what it copies, wherever that begins: there rows are farther apart.
    copy = dense.clone(memory_format=torch.contiguous_format) if apart else pad(dense, (0, _ALIGNED))[..., : tensor.shape[3]]
    return copy.transpose(1, 2) if rows_first else copy


def _begins_unaligned(tensor: torch.Tensor) -> bool:
    """Of a tensor that is traced: as far as its place in its storage tells."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        with suppress(RuntimeError):  # transforms of torch.func have tensors without memory
            return tensor.data_ptr() % (2 * _ALIGNED) != 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # SymPy: whoever traces has it already

    return guard_or_false(tensor.storage_offset() % _ALIGNED != 0)


def _check_options(options: Any) -> None:
    if not isinstance(options, dict):
        raise ArgumentError(f"kernel_options must be a dict; got {shown(options)}")
    for name in options:
        if str(name).removeprefix("fwd_").removeprefix("bwd_") not in _OF_TRITON:
            raise ArgumentError(f"kernel_options must be FlexAttention's, which are {', '.join(sorted(_OF_TRITON))}; got {shown(name)}")


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: str | torch.device | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """PyTorch's create_block_mask: the same BlockMask, made by one kernel that looks at no more than it must.

    mask_mod: a function (batch, head, query, key), as `flashgen.block_mask` takes it
    B, H: entries of the batch and query heads; None: the mask of the first is that of all
    Q_LEN, KV_LEN: queries and keys
    device: where; None for the current CUDA device
    BLOCK_SIZE: queries and keys of a block, or one number for both, multiples of 16 up to 32768
    _compile: there is nothing to compile; both values are right
    separate_full_blocks: whether blocks that are seen whole are listed apart; else mask_mod is asked in these, too
    compute_dq_write_order, dq_kv_order: for gradients of one of PyTorch's own kernels: they must be what they are by default

    PyTorch's own function makes a bool for each query and key, B * H * Q_LEN * KV_LEN bytes; this one a byte for each block. Raises as
    `flashgen.block_mask` does.
    """
    if compute_dq_write_order is not False or dq_kv_order is not True:
        name, given = (
            ("dq_kv_order", dq_kv_order) if compute_dq_write_order is False else ("compute_dq_write_order", compute_dq_write_order)
        )
        raise ArgumentError(
            f"{name} must be left out: it is for a kernel of PyTorch's, and create_block_mask of torch has it; got {shown(given)}"
        )
    of_batch, of_heads = 1 if B is None else B, 1 if H is None else H
    where = "cuda" if device is None else device
    try:
        made = block_mask(mask_mod, batch=of_batch, heads=of_heads, len_q=Q_LEN, len_kv=KV_LEN, device=where, block_size=BLOCK_SIZE)
    except ArgumentError as error:
        raise by_other_names(error, _NAMES_OF_MASK) from error
    states, (of_q, of_kv) = made.states, made.block_size
    if not separate_full_blocks:
        states = states.clamp(max=PART)
    else:  # PyTorch's are full only where a block ends with the queries and keys, or before
        for axis, whole in ((2, Q_LEN // of_q), (3, KV_LEN // of_kv)):
            states.narrow(axis, whole, states.shape[axis] - whole).clamp_(max=PART)
    states = states.expand(of_batch, of_heads, -1, -1)
    listed = (*_listed(states == PART), *(_listed(states == ALL) if separate_full_blocks else (None, None)))
    options: Any = {"BLOCK_SIZE": (of_q, of_kv), "mask_mod": mask_mod, "seq_lengths": (Q_LEN, KV_LEN)}
    return BlockMask.from_kv_blocks(*listed, **options)


def _listed(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row: how many blocks are wanted, and which, these first, and each part in rising order."""
    return wanted.sum(-1, dtype=torch.int32), wanted.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
