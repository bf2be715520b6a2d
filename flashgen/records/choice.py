"""The choice among tuning records: which of them may speak for a workload, and which is the best. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import find_family
from flashgen.codegen.plain import canonical, parse
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.spec import KernelSpec, PlainSpec
from flashgen.codegen.target import Target, targets
from flashgen.codegen.workload import Workload, equal_lengths, mean_lengths

from .record import Record, Timing

FARTHEST = 3.0  # how far, by `distance`, a record may be from the workload that it is to speak for

# The fastest record of each workload by each driver and compiler. A workload's fastest comes first.
Fastest = dict[Workload, dict[tuple[str, str], Record]]


@dataclass(frozen=True)
class Choice:
    """The best record for a workload: whether it is of that very workload, and of the driver and compiler asked for.

    older: its config counts, its time does not: it is of an older revision of its family or of the benchmark, of another problem or GPU
    problem: for which its config counts, where that is another than the record's own
    device_name: of the GPU that it was measured on, where that is another than the one asked for
    """

    record: Record
    exact_workload: bool
    same_toolchain: bool
    older: bool = False
    problem: Problem | None = None
    device_name: str = ""

    @property
    def is_of_older_version(self) -> bool:
        """Whether an older version of flashgen measured it."""
        return self.older and self.problem is None and not self.device_name

    def spec(self, target: Target) -> KernelSpec:
        """The kernel to use: the record's config in the present revision of its family. Raises ArgumentError if there is none."""
        return PlainSpec.from_json(self.record.spec).as_of_now(target, self.problem)


@lru_cache(maxsize=2**14)
def bucket(workload: Workload) -> Workload:
    """The workload that stands for all of its size: lengths, ends of a window, a chunk and batch * heads rounded up to powers of two.

    One kernel is chosen per bucket, so a length not seen before costs at most one compile per bucket. The bucket keeps the group, on
    which alone it may depend whether a kernel takes a workload: see `Family.config_refusals`. That of packed sequences is the bucket of
    as many of their mean lengths: how long each is only the device knows.
    """
    return Workload(1, *bucket_sizes(workload))


def bucket_sizes(workload: Workload) -> tuple[int, ...]:
    """The sizes of a workload's bucket but for its batch, which is 1: as good a key as the bucket itself, and cheaper to come by."""
    len_q, len_kv = mean_lengths(workload)
    group = workload.heads_q // max(1, workload.heads_kv)
    heads = _power_of_two(workload.batch * workload.heads_kv, _MOST // max(1, group))
    sizes = heads * group, heads, _power_of_two(len_q), _power_of_two(len_kv)
    if not workload.is_local:
        return sizes
    return (*sizes, _window_end(workload.window_left), _window_end(workload.window_right), _power_of_two(workload.chunk))


def _window_end(end: int) -> int:
    """An end of a window, rounded away from 0 to a power of two, or open."""
    return _power_of_two(end) if end > 0 else -_power_of_two(-end) if end else 0


_MOST = 2**31 - 1  # of each size of a workload


def _power_of_two(size: int, most: int = _MOST) -> int:
    return min(1 << max(0, size - 1).bit_length(), most)


def distance(a: Workload, b: Workload) -> float:
    """How unlike two workloads are: octaves of len_q, len_kv, pairs that a window and chunks let through, and batch * heads_q.

    Plus 1 if the query heads of a group differ. Packed sequences count as ones of their mean lengths, as in a bucket.
    """
    a, b = equal_lengths(a), equal_lengths(b)
    sizes = [(a.len_q, b.len_q), (a.len_kv, b.len_kv), (a.batch * a.heads_q, b.batch * b.heads_q)]
    if a.is_local or b.is_local:
        sizes.append((a.visible_pairs(Mask.FULL), b.visible_pairs(Mask.FULL)))
    octaves = sum(abs(math.log2(max(1, x) / max(1, y))) for x, y in sizes)
    return octaves + (a.heads_q // max(1, a.heads_kv) != b.heads_q // max(1, b.heads_kv))


class Known:
    """What the records of one device say of one problem: those of the present revisions and benchmark, and apart from them older ones."""

    def __init__(self, present: Fastest, older: Fastest) -> None:
        self.present, self.older = present, older
        self._nearest: dict[tuple[Workload, tuple[str, str], bool], Choice | None] = {}

    @property
    def workloads(self) -> frozenset[Workload]:
        """Those that have a record of their own, of whatever age."""
        return frozenset(self.present.keys() | self.older.keys())

    def exact(self, workload: Workload, toolchain: tuple[str, str], older: bool = False) -> Choice | None:
        """The best record of that very workload: of that driver and compiler, else of any."""
        return _of(self.older if older else self.present, workload, workload, toolchain, older)

    def nearest(self, workload: Workload, toolchain: tuple[str, str], older: bool = False) -> Choice | None:
        """The best record of a workload near to this one: see `choose`. What was found is kept: a call costs a look-up."""
        wanted = (workload, toolchain, older)
        if wanted not in self._nearest:
            self._nearest[wanted] = _nearest(self.older if older else self.present, workload, toolchain, older)
        return self._nearest[wanted]

    def choices(self, workload: Workload, toolchain: tuple[str, str], any_length: bool = False, older: bool = False) -> Iterator[Choice]:
        """The record of that very workload, unless for `any_length` of its bucket, then the one nearest to the bucket."""
        if not any_length and (choice := self.exact(workload, toolchain, older)):
            yield choice
        if choice := self.nearest(bucket(workload), toolchain, older):
            yield choice


def choose(fastest: Fastest, workload: Workload, toolchain: tuple[str, str]) -> Choice | None:
    """The best record for a workload; `toolchain` is the versions of driver and compiler.

    In this order: same driver and compiler, exact workload; any, exact; same, nearest workload; any, nearest. None if all are too far,
    or of kernels that cannot take the workload. Workloads of the same bucket are nearer than all others.
    """
    return _of(fastest, workload, workload, toolchain) or _nearest(fastest, workload, toolchain)


def _nearest(fastest: Fastest, workload: Workload, toolchain: tuple[str, str], older: bool = False) -> Choice | None:
    near = sorted(by_nearness(fastest, workload), key=lambda other: toolchain not in fastest[other])
    found = (_of(fastest, other, workload, toolchain, older) for other in near)
    return next((choice for choice in found if choice), None)


def by_nearness(workloads: Iterable[Workload], workload: Workload, farthest: float = FARTHEST) -> list[Workload]:
    """Those that may speak for `workload`, the nearest first: those of its bucket come before all others. `farthest`: by `distance`."""

    def preference(other: Workload) -> tuple[bool, float, Workload]:
        return bucket(other) != bucket(workload), distance(other, workload), other

    return sorted((other for other in workloads if distance(other, workload) <= farthest), key=preference)


def _of(fastest: Fastest, chosen: Workload, workload: Workload, toolchain: tuple[str, str], older: bool = False) -> Choice | None:
    """The record of the workload `chosen` that is to speak for `workload`, if there is one and its kernel takes it."""
    if (records := fastest.get(chosen)) is None:
        return None
    record = records.get(toolchain, next(iter(records.values())))
    return Choice(record, chosen == workload, toolchain in records, older) if takes(record, workload) else None


def takes(record: Record, workload: Workload) -> bool:
    """Whether the record's kernel can take a workload, which need not be the one that it was measured on."""
    family = find_family(record.spec["family"])
    return not family.config_refusals(family.config_type.from_json(record.spec["config"]), workload)


@dataclass(frozen=True)
class Entry:
    """One measured time, before a `Record` is made of it: of tens of thousands, only those that win need to be made.

    conditions: what a record competes within, its workload and toolchain; spec: its JSON as text; record: makes it, or raises ArgumentError
    """

    seconds: float
    benchmark_version: int
    conditions: Hashable
    spec: str
    record: Callable[[], Record]

    @classmethod
    def of(cls, record: Record) -> Entry | None:
        """Of a record that is made already; None for a failure."""
        if not isinstance(record.outcome, Timing):
            return None
        conditions = (record.key.workload, record.key.toolchain)
        return cls(record.outcome.seconds, record.key.benchmark_version, conditions, canonical(record.spec), lambda: record)


def known_of(
    entries: Iterable[Entry],
    problem: Problem,
    target: Target,
    benchmark_version: int,
    excluded: frozenset[str] = frozenset(),
    spoiled: Callable[[ArgumentError], object] = lambda error: None,
) -> Known:
    """What is known of a problem, from the times of one device; `excluded`: families that do not count. `spoiled` hears of bad entries.

    The families of today must be able to make a kernel of that config for that problem and target. A record that a later version wrote
    does not count. Times are compared within one revision and benchmark version only: of older ones the youngest come first.
    """
    aged: list[tuple[tuple[int, int, float], Entry]] = []
    ages: dict[str, int | None] = {}
    for entry in entries:
        try:
            if entry.spec not in ages:
                ages[entry.spec] = _age(entry.spec, problem, target, excluded)
        except ArgumentError as error:
            spoiled(error)
            continue
        age, versions = ages[entry.spec], benchmark_version - entry.benchmark_version
        if age is not None and versions >= 0:
            aged.append(((versions, age, entry.seconds), entry))
    known, done = Known({}, {}), set()
    for (versions, age, _), entry in sorted(aged, key=lambda pair: pair[0]):
        older = bool(versions or age)
        if (entry.conditions, older) in done:
            continue
        try:
            record = entry.record()
        except ArgumentError as error:
            spoiled(error)
            continue
        done.add((entry.conditions, older))
        (known.older if older else known.present).setdefault(record.key.workload, {})[record.key.toolchain] = record
    return known


@lru_cache(maxsize=2**16)
def _plain_spec(text: str) -> PlainSpec:
    return PlainSpec.from_json(parse(text, "spec"))


def _age(text: str, problem: Problem, target: Target, excluded: frozenset[str]) -> int | None:
    """How many revisions ago a spec was made; None if it is not for that problem and target, or no family makes it any more.

    Raises ArgumentError if the text holds no spec.
    """
    plain = _plain_spec(text)
    if plain.problem != problem or plain.family in excluded or plain.target != target.name:
        return None
    try:
        age = find_family(plain.family).revision - plain.revision
        plain.as_of_now(target)
    except ArgumentError:
        return None
    return age if age >= 0 else None


def tells_time(record: Record, benchmark_version: int) -> bool:
    """Whether the record's time is one of a kernel of today, measured as today: older ones give their config alone."""
    age = find_family(record.spec["family"]).revision - record.spec["revision"]
    present = age == 0 and record.key.benchmark_version == benchmark_version
    return present and isinstance(record.outcome, Timing) and why_useless(record, benchmark_version) is None


def why_useless(record: Record, benchmark_version: int) -> str | None:
    """Why no look-up of this version could ever take the record, whatever the GPU; None if one could.

    A driver or compiler of another version does not make it useless, nor do older times, which still give their configs. Raises
    ArgumentError for a family that is not known.
    """
    plain = PlainSpec.from_json(record.spec)
    family, failed = find_family(plain.family), not isinstance(record.outcome, Timing)
    version = record.key.benchmark_version
    if version > benchmark_version or (failed and version != benchmark_version):
        return f"measured by benchmark version {version}; the one here is {benchmark_version}"
    if plain.revision > family.revision or (failed and plain.revision != family.revision):
        return f"of revision {plain.revision} of {family.name}; the one here is {family.revision}"
    try:
        if plain.target in targets():
            plain.as_of_now()
        else:  # of a GPU without a target file: what it allows is known only on it
            family.config_type.from_json(plain.config)
    except ArgumentError as error:
        return f"of a kernel that {family.name} no longer makes: {error}"
    return None
