"""What a forward family needs to leave out keys that are too far from a query to count: two kernels before the others, which find them.

Scores with ALiBi fall with the distance to a key by themselves. The first kernel bounds products of queries and keys, the second one finds
by them from which key on a work tile has keys that count. See templates/tile/common/far_keys.cuh; the backward pass: far_queries.py.
"""

from __future__ import annotations

from .attention import reciprocal, scale_values
from .linear_terms import has_linear_terms
from .modifier import modifier_values, score_unit, with_modifiers
from .operands import Call
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import BlockResources, Buffer, KernelLaunch, KernelText
from .workload import Workload

BOUNDS_SUFFIX, SUFFIX = "_bounds", "_first_keys"
ROWS, WARPS = 64, 8  # kFarRows and kFarWarps
FEWEST_KEYS = 1536  # reading q and k once more takes more of shorter calls than it brings: docs/performance-log.md, "Modifiers"
_ATOMS, _TILES = ("bits", "griddepcontrol"), ("common/row_statistics", "common/far_keys")
BOUND_BUFFERS = tuple(Parameter("u32*", name) for name in ("query_bounds", "key_bounds"))
FIRST_KEYS = Parameter("int*", "first_keys")
_SIZES = ("batch", "heads_q", "heads_kv", "len_q", "len_kv", "query_bounds_of_head", "key_bounds_of_head")


def far_block(pointers: tuple[Parameter, ...], parts: str, strides: tuple[str, ...] = (), heads: str = "heads_q") -> ParameterBlock:
    """Parameters of a kernel. parts: what each of `heads` is divided into, a warp for each."""
    return ParameterBlock(
        (
            *pointers,
            *(Parameter("i64", f"{tensor}_{dim}") for tensor in strides for dim in ("batch", "head", "row")),
            *(Parameter("u64", f"{name}_reciprocal") for name in (heads, "group", parts)),
            *(*(Parameter("int", name) for name in (*_SIZES, parts)), Parameter("float", "scale_log2")),
        )
    )


OPERANDS = tuple(Parameter("const Element*", name) for name in ("q", "k"))
_OF_BOUNDS = far_block((*OPERANDS, *BOUND_BUFFERS), "parts", ("q", "k"))
OF_FIRST_KEYS = far_block((FIRST_KEYS, *BOUND_BUFFERS), "query_tiles")


def leaves_out_far_keys(problem: Problem, pack_gqa: int = 1) -> bool:
    """Whether kernels of a problem may do so. pack_gqa: query heads that share a work tile, of which each has its own slope."""
    return bool(problem.modifiers) and pack_gqa == 1 and has_linear_terms(problem) and not (problem.is_packed or problem.is_cached)


def is_long(w: Workload) -> bool:
    """Whether a call has enough queries and keys for some to be left out."""
    return w.len_kv >= FEWEST_KEYS and w.len_q >= FEWEST_KEYS


def with_far_files(files: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A family's files of atoms and tile operations, forward or backward, with those of far keys that it lacks."""
    atoms, tiles = files
    return tuple(dict.fromkeys((*atoms, *_ATOMS))), tuple(dict.fromkeys((*tiles, *_TILES)))


def far_kernels(problem: Problem) -> tuple[KernelText, ...]:
    """The two kernels, in their order."""
    each = ((_OF_BOUNDS, BOUNDS_SUFFIX, "BoundParameters"), (OF_FIRST_KEYS, SUFFIX, "FirstKeyParameters"))
    return tuple(KernelText(with_modifiers(block, problem), suffix, struct) for block, suffix, struct in each)


def far_resources() -> dict[str, BlockResources]:
    """What their blocks take."""
    return dict.fromkeys((BOUNDS_SUFFIX, SUFFIX), BlockResources(WARPS * 32, 0))


def with_first_keys(block: ParameterBlock) -> ParameterBlock:
    """The parameters of the kernel that visits the keys that count. Where nobody has found these the pointer is null, and all count."""
    return block.with_fields(FIRST_KEYS)


def far_launch(call: Call, queries: int) -> tuple[tuple[KernelLaunch, ...], tuple[Buffer, ...]]:
    """Of a call: the launches of both kernels, and their memory; none where they do not pay. queries: of a work tile."""
    if not is_long(call.workload):
        return (), ()
    bounds, first_keys = far_kernels(call.problem)
    return bound_launches(call, bounds, first_keys, queries)


def bound_launches(
    call: Call, bounds: KernelText, first_keys: KernelText, queries: int
) -> tuple[tuple[KernelLaunch, ...], tuple[Buffer, ...]]:
    """The launches of two kernels that bound rows and find the first keys of each `queries` of them, and their memory."""
    w = call.workload
    heads, query_tiles, parts = w.batch * w.heads_q, -(-w.len_q // queries), -(-max(w.len_q, w.len_kv) // ROWS)
    known = far_values(call) | {"parts": parts, "parts_reciprocal": reciprocal(parts)}
    known |= {"query_tiles": query_tiles, "query_tiles_reciprocal": reciprocal(query_tiles)}
    return (
        (
            KernelLaunch(-(-heads * parts // WARPS), bounds.parameters.values_of(known), suffix=BOUNDS_SUFFIX),
            KernelLaunch(-(-heads * query_tiles // WARPS), first_keys.parameters.values_of(known), suffix=SUFFIX, overlaps=True),
        ),
        (
            Buffer("query_bounds", heads * bounds_of(w.len_q) * 8),
            Buffer("key_bounds", w.batch * w.heads_kv * bounds_of(w.len_kv) * 4),
            Buffer(FIRST_KEYS.name, heads * query_tiles * 4),
        ),
    )


def bounds_of(length: int) -> int:
    """Into how many parts, each with a bound, so many queries or keys of a head are divided."""
    return -(-length // ROWS)


def far_values(call: Call) -> dict[str, int | float]:
    """What the kernels are told of a call, but for what each of them divides heads into."""
    w = call.workload
    found: dict[str, int | float] = {name: getattr(w, name) for name in ("batch", "heads_q", "heads_kv", "len_q", "len_kv")}
    for name in ("q", "k"):
        strides = call.views[name].strides
        found |= {f"{name}_batch": strides[0], f"{name}_row": strides[1], f"{name}_head": strides[2]}
    found |= {"query_bounds_of_head": bounds_of(w.len_q), "key_bounds_of_head": bounds_of(w.len_kv)}
    found |= {"heads_q_reciprocal": reciprocal(w.heads_q), "group_reciprocal": reciprocal(w.heads_q // w.heads_kv)}
    return found | {"scale_log2": scale_values(score_unit(call))["scale_log2"], **modifier_values(call)}
