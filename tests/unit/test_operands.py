"""Operands, calls and operations: what a call must say of the tensors of its operation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flashgen.codegen.attention import attention_call
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.operation import find_operation, operation_of, operations
from flashgen.codegen.problem import Dtype, Problem, Sequences
from flashgen.codegen.workload import Workload

PROBLEM, WORKLOAD = Problem(Dtype.BF16, 64, 32), Workload(2, 6, 3, 5, 7)
SCALE = {"scale": 0.125}
FORWARD = find_operation("forward")


def test_operations_are_found_by_name() -> None:
    assert all(find_operation(name) is operation and operation.name == name for name, operation in operations().items())
    assert operation_of(PROBLEM) is FORWARD
    with pytest.raises(ArgumentError, match=r"^operation must be one of .*forward.*; got 'sideways'$"):
        find_operation("sideways")


@pytest.mark.parametrize("operation", operations().values(), ids=operations())
def test_an_operation_has_operands_of_their_own_names_and_examples(operation: Any) -> None:
    assert operation.examples()
    for problem, workload in operation.examples():
        names = [operand.name for operand in operation.operands(problem)]
        assert len(set(names)) == len(names)
        assert operation_of(problem) is operation
        call = operation.call(problem, workload, {}, dict.fromkeys(operation.scalars(problem, workload), 1.0))
        assert list(call.views) == names


def test_a_call_has_a_view_of_each_operand() -> None:
    call = FORWARD.call(PROBLEM, WORKLOAD, {"v": (9999, 999, 99, 1)}, SCALE)
    assert {name: view.sizes for name, view in call.views.items()} == {
        "q": (2, 5, 6, 64),
        "k": (2, 7, 3, 64),
        "v": (2, 7, 3, 32),
        "out": (2, 5, 6, 32),
        "lse": (2, 6, 5),
    }
    assert call.views["q"].strides == (5 * 6 * 64, 6 * 64, 64, 1)
    assert call.views["lse"].strides == (6 * 5, 5, 1)
    assert call.views["v"].strides == (9999, 999, 99, 1)


def test_packed_sequences_have_an_axis_of_tokens() -> None:
    problem = dataclasses.replace(PROBLEM, sequences=Sequences.PACKED)
    call = FORWARD.call(problem, dataclasses.replace(WORKLOAD, tokens_q=50, tokens_kv=70), {"v": (999, 99, 1)}, SCALE)
    assert {name: view.sizes for name, view in call.views.items()} == {
        "q": (50, 6, 64),
        "k": (70, 3, 64),
        "v": (70, 3, 32),
        "out": (50, 6, 32),
        "lse": (6, 50),
        "cu_seqlens_q": (3,),
        "cu_seqlens_kv": (3,),
        "seqused_q": (2,),
        "seqused_kv": (2,),
    }
    assert call.views["v"].strides == (999, 99, 1)
    strided = [operand.name for operand in FORWARD.operands(problem) if operand.is_strided]
    assert strided == ["q", "k", "v", "out"]


def test_a_call_of_attention_is_dense_and_has_the_usual_scale_where_nothing_else_is_said() -> None:
    strides = {name: (1000 * i, 100 * i, 10 * i, 1) for i, name in enumerate(("q", "k", "v", "out"), 1)}
    given = attention_call(PROBLEM, WORKLOAD, strides, 0.5)
    assert {name: given.views[name].strides for name in strides} == strides
    assert given.scalars == {"scale": 0.5}
    plain = attention_call(PROBLEM, WORKLOAD)
    assert plain == FORWARD.call(PROBLEM, WORKLOAD, {}, SCALE)
    expected = {"q": (5 * 6 * 64, 6 * 64, 64, 1), "k": (7 * 3 * 64, 3 * 64, 64, 1), "v": (7 * 3 * 32, 3 * 32, 32, 1)}
    assert {name: plain.views[name].strides for name in expected} == expected


@pytest.mark.parametrize(
    ("strides", "scalars", "message"),
    [
        ({"bias": (1,)}, SCALE, r"^strides must be of q, k, v, out, lse; got bias$"),
        ({"k": (1, 1, 1)}, SCALE, r"^strides of k must be 4, one for each axis; got \(1, 1, 1\)$"),
        ({"lse": (1, 1, 1, 1)}, SCALE, r"^strides of lse must be 3, one for each axis; got \(1, 1, 1, 1\)$"),
        ({}, {"scale": 1.0, "softcap": 2.0}, r"^scalars must be of scale; got scale, softcap$"),
    ],
)
def test_a_call_that_is_not_of_its_operation_is_refused(strides: dict[str, Any], scalars: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FORWARD.call(PROBLEM, WORKLOAD, strides, scalars)


def test_scalars_are_as_usual_where_nobody_says_otherwise() -> None:
    assert FORWARD.call(PROBLEM, WORKLOAD).scalars == {"scale": PROBLEM.head_dim**-0.5}
    assert FORWARD.call(PROBLEM, WORKLOAD, scalars={"scale": 0.5}).scalars == {"scale": 0.5}
