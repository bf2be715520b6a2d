"""What a family is tested on: the examples of its operation. That there are none is a failure, never a pass."""

from __future__ import annotations

import dataclasses

from flashgen.codegen.attention import attention_call
from flashgen.codegen.family import Family, families
from flashgen.codegen.operation import operations
from flashgen.codegen.problem import Problem
from flashgen.codegen.target import Target, targets
from flashgen.codegen.workload import Workload


def families_of(operation: str = "forward") -> list[Family]:
    """Those that compute it: for tests whose inputs are made for that operation."""
    found = [family for family in families().values() if family.operation == operation]
    assert found, f"no family computes {operation}"
    return found


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
