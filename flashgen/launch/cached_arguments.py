"""What the arguments of a call on a KV cache must be: the checks for tensors on a GPU, on the CPU, fake and empty ones.

Lengths, pages and padding are only on the device. Kernels clamp them, so that wrong ones reach nothing outside of the tensors; whoever
wants to be told of them sets FLASHGEN_CHECK_SEQUENCES=1 (cached_values.py), which makes each call wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flashgen.codegen.attention import require_scale
from flashgen.codegen.errors import ArgumentError, require_int, shown
from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.problem import Problem, Sequences
from flashgen.codegen.typed import require_type
from flashgen.codegen.workload import Workload

from .append_arguments import MOST_KEYS
from .arguments import DTYPES, E4M3, TracedArgumentError, check_options, check_strides, problem_of, require_dense, require_initialized
from .asked import check_tensors
from .descales import check_descales, check_dtype, descales_fit

_PLAIN = {torch.Tensor}


class CachedKeys(NamedTuple):
    """Where the keys of sequences are in a cache: what a call says of them beside the cache itself, and what its elements stand for.

    k_descale, v_descale: [batch, heads_kv], of e4m3 elements alone, see descales.py
    """

    cache_seqlens: torch.Tensor
    block_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor | None:
        """The pages of each sequence, [batch, pages of a sequence]; [batch] where each has one page. None: sequence b has page b."""
        return self.block_table if self.cache_batch_idx is None else self.cache_batch_idx

    @property
    def table_pages(self) -> int:
        """Pages that a sequence may have."""
        return 1 if self.block_table is None else self.block_table.shape[1]


def check_cached_types(q: Any, k_cache: Any, v_cache: Any, where: CachedKeys, causal: Any, scale: Any, return_lse: Any) -> None:
    """Raises ArgumentError unless these have the types that operators take, and tensors lie in memory by strides.

    torch.compile traces this.
    """
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor)
    if not isinstance(where[0], torch.Tensor):
        require_type("cache_seqlens", where[0], torch.Tensor | int | None)
    for name, tensor in zip(CachedKeys._fields[1:], where[1:], strict=True):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor | None)
    require_bottom_right(causal)
    check_options(causal, scale, "bshd", return_lse)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), *zip(CachedKeys._fields, where, strict=True)):
        if tensor is not None:
            require_initialized(name, tensor)
            require_dense(name, tensor)


def require_bottom_right(causal: Any) -> None:
    """Raises ArgumentError for a causal mask that is aligned top-left: by lengths, which only the device knows."""
    if isinstance(causal, str):
        raise ArgumentError(f"causal must be True or False for a cache, whose mask is aligned bottom-right; got {shown(causal)}")


def check_added_types(
    k: Any, v: Any, rotary_cos: Any, rotary_sin: Any, rotary_interleaved: Any, num_splits: Any, batch_invariant: Any, has_lengths: bool
) -> None:
    """Raises ArgumentError unless these have the types that `attention_with_kvcache` takes, and both of a pair are there, or neither.

    has_lengths: whether the call says how long sequences are. torch.compile traces this.
    """
    for name, tensor in (("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if tensor is not None:
            if not isinstance(tensor, torch.Tensor):
                require_type(name, tensor, torch.Tensor | None)
            require_initialized(name, tensor)
            require_dense(name, tensor)
    for (name, one), (other_name, other) in ((("k", k), ("v", v)), (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin))):
        if (one is None) is not (other is None):
            lacking, there = (name, other_name) if one is None else (other_name, name)
            raise ArgumentError(f"{lacking} must be given where {there} is; got None")
    for name, flag in (("rotary_interleaved", rotary_interleaved), ("batch_invariant", batch_invariant)):
        if not isinstance(flag, bool):
            require_type(name, flag, bool)
    if num_splits is not None and (not isinstance(num_splits, int) or isinstance(num_splits, bool)):
        require_type("num_splits", num_splits, int | None)
    if num_splits is not None and num_splits < 0:
        require_int("num_splits", num_splits, 0, MOST_KEYS)
    if not has_lengths and (k is not None or rotary_cos is not None):
        raise ArgumentError("cache_seqlens must say where new keys and positions begin, where k, v or rotary tables are given; got None")


def check_cached_call(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    where: CachedKeys,
    causal: bool,
    scale: float | None,
    batch_invariant: bool = False,
    modifiers: Given = NO_MODIFIERS,
    tensors: Sequence[torch.Tensor] = (),
) -> Problem:
    """The call's problem. Raises ArgumentError unless a kernel for some GPU could take it. Works on fake tensors."""
    if not (_are_strided(q, k_cache, v_cache, *where) and cache_fits(q, k_cache, v_cache, where)):
        _check_cache(q, k_cache, v_cache, where)
        _check_sequences(q, k_cache, where)
    if scale is not None:
        require_scale(scale)
    options: dict[str, Any] = {"modifiers": modifiers, "sequences": Sequences.CACHED, "batch_invariant": batch_invariant}
    problem = problem_of(q, v_cache, causal, **options)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_strides(name, tensor)
    if tensors:
        check_tensors(problem, sizes_of_modifiers(q, k_cache, where), q, tensors)
    return problem


def sizes_of_modifiers(q: torch.Tensor, k_cache: torch.Tensor, where: CachedKeys) -> dict[str, int]:
    """What axes of their operands name; len_kv: keys that a sequence has room for."""
    known = {"batch": q.shape[0], "heads_q": q.shape[2], "heads_kv": k_cache.shape[2], "len_q": q.shape[1]}
    return {**known, "len_kv": where.table_pages * k_cache.shape[1]}


def check_cached_traced(*arguments: Any) -> None:
    """As `check_cached_call`, for calls that PyTorch may be tracing: raises TracedArgumentError."""
    try:
        check_cached_call(*arguments)
    except ArgumentError as error:
        raise TracedArgumentError(str(error)) from error


def _are_strided(*tensors: torch.Tensor | None) -> bool:
    return all(one is None or (one.layout is torch.strided and not one.is_nested) for one in tensors)


def cache_fits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, where: CachedKeys) -> bool:
    """The rules of `check_cached_call` about shapes, dtypes and devices in short: each call of other sizes asks, and nearly all keep them.

    Those of tensors that are traced are asked the long way. All have sizes and strides.
    """
    seqlens, table, leftpad = where.cache_seqlens, where.table, where.cache_leftpad
    beside = [one for one in where if one is not None]
    if not {type(q), type(k_cache), type(v_cache), *map(type, beside)} <= _PLAIN:
        return False
    of_q, of_k, of_v, device, dtype = q.shape, k_cache.shape, v_cache.shape, q.device, q.dtype
    if not len(of_q) == len(of_k) == len(of_v) == 4 or (where.block_table is not None and where.cache_batch_idx is not None):
        return False
    if not (dtype in DTYPES and k_cache.dtype is v_cache.dtype in (dtype, E4M3) and k_cache.device == device and v_cache.device == device):
        return False
    for one in beside:
        if one.device != device:
            return False
    batch, of_batch = of_q[0], (of_q[0],)
    if table is None:
        pages_fit = of_k[0] >= batch
    else:
        shape, widths = table.shape, 2 if where.block_table is not None else 1
        pages_fit = table.dtype is torch.int32 and len(shape) == widths and shape[0] == batch
        pages_fit = pages_fit and (widths == 1 or shape[1] < 2 or table.stride(1) == 1)
    keys = where.table_pages * of_k[1] if pages_fit else 0
    return (
        pages_fit
        and descales_fit(where.k_descale, where.v_descale, batch, k_cache)
        and keys <= MOST_KEYS
        and of_k[0] <= MOST_KEYS
        and (of_k[0] > 0 or not keys or not batch)
        and seqlens.shape == of_batch
        and seqlens.dtype is torch.int32
        and (batch < 2 or seqlens.stride(0) == 1)
        and (leftpad is None or (leftpad.shape == of_batch and leftpad.dtype is torch.int32 and (batch < 2 or leftpad.stride(0) == 1)))
        and of_k[:3] == of_v[:3]
        and of_k[3] == of_q[3]
        and (not of_q[2] or bool(of_k[2] and not of_q[2] % of_k[2]))
    )


def _check_cache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, where: CachedKeys) -> None:
    """Ranks, dtypes, devices and sizes of q and the cache go together."""
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        require_dense(name, tensor)
        require_dimensions(name, tensor, where.block_table is not None)
        check_dtype(name, tensor.dtype, q.dtype, k_cache.dtype)
        if tensor.device != q.device:
            raise ArgumentError(f"{name} must be on q's device {q.device}; got {tensor.device}")
    if k_cache.shape[3] != q.shape[3]:
        raise ArgumentError(f"k_cache must have q's head_dim {q.shape[3]}; got {k_cache.shape[3]}")
    for dim, what in enumerate(("number of pages" if where.block_table is not None else "batch size", "number of keys", "number of heads")):
        if v_cache.shape[dim] != k_cache.shape[dim]:
            raise ArgumentError(f"v_cache must have k_cache's {what} {k_cache.shape[dim]}; got {v_cache.shape[dim]}")
    if q.shape[2] and (not k_cache.shape[2] or q.shape[2] % k_cache.shape[2]):
        raise ArgumentError(f"q must have a number of heads that is a multiple of k_cache's {k_cache.shape[2]}; got {q.shape[2]}")


def require_dimensions(name: str, tensor: torch.Tensor, in_pages: bool) -> None:
    """Raises ArgumentError unless q, or k_cache or v_cache, has the dimensions that it must have."""
    if tensor.ndim != 4:
        of_cache = "pages, keys of a page" if in_pages else "batch, keys"
        dims = f"({'batch, len_q' if name == 'q' else of_cache}, heads, head_dim)"
        raise ArgumentError(f"{name} must have 4 dimensions {dims}; got {tensor.ndim}")


def _check_sequences(q: torch.Tensor, k_cache: torch.Tensor, where: CachedKeys) -> None:
    """Ranks, dtypes, devices and sizes of what says where keys are; the values are on the device."""
    batch, pages = q.shape[0], k_cache.shape[0]
    check_descales(where.k_descale, where.v_descale, q, k_cache)
    for name, tensor in zip(CachedKeys._fields, where, strict=True):
        if tensor is None or name.endswith("descale"):
            continue
        require_dense(name, tensor)
        dims = 2 if name == "block_table" else 1
        if tensor.ndim != dims:
            of_table = " (batch, pages of a sequence)" if dims == 2 else ""
            raise ArgumentError(f"{name} must have {dims} dimension{'s'[: dims - 1]}{of_table}; got {tensor.ndim}")
        if tensor.dtype != torch.int32:
            raise ArgumentError(f"{name} must be torch.int32; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(f"{name} must be on q's device {q.device}; got {tensor.device}")
        if tensor.shape[0] != batch:
            raise ArgumentError(f"{name} must have an entry for each of {batch} sequences of q; got {tensor.shape[0]}")
        if name != "cache_batch_idx" and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            last = " in its last dimension" if dims == 2 else ""
            raise ArgumentError(f"{name} must be contiguous{last}; got stride {tensor.stride(-1)}")
    if where.block_table is not None and where.cache_batch_idx is not None:
        raise ArgumentError("cache_batch_idx must be left out where block_table says which pages a sequence has; got both")
    if where.table is None and pages < batch:
        raise ArgumentError(f"k_cache must have at least q's batch size {batch}, without cache_batch_idx or block_table; got {pages}")
    keys = require_countable(where.table_pages, k_cache.shape[1])
    if pages > MOST_KEYS:
        raise ArgumentError(f"k_cache must have at most {MOST_KEYS} pages; got {pages}")
    if batch and keys and not pages:
        raise ArgumentError("k_cache must have a page where sequences may have keys; got none")


def require_countable(table_pages: int, page_size: int) -> int:
    """How many keys a sequence may have. Raises ArgumentError for more than an int counts."""
    if table_pages * page_size > MOST_KEYS:
        many = f"{table_pages} pages of {page_size} keys each"
        raise ArgumentError(f"block_table must name at most {MOST_KEYS} keys of a sequence; got {many}")
    return table_pages * page_size


def check_length(length: int, keys: int, added: int = 0) -> None:
    """Raises ArgumentError unless sequences of so many keys, and as many as are added, fit a cache that has this many for each."""
    if added > keys:
        raise ArgumentError(f"k must have at most {keys} new keys, which a sequence has room for; got {added}")
    if not 0 <= length <= keys - added:
        require_int("cache_seqlens", length, 0, keys - added)


def cached_workload(q: torch.Tensor, k_cache: torch.Tensor, where: CachedKeys, modifiers: Given = NO_MODIFIERS) -> Workload:
    """The sizes of a call that has passed `check_cached_call`."""
    (batch, len_q, heads_q, _), (pages, page_size, heads_kv, _), table_pages = q.shape, k_cache.shape, where.table_pages
    of_pages = {"pages": pages, "page_size": page_size, "table_pages": table_pages}
    return Workload(batch, heads_q, heads_kv, len_q, table_pages * page_size, **dict(modifiers.sizes), **of_pages)
