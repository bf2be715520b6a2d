"""What a backward family needs to leave out queries that are too far from a key to count: three kernels before the others.

As in the forward pass the first one bounds products of queries and keys, here with the log-sum-exp in place of a query's own key, and the
second one finds from which key on queries have keys that count. The third one turns that round: up to which query a key tile counts. See
templates/tile/common/far_keys.cuh.
"""

from __future__ import annotations

from .attention import reciprocal
from .far_keys import (
    BOUND_BUFFERS,
    BOUNDS_SUFFIX,
    FIRST_KEYS,
    OF_FIRST_KEYS,
    OPERANDS,
    ROWS,
    SUFFIX,
    WARPS,
    bound_launches,
    far_block,
    far_resources,
    far_values,
    is_long,
    leaves_out_far_keys,
)
from .modifier import with_modifiers
from .operands import Call
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .program import BlockResources, Buffer, KernelLaunch, KernelText

LAST_SUFFIX = "_last_queries"
_LAST_QUERIES = Parameter("int*", "last_queries")
_OF_BOUNDS = far_block((*OPERANDS, Parameter("const float*", "lse"), *BOUND_BUFFERS), "parts", ("q", "k"))
_OF_LAST_QUERIES = far_block((FIRST_KEYS, _LAST_QUERIES), "key_tiles", heads="heads_kv")


def leaves_out_far_queries(problem: Problem) -> bool:
    """Whether kernels of a problem may do so. Where blocks add to dQ in one order, each waits for all before it."""
    return leaves_out_far_keys(problem) and not problem.deterministic


def far_query_kernels(problem: Problem) -> tuple[KernelText, ...]:
    """The three kernels, in their order, if there are some."""
    if not leaves_out_far_queries(problem):
        return ()
    bounds, first_keys = (with_modifiers(block, problem) for block in (_OF_BOUNDS, OF_FIRST_KEYS))
    return (
        KernelText(bounds, BOUNDS_SUFFIX, "BoundParameters"),
        KernelText(first_keys, SUFFIX, "FirstKeyParameters"),
        KernelText(_OF_LAST_QUERIES, LAST_SUFFIX, "LastQueryParameters"),
    )


def far_query_resources(problem: Problem) -> dict[str, BlockResources]:
    """What their blocks take."""
    return {**far_resources(), LAST_SUFFIX: BlockResources(WARPS * 32, 0)} if leaves_out_far_queries(problem) else {}


def with_last_queries(block: ParameterBlock, problem: Problem) -> ParameterBlock:
    """The parameters of the main kernel. Where nobody has found the last queries the pointer is null, and all count."""
    return block.with_fields(_LAST_QUERIES) if leaves_out_far_queries(problem) else block


def far_query_launch(call: Call, keys: int) -> tuple[tuple[KernelLaunch, ...], tuple[Buffer, ...]]:
    """Of a call: the launches of the kernels, and their memory; none where they do not pay. keys: of a key tile."""
    w = call.workload
    if not leaves_out_far_queries(call.problem) or not is_long(w):
        return (), ()
    bounds, first_keys, last_queries = far_query_kernels(call.problem)
    launches, buffers = bound_launches(call, bounds, first_keys, ROWS)
    key_tiles = -(-w.len_kv // keys)
    known = far_values(call) | {"key_tiles": key_tiles, "key_tiles_reciprocal": reciprocal(key_tiles)}
    known |= {"heads_kv_reciprocal": reciprocal(w.heads_kv)}
    tiles = w.batch * w.heads_kv * key_tiles
    last = KernelLaunch(-(-tiles // WARPS), last_queries.parameters.values_of(known), suffix=LAST_SUFFIX, overlaps=True)
    return (*launches, last), (*buffers, Buffer(_LAST_QUERIES.name, tiles * 4))
