"""What a launch of the Hopper backward kernels is given beside sizes and strides: the order of its blocks, and tensor maps."""

from __future__ import annotations

from flashgen.codegen.attention import MAX_L2_GROUP_HEADS, float32, largest_divisor, padded, reciprocal, scale_values
from flashgen.codegen.devices import Device
from flashgen.codegen.modifier import score_unit
from flashgen.codegen.operands import Call
from flashgen.codegen.packed import packed_map
from flashgen.codegen.packed_gradients import gradient_map_reasons
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.tensor_map import STRIDE_END, TensorMapShape, tensor_map_shape
from flashgen.codegen.workload import Workload

L2_GROUP_BYTES = 32 * 2**20  # of Q, dO and the sums of dQ that blocks that run together may take of the L2
L2_GROUP_HEADS = 16  # of short sequences, where more are slower: docs/performance-log.md, "Smaller changes"
MAPPED = ("q", "k", "v", "d_out", "d_q", "d_k", "d_v")  # tensors that have a map
PANEL = 64  # columns of a tile that lie together: 128 bytes, what a tensor copy permutes within


def panels(width: int) -> int:
    """Panels of so many columns."""
    return -(-width // PANEL)


def heads_of_l2_group(problem: Problem, w: Workload, head_blocks: int, device: Device) -> int:
    """Key/value heads of a group of the L2 swizzle: see templates/tile/common/tile_scheduler.cuh. Without a mask, one head after the other.

    Not so of packed sequences, where one head of all of them would come before the next head: rows of neighbouring heads lie together.
    A window is like a mask: the last key tiles see fewer queries than others, and a launch should end with those of several heads.
    But blocks that wait for others of their head (semaphore.cuh beside it) lose the least time with other heads between them. With grouped
    queries the blocks of a group, `head_blocks` for each of its heads, are about as many as run at once: see tile_walk.cuh beside it.
    """
    if problem.mask is Mask.FULL and not (w.is_local or problem.deterministic or problem.is_packed):
        return 1
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes + 4 * padded(problem.head_dim)
    # Blocks of a key/value head walk over its query heads side by side: most are in one of them, some in the next.
    fitting = L2_GROUP_BYTES // (min(2, w.heads_q // w.heads_kv) * max(1, w.len_q) * row_bytes)
    if w.heads_q > w.heads_kv and not problem.deterministic:
        fitting = min(fitting, round(device.sm_count / max(1, head_blocks)))
    most = MAX_L2_GROUP_HEADS if problem.deterministic else L2_GROUP_HEADS
    heads = w.batch * w.heads_kv
    return largest_divisor(heads, max(1, min(fitting, heads, most)))


def size_values(call: Call, w: Workload, tiles: tuple[int, int], l2_heads: int) -> dict[str, int | float]:
    """What kernels are told of sizes, strides and the scale. w: see `room`; tiles: of queries and keys, of a head; l2_heads: of a group."""
    query_tiles, key_tiles = tiles
    group = w.heads_q // w.heads_kv
    divisors = {
        "query_tiles": query_tiles,
        "heads_q": w.heads_q,
        "group": group,
        "heads_kv": w.heads_kv,
        "l2_group_heads": l2_heads,
        "l2_group_tiles": l2_heads * key_tiles,
        "l2_group_queries": l2_heads * group,
    }
    known: dict[str, int | float] = {f"{name}_reciprocal": reciprocal(divisor) for name, divisor in divisors.items()}
    known |= {**divisors, "key_tiles": key_tiles, "len_q": w.len_q, "len_kv": w.len_kv, "tokens_q": call.workload.tokens_q}
    known |= {"scale_log2": scale_values(score_unit(call))["scale_log2"], "scale": float32(call.scalars["scale"])}
    for name in ("q", "k", "v", "out", "d_out"):
        *batch, row, head, _ = call.views[name].strides
        known |= {f"{name}_batch": batch[0] if batch else 0, f"{name}_head": head, f"{name}_row": row}
    return known


def map_refusals(call: Call) -> list[str]:
    """What cuTensorMapEncodeTiled would refuse: tensors without elements, strides of 2^40 bytes."""
    if call.problem.is_packed:
        return gradient_map_reasons(call, MAPPED)
    reasons, end = [], STRIDE_END // call.problem.dtype.bytes
    for name in ("len_q", "len_kv"):
        if not getattr(call.workload, name):
            reasons.append(f"{name} must be at least 1 for tensor copies; got 0")
    for name in MAPPED:
        if (longest := max(call.views[name].strides)) >= end:
            reasons.append(f"strides of {name} must be below {end} elements; got {longest}")
    return reasons


def tensor_maps(block_q: int, block_kv: int, call: Call) -> dict[str, TensorMapShape]:
    """As (column, row, head, batch). dK and dV go out 16 rows at a time, those of a warp; dQ goes out a tile at a time."""
    problem, w = call.problem, call.workload
    d, dv, size = problem.head_dim, problem.head_dim_v, problem.dtype.bytes
    queries, keys = (w.len_q, w.heads_q), (w.len_kv, w.heads_kv)
    boxes: dict[str, tuple[int, tuple[int, int], int]] = {
        **{"q": (d, queries, block_q), "d_out": (dv, queries, block_q), "d_q": (d, queries, block_q)},
        **{"k": (d, keys, block_kv), "v": (dv, keys, block_kv), "d_k": (d, keys, 16), "d_v": (dv, keys, 16)},
    }
    maps = {}
    if problem.is_packed:
        for name, (width, (_, heads), rows) in boxes.items():
            row, head, _ = call.views[name].strides
            maps[name] = packed_map(problem.dtype, width, heads, (row, head), (PANEL, rows))
        return maps
    for name, (width, sizes, rows) in boxes.items():
        batch, row, head, _ = call.views[name].strides
        in_bytes = (row * size, head * size, batch * size)
        maps[name] = tensor_map_shape(problem.dtype, (width, *sizes, w.batch), in_bytes, (PANEL, rows, 1, 1))
    return maps
