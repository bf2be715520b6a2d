"""What a launch of the Hopper backward kernels is given beside sizes and strides: the order of its blocks, and tensor maps."""

from __future__ import annotations

from flashgen.codegen.attention import MAX_L2_GROUP_HEADS, largest_divisor, padded
from flashgen.codegen.devices import Device
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.tensor_map import TensorMapShape, tensor_map_shape
from flashgen.codegen.workload import Workload

L2_GROUP_BYTES = 32 * 2**20  # of Q, dO and the sums of dQ that blocks that run together may take of the L2
L2_GROUP_HEADS = 16  # of short sequences, where more are slower: docs/performance-log.md, "Smaller changes"
PANEL = 64  # columns of a tile that lie together: 128 bytes, what a tensor copy permutes within


def panels(width: int) -> int:
    """Panels of so many columns."""
    return -(-width // PANEL)


def heads_of_l2_group(problem: Problem, w: Workload, head_blocks: int, device: Device) -> int:
    """Key/value heads of a group of the L2 swizzle: see templates/tile/common/tile_scheduler.cuh. Without a mask, one head after the other.

    A window is like a mask: the last key tiles see fewer queries than others, and a launch should end with those of several heads.
    But blocks that wait for others of their head (semaphore.cuh beside it) lose the least time with other heads between them. With grouped
    queries the blocks of a group, `head_blocks` for each of its heads, are about as many as run at once: see tile_walk.cuh beside it.
    """
    if problem.mask is Mask.FULL and not (w.is_local or problem.deterministic):
        return 1
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes + 4 * padded(problem.head_dim)
    # Blocks of a key/value head walk over its query heads side by side: most are in one of them, some in the next.
    fitting = L2_GROUP_BYTES // (min(2, w.heads_q // w.heads_kv) * w.len_q * row_bytes)
    if w.heads_q > w.heads_kv and not problem.deterministic:
        fitting = min(fitting, round(device.sm_count / max(1, head_blocks)))
    most = MAX_L2_GROUP_HEADS if problem.deterministic else L2_GROUP_HEADS
    heads = w.batch * w.heads_kv
    return largest_divisor(heads, max(1, min(fitting, heads, most)))


def tensor_maps(block_q: int, block_kv: int, call: Call) -> dict[str, TensorMapShape]:
    """As (column, row, head, batch). dK and dV go out 16 rows at a time, those of a warp; dQ goes out a tile at a time."""
    problem, w = call.problem, call.workload
    d, dv, size = problem.head_dim, problem.head_dim_v, problem.dtype.bytes
    queries, keys = (w.len_q, w.heads_q), (w.len_kv, w.heads_kv)
    boxes = {
        **{"q": (d, queries, block_q), "d_out": (dv, queries, block_q), "d_q": (d, queries, block_q)},
        **{"k": (d, keys, block_kv), "v": (dv, keys, block_kv), "d_k": (d, keys, 16), "d_v": (dv, keys, 16)},
    }
    maps = {}
    for name, (width, sizes, rows) in boxes.items():
        batch, row, head, _ = call.views[name].strides
        in_bytes = (row * size, head * size, batch * size)
        maps[name] = tensor_map_shape(problem.dtype, (width, *sizes, w.batch), in_bytes, (PANEL, rows, 1, 1))
    return maps
