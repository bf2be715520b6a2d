"""What the generic backward kernels are given: the fields of their `Parameters` structs."""

from __future__ import annotations

from flashgen.codegen.parameters import Parameter, ParameterBlock


def _strides(*tensors: str) -> tuple[Parameter, ...]:
    return tuple(Parameter("i64", f"{tensor}_{dim}") for tensor in tensors for dim in ("batch", "head", "row"))


def _named(c_type: str, *names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(c_type, name) for name in names)


ROW_PARAMETERS = ParameterBlock(
    (
        *_named("const Element*", "q", "k", "v", "out", "d_out"),
        *_named("const float*", "lse", "d_lse"),
        *_named("float*", "row_lse", "row_delta", "row_shift", "d_q_sum"),
        *_named("int*", "huge_tiles"),
        *_strides("q", "k", "v", "out", "d_out"),
        *_named("u64", "heads_q_reciprocal", "group_reciprocal", "query_tiles_reciprocal"),
        *_named("int", "heads_q", "len_q", "len_kv", "query_tiles"),
        *_named("float", "scale_log2"),
    )
)
PARAMETERS = ParameterBlock(
    (
        *_named("const Element*", "q", "k", "v", "d_out"),
        *_named("const float*", "row_lse", "row_delta", "row_shift"),
        *_named("const int*", "huge_tiles"),
        *_named("float*", "d_q_sum"),
        *_named("Element*", "d_k", "d_v"),
        *_strides("q", "k", "v", "d_out", "d_k", "d_v"),
        *_named("u64", "heads_kv_reciprocal", "l2_group_heads_reciprocal", "l2_group_tiles_reciprocal"),
        *_named("int", "heads_q", "heads_kv", "group", "len_q", "len_kv", "query_tiles", "key_tiles", "l2_group_heads", "l2_group_tiles"),
        *_named("float", "scale", "scale_log2"),
    )
)
SUM_PARAMETERS = ParameterBlock(
    (
        *_named("const float*", "d_q_sum"),
        *_named("Element*", "d_q"),
        *_strides("d_q"),
        *_named("u64", "heads_q_reciprocal", "query_tiles_reciprocal"),
        *_named("int", "heads_q", "len_q", "len_kv", "query_tiles"),
        *_named("float", "scale"),
    )
)
