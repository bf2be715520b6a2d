"""What the arguments of a call that appends to a cache must be: the checks for tensors on a GPU, on the CPU, fake and empty ones.

Lengths and page tables are only on the device: kernels write nothing where these say nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import require_possible
from flashgen.codegen.operands import Call
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import CacheDtype, Problem, Sequences
from flashgen.codegen.typed import require_type
from flashgen.codegen.workload import Workload

from .alignment import require_aligned
from .arguments import DTYPES, E4M3, TracedArgumentError, check_strides, require_dense, require_initialized
from .asked import require_no_gradient
from .descales import check_descales, descale_strides
from .sized_tensor import SizedTensor

CHUNK = 8  # elements that a kernel reads of a table at once, where its rows are whole chunks
MOST_KEYS = 2**31 - 1  # of a sequence, and of each size


class AppendTensors(NamedTuple):
    """The tensors of a call, in the order of the operator's arguments; None for those that are not there.

    k_cache: [pages, page_size, heads_kv, head_dim]; v_cache: the same with head_dim_v; k, v: [batch, new_keys, heads_kv, ..];
    cache_seqlens: int32 [batch]; block_table: int32 [batch, table_pages], without which sequence b has page b alone;
    q: [batch, len_q, heads_q, head_dim], which nobody looks at without tables; rotary_cos, rotary_sin: [rotary_positions, rotary_dim / 2],
    of the dtype of k and q or fp32; k_descale, v_descale: fp32 [batch, heads_kv], of e4m3 caches alone
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache_seqlens: torch.Tensor
    block_table: torch.Tensor | None
    q: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of what is written, and of queries: the caches' but where these are e4m3."""
        if self.k_cache.dtype != E4M3:
            return self.k_cache.dtype
        given = self.k if self.k is not None else self.q
        return torch.bfloat16 if given is None else given.dtype

    @property
    def rotated(self) -> torch.Tensor | None:
        """The queries, if they are rotated."""
        return self.q if self.rotary_cos is not None else None

    @property
    def named(self) -> Mapping[str, torch.Tensor]:
        """Those that are there, by name."""
        return {name: tensor for name, tensor in zip(self._fields, self, strict=True) if tensor is not None}

    @property
    def by_operand(self) -> dict[str, torch.Tensor]:
        """Those that are there, by the names of the operation's operands."""
        kind = "" if self.rotary_cos is None or self.rotary_cos.dtype in DTYPES else "_fp32"
        names = (*self._fields[:2], "k_new", "v_new", *self._fields[4:7], f"rotary_cos{kind}", f"rotary_sin{kind}", *self._fields[9:])
        there = self._replace(q=self.rotated)
        return {name: tensor for name, tensor in zip(names, there, strict=True) if tensor is not None}


def check_append(tensors: AppendTensors, rotary_interleaved: bool, by_query: bool) -> Problem:
    """The call's problem. Raises ArgumentError unless a kernel for some GPU could take it. Works on fake tensors."""
    for name, value in (("rotary_interleaved", rotary_interleaved), ("by_query", by_query)):
        if type(value) is not bool:
            require_type(name, value, bool)
    optional = ("k", "v", "block_table", "q", "rotary_cos", "rotary_sin", "k_descale", "v_descale")
    for name, tensor in zip(tensors._fields, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor | SizedTensor) and not (tensor is None and name in optional):
            require_type(name, tensor, torch.Tensor | None if name in optional else torch.Tensor)
    for one, other in (("k", "v"), ("rotary_cos", "rotary_sin")):
        if (getattr(tensors, one) is None) is not (getattr(tensors, other) is None):
            there, missing = (one, other) if getattr(tensors, other) is None else (other, one)
            raise ArgumentError(f"{missing} must be given where {there} is; got none")
    for name, tensor in tensors.named.items():
        require_initialized(name, tensor)
        require_dense(name, tensor)
        if tensor.device != tensors.k_cache.device:
            raise ArgumentError(f"{name} must be on k_cache's device {tensors.k_cache.device}; got {tensor.device}")
        require_no_gradient(name, tensor)
    _check_numbers(tensors)
    _check_rows(tensors)
    _check_pages(tensors)
    check_descales(tensors.k_descale, tensors.v_descale, tensors.cache_seqlens, tensors.k_cache)
    if tensors.rotary_cos is not None and tensors.rotary_sin is not None:
        _check_tables(tensors.rotary_cos, tensors.rotary_sin, tensors)
        _check_positions(tensors, by_query)
    dtype_kv = CacheDtype.E4M3 if tensors.k_cache.dtype == E4M3 else None
    return _problem(tensors.dtype, int(tensors.k_cache.shape[3]), int(tensors.v_cache.shape[3]), dtype_kv)


def check_append_traced(*arguments: AppendTensors | bool) -> None:
    """As `check_append`, for calls that PyTorch may be tracing: raises TracedArgumentError."""
    try:
        check_append(*arguments)  # type: ignore[arg-type]
    except ArgumentError as error:
        raise TracedArgumentError(str(error)) from error


def _check_rows(tensors: AppendTensors) -> None:
    """Ranks, dtypes and sizes of what has rows of heads go together."""
    k_cache, v_cache, batch = tensors.k_cache, tensors.v_cache, tensors.cache_seqlens.shape[0]
    axes = {"k_cache": "pages, page_size, heads_kv, head_dim", "v_cache": "pages, page_size, heads_kv, head_dim_v"}
    for name, tensor in tensors.named.items():
        if name not in ("k_cache", "v_cache", "k", "v", "q"):
            continue
        if tensor.ndim != 4:
            raise ArgumentError(f"{name} must have 4 dimensions ({axes.get(name, 'batch, length, heads, head_dim')}); got {tensor.ndim}")
        if tensor.dtype not in DTYPES and (name not in axes or tensor.dtype != E4M3):
            raise ArgumentError(f"{name} must be torch.bfloat16 or torch.float16{f', or {E4M3}' * (name in axes)}; got {tensor.dtype}")
        if name in axes or k_cache.dtype != E4M3:
            if tensor.dtype != k_cache.dtype:
                raise ArgumentError(f"{name} must have k_cache's dtype {k_cache.dtype}; got {tensor.dtype}")
        elif tensor.dtype != tensors.dtype:
            raise ArgumentError(f"{name} must have k's dtype {tensors.dtype}; got {tensor.dtype}")
        check_strides(name, tensor)
        if name in axes and tensors.k is not None and tensor.numel():
            for dim in range(3):
                if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
                    raise ArgumentError(f"{name} must have memory for each key that is added; got stride 0 in dimension {dim}, as expanded")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ArgumentError(
            f"v_cache must have k_cache's pages, page_size and heads {tuple(k_cache.shape[:3])}; got {tuple(v_cache.shape[:3])}"
        )
    for name, new, cache in (("k", tensors.k, k_cache), ("v", tensors.v, v_cache)):
        if new is not None and new.shape[2:] != cache.shape[2:]:
            raise ArgumentError(f"{name} must have {name}_cache's heads and head_dim {tuple(cache.shape[2:])}; got {tuple(new.shape[2:])}")
        if new is not None and new.shape[0] != batch:
            raise ArgumentError(f"{name} must have a batch size of {batch}, the sequences of cache_seqlens; got {new.shape[0]}")
    if tensors.k is not None and tensors.v is not None and tensors.v.shape[1] != tensors.k.shape[1]:
        raise ArgumentError(f"v must have k's length {tensors.k.shape[1]}; got {tensors.v.shape[1]}")
    if (q := tensors.rotated) is not None:
        heads_kv = k_cache.shape[2]
        if q.shape[3] != k_cache.shape[3]:
            raise ArgumentError(f"q must have k_cache's head_dim {k_cache.shape[3]}; got {q.shape[3]}")
        if q.shape[0] != batch:
            raise ArgumentError(f"q must have a batch size of {batch}, the sequences of cache_seqlens; got {q.shape[0]}")
        if q.shape[2] and (not heads_kv or q.shape[2] % heads_kv):
            raise ArgumentError(f"q must have a number of heads that is a multiple of k_cache's {heads_kv}; got {q.shape[2]}")


def _check_numbers(tensors: AppendTensors) -> None:
    """What says where sequences are, by itself."""
    for name, tensor, dims in (("cache_seqlens", tensors.cache_seqlens, 1), ("block_table", tensors.block_table, 2)):
        if tensor is None:
            continue
        if tensor.dtype != torch.int32:
            raise ArgumentError(f"{name} must be torch.int32; got {tensor.dtype}")
        if tensor.ndim != dims:
            raise ArgumentError(f"{name} must have {dims} dimension{'s' * (dims > 1)}; got {tensor.ndim}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ArgumentError(f"{name} must be contiguous in its last dimension (stride 1); got stride {tensor.stride(-1)}")


def _check_pages(tensors: AppendTensors) -> None:
    """Sequences have pages."""
    lengths, table, (pages, page_size) = tensors.cache_seqlens, tensors.block_table, tensors.k_cache.shape[:2]
    if table is None:
        if lengths.shape[0] > pages:
            raise ArgumentError(
                f"k_cache must have a page for each of {lengths.shape[0]} sequences, as there is no block_table; got {pages}"
            )
    elif table.shape[0] != lengths.shape[0]:
        raise ArgumentError(f"block_table must have a row for each of {lengths.shape[0]} sequences; got {table.shape[0]}")
    elif table.shape[1] * page_size > MOST_KEYS:
        raise ArgumentError(f"block_table must have pages of at most {MOST_KEYS} keys for a sequence; got {table.shape[1]} of {page_size}")


def _check_tables(cosines: torch.Tensor, sines: torch.Tensor, tensors: AppendTensors) -> None:
    """Of the rotary embedding."""
    head_dim, dtype = tensors.k_cache.shape[3], tensors.dtype
    for name, table in (("rotary_cos", cosines), ("rotary_sin", sines)):
        if table.dtype not in (dtype, torch.float32):
            raise ArgumentError(f"{name} must be {dtype} or torch.float32; got {table.dtype}")
        if table.ndim != 2:
            raise ArgumentError(f"{name} must have 2 dimensions (positions, rotary_dim / 2); got {table.ndim}")
        if not table.is_contiguous():
            raise ArgumentError(f"{name} must be contiguous; got strides {tuple(table.stride())}")
    if sines.dtype != cosines.dtype:
        raise ArgumentError(f"rotary_sin must have rotary_cos's dtype {cosines.dtype}; got {sines.dtype}")
    if sines.shape != cosines.shape:
        raise ArgumentError(f"rotary_sin must have rotary_cos's shape {tuple(cosines.shape)}; got {tuple(sines.shape)}")
    positions, pairs = cosines.shape
    if positions > MOST_KEYS:
        raise ArgumentError(f"rotary_cos must have at most {MOST_KEYS} rows; got {positions}")
    if not 1 <= pairs <= head_dim // 2:
        raise ArgumentError(f"rotary_cos must have from 1 to {head_dim // 2} columns, half of those that are rotated; got {pairs}")


def _check_positions(tensors: AppendTensors, by_query: bool) -> None:
    """The rotary tables have a row for each position that keys and queries may have, which kernels do not ask: they repeat the last row.

    Only the device knows how long sequences are, so all keys count that one has room for. A block_table that is wider than its sequences
    will ever be, as of a pool that many models share, is cut by whoever knows that: nobody could tell it from one that will be filled.
    """
    cosines, table, queries = tensors.rotary_cos, tensors.block_table, tensors.rotated
    assert cosines is not None
    room = tensors.k_cache.shape[1] if table is None else table.shape[1] * tensors.k_cache.shape[1]
    of_queries = 0 if queries is None else queries.shape[1] if by_query else min(1, queries.shape[1])
    beyond = max(0, of_queries - (0 if tensors.k is None else tensors.k.shape[1]))
    needed = max(1, room + beyond)
    if cosines.shape[0] < needed:
        why = f"as a sequence has room for {room} keys" + (f" and queries may have positions up to {needed - 1}" if beyond else "")
        raise ArgumentError(f"rotary_cos must have a row for each of {needed} positions, {why}; got {cosines.shape[0]}")


@lru_cache(maxsize=2**10)
def _problem(dtype: torch.dtype, head_dim: int, head_dim_v: int, dtype_kv: CacheDtype | None) -> Problem:
    """One instance for all calls. Raises ArgumentError if no family can compute it on any target."""
    problem = Problem(DTYPES[dtype], head_dim, head_dim_v, operation="append", sequences=Sequences.CACHED, dtype_kv=dtype_kv)
    require_possible(problem)
    return problem


def append_call(problem: Problem, tensors: AppendTensors, rotary_interleaved: bool, by_query: bool) -> Call:
    """The call of tensors that have passed `check_append`."""
    pages, page_size, heads_kv, _ = tensors.k_cache.shape
    batch, table, q = tensors.cache_seqlens.shape[0], tensors.block_table, tensors.rotated
    table_pages = 1 if table is None else table.shape[1]
    heads_q, len_q = (heads_kv, 0) if q is None else (q.shape[2], q.shape[1])
    new_keys = 0 if tensors.k is None else tensors.k.shape[1]
    in_pages = {"pages": pages, "page_size": page_size, "table_pages": table_pages, "new_keys": new_keys}
    workload = Workload(batch, heads_q, heads_kv, len_q, table_pages * page_size, **in_pages)
    names = ("k_cache", "v_cache", "k_new", "v_new", "q", "block_table")
    strides = {name: _strides(tensor) for name, tensor in tensors.by_operand.items() if name in names}
    strides |= descale_strides(tensors.k_descale, tensors.v_descale)
    positions, pairs = (0, 0) if tensors.rotary_cos is None else tensors.rotary_cos.shape
    scalars: dict[str, float] = {"rotary_positions": positions, "rotary_dim": 2 * pairs}
    scalars |= {"rotary_interleaved": int(rotary_interleaved), "rotary_by_query": int(by_query)}
    return operation_of(problem).call(problem, workload, strides, scalars)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """In elements; 0 where the size is 1, so that a stride that is never used cannot overflow. The last one is 1."""
    return (*[step if size > 1 else 0 for size, step in zip(tensor.shape[:-1], tensor.stride(), strict=False)], 1)


def require_append_memory(tensors: AppendTensors) -> None:
    """Raises ArgumentError unless these begin at addresses that kernels can take, and are there."""
    cosines = tensors.rotary_cos
    for name, tensor in tensors.named.items():
        is_table = name.startswith("rotary")
        in_chunks = not is_table or (cosines is not None and cosines.shape[1] % CHUNK == 0)
        if in_chunks and tensor.dtype != torch.int32 and not name.endswith("descale"):
            require_aligned({name: tensor.data_ptr()})
        if tensor.numel() and not tensor.data_ptr():
            raise ArgumentError(f"{name} must have a storage that holds its elements; got one without")
