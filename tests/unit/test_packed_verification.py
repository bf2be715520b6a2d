"""What verification puts to kernels of packed sequences, by kernels that are made up: each is plain attention with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.launch.tensors import Tensors
from flashgen.numerics.oracle import oracle_of
from flashgen.numerics.sequences import sequences_of
from flashgen.verification import cases, screen
from flashgen.verification.screen import Screen, verify_kernel

PROBLEMS = {mask: Problem(Dtype.BF16, 16, 24, mask, sequences=Sequences.PACKED) for mask in Mask}
Given = dict[str, Tensor]
Fault = Callable[[Given], Given]


def right(tensors: Given) -> Given:
    return tensors


def the_tail_is_seen(tensors: Given) -> Given:
    """Keys that are not used any more."""
    return {name: tensor for name, tensor in tensors.items() if name != "seqused_kv"}


def queries_past_the_end(tensors: Given) -> Given:
    return {name: tensor for name, tensor in tensors.items() if name != "seqused_q"}


def a_key_of_the_next_sequence(tensors: Given) -> Given:
    ends = tensors["cu_seqlens_kv"].clone()
    ends[1:-1] += 1
    return {**tensors, "cu_seqlens_kv": ends}


def ends_of_queries_for_keys(tensors: Given) -> Given:
    return {**tensors, "cu_seqlens_kv": tensors["cu_seqlens_q"]}


FAULTS = (the_tail_is_seen, queries_past_the_end, a_key_of_the_next_sequence, ends_of_queries_for_keys)


def tokens_outside_as_they_were(problem: Problem, tensors: Tensors) -> None:
    launched(problem, tensors, right)
    outside = torch.ones(len(tensors["q"]), dtype=torch.bool)
    for one in sequences_of(tensors):
        outside[one.queries] = False
    tensors["out"][outside] = torch.nan


def launched(problem: Problem, tensors: Tensors, fault: Fault) -> None:
    tensors.poison()
    found = oracle_of(problem).plain(problem, fault(dict(tensors)), tensors.call().scalars)
    for name, tensor in tensors.outputs.items():
        tensor.copy_(found[name])


@pytest.fixture
def made_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Problem, Callable[[Problem, Tensors], None]], Any]:
    """A kernel on the CPU that does what a function does."""
    family = SimpleNamespace(name="made", group_unit=lambda config: 1, call_refusals=lambda call, config: [])

    def made(problem: Problem, launch: Callable[[Problem, Tensors], None]) -> Any:
        return SimpleNamespace(spec=SimpleNamespace(family=family, problem=problem, config=None), launch=launch)

    monkeypatch.setattr(screen, "run_on_cpu", lambda kernel, tensors, **_: kernel.launch(kernel.spec.problem, tensors))
    return made


def of_fault(fault: Fault) -> Callable[[Problem, Tensors], None]:
    return lambda problem, tensors: launched(problem, tensors, fault)


@pytest.mark.parametrize("mask", Mask)
def test_all_cases_are_run_packed(made_of: Callable[..., Any], mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    some = tuple(shape for shape in cases.SHAPES if shape[3] * shape[4] < 40000)
    monkeypatch.setattr(cases, "SHAPES", some)
    results = verify_kernel(made_of(PROBLEMS[mask], of_fault(right)))
    assert [result.verdict.message for result in results if not result.verdict.ok] == []
    assert len(results) == 2 * len(some) + 4
    for result in results:
        w = result.workload
        assert w.tokens_q or w.tokens_kv
    assert {result.workload.batch for result in results[:4]} == {some[0][0] + 2, some[1][0] + 2}


@pytest.mark.parametrize("mask", Mask)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_candidate_with_a_fault_does_not_pass_the_screen(made_of: Callable[..., Any], fault: Fault, mask: Mask) -> None:
    """The two small workloads that each candidate of a tune must pass are enough."""
    judged = Screen(PROBLEMS[mask], "cpu")
    assert all(result.verdict.ok for result in judged.judge(made_of(PROBLEMS[mask], of_fault(right))))
    assert not all(result.verdict.ok for result in judged.judge(made_of(PROBLEMS[mask], of_fault(fault))))


def test_tokens_outside_are_looked_at(made_of: Callable[..., Any]) -> None:
    results = Screen(PROBLEMS[Mask.FULL], "cpu").judge(made_of(PROBLEMS[Mask.FULL], tokens_outside_as_they_were))
    assert "out is NaN" in results[0].verdict.message


@pytest.mark.parametrize("mask", Mask)
def test_enough_rows_see_keys(mask: Mask) -> None:
    """A root mean square over a handful of rows is a coin flip."""
    shapes = [shape for shape in cases.SHAPES if 0 < shape[3] * shape[4] < 10000]
    judged = Screen(PROBLEMS[mask], "cpu", shapes)
    seeing = [int(case.expected[0].exact["lse"].isfinite().sum()) for case in judged.cases(group_unit=1)]
    assert min(seeing) >= 100, dict(zip(shapes, seeing, strict=True))


@pytest.mark.parametrize("sequences", [Sequences.DENSE, Sequences.PACKED])
def test_what_follows_from_inputs_is_that_of_those_that_are_there(sequences: Sequences) -> None:
    """In the backward pass out and lse, which change with the used lengths that every other case leaves out."""
    problem = Problem(Dtype.BF16, 16, 24, Mask.CAUSAL, "backward", sequences=sequences)
    for case in Screen(problem, "cpu", cases.SCREENING, magnitudes=(1.0, 4.0)).cases(1):
        given = {name: case.tensors[name].clone() for name in ("out", "lse")}
        case.tensors.derive()
        for name, tensor in given.items():
            assert torch.equal(tensor, case.tensors[name]), (case.workload, case.magnitude, name)
