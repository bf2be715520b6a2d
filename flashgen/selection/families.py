"""Which families can compute a problem or take a call, and the config of one for where nothing is known."""

from __future__ import annotations

from functools import lru_cache

from flashgen.codegen.config import Config
from flashgen.codegen.errors import ArgumentError, IllegalConfigError, choice_error
from flashgen.codegen.family import Family, automatic_families, families, find_family
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

NO_FAMILY: frozenset[str] = frozenset()


def families_for(problem: Problem, target: Target, name: str | None = None) -> list[Family]:
    """The automatic families that can compute `problem` on `target`, those preferred first; or the one of that name.

    Raises ArgumentError with the reasons of every family of its operation if none can.
    """
    asked = (find_family(name),) if name is not None else automatic_families(problem)
    return list(_able(asked, problem, target))


def excluded_families(call: Call, target: Target) -> frozenset[str]:
    """Names of the families that can compute the call's problem on `target`, but not with its sizes and strides.

    Raises ArgumentError with every family's reasons if that leaves none.
    """
    refusals = {family: family.call_refusals(call) for family in families_for(call.problem, target)}
    if not any(refusals.values()):
        return NO_FAMILY
    able = _without_reasons(refusals)
    return frozenset(family.name for family in refusals if family not in able)


@lru_cache(maxsize=2**10)
def _able(asked: tuple[Family, ...], problem: Problem, target: Target) -> tuple[Family, ...]:
    """As `families_for`; kept, because each call of a new length asks."""
    able = _without_reasons({family: _reasons(family, problem, target) for family in asked})
    return tuple(sorted(able, key=lambda family: (-family.preference, family.name)))


def _reasons(family: Family, problem: Problem, target: Target) -> list[str]:
    """Why a family cannot compute a problem: it refuses it, or what modifiers need leaves it no config."""
    reasons = family.refusals(problem, target)
    if problem.modifiers and not reasons:
        try:
            family.default(problem, target)
        except IllegalConfigError as error:
            return [f"{family.name} has no config for modifiers {', '.join(problem.modifiers)}: {error.reasons[0]}"]
    return reasons


def _without_reasons(refusals: dict[Family, list[str]]) -> list[Family]:
    """The families that refuse for no reason. Raises ArgumentError with all reasons if all refuse."""
    able = [family for family, reasons in refusals.items() if not reasons]
    if not able:
        raise ArgumentError("; ".join(dict.fromkeys(reason for reasons in refusals.values() for reason in reasons)))
    return able


def families_not_asked(asked: str | None = None) -> frozenset[str]:
    """Names of the families that do not count: all others where one is asked for by name, else those that are not automatic."""
    if asked is not None:
        return frozenset(families()) - {asked}
    return frozenset(family.name for family in families().values() if not family.automatic)


def family_of(config: Config) -> Family:
    """The family that a config belongs to. Raises ArgumentError if there is none."""
    owners = {family.config_type: family for family in families().values()}
    if type(config) not in owners:
        raise choice_error("config", type(config).__name__, [kind.__name__ for kind in owners])
    return owners[type(config)]


def default_spec(
    problem: Problem,
    target: Target,
    excluded: frozenset[str] = frozenset(),
    family: str | None = None,
    workload: Workload | None = None,
) -> KernelSpec:
    """The config for where nothing is known: it compiles cleanly everywhere. Of the family preferred, or of the one of that name.

    `excluded`: names of families that do not count; `workload`: for which families are preferred, where that is known: of a bucket
    """
    able = [one for one in families_for(problem, target, family) if one.name not in excluded]
    chosen = able[0] if workload is None else max(able, key=lambda one: one.preference_for(problem, workload))  # the first of equals
    return KernelSpec(chosen, problem, chosen.default(problem, target), target)
