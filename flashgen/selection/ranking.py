"""The legal configs of a problem in the order in which the models of their families expect them to be fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Family
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from .families import families_for

OWN_SHARE = 8  # one in so many of a shortlist is any family's own


@dataclass(frozen=True)
class Candidate:
    """A config of a family, with the model's expectation for a workload in seconds and what bounds it."""

    family: Family
    config: Config
    seconds: float
    bound_by: str


def ranked(problem: Problem, workload: Workload, device: Device, among: Sequence[Family] | None = None) -> list[Candidate]:
    """All legal configs of `among`, or of all families that can, that are worth trying, the model's best first. Deterministic."""
    found = []
    for family in families_for(problem, device.target) if among is None else among:
        for config in family.legal_configs(problem, device.target):
            if family.config_refusals(config, workload) or not family.not_dominated(config, workload):
                continue
            prediction = family.predict(problem, config, workload, device)
            found.append(Candidate(family, config, prediction.seconds, prediction.bound_by))
    return sorted(found, key=lambda c: (c.seconds, c.config.name))


def shortlist(problem: Problem, workload: Workload, device: Device, count: int, among: Sequence[Family] | None = None) -> list[Candidate]:
    """The model's best `count` of `ranked`. Of configs that it cannot tell apart, two will do: the others would crowd out what differs.

    Of several families each has at least its best `count // OWN_SHARE`, where it has so many: the models of two families need not err in
    the same direction.
    """
    alike: Counter[float] = Counter()
    best: dict[str, list[tuple[int, Candidate]]] = {}  # of each family, with their numbers among all
    for number, candidate in enumerate(ranked(problem, workload, device, among)):
        alike[candidate.seconds] += 1
        if alike[candidate.seconds] <= 2:
            best.setdefault(candidate.family.name, []).append((number, candidate))
    least = min(count // OWN_SHARE, count // len(best)) if len(best) > 1 else 0
    own = [numbered for of_family in best.values() for numbered in of_family[:least]]
    others = sorted((numbered for of_family in best.values() for numbered in of_family[least:]), key=_number)
    return [candidate for _, candidate in sorted(own + others[: count - len(own)], key=_number)]


def _number(numbered: tuple[int, Candidate]) -> int:
    return numbered[0]
