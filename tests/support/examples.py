"""What a family is tested on: the examples of its operation. That there are none is a failure, never a pass."""

from __future__ import annotations

import dataclasses

from flashgen.codegen.attention import attention_call
from flashgen.codegen.family import Family, families
from flashgen.codegen.operation import find_operation, operations
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import Target, targets
from flashgen.codegen.workload import Workload


def families_of(operation: str = "forward") -> list[Family]:
    """Those that compute it: for tests whose inputs are made for that operation."""
    found = [family for family in families().values() if family.operation == operation]
    assert found, f"no family computes {operation}"
    return found


def example_problems(family: Family) -> list[Problem]:
    """The problems of its operation's examples: for tests whose own problems are attention's, with head dims and masks."""
    return list(dict.fromkeys(problem for problem, _ in find_operation(family.operation).examples()))


def is_of_attention(family: Family) -> bool:
    """Whether the family's problems have head dims and masks."""
    return find_operation(family.operation).is_attention


def examples(family: Family) -> list[tuple[Problem, Workload, Target]]:
    """Problems, each with a workload and a target; of every target on which the family can do anything."""
    of_operations = [example for operation in operations().values() for example in operation.examples()]
    found = [(p, w, target) for p, w in of_operations for target in targets().values() if not family.refusals(p, target)]
    assert found, f"{family.name} computes no example of any operation ({', '.join(operations())}): it would not be tested"
    return found


def taken(family: Family, problem: Problem, workload: Workload) -> Workload:
    """The workload, its keys halved until the family takes it (`Family.call_refusals`): for a family of short sequences."""
    while reasons := family.call_refusals(attention_call(problem, workload)):
        assert workload.len_kv > 1, f"{family.name} takes no length: {'; '.join(reasons)}"
        workload = dataclasses.replace(workload, len_kv=workload.len_kv // 2)
    return workload
