"""What the kernels of the Hopper backward families are given: the fields of their `Parameters` structs."""

from __future__ import annotations

from flashgen.codegen.far_queries import with_last_queries
from flashgen.codegen.key_order import with_key_order
from flashgen.codegen.modifier import reads_scores, with_modifiers
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Problem
from flashgen.codegen.score_tensors import OF_BATCHES
from flashgen.codegen.seen_tiles import with_seen_tiles
from flashgen.codegen.semaphores import with_semaphores

_TILES = tuple(Parameter("u64", f"{n}_reciprocal") for n in ("query_tiles", "heads_q"))
_SIZES = tuple(Parameter("int", n) for n in ("heads_q", "len_q", "len_kv", "query_tiles"))


def _strides(*tensors: str) -> tuple[Parameter, ...]:
    return tuple(Parameter("i64", f"{tensor}_{dim}") for tensor in tensors for dim in ("batch", "head", "row"))


PARAMETERS = ParameterBlock(
    (
        *(Parameter("TensorMap", f"{tensor}_map") for tensor in ("q", "k", "v", "d_out", "d_k", "d_v")),
        *(Parameter("const float*", n) for n in ("row_lse", "row_delta", "row_shift")),
        Parameter("float*", "d_q_sum"),
        *(Parameter("u64", f"{n}_reciprocal") for n in ("heads_kv", "l2_group_heads", "l2_group_tiles")),
        *_SIZES,
        *(Parameter("int", n) for n in ("heads_kv", "group", "key_tiles", "l2_group_heads", "l2_group_tiles")),
        *(Parameter("float", n) for n in ("scale_log2", "scale")),
    )
)
ROW_PARAMETERS = ParameterBlock(
    (
        *(Parameter("const Element*", n) for n in ("q", "k", "v", "out", "d_out")),
        *(Parameter("const float*", n) for n in ("lse", "d_lse")),
        *(Parameter("float*", n) for n in ("row_lse", "row_delta", "row_shift", "d_q_sum")),
        *_strides("q", "k", "v", "out", "d_out"),
        *_TILES,
        Parameter("u64", "group_reciprocal"),
        *_SIZES,
        Parameter("float", "scale_log2"),
    )
)
SUM_PARAMETERS = ParameterBlock(
    (
        Parameter("TensorMap", "d_q_map"),
        Parameter("float*", "d_q_sum"),
        *_TILES,
        *_SIZES,
        Parameter("float", "scale"),
    )
)


def main_parameters(block: ParameterBlock, problem: Problem) -> ParameterBlock:
    """Of the kernel that computes dK, dV and the sums of dQ, with those of a problem's modifiers."""
    block = with_last_queries(block, problem)
    block = with_seen_tiles(block.with_fields(*OF_BATCHES) if reads_scores(problem) and not problem.is_packed else block, problem)
    return with_modifiers(with_semaphores(with_key_order(block, problem, main=True), problem), problem)
