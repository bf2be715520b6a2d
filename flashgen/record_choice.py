"""The choice among tuning records: which of them may speak for a workload, and which is the best. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Problem, Workload
from flashgen.codegen.spec import KernelSpec, PlainSpec
from flashgen.codegen.target import Target, targets

from .record import Record, Timing

FARTHEST = 3.0  # how far, by `distance`, a record may be from the workload that it is to speak for

# The fastest record of each workload by each driver and compiler. A workload's fastest comes first.
Fastest = dict[Workload, dict[tuple[str, str], Record]]


@dataclass(frozen=True)
class Choice:
    """The best record for a workload: whether it is of that very workload, and of the driver and compiler asked for."""

    record: Record
    exact_workload: bool
    same_toolchain: bool


def distance(a: Workload, b: Workload) -> float:
    """How unlike two workloads are: octaves of len_q, len_kv and batch * heads_q, plus 1 if the query heads of a group differ."""
    sizes = ((a.len_q, b.len_q), (a.len_kv, b.len_kv), (a.batch * a.heads_q, b.batch * b.heads_q))
    octaves = sum(abs(math.log2(max(1, x) / max(1, y))) for x, y in sizes)
    return octaves + (a.heads_q // max(1, a.heads_kv) != b.heads_q // max(1, b.heads_kv))


def choose(fastest: Fastest, workload: Workload, toolchain: tuple[str, str]) -> Choice | None:
    """The best record for a workload; `toolchain` is the versions of driver and compiler.

    In this order: same driver and compiler, exact workload; any, exact; same, nearest workload; any, nearest. None if all are too far,
    or of kernels that cannot take the workload.
    """
    near = [workload] if workload in fastest else [w for w in fastest if distance(w, workload) <= FARTHEST]
    for chosen in sorted(near, key=lambda w: (toolchain not in fastest[w], distance(w, workload))):
        records = fastest[chosen]
        record = records.get(toolchain, next(iter(records.values())))
        if takes(record, workload):
            return Choice(record, chosen == workload, toolchain in records)
    return None


def takes(record: Record, workload: Workload) -> bool:
    """Whether the record's kernel can take a workload, which need not be the one that it was measured on."""
    family = find_family(record.spec["family"])
    return not family.workload_refusals(family.config_type.from_json(record.spec["config"]), workload)


def fastest_of(
    records: Iterable[Record], problem: Problem, target: Target, benchmark_version: int, without: frozenset[str] = frozenset()
) -> Fastest:
    """What `choose` takes, of the records of one device: only specs that `is_usable` lets through count, and only that benchmark."""
    timed = [(r.outcome.seconds, r) for r in records if isinstance(r.outcome, Timing) and r.key.benchmark_version == benchmark_version]
    found: Fastest = {}
    for _, record in sorted(timed, key=lambda pair: pair[0]):
        if is_usable(record.spec, problem, target, without):
            found.setdefault(record.key.workload, {}).setdefault(record.key.toolchain, record)
    return found


def is_usable(spec: Any, problem: Problem, target: Target, without: frozenset[str] = frozenset()) -> bool:
    """Whether a spec's JSON is for that problem and target, and its family is of the revision measured and still takes the config.

    `without`: names of families that do not count.
    """
    if PlainSpec.from_json(spec).problem != problem or spec["family"] in without:
        return False
    try:
        return KernelSpec.from_json(spec, target).target == target
    except ArgumentError:
        return False


def why_useless(record: Record, benchmark_version: int) -> str | None:
    """Why no look-up of this version could ever take the record, whatever the GPU; None if one could.

    A driver or compiler of another version does not make it useless. Raises ArgumentError for a family that is not known.
    """
    family = find_family(record.spec["family"])
    if record.key.benchmark_version != benchmark_version:
        return f"measured by benchmark version {record.key.benchmark_version}; the one here is {benchmark_version}"
    if record.spec["revision"] != family.revision:
        return f"of revision {record.spec['revision']} of {family.name}; the one here is {family.revision}"
    try:
        if record.spec["target"] in targets():
            KernelSpec.from_json(record.spec)
        else:  # of a GPU without a target file: what it allows is known only on it
            family.config_type.from_json(record.spec["config"])
    except ArgumentError as error:
        return f"of a kernel that {family.name} no longer makes: {error}"
    return None
