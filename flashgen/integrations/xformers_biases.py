"""What xformers' biases are in flashgen's calls: dense ones, packed sequences and caches.

A class is looked up by itself, never by what it derives from: one that is not known here may mean anything, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add, gt
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from xformers.ops.fmha import attn_bias as biases

from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.modifier import NO_MODIFIERS

from ..api import attention
from ..kvcache import attention_with_kvcache
from ..launch.keywords import modified_of_call
from ..operators.cached_plans import LEFTPAD, TABLE, CachedOptions, cached_run_at_hand
from ..varlen import attention_varlen


class Asked(NamedTuple):
    """A call with query, key and value of [batch, length, heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: Any
    p: float
    scale: float | None
    return_lse: bool

    @property
    def wants_gradients(self) -> bool:
        """Of tensors: no class with blocks has one of biases."""
        return torch.is_grad_enabled() and (self.q.requires_grad or self.k.requires_grad or self.v.requires_grad)


Options = dict[str, Any]  # keywords of flashgen's calls
Route = Callable[[Asked, Options], tuple[Any, Any]]  # -> out [batch, len_q, heads, head_dim_v] and, if wanted, lse [batch, heads, len_q]
_attention: Callable[..., Any] = attention  # whose overloads know no bool that is not known
_with_kvcache: Callable[..., Any] = attention_with_kvcache


def route_of(bias: Any, query: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[Route, Options]:
    """Which call a bias makes of one with this query, and its keywords. Raises ArgumentError for unknown biases.

    query: as it was given; q, k: with heads, and without groups
    """
    kind = type(bias)
    if kind is NoneType:  # each call asks: what most calls are comes first
        return _dense, {}
    if kind is biases.LowerTriangularMask:
        return _dense, {"causal": _top_left(q, k)}
    known = _ROUTES.get(kind)
    if known is None:
        if isinstance(bias, torch.Tensor):
            return _dense, {"bias": _by_heads(bias, query)}
        if kind is biases.LowerTriangularMaskWithTensorBias:
            return _dense, {"causal": _top_left(q, k), "bias": _by_heads(bias._bias, query)}
        names = ", ".join(sorted(known.__name__ for known in _ROUTES))
        wanted = f"None, a tensor, LowerTriangularMask, LowerTriangularMaskWithTensorBias or one of {names}"
        raise ArgumentError(f"attn_bias must be {wanted}, of which no class may derive; got {shown(bias)}")
    route, options = known
    if route is not _dense:
        _require_room(bias, q, k)
    return route, options(bias)


def _require_room(bias: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises ArgumentError for blocks that query or key have no room for."""
    (batch_q, len_q, _, _), (batch_kv, len_kv, _, _) = q.shape, k.shape
    if not batch_q == batch_kv == 1:
        blocks = f"{type(bias).__name__}, whose blocks are sequences"
        raise ArgumentError(f"query and key must have a batch of 1 beside {blocks}; got {batch_q} and {batch_kv}")
    last_q, last_kv = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
    if last_q > len_q:
        raise ArgumentError(f"attn_bias must have blocks within query's {len_q} tokens; got {last_q}")
    if last_kv > len_kv and not hasattr(bias, "block_tables"):
        raise ArgumentError(f"attn_bias must have blocks within key's {len_kv} tokens; got {last_kv}")


def _top_left(q: torch.Tensor, k: torch.Tensor) -> bool | str:
    return True if q.shape[1] == k.shape[1] else "top_left"


def _by_heads(bias: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[batch, heads, len_q, len_kv]. In groups, one that is the same for all groups or for all heads, but not for both, is copied."""
    rank = query.ndim
    if bias.ndim != rank or bias.dtype not in (torch.float32, query.dtype):
        wanted = f"query's {rank} dimensions, and torch.float32 or query's {query.dtype} to be added to scores"
        raise ArgumentError(f"attn_bias must have {wanted}; got {bias.dtype} of {tuple(bias.shape)}")
    if rank < 5:
        return bias if rank == 4 else bias.unsqueeze(1)
    own, groups = bias.shape[1:3], query.shape[2:4]
    if own[0] not in (1, groups[0]) or own[1] not in (1, groups[1]):
        raise ArgumentError(f"attn_bias must have query's groups and heads {tuple(groups)}, or 1 of either; got {tuple(own)}")
    return (bias if own.numel() == 1 else bias.expand(-1, *groups, -1, -1)).flatten(1, 2)


def _dense(asked: Asked, options: Options) -> tuple[Any, Any]:
    q, k, v, _, p, scale, return_lse = asked
    found = _attention(q, k, v, dropout_p=p, scale=scale, return_lse=return_lse, **options)
    return found if return_lse else (found, None)


def _packed(asked: Asked, options: Options, used: torch.Tensor | None = None) -> tuple[Any, Any]:
    """Blocks are sequences; `used`: how many keys of each."""
    q, k, v, bias, p, scale, return_lse = asked
    of_q, of_kv = bias.q_seqinfo, bias.k_seqinfo
    found = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=of_q.seqstart,
        cu_seqlens_kv=of_kv.seqstart,
        max_seqlen_q=of_q.max_seqlen,
        max_seqlen_kv=of_kv.max_seqlen,
        seqused_kv=used,
        dropout_p=p,
        scale=scale,
        return_lse=return_lse,
        **options,
    )
    return found if return_lse else (found, None)


def _padded(asked: Asked, options: Options) -> tuple[Any, Any]:
    """Each sequence has room for as many keys: a cache, where nobody wants gradients and all sequences have as many queries."""
    _, k, v, bias, p, _, _ = asked
    of_kv = bias.k_seqinfo
    if p or not _is_even(asked) or asked.wants_gradients:
        return _packed(asked, options, of_kv.seqlen)
    batch, padding = len(of_kv.seqlen_py), of_kv.padding
    if k.shape[1] == v.shape[1] == batch * padding:
        found = _in_parts(asked, options, padding, 0, of_kv.seqlen)
        if found is not None:
            return found
    return _cached(asked, options, True, _divided(k, batch, padding), _divided(v, batch, padding), cache_seqlens=of_kv.seqlen)


def _gappy(asked: Asked, options: Options) -> tuple[Any, Any]:
    """Sequences have their keys anywhere: all of them share a cache, and begin behind what is padding to them."""
    of_kv, is_even = asked.bias.k_seqinfo, _is_even(asked)
    if asked.p or not is_even or asked.wants_gradients:
        starts = of_kv.seqstart_py
        if not any(map(gt, map(add, starts, of_kv.seqlen_py), starts[1:])):
            return _packed(asked, options, of_kv.seqlen)
        _require_cache(asked, "whose keys overlap")
    firsts, batch = of_kv.seqstart[:-1], len(of_kv.seqlen_py)
    k, v = asked.k.expand(batch, -1, -1, -1), asked.v.expand(batch, -1, -1, -1)
    return _cached(asked, options, is_even, k, v, cache_seqlens=firsts + of_kv.seqlen, cache_leftpad=firsts)


def _paged(asked: Asked, options: Options) -> tuple[Any, Any]:
    _require_cache(asked, "whose keys are in pages")
    bias = asked.bias
    where = {"cache_seqlens": bias.k_seqinfo.seqlen, "block_table": bias.block_tables}
    there, is_even, size = TABLE, _is_even(asked), bias.page_size
    if isinstance(bias, biases.PagedBlockDiagonalGappyKeysMask):
        where["cache_leftpad"] = bias.k_seqinfo.seqstart[:-1]
        there |= LEFTPAD
    if is_even:
        found = _in_parts(asked, options, size, there, *where.values())
        if found is not None:
            return found
    return _cached(asked, options, is_even, _divided(asked.k, -1, size), _divided(asked.v, -1, size), **where)


def _in_parts(asked: Asked, options: Options, of_kv: int, there: int, *where: torch.Tensor) -> tuple[Any, Any] | None:
    """The call past the dispatcher, without a view of each tensor; None if it is not to go there.

    One query each alone goes there: plans of parts are kept by their lengths, so that prompts of many lengths would be planned in full.
    of_kv: keys of a sequence, or of a page; there: bits of what is there beside lengths, both `where`: see `cached_run_at_hand`
    """
    q, k, v, bias, _, scale, return_lse = asked
    if is_dynamo_compiling() or bias.q_seqinfo.max_seqlen != 1 or not of_kv:
        return None
    given: Any = NO_MODIFIERS
    causal, tensors = options.get("causal", False), [q, k, v, *where]
    if "window" in options:
        causal, _, given = modified_of_call(causal, options["window"], None, None, None, top_left=None)
    run = cached_run_at_hand(tensors, CachedOptions(there, causal, scale, given, parts=(1, of_kv)))
    if run is None:
        return None
    out, lse = run(return_lse, *tensors)
    return out, lse if lse is None else _in_a_row(lse)


def _in_a_row(lse: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens] of [batch, heads, len_q]."""
    return lse.transpose(0, 1).flatten(1).unsqueeze(0)


def _divided(tensor: torch.Tensor, parts: int, size: int) -> torch.Tensor:
    """[parts, size, heads, head_dim] of [1, tokens, heads, head_dim]. Raises ArgumentError for other tokens."""
    try:
        shape = tensor.shape
        return tensor.view(parts, size, shape[2], shape[3])
    except RuntimeError as error:
        whole = f"pages of {size}" if parts < 0 else f"{parts} times its padding of {size}"
        raise ArgumentError(f"key and value must have as many tokens as attn_bias says, {whole}; got {tensor.shape[1]}") from error


def _require_cache(asked: Asked, why: str) -> None:
    """Raises ArgumentError for a call that a cache cannot compute."""
    name = type(asked.bias).__name__
    if asked.p:
        raise ArgumentError(f"p must be 0 beside {name}, {why}: caches are for inference; got {asked.p}")
    if asked.wants_gradients:
        raise ArgumentError(f"attn_bias must not be a {name}, {why}, where gradients are asked for: torch.no_grad() asks for none")


def _is_even(asked: Asked) -> bool:
    """Whether all sequences have as many queries."""
    of_q = asked.bias.q_seqinfo
    longest = of_q.max_seqlen
    return bool(of_q.min_seqlen == longest and longest * (len(of_q.seqstart_py) - 1) == asked.q.shape[1])


def _cached(asked: Asked, options: Options, is_even: bool, k: torch.Tensor, v: torch.Tensor, **where: torch.Tensor) -> tuple[Any, Any]:
    """Of keys in a cache. Sequences with fewer queries than the longest get others before them, whose results nobody takes."""
    q, _, _, bias, _, scale, return_lse = asked
    of_q = bias.q_seqinfo
    longest = of_q.max_seqlen
    if is_even:
        q = _divided(q, len(of_q.seqstart_py) - 1, longest)
    else:
        ends = of_q.seqstart[1:]
        q = q[0, (ends[:, None] + torch.arange(-longest, 0, device=q.device)).clamp_(min=0)]
    found = _with_kvcache(q, k, v, scale=scale, return_lse=return_lse, **where, **options)
    out, lse = found if return_lse else (found, None)
    if is_even:
        out = _divided(out, 1, asked.q.shape[1])
        return out, lse if lse is None else _in_a_row(lse)
    token = torch.arange(asked.q.shape[1], device=q.device)
    sequence = torch.searchsorted(ends, token, right=True).clamp_(max=ends.shape[0] - 1)
    row = (token - ends[sequence] + longest).clamp_(max=longest - 1)
    return out[sequence, row].unsqueeze(0), lse if lse is None else lse[sequence, :, row].T.unsqueeze(0)


def _all(bias: Any) -> Options:
    return {}


def _causal(bias: Any) -> Options:
    return {"causal": True}


def _within(bias: Any) -> Options:
    return {"window": (bias.window_left, bias.window_right)}


def _last(bias: Any) -> Options:
    return {"window": (bias._window_size - 1, 0)}


def _at_or_before(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def _causal_top_left(bias: Any) -> Options:
    """Queries and keys have the same boundaries if these are one object; lengths in memory may change in a graph's replays."""
    return {"causal": True} if bias.q_seqinfo is bias.k_seqinfo else {"mask_mod": _at_or_before}


def _last_top_left(bias: Any) -> Options:
    size = bias._window_size
    if bias.q_seqinfo is bias.k_seqinfo:
        return {"window": (size - 1, 0)}
    return {"mask_mod": lambda batch, head, query, key: (query >= key) & (query - key < size)}


_ROUTES: dict[type, tuple[Route, Callable[[Any], Options]]] = {
    biases.LowerTriangularFromBottomRightMask: (_dense, _causal),
    biases.LowerTriangularFromBottomRightLocalAttentionMask: (_dense, _last),
    biases.LocalAttentionFromBottomRightMask: (_dense, _within),
    biases.BlockDiagonalMask: (_packed, _all),
    biases.BlockDiagonalCausalMask: (_packed, _causal_top_left),
    biases.BlockDiagonalCausalFromBottomRightMask: (_packed, _causal),
    biases.BlockDiagonalCausalLocalAttentionMask: (_packed, _last_top_left),
    biases.BlockDiagonalCausalLocalAttentionFromBottomRightMask: (_packed, _last),
    biases.BlockDiagonalPaddedKeysMask: (_padded, _all),
    biases.BlockDiagonalCausalWithOffsetPaddedKeysMask: (_padded, _causal),
    biases.BlockDiagonalLocalAttentionPaddedKeysMask: (_padded, _within),
    biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask: (_padded, _last),
    biases.BlockDiagonalGappyKeysMask: (_gappy, _all),
    biases.BlockDiagonalCausalWithOffsetGappyKeysMask: (_gappy, _causal),
    biases.PagedBlockDiagonalPaddedKeysMask: (_paged, _all),
    biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask: (_paged, _causal),
    biases.PagedBlockDiagonalGappyKeysMask: (_paged, _all),
    biases.PagedBlockDiagonalCausalWithOffsetGappyKeysMask: (_paged, _causal),
}
