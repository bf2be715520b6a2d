"""Which cases of a matrix a run has: the same each time, spread over what the cases differ in, and so many for each family.

Plain `pytest` has a sample of each family, `--slow` has all cases. `--slow-rest 120,FAMILY=240` has what plain `pytest` leaves out, of each
family as much as takes 120 seconds on two cores, or 240 of the one that is named: planted faults first, then as many others as fit. So the
time of a run grows with the number of families, and not with that of targets, configs, problems and faults.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sample(
    cases: Sequence[T], count: int, seed: str, kinds: Callable[[T], Iterable[Hashable]], seen: Counter[Hashable] | None = None
) -> list[T]:
    """`count` of the cases, or all if there are fewer, in their order; the same for the same arguments.

    `kinds`: what a case is of, such as its target and its mask. Each further one is of kinds that have come up least. `seen`: how often
    they have in other samples, to which this one adds its own.
    """
    left = list(enumerate(cases))
    random.Random(seed).shuffle(left)
    seen = Counter() if seen is None else seen
    taken: list[tuple[int, T]] = []
    while left and len(taken) < count:
        best = max(left, key=lambda case: sum(0.25 ** seen[kind] for kind in kinds(case[1])))
        left.remove(best)
        taken.append(best)
        seen.update(kinds(best[1]))
    return [case for _, case in sorted(taken, key=lambda case: case[0])]


def of_family(name: str, seconds: float, fault: bool = False) -> pytest.MarkDecorator:
    """Marks a test that grows with a family: its name, about how long it takes on two cores, and whether it is of planted faults."""
    return pytest.mark.of_family(name, seconds, fault)


def planned(
    cases: Iterable[T],
    each: int | Callable[[str], int],
    family: Callable[[T], str],
    kinds: Callable[[T], Iterable[Hashable]],
    name: Callable[[T], str],
    seconds: Callable[[T], float],
    fault: bool = False,
    able: Callable[[T], bool] = lambda case: True,
) -> list[object]:
    """All cases as parameters of a test, of which `each` of every family are for every run and the others for --slow.

    `each`: a number, or one for each family's name; `name`: the case's id; `seconds`: about how long it takes on two cores; `fault`:
    whether the cases are planted faults; `able`: whether a case may be one of those for every run.
    """
    by_family: dict[str, list[T]] = defaultdict(list)
    for case in cases:
        by_family[family(case)].append(case)
    found: list[object] = []
    for of, mine in by_family.items():
        quick = sample(list(filter(able, mine)), each(of) if callable(each) else each, of, kinds)
        for case in mine:
            marks = [of_family(of, seconds(case), fault), *([] if case in quick else [pytest.mark.slow])]
            values = case if isinstance(case, tuple) else (case,)
            found.append(pytest.param(*values, marks=marks, id=name(case)))
    return found


def few_of(cases: Iterable[T], *quick: T) -> list[object]:
    """All cases as parameters of a test, of which the `quick` ones are for every run and the others for --slow."""
    values = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*each, marks=() if case in quick else pytest.mark.slow) for case, each in values]


def every_case(config: pytest.Config) -> bool:
    """Whether tests marked slow run."""
    return bool(config.getoption("--slow")) or config.getoption("--slow-rest") is not None


def to_run(request: pytest.FixtureRequest) -> list[Mapping[str, Any]]:
    """Of each test of the file that will run, its parameters by name: for what is to be compiled ahead."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    slow = every_case(request.config)
    return [item.callspec.params for item in items if hasattr(item, "callspec") and (slow or not item.get_closest_marker("slow"))]


@dataclass(frozen=True)
class Costly:
    """A slow test as a budget sees it. `family`: None for one that is of no family."""

    name: str
    family: str | None
    seconds: float
    fault: bool


def budgets(option: str) -> dict[str, float]:
    """Seconds by family, of '120' or '120,FAMILY=240': the first is for those that have none of their own. Raises ValueError."""
    every, *own = option.split(",")
    named = dict(one.split("=") for one in own)
    return defaultdict(lambda: float(every), {name: float(seconds) for name, seconds in named.items()})


def within(tests: Iterable[Costly], left: MutableMapping[str, float]) -> Collection[str]:
    """Names of those that a run takes where each family has so many seconds `left`: as many as fit, and those of no family.

    Faults come first, the cheapest before the others. All else is taken by a hash of its name: so a run has some of each test, and what is
    added or goes changes little of the rest.
    """

    def rank(test: Costly) -> tuple[bool, float, bytes]:
        return not test.fault, test.seconds if test.fault else 0.0, hashlib.sha256(test.name.encode()).digest()

    taken = set()
    for test in sorted(tests, key=rank):
        if test.family is not None:
            if test.seconds > left[test.family]:
                continue
            left[test.family] -= test.seconds
        taken.add(test.name)
    return taken
