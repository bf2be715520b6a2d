"""What a family needs for packed sequences: the kernel that finds where they lie, before the others, and tensor maps of their tokens.

Where sequences lie only the device knows. So nothing of a launch depends on it: grids and buffers follow from how many sequences and tokens
there are, and a captured graph stays right when lengths change. The kernel `_sequences` lists the query tiles that exist, the longest
sequence last, and those behind it visit these alone. See templates/tile/common/packed_sequences.cuh.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .attention import TENSORS, l2_group_heads, reciprocal
from .devices import Device
from .modifiers import kind_of
from .operands import Call
from .parameters import Parameter, ParameterBlock
from .problem import Dtype, Problem
from .program import BlockResources, Buffer, KernelLaunch, KernelText
from .tensor_map import STRIDE_END, TensorMapShape, tensor_map_shape
from .workload import Workload

SUFFIX = "_sequences"
THREADS = 512
MAP_ROWS = 2**30  # rows of a tensor map: kMapRows in packed_sequences.cuh
MAX_TOKENS = MAP_ROWS
TILES = ("common/block_scan", "common/packed_sequences", "common/sequence_sections", "common/packed_work")
ATOMS = ("barrier", "bits", "cp_async", "popc", "shfl_sync", "vote_sync")
# Those that count queries and keys within a sequence, or know only which one it is.
MODIFIERS = ("alibi", "bias", "bias_fp32", "boolean_mask", "chunk", "dropout", "prefix_len", "sinks", "softcap", "traced", "window")
_LENGTH_CLASSES = 256  # kLengthClasses in packed_work.cuh
TOKENS_OF_A_BLOCK = 256  # of q, for each block that clears rows: there are seldom any
TILE_BYTES = 32  # PackedTile in the list; its length takes as much
_FAR = 2**31 - 2**16  # rows of the dimensions that lead to a sequence: more than any coordinate
AROUND = 2**34  # bytes: MAP_ROWS of them are all of memory

LIST = Parameter("u32*", "work_list")
BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv")
_OF_SEQUENCES = ParameterBlock(
    (
        *(Parameter("const int*", name) for name in BOUNDARIES),
        *(Parameter("u32*", name) for name in ("out", "work_list", "sequence_rows", "sequence_order")),
        Parameter("float*", "lse"),
        *(Parameter("i64", name) for name in ("out_row", "out_head")),
        *(Parameter("int", name) for name in ("batch", "heads_q", "tokens_q", "tokens_kv", "l2_group_heads", "clearing_blocks")),
    )
)
_OF_DENSE = ("len_q", "len_kv", "query_tiles", "l2_group_tiles", "l2_group_tiles_reciprocal", "tiles")


def with_packed_files(atoms: tuple[str, ...], tiles: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files of atoms and tile operations, with those of packed sequences."""
    after = tiles.index("common/sequences") + 1
    return (*atoms, *(name for name in ATOMS if name not in atoms)), (*tiles[:after], *TILES, *tiles[after:])


def packed_reasons(problem: Problem) -> list[str]:
    """Why kernels that compute packed sequences do not compute these."""
    if not problem.is_packed:
        return []
    others = [kind_of(name) for name in problem.modifiers if kind_of(name) not in MODIFIERS]
    rule = f"modifiers must be of {', '.join(MODIFIERS)} with packed sequences, as others know all queries or keys"
    return [f"{rule}; got {', '.join(others)}"] if others else []


def packed_call_reasons(call: Call, queries: int) -> list[str]:
    """Why no kernel can take a call on packed sequences; queries: of a tile, at least."""
    w, reasons = call.workload, []
    for name in ("tokens_q", "tokens_kv"):
        if (tokens := getattr(w, name)) > MAX_TOKENS:
            reasons.append(f"{name} must be at most {MAX_TOKENS} with packed sequences; got {tokens}")
    if (tiles := most_tiles(w, queries) * w.heads_q) > 2**31 - 1:
        reasons.append(f"query tiles of all heads must be at most {2**31 - 1}; got {tiles}: lower batch, tokens_q or heads_q")
    return reasons


def map_reasons(call: Call, queries: int, tensors: Collection[str] = TENSORS) -> list[str]:
    """The same, and why `packed_map` cannot describe its tensors: one without elements, or rows too far apart."""
    reasons, most = packed_call_reasons(call, queries), AROUND // call.problem.dtype.bytes
    if not call.workload.tokens_kv:
        reasons.append("tokens_kv must be at least 1 for tensor copies; got 0")
    for name in tensors:
        row, head, _ = call.views[name].strides
        for axis, stride, end in (("rows", row, most), ("heads", head, STRIDE_END // call.problem.dtype.bytes)):
            if stride >= end:
                reasons.append(f"strides of {axis} of {name} must be below {end} elements with packed sequences; got {stride}")
    return reasons


def most_tiles(workload: Workload, queries: int) -> int:
    """Query tiles of a head, each of so many queries, that there may be at most: each sequence has one that is not whole."""
    return workload.tokens_q // queries + workload.batch


def most_key_tiles(workload: Workload, keys: int) -> int:
    """The same of keys."""
    return workload.tokens_kv // keys + workload.batch


def packed_block(block: ParameterBlock, problem: Problem) -> ParameterBlock:
    """The parameters of a kernel, where sequences are packed without lengths, and with the list."""
    if not problem.is_packed:
        return block
    left = ParameterBlock(tuple(field for field in block.fields if field.name not in (*_OF_DENSE, "tile_counter")))  # the list has one
    return left.with_fields(LIST, Parameter("int", "tokens_q"))


def packed_kernels(problem: Problem) -> tuple[KernelText, ...]:
    """The kernel, before all others, if sequences are packed."""
    return (KernelText(_OF_SEQUENCES, SUFFIX, "SequencesParameters"),) if problem.is_packed else ()


def packed_resources(problem: Problem) -> dict[str, BlockResources]:
    """What its blocks take: of shared memory for sums of warps, counts of each warp and class, and a sequence of each thread."""
    warps = THREADS // 32
    return {SUFFIX: BlockResources(THREADS, warps * 4 + warps * _LENGTH_CLASSES * 4 + THREADS * 32)} if problem.is_packed else {}


def packed_context(problem: Problem, queries: int, overlap: bool) -> dict[str, object]:
    """What templates are told. overlap: whether the kernel that finds sequences overlaps with what is before and behind it."""
    lists, clears = f"list_query_tiles<{queries}>", f"clear_unused_rows<{problem.head_dim_v}>"
    told: dict[str, object] = {"sequences_threads": THREADS, "sequences_list": lists, "sequences_clear": clears}
    return {**told, "sequences_overlap": overlap, "sequences_waits": overlap}


def packed_group_heads(problem: Problem, workload: Workload, group_bytes: int) -> int:
    """Heads of an L2 group: what the longest sequence has of their K and V fits. Those of all sequences then follow each other."""
    longest = min(workload.len_kv, workload.tokens_kv)
    return l2_group_heads(problem, replace(workload, batch=1, len_kv=longest), group_bytes)


def group_values(heads: int) -> dict[str, int | float]:
    """Of an L2 group of so many heads."""
    return {"l2_group_heads": heads, "l2_group_heads_reciprocal": reciprocal(heads)}


def packed_launch(call: Call, queries: int, group_heads: int, device: Device, overlap: bool) -> tuple[KernelLaunch, tuple[Buffer, ...]]:
    """The launch of the kernel, and its memory. overlap: see `packed_context`."""
    w = call.workload
    row, head, _ = call.views["out"].strides
    clearing = max(1, min(device.sm_count - 1, w.tokens_q // TOKENS_OF_A_BLOCK))
    values: dict[str, int | float] = {"out_row": row, "out_head": head, "l2_group_heads": group_heads, "clearing_blocks": clearing}
    values |= {name: getattr(w, name) for name in ("batch", "heads_q", "tokens_q", "tokens_kv")}
    buffers = (
        Buffer(LIST.name, (most_tiles(w, queries) + 1) * TILE_BYTES),
        Buffer("sequence_rows", max(1, w.batch) * 16),
        Buffer("sequence_order", max(1, w.batch) * 4),
    )
    return KernelLaunch(1 + clearing, values, suffix=SUFFIX, overlaps=overlap), buffers


def packed_map(dtype: Dtype, width: int, heads: int, strides: tuple[int, int], box: tuple[int, int]) -> TensorMapShape:
    """The map of a packed tensor, by which copies end where a sequence does: (column, row, head, end, around).

    Row i of a sequence of `length` rows, of which the last one is before row `end` of the tensor, has the coordinates
    (MAP_ROWS - length + i, end, MAP_ROWS) among rows, ends and around: so it is outside of the map from i = length on. Its address is right
    modulo 2^64, which is all that counts: MAP_ROWS times the strides of rows and around, which add up to 2^34 bytes, are 0.

    strides: of rows and heads, in elements; box: columns and rows
    """
    row, head = (stride * dtype.bytes for stride in strides)
    return tensor_map_shape(dtype, (width, MAP_ROWS, heads, _FAR, _FAR), (row, head, row, AROUND - row), (*box, 1, 1, 1))
