"""Tuning records: what was measured of each candidate on which GPU, and the choice of the best. No torch."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from flashgen.build.cache_dir import cache_dir
from flashgen.codegen.device import Device
from flashgen.codegen.errors import ArgumentError, choice_error, require_int
from flashgen.codegen.problem import Problem, Workload
from flashgen.codegen.spec import KernelSpec, problem_from_json
from flashgen.codegen.target import Target

from .record_file import RecordFile, Row

FARTHEST = 3.0  # how far, by `distance`, a record may be from the workload that it is to speak for

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Timing:
    """Time of one launch, in seconds: median, 10 % and 90 % over the rounds."""

    seconds: float
    low: float
    high: float
    rounds: int

    def __post_init__(self) -> None:
        for name in ("low", "seconds", "high"):
            value = getattr(self, name)
            if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
                raise ArgumentError(f"{name} must be a finite number of seconds > 0, as a float; got {value!r}")
        if not self.low <= self.seconds <= self.high:
            raise ArgumentError(f"seconds must be from low {self.low} to high {self.high}; got {self.seconds}")
        require_int("rounds", self.rounds, 1, _INT_MAX)


class FailureKind(enum.Enum):
    """Why a candidate has no time: it does not compile, spills or has an ignored directive, is wrong, or does not launch."""

    COMPILE = "compile"
    DEFECT = "defect"
    WRONG = "wrong"
    LAUNCH = "launch"


@dataclass(frozen=True)
class Failure:
    """A candidate that cannot be used, and why."""

    kind: FailureKind
    message: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, FailureKind):
            raise choice_error("kind", self.kind, FailureKind)
        _require_text("message", self.message, empty=True)


@dataclass(frozen=True)
class RecordKey:
    """What a measurement is of, and what it was made with and on."""

    device_name: str
    sm_count: int
    driver_version: str
    nvrtc_version: str
    spec_digest: str
    workload: Workload
    benchmark_version: int

    def __post_init__(self) -> None:
        for name in ("device_name", "driver_version", "nvrtc_version", "spec_digest"):
            _require_text(name, getattr(self, name))
        require_int("sm_count", self.sm_count, 1, _INT_MAX)
        require_int("benchmark_version", self.benchmark_version, 0, _INT_MAX)
        if not isinstance(self.workload, Workload):
            raise ArgumentError(f"workload must be a Workload; got {self.workload!r}")


@dataclass(frozen=True)
class Record:
    """One candidate's outcome. Registers and spills are a thread's, shared memory is a block's.

    `spec` is `KernelSpec.to_json()`, of any revision. Raises ArgumentError unless the key's spec_digest is its digest.
    """

    key: RecordKey
    spec: dict[str, Any]
    outcome: Timing | Failure
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None

    def __post_init__(self) -> None:
        if not isinstance(self.key, RecordKey):
            raise ArgumentError(f"key must be a RecordKey; got {self.key!r}")
        _problem_of(self.spec)
        if self.key.spec_digest != hashlib.sha256(_canonical(self.spec).encode()).hexdigest():
            raise ArgumentError(f"spec_digest must be the digest of the spec; got {self.key.spec_digest!r}")
        if not isinstance(self.outcome, (Timing, Failure)):
            raise ArgumentError(f"outcome must be a Timing or a Failure; got {self.outcome!r}")
        for name in ("registers", "spill_bytes", "shared_bytes"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 0, _INT_MAX)


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


# The fastest record of each workload by each driver and compiler. A workload's fastest comes first.
_Fastest = dict[Workload, dict[tuple[str, str], Record]]


class Records:
    """The tuning records in one SQLite file. Safe to use from several threads and processes at once, and across fork.

    A file or folder that cannot be used gives a RuntimeWarning, never an error: see `RecordFile`. So does a row that holds no valid
    record, which is skipped.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file, records.sqlite3 in `cache_dir()` if None."""
        self._file = RecordFile(path if path is not None else cache_dir() / "records.sqlite3")
        self.path = self._file.path
        self._warned = False
        # Rows, by key, of the devices that `best` was asked for, and what it found in them; others' later writes are not seen.
        self._rows: dict[tuple[str, int], dict[tuple[Any, ...], Row]] = {}
        self._fastest: dict[tuple[Problem, Device, int], _Fastest] = {}

    def get(self, key: RecordKey) -> Record | None:
        """The record with that key, read from the file."""
        row = self._file.find(_key_values(key))
        if row is not None:
            with self._skipping():
                return _record_of(row)
        return None

    def put(self, record: Record) -> None:
        """Adds a record, or replaces the one with its key. Once this returns, a killed process does not lose it."""
        row = _row_of(record)
        with self._file.lock:
            self._file.put(row)
            device = (record.key.device_name, record.key.sm_count)
            if device in self._rows:
                self._rows[device][row.key] = row
                self._fastest.clear()

    def for_device(self, device_name: str, sm_count: int) -> list[Record]:
        """All records of a device, read from the file, failures and old revisions included."""
        found = []
        for row in self._file.of_device(device_name, sm_count):
            with self._skipping():
                found.append(_record_of(row))
        return found

    def best(
        self, problem: Problem, workload: Workload, device: Device, driver_version: str, nvrtc_version: str, benchmark_version: int
    ) -> Choice | None:
        """The fastest kernel known for a workload on a device, or None.

        In this order: same driver and compiler, exact workload; any, exact; same, nearest workload; any, nearest. Only specs that the
        families of today can make, and times of the same benchmark, count. The first call for a device reads its rows, later ones do not.
        """
        wanted = (problem, device, benchmark_version)
        with self._file.lock:
            if wanted not in self._fastest:
                self._fastest[wanted] = self._find_fastest(*wanted)
            fastest = self._fastest[wanted]

        toolchain = (driver_version, nvrtc_version)
        near = [workload] if workload in fastest else [w for w in fastest if distance(w, workload) <= FARTHEST]
        if not near:
            return None
        chosen = min(near, key=lambda w: (toolchain not in fastest[w], distance(w, workload)))
        records = fastest[chosen]
        return Choice(records.get(toolchain, next(iter(records.values()))), chosen == workload, toolchain in records)

    def __len__(self) -> int:
        return len(self._file)

    def clear(self) -> int:
        """Removes all records; says how many."""
        with self._file.lock:
            self._rows.clear()
            self._fastest.clear()
            return self._file.clear()

    def _find_fastest(self, problem: Problem, device: Device, benchmark_version: int) -> _Fastest:
        """Goes through the rows in order of time. Of tens of thousands of them only those that it returns are made records."""
        name = (device.name, device.sm_count)
        if name not in self._rows:
            self._rows[name] = {row.key: row for row in self._file.of_device(*name)}
        timed = [r for r in self._rows[name].values() if r.benchmark_version == benchmark_version and isinstance(r.seconds, float)]
        is_usable = cache(partial(_is_usable, problem=problem, target=device.target))  # many rows are of one spec
        found: _Fastest = defaultdict(dict)
        done = set()
        for row in sorted(timed, key=lambda row: row.seconds):
            place = (row.driver_version, row.nvrtc_version, row.batch, row.heads_q, row.heads_kv, row.len_q, row.len_kv)
            if place in done:
                continue
            with self._skipping():
                if is_usable(row.spec):
                    record = _record_of(row)
                    found[record.key.workload][row.driver_version, row.nvrtc_version] = record
                    done.add(place)
        return dict(found)

    @contextmanager
    def _skipping(self) -> Iterator[None]:
        """Goes on after a row that holds no valid record, with a warning the first time."""
        try:
            yield
        except (ValueError, TypeError, RecursionError) as error:  # what our types, and JSON that is torn or too deep, raise
            if not self._warned:
                self._warned = True
                message = f"{self.path}: skipping each row that holds no valid record (the first: {error})"
                warnings.warn(message, RuntimeWarning, stacklevel=5)


def _is_usable(text: str, problem: Problem, target: Target) -> bool:
    """Whether a spec's JSON is for that problem and target, and its family is of the revision measured and still takes the config."""
    spec = json.loads(text)
    if _problem_of(spec) != problem:
        return False
    try:
        return KernelSpec.from_json(spec, target).target == target
    except ArgumentError:
        return False


def _require_text(name: str, value: object, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        raise ArgumentError(f"{name} must be {'' if empty else 'non-empty '}text; got {value!r}")


def _canonical(spec: Any) -> str:
    """The text that `KernelSpec.digest` is of."""
    try:
        return json.dumps(spec, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"spec must hold JSON values; got {spec!r}") from error


def _problem_of(spec: Any) -> Problem:
    """The problem of a spec of any revision. Raises ArgumentError if it is no spec."""
    kinds = {"family": str, "revision": int, "problem": dict, "config": dict, "target": str}
    if not isinstance(spec, dict) or spec.keys() != kinds.keys() or not all(isinstance(spec[name], kind) for name, kind in kinds.items()):
        raise ArgumentError(f"spec must have family, revision, problem, config and target, as KernelSpec.to_json gives them; got {spec!r}")
    return problem_from_json(spec["problem"])


def _key_values(key: RecordKey) -> tuple[Any, ...]:
    *before, workload, benchmark_version = astuple(key)
    return (*before, *workload, benchmark_version)


def _row_of(record: Record) -> Row:
    if isinstance(record.outcome, Timing):
        outcome = (*astuple(record.outcome), None, None)
    else:
        outcome = (None, None, None, None, record.outcome.kind.value, record.outcome.message)
    sizes = (record.registers, record.spill_bytes, record.shared_bytes)
    return Row._make((*_key_values(record.key), _canonical(record.spec), *outcome, *sizes))


def _record_of(row: Row) -> Record:
    """The reverse of `_row_of`. Raises ValueError, TypeError or RecursionError if the row holds no valid record."""
    name, sm_count, driver, nvrtc, digest, *sizes, benchmark = row.key
    key = RecordKey(name, sm_count, driver, nvrtc, digest, Workload(*sizes), benchmark)
    timing, failure = (row.seconds, row.low, row.high, row.rounds), (row.failure, row.message)
    if any(v is not None for v in timing) == any(v is not None for v in failure):
        raise ArgumentError(f"outcome must be either a time or a failure; got {(*timing, *failure)}")
    outcome = Timing(*timing) if row.failure is None else Failure(FailureKind(row.failure), row.message)
    return Record(key, json.loads(row.spec), outcome, row.registers, row.spill_bytes, row.shared_bytes)
