"""The plan by which a run takes a part of each matrix: it spreads, it repeats itself, and no family is without cases."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen.family import families
from tests.compile import test_compile
from tests.emulator import test_faults, test_faults_sm90, test_huge, test_kernels, test_layouts, test_standard_faults, test_verification
from tests.support.caught import TARGET
from tests.support.examples import families_of
from tests.support.faults import FAULTS
from tests.support.plan import Costly, budgets, planned, sample, within
from tests.unit import test_faults_apply

CASES = list(itertools.product("abcdefgh", range(5), (False, True)))
CI = Path(__file__).parents[2] / ".ci/run"
# Tests whose parameters are planned: those of every family of attention's forward pass, and those of families that have faults or chosen
# configs of their own.
OF_EVERY_FAMILY: tuple[Any, ...] = (  # made for forward: other operations have tests of their own
    test_kernels.test_right_in_every_order,
    test_layouts.test_a_layout_gives_what_dense_tensors_give,
    test_verification.test_a_stride_taken_for_another_is_seen,
)
OF_FAULTS: tuple[Any, ...] = (
    test_faults.test_a_race_is_caught_by_the_check_for_it,
    test_faults.test_caught,
    test_faults.test_caught_by_its_check,
    test_faults_sm90.test_caught_by_its_check,
    test_standard_faults.test_caught,
    test_standard_faults.test_a_race_is_caught_by_the_check_for_it,
    test_verification.test_sums_without_compensation_are_seen,
    test_verification.test_what_ordinary_cases_hide_is_seen,
    test_verification.test_a_key_at_the_edge_of_a_step_is_seen,
)
OTHERS: tuple[Any, ...] = (
    test_faults_apply.test_compile,
    test_kernels.test_chosen_configs,
    test_huge.test_huge_logits,
    test_compile.test_all_defaults_are_free_of_defects,
    test_compile.test_legal_configs_compile,
)


def parameters(test: Any) -> list[Any]:
    """Of a test, with their marks."""
    return [parameter for mark in test.pytestmark if mark.name == "parametrize" for parameter in mark.args[1]]


def is_slow(parameter: Any) -> bool:
    return any(mark.name == "slow" for mark in parameter.marks)


def costly(test: Any, parameter: Any) -> Costly:
    (mark,) = (mark for mark in parameter.marks if mark.name == "of_family")
    return Costly(f"{test.__module__}.{test.__name__}[{parameter.id}]", *mark.args)


def test_a_sample_spreads_and_repeats_itself() -> None:
    some = sample(CASES, 16, "seed", enumerate)
    assert some == sample(CASES, 16, "seed", enumerate) != sample(CASES, 16, "another seed", enumerate)
    assert some == sorted(some, key=CASES.index), "in their order"
    for place, least in ((0, 2), (1, 3), (2, 8)):
        counts = Counter(case[place] for case in some)
        assert len(counts) == len({case[place] for case in CASES})
        assert min(counts.values()) >= least, counts
    assert sample(CASES, 1000, "seed", enumerate) == CASES
    assert sample([], 3, "seed", enumerate) == []


def test_each_family_has_so_many_cases_in_every_run_and_all_in_a_slow_one() -> None:
    found: list[Any] = planned(CASES, 2, lambda c: c[0], enumerate, lambda c: f"{c}", lambda c: float(c[1]))
    assert [parameter.values for parameter in found] == CASES
    assert Counter(parameter.values[0] for parameter in found if not is_slow(parameter)) == dict.fromkeys("abcdefgh", 2)


def test_a_budget_is_for_faults_first_and_then_for_some_of_all_else() -> None:
    tests = [
        Costly(f"{family}{at}", family, seconds, at % 4 == 0) for family in "ab" for at, seconds in enumerate([5.0, 9.0, 1.0, 2.0] * 4)
    ]
    taken = within([*tests, Costly("of none", None, 1000.0, False)], budgets("23,b=30"))
    assert "of none" in taken
    for family, budget in (("a", 23.0), ("b", 30.0)):
        mine = [test for test in tests if test.family == family and test.name in taken]
        assert {test.name for test in mine} >= {f"{family}{at}" for at in (0, 4, 8, 12)}
        assert budget - 2.0 < sum(test.seconds for test in mine) <= budget
    assert within(tests, budgets("0")) == set()
    with pytest.raises(ValueError, match="soon"):
        budgets("soon")["a"]


def in_ci() -> dict[str, float]:
    """Seconds by family that CI has for slow tests."""
    (option,) = re.findall(r"--slow-rest (\S+)", CI.read_text(encoding="utf-8"))
    return budgets(option)


@pytest.mark.parametrize("test", [*OF_EVERY_FAMILY, *OF_FAULTS, *OTHERS], ids=lambda test: f"{test.__module__}.{test.__name__}")
def test_whatever_is_planned_says_what_it_costs_its_family(test: Any) -> None:
    for parameter in parameters(test):
        if is_slow(parameter):
            planned_test = costly(test, parameter)
            assert planned_test.family in families()
            assert 0 < planned_test.seconds <= in_ci()[planned_test.family], "one that exceeds the budget of its family never runs in CI"


@pytest.mark.parametrize("test", OF_EVERY_FAMILY, ids=lambda test: f"{test.__module__}.{test.__name__}")
def test_no_family_is_without_cases(test: Any) -> None:
    with_cases = {parameter.values[0].name for parameter in parameters(test) if not is_slow(parameter)}
    assert with_cases == {family.name for family in families_of()}


def test_no_family_s_faults_are_left_to_slow_runs_alone() -> None:
    """Each has some in the emulator in every run. With --slow each fault is planted there, and compiled for a GPU."""
    faults = {fault.name: fault.setting.spec(TARGET).family.name for fault in FAULTS}
    emulated = [parameter for test in OF_FAULTS[:6] for parameter in parameters(test)]
    assert {faults[p.id] for p in emulated if p.id in faults and not is_slow(p)} == set(faults.values())
    assert {p.id for p in emulated} >= faults.keys()
    compiled = [fault.name for p in parameters(test_faults_apply.test_compile) for fault in p.values[0]]
    assert sorted(compiled) == sorted(faults)


def test_ci_has_time_for_every_forward_fault() -> None:
    """And some for the rest."""
    left = in_ci()
    tests = [costly(test, p) for test in OF_FAULTS for p in parameters(test) if is_slow(p)]
    taken = within(tests, left)
    assert [test.name for test in tests if test.name not in taken] == []
    assert min(left[name] for name in ("attention_forward", "attention_forward_sm90")) > 20
    assert in_ci()["a new one"] == 45
