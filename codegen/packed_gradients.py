"""What backward families need for packed sequences: the lists of tiles that the kernel `_sequences` makes, and room for what kernels share.

See templates/tile/common/packed_gradients.cuh; packed.py has what the forward pass needs, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache

from .devices import Device
from .operands import Call
from .packed import (
    BOUNDARIES,
    LIST,
    SUFFIX,
    THREADS,
    TILE_BYTES,
    TILES,
    TOKENS_OF_A_BLOCK,
    map_reasons,
    most_key_tiles,
    most_tiles,
    packed_call_reasons,
    with_packed_files,
)
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import Buffer, KernelLaunch, KernelText
from .seen_tiles import scatters
from .workload import Workload

LEAST_ROWS = 16  # of a tile of any family
MOST_SEQUENCES = 2**23  # each may have a tile of 128 rows beside its tokens, and rows of all are counted in an int
_TOKENS = Parameter("int", "tokens_q")
_QUERY_LIST = Parameter("u32*", "query_list")  # of query tiles, for the kernels beside the main one
_CLEARED = ("d_q", "d_k", "d_v")
_OF_SEQUENCES = ParameterBlock(
    (
        *(Parameter("const int*", name) for name in BOUNDARIES),
        *(Parameter("u32*", name) for name in (*_CLEARED, LIST.name, _QUERY_LIST.name, "sequence_rows", "sequence_order")),
        *(Parameter("i64", f"{name}_{dim}") for name in _CLEARED for dim in ("row", "head")),
        *(Parameter("int", name) for name in ("batch", "heads_q", "heads_kv", "tokens_q", "tokens_kv")),
        *(Parameter("int", name) for name in ("l2_group_heads", "l2_group_queries", "clearing_blocks")),
    )
)
# Query tiles are counted, too, and are the distance of heads in what kernels share: see PackedGradientRows.
_OF_DENSE = (
    *("len_q", "len_kv", "key_tiles", "query_tiles_reciprocal", "l2_group_tiles", "l2_group_tiles_reciprocal"),
    *("work_tiles", "sum_tiles"),
)
_OF_SUMS = (Parameter("u64", "l2_group_queries_reciprocal"), Parameter("int", "l2_group_queries"))  # query heads of an L2 group


def gradient_call_reasons(call: Call, queries: int, keys: int) -> list[str]:
    """Why they cannot take a call; queries and keys: of a tile, at least."""
    w = call.workload
    reasons = packed_call_reasons(call, queries)
    if w.batch > MOST_SEQUENCES:
        reasons.append(f"batch must be at most {MOST_SEQUENCES} for gradients of packed sequences; got {w.batch}")
    heads, name = (w.heads_q, "heads_q") if scatters(call.problem) else (w.heads_kv, "heads_kv")  # looks differ by query heads
    if (tiles := most_key_tiles(w, keys) * heads) > 2**31 - 1:
        reasons.append(f"key tiles of all heads must be at most {2**31 - 1}; got {tiles}: lower batch, tokens_kv or {name}")
    return reasons


def gradient_map_reasons(call: Call, tensors: Collection[str]) -> list[str]:
    """The same for kernels that copy these tensors by `packed_map`."""
    reasons = map_reasons(call, LEAST_ROWS, tensors) + gradient_call_reasons(call, LEAST_ROWS, LEAST_ROWS)
    if not call.workload.tokens_q:
        reasons.append("tokens_q must be at least 1 for tensor copies; got 0")
    return list(dict.fromkeys(reasons))


def with_gradient_files(files: tuple[tuple[str, ...], tuple[str, ...]], problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A family's files of atoms and tile operations, with those of packed sequences if these are."""
    if not problem.is_packed:
        return files
    atoms, tiles = with_packed_files(*files)
    after = tiles.index(TILES[-1]) + 1
    return atoms, (*tiles[:after], "common/packed_gradients", *tiles[after:])


def gradient_block(block: ParameterBlock, problem: Problem, main: bool = False, sums: bool = True) -> ParameterBlock:
    """The parameters of a kernel, where sequences are packed without lengths, and with its lists.

    main: whether it computes key tiles; sums: whether it rounds sums of dQ, or makes them 0
    """
    return _packed_block(block, main, sums) if problem.is_packed else block


@cache
def _packed_block(block: ParameterBlock, main: bool, sums: bool) -> ParameterBlock:
    left = ParameterBlock(tuple(field for field in block.fields if field.name not in _OF_DENSE))
    lists = (*([LIST] if main else []), *([_QUERY_LIST] if sums else []))
    return left.with_fields(*lists, _TOKENS, *(_OF_SUMS if main and sums else ()))


def tensor_gradient_block(block: ParameterBlock, problem: Problem) -> ParameterBlock:
    """The same of a kernel for gradients of modifiers' tensors. Where it goes over rows of packed sequences, it does so by the list."""
    return _of_listed(block) if problem.is_packed and any(field.name == "row_delta" for field in block.fields) else block


@cache
def _of_listed(block: ParameterBlock) -> ParameterBlock:
    left = ParameterBlock(tuple(field for field in block.fields if field.name not in ("batch", "heads_q", *_OF_DENSE)))
    return left.with_fields(_QUERY_LIST, _TOKENS)


def gradient_sequences(problem: Problem) -> tuple[KernelText, ...]:
    """The kernel that finds sequences, before all others, if they are packed."""
    return (KernelText(_OF_SEQUENCES, SUFFIX, "SequencesParameters"),) if problem.is_packed else ()


def gradient_context(problem: Problem, queries: int, keys: int, overlap: bool) -> dict[str, object]:
    """What templates are told. queries, keys: of a tile; overlap: whether the next kernel may begin while that one is under way."""
    last_first = "true" if problem.deterministic else "false"
    return {
        "sequences_threads": THREADS,
        "sequences_list": f"list_gradient_tiles<{queries}, {keys}, {last_first}>",
        "sequences_clear": f"clear_unused_gradients<{problem.head_dim}, {problem.head_dim_v}>",
        "sequences_overlap": overlap,
        "sequences_waits": False,  # the kernel behind writes zeros before it waits: nobody may use their memory any more
    }


def room(call: Call, queries: int, keys: int) -> Workload:
    """One dense sequence with as many tiles as packed ones may have, for launches and buffers; a workload of dense ones itself."""
    if not call.problem.is_packed:
        return call.workload
    w = call.workload
    lengths = {"len_q": max(1, most_tiles(w, queries)) * queries, "len_kv": max(1, most_key_tiles(w, keys)) * keys}
    return replace(w, batch=1, **lengths, tokens_q=0, tokens_kv=0)


def one_sequence(workload: Workload) -> Workload:
    """The longest sequence alone, as far as the caller knows it: blocks of all sequences of a head follow each other."""
    w = workload
    return replace(w, batch=1, len_q=min(w.len_q, w.tokens_q), len_kv=min(w.len_kv, w.tokens_kv), tokens_q=0, tokens_kv=0)


def sequence_launches(
    call: Call, queries: int, keys: int, group_heads: int, device: Device
) -> tuple[tuple[KernelLaunch, ...], tuple[Buffer, ...]]:
    """The launch of the kernel that finds sequences, if they are packed, and its memory. group_heads: key/value heads of an L2 group."""
    w = call.workload
    if not call.problem.is_packed:
        return (), ()
    clearing = max(1, min(device.sm_count - 1, max(w.tokens_q, w.tokens_kv) // TOKENS_OF_A_BLOCK))
    queries_of_group = group_heads * (w.heads_q // w.heads_kv)
    values: dict[str, int | float] = {"l2_group_heads": group_heads, "l2_group_queries": queries_of_group, "clearing_blocks": clearing}
    values |= {name: getattr(w, name) for name in ("batch", "heads_q", "heads_kv", "tokens_q", "tokens_kv")}
    for name in _CLEARED:
        values[f"{name}_row"], values[f"{name}_head"], _ = call.views[name].strides
    buffers = (
        Buffer(LIST.name, (most_key_tiles(w, keys) + 1) * TILE_BYTES),
        Buffer(_QUERY_LIST.name, (most_tiles(w, queries) + 1) * TILE_BYTES),
        Buffer("sequence_rows", max(1, w.batch) * 16),
        Buffer("sequence_order", max(1, w.batch) * 4),
    )
    return (KernelLaunch(1 + clearing, values, suffix=SUFFIX),), buffers
