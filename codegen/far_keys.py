"""What a forward family needs to leave out keys that are too far from a query to count: two kernels before the others, which find them.

Scores with ALiBi fall with the distance to a key by themselves. The first kernel bounds products of queries and keys, the second one finds
by them from which key on a work tile has keys that count. See templates/tile/common/far_keys.cuh.
"""

from __future__ import annotations

from .attention import reciprocal, scale_values
from .linear_terms import has_linear_terms
from .modifier import modifier_values, score_unit, with_modifiers
from .operands import Call
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import BlockResources, Buffer, KernelLaunch, KernelText

BOUNDS_SUFFIX, SUFFIX = "_bounds", "_first_keys"
ROWS, WARPS = 64, 8  # kFarRows and kFarWarps
FEWEST_KEYS = (
    2048  # reading q and k once more takes a larger part of shorter calls than leaving out keys can bring: docs/performance-log.md
)
ATOMS = ("bits", "griddepcontrol")
_TILE_FILES = ("common/row_statistics", "common/far_keys")
_FIRST_KEYS = Parameter("int*", "first_keys")
_SIZES = ("batch", "heads_q", "heads_kv", "len_q", "len_kv", "query_bounds_of_head", "key_bounds_of_head")


def _block(pointers: tuple[Parameter, ...], parts: str, strides: tuple[str, ...] = ()) -> ParameterBlock:
    """parts: what a head's rows are divided into, a warp for each."""
    return ParameterBlock(
        (
            *(*pointers, *(Parameter("u32*", name) for name in ("query_bounds", "key_bounds"))),
            *(Parameter("i64", f"{tensor}_{dim}") for tensor in strides for dim in ("batch", "head", "row")),
            *(Parameter("u64", f"{name}_reciprocal") for name in ("heads_q", "group", parts)),
            *(*(Parameter("int", name) for name in (*_SIZES, parts)), Parameter("float", "scale_log2")),
        )
    )


_OF_BOUNDS = _block(tuple(Parameter("const Element*", name) for name in ("q", "k")), "parts", ("q", "k"))
_OF_FIRST_KEYS = _block((_FIRST_KEYS,), "query_tiles")


def leaves_out_far_keys(problem: Problem, pack_gqa: int = 1) -> bool:
    """Whether kernels of a problem may do so. pack_gqa: query heads that share a work tile, of which each has its own slope."""
    return bool(problem.modifiers) and pack_gqa == 1 and has_linear_terms(problem) and not (problem.is_packed or problem.is_cached)


def with_far_keys(tiles: tuple[str, ...]) -> tuple[str, ...]:
    """Files of tile operations, with those of far keys."""
    return (*tiles, *_TILE_FILES)


def far_kernels(problem: Problem) -> tuple[KernelText, ...]:
    """The two kernels, in their order."""
    each = ((_OF_BOUNDS, BOUNDS_SUFFIX, "BoundParameters"), (_OF_FIRST_KEYS, SUFFIX, "FirstKeyParameters"))
    return tuple(KernelText(with_modifiers(block, problem), suffix, struct) for block, suffix, struct in each)


def far_resources() -> dict[str, BlockResources]:
    """What their blocks take."""
    return dict.fromkeys((BOUNDS_SUFFIX, SUFFIX), BlockResources(WARPS * 32, 0))


def with_first_keys(block: ParameterBlock) -> ParameterBlock:
    """The parameters of the kernel that visits the keys that count. Where nobody has found these the pointer is null, and all count."""
    return block.with_fields(_FIRST_KEYS)


def far_launch(call: Call, queries: int) -> tuple[tuple[KernelLaunch, ...], tuple[Buffer, ...]]:
    """Of a call: the launches of both kernels, and their memory; none where they do not pay. queries: of a work tile."""
    w = call.workload
    if w.len_kv < FEWEST_KEYS or w.len_q < FEWEST_KEYS:
        return (), ()
    heads, query_tiles = w.batch * w.heads_q, -(-w.len_q // queries)
    query_bounds, key_bounds = -(-w.len_q // ROWS), -(-w.len_kv // ROWS)
    parts = max(query_bounds, key_bounds)
    known: dict[str, int | float] = {
        **{
            f"{tensor}_{dim}": call.views[tensor].strides[axis]
            for tensor in ("q", "k")
            for axis, dim in enumerate(("batch", "row", "head"))
        },
        **{f"{name}_reciprocal": reciprocal(number) for name, number in (("parts", parts), ("query_tiles", query_tiles))},
        **{"heads_q_reciprocal": reciprocal(w.heads_q), "group_reciprocal": reciprocal(w.heads_q // w.heads_kv)},
        **{name: getattr(w, name) for name in ("batch", "heads_q", "heads_kv", "len_q", "len_kv")},
        **{"query_bounds_of_head": query_bounds, "key_bounds_of_head": key_bounds, "parts": parts, "query_tiles": query_tiles},
        **{"scale_log2": scale_values(score_unit(call))["scale_log2"], **modifier_values(call)},
    }
    bounds, first_keys = far_kernels(call.problem)
    return (
        (
            KernelLaunch(-(-heads * parts // WARPS), _values_of(bounds, known), suffix=BOUNDS_SUFFIX),
            KernelLaunch(-(-heads * query_tiles // WARPS), _values_of(first_keys, known), suffix=SUFFIX, overlaps=True),
        ),
        (
            Buffer("query_bounds", heads * query_bounds * 8),
            Buffer("key_bounds", w.batch * w.heads_kv * key_bounds * 4),
            Buffer(_FIRST_KEYS.name, heads * query_tiles * 4),
        ),
    )


def _values_of(kernel: KernelText, known: dict[str, int | float]) -> dict[str, int | float]:
    return {field.name: known[field.name] for field in kernel.parameters.values}
