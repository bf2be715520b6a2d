"""Every family computes the examples of its operation, and every oracle gives of a sample what it gives of the whole.

Families of the forward and the backward pass have tests made for them, beside which this one adds little: plain pytest has the others here.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashgen.codegen.family import Family, families
from flashgen.codegen.operation import operation_of, operations
from flashgen.codegen.problem import Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload
from flashgen.launch import cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.oracle import oracle_of
from flashgen.verification.expected import Expected
from tests.support.examples import examples
from tests.support.plan import few_of, planned

WITH_THEIR_OWN = ("forward", "backward")
EXAMPLES = [(problem, workload) for operation in operations().values() for problem, workload in operation.examples()]


def drawn(problem: Problem, workload: Workload) -> Tensors:
    return Tensors.random(problem, workload, torch.Generator().manual_seed(0))


def example_of_each_problem(family: Family) -> list[tuple[Problem, Workload, Target]]:
    """On the target of most other files, with which it then shares what is compiled, or on another one if the family is not for that."""
    of_problem = {one[0]: one for one in sorted(examples(family), key=lambda one: one[2].name == "sm_90a")}
    return list(of_problem.values())


@pytest.mark.parametrize(
    ("family", "problem", "workload", "target"),
    planned(
        [(family, *example) for family in families().values() for example in example_of_each_problem(family)],
        lambda name: 0 if families()[name].operation in WITH_THEIR_OWN else 1,
        family=lambda one: one[0].name,
        kinds=lambda one: one[1:],
        name=lambda one: f"{one[0].name}-{one[1].name}-{one[3].name}",
        seconds=lambda one: 3.0,
    ),
)
def test_a_family_computes_the_examples_of_its_operation(family: Family, problem: Problem, workload: Workload, target: Target) -> None:
    """In rows with gaps, too, and where there are none. One that is wrong on purpose does not, and the rule sees it.

    Calls of the forward and the backward pass that have no rows are answered before a family is asked.
    """
    kernel = cpu.load_emulated(KernelSpec(family, problem, family.default(problem, target), target))
    no_rows = dataclasses.replace(workload, batch=0, len_q=0)
    made = [drawn(problem, workload), drawn(problem, workload).apart()]
    if family.operation not in WITH_THEIR_OWN:
        made.append(drawn(problem, no_rows))
    for tensors in made:
        if not family.call_refusals(tensors.call()):
            expected = Expected.of(tensors)
            cpu.run_on_cpu(kernel, tensors)
            verdict = expected.judge(tensors)
            assert verdict.ok is (family.correct or tensors.workload is no_rows), verdict.message


def _rounding(dtype: torch.dtype, expected: torch.Tensor) -> float:
    """What plain PyTorch's products of other sizes, which add in another order, may change of a number that is small by cancellation."""
    if not dtype.is_floating_point or not expected.isfinite().any():
        return 0.0
    return torch.finfo(dtype).eps * float(expected[expected.isfinite()].abs().max())


@pytest.mark.parametrize(
    ("problem", "workload"), few_of(EXAMPLES, *EXAMPLES[::3]), ids=[f"{problem.name}-{workload.name}" for problem, workload in EXAMPLES]
)
def test_an_oracle_gives_of_a_sample_what_it_gives_of_the_whole(problem: Problem, workload: Workload) -> None:
    oracle, tensors, scalars = oracle_of(problem), drawn(problem, workload), operation_of(problem).scalars(problem, workload)
    sample = oracle.sample(problem, workload, 20, 1)
    for compute in (oracle.exact, oracle.plain):
        of_sample, whole = compute(problem, tensors, scalars, sample), oracle.sampled(compute(problem, tensors, scalars), sample)
        assert of_sample.keys() == whole.keys() == tensors.outputs.keys()
        for name, expected in whole.items():
            rtol, atol = (1e-9, 1e-6) if compute == oracle.exact else (1e-2, 1e-6 + _rounding(tensors[name].dtype, expected))
            torch.testing.assert_close(of_sample[name], expected, rtol=rtol, atol=atol, equal_nan=True)
    every = oracle.rows_of({name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in tensors.outputs.items()})
    assert len(set(map(tuple, every.tolist()))) == len(every) > 0
