"""The numbers of a launch of attention_forward_sm90, and its tensor maps."""

from __future__ import annotations

import dataclasses

from flashgen.codegen.attention import TENSORS, heads_that_fit, l2_group_heads, reciprocal
from flashgen.codegen.cached import box_keys
from flashgen.codegen.operands import Call
from flashgen.codegen.packed import group_values, most_tiles, packed_group_heads, packed_map
from flashgen.codegen.problem import Problem
from flashgen.codegen.tensor_map import TensorMapShape, tensor_map_shape
from flashgen.codegen.workload import Workload

from .config import AttentionForwardSm90Config

PANEL = 64  # columns of a tile that lie together: 128 bytes, what a tensor copy permutes within
OUT_ROWS = 16  # of a box of the output: those of a warp
LONG = 2048  # keys from which on the K and V of an L2 group may take more of it
L2_GROUP_BYTES, SHORT_L2_GROUP_BYTES = 32 * 2**20, 16 * 2**20
WINDOW_L2_GROUP_HEADS = 8  # at most, under a window: docs/performance-log.md, "What a work tile costs"


def work_tiles(config: AttentionForwardSm90Config, workload: Workload) -> int:
    """Work tiles of a launch on dense sequences."""
    return -(-workload.len_q // config.queries) * (workload.heads_q // config.pack_gqa) * workload.batch


def forward_group_heads(problem: Problem, config: AttentionForwardSm90Config, w: Workload) -> int:
    """Heads of a group of the L2 swizzle, or sets of heads under PackGQA: see templates/tile/common/tile_scheduler.cuh.

    A window is like a causal mask: a head's first queries see fewer keys than others, so a launch should end with the tiles of several
    heads' first queries. Tiles that run together are neighbours, and of a head only the keys near them need room in the L2. Tiles that are
    not claimed go to blocks by number: with few heads in a group some blocks would get short ones each time, so there one head is best.
    """
    if not w.has_window:
        return l2_group_heads(problem, w, L2_GROUP_BYTES if w.len_kv >= LONG else SHORT_L2_GROUP_BYTES)
    if not config.dynamic:
        return 1
    seen = min(w.len_kv, max(0, w.window_left + w.window_right + 1))
    return heads_that_fit(problem, w, seen, SHORT_L2_GROUP_BYTES, WINDOW_L2_GROUP_HEADS)


def tile_values(problem: Problem, config: AttentionForwardSm90Config, workload: Workload) -> dict[str, int | float]:
    """The parameters that say how tiles are found."""
    query_tiles, sets = -(-workload.len_q // config.queries), workload.heads_q // config.pack_gqa
    in_sets = workload if config.pack_gqa == 1 else dataclasses.replace(workload, heads_q=sets)
    l2_heads = forward_group_heads(problem, config, in_sets)
    return {
        "head_sets": sets,
        "head_sets_reciprocal": reciprocal(sets),
        "l2_group_heads": l2_heads,
        "l2_group_heads_reciprocal": reciprocal(l2_heads),
        "l2_group_tiles": l2_heads * query_tiles,
        "l2_group_tiles_reciprocal": reciprocal(l2_heads * query_tiles),
        "group_reciprocal": reciprocal(workload.heads_q // workload.heads_kv),
        "len_q": workload.len_q,
        "len_kv": workload.len_kv,
        "query_tiles": query_tiles,
        "tiles": query_tiles * sets * workload.batch,
    }


def packed_tile_values(problem: Problem, workload: Workload) -> dict[str, int | float]:
    """The same of packed sequences, whose tiles only the device knows."""
    heads, longest = workload.heads_q, min(workload.len_kv, workload.tokens_kv)
    group_bytes = L2_GROUP_BYTES if longest >= LONG else SHORT_L2_GROUP_BYTES
    return {
        "head_sets": heads,
        "head_sets_reciprocal": reciprocal(heads),
        "group_reciprocal": reciprocal(heads // workload.heads_kv),
        "tokens_q": workload.tokens_q,
        **group_values(packed_group_heads(problem, workload, group_bytes)),
    }


def most_work_tiles(config: AttentionForwardSm90Config, workload: Workload) -> int:
    """Work tiles of a launch on packed sequences, at most."""
    return most_tiles(workload, config.queries) * workload.heads_q


def forward_maps(config: AttentionForwardSm90Config, call: Call) -> dict[str, TensorMapShape]:
    """Of q, k, v and out as (column, row, head, batch); the output goes out 16 rows at a time, those of a warp.

    Where heads are packed, q and out are (column, head, row, batch): a box has some heads' rows of one query next to each other. Keys of a
    cache have its pages in place of the batch, and boxes within pages.
    """
    problem, w = call.problem, call.workload
    d, dv, size = problem.head_dim, problem.head_dim_v, problem.dtype.bytes
    queries, keys = (w.len_q, w.heads_q), (w.len_kv, w.heads_kv)
    rows = config.block_kv
    if problem.is_cached:
        keys, rows = (w.page_size, w.heads_kv), box_keys(w, rows)
    boxes = ((d, queries, config.block_q), (d, keys, rows), (dv, keys, rows), (dv, queries, OUT_ROWS))
    packed = config.pack_gqa
    maps = {}
    if problem.is_packed:
        for name, (width, (_, heads), rows) in zip(TENSORS, boxes, strict=True):
            row, head, _ = call.views[name].strides
            maps[name] = packed_map(problem.dtype, width, heads, (row, head), (PANEL, rows))
        return maps
    for name, (width, sizes, rows) in zip(TENSORS, boxes, strict=True):
        batch, row, head, _ = call.views[name].strides
        steps, box = (row, head), (rows, 1)
        count = w.pages if problem.is_cached and sizes is keys else w.batch
        if packed > 1 and sizes is queries:
            sizes, steps, box = (w.heads_q, w.len_q), (head, row), (packed, rows // packed)
        in_bytes = (steps[0] * size, steps[1] * size, batch * size)
        maps[name] = tensor_map_shape(problem.dtype, (width, *sizes, count), in_bytes, (PANEL, *box, 1))
    return maps
