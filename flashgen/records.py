"""Tuning records: what was measured of each candidate on which GPU, in one SQLite file, and the choice of the best. No torch."""

from __future__ import annotations

import enum
import fcntl
import hashlib
import json
import math
import os
import sqlite3
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from flashgen.build.cache_dir import UnsafeCacheError, cache_dir, make_safe_dir, require_safe
from flashgen.codegen.device import Device
from flashgen.codegen.errors import ArgumentError, choice_error, require_int
from flashgen.codegen.problem import Problem, Workload
from flashgen.codegen.spec import KernelSpec, problem_from_json
from flashgen.codegen.target import Target

SCHEMA = 1  # raise when the table, or what it means, changes
FARTHEST = 3.0  # how far, by `distance`, a record may be from the workload that it is to speak for

_INT_MAX = 2**31 - 1
_BUSY_SECONDS = 10.0
_KEY = "device_name, sm_count, driver_version, nvrtc_version, spec_digest, batch, heads_q, heads_kv, len_q, len_kv, benchmark_version"
_COLUMNS = f"{_KEY}, spec, seconds, low, high, rounds, failure, message, registers, spill_bytes, shared_bytes"
_AT = {name.strip(): place for place, name in enumerate(_COLUMNS.split(","))}
_TABLE = f"CREATE TABLE candidates ({_COLUMNS}, PRIMARY KEY ({_KEY}))"
_INSERT = f"INSERT OR REPLACE INTO candidates VALUES ({', '.join('?' * len(_COLUMNS.split(',')))})"
_SELECT = f"SELECT {_COLUMNS} FROM candidates"
_SELECT_ONE = f"{_SELECT} WHERE ({_KEY}) = ({', '.join('?' * len(_KEY.split(',')))})"
_SELECT_DEVICE = f"{_SELECT} WHERE device_name = ? AND sm_count = ?"

_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode  # as KernelSpec.digest has it

Row = tuple[Any, ...]
Toolchain = tuple[str, str]  # versions of driver and compiler


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
        _problem_of(_spec_text(self.spec), self.key.spec_digest)
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


class Records:
    """The tuning records in one SQLite file. Safe to use from several threads and processes at once, and across fork.

    The file is made on first use, with mode 0600. One that is damaged or of another schema is renamed aside; where none can be
    written or the folder is not safe, records are kept in memory. Each of these gives one RuntimeWarning, never an error.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file, records.sqlite3 in `cache_dir()` if None."""
        self.path = (path if path is not None else cache_dir() / "records.sqlite3").absolute()
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._in_memory = False
        self._warned_of_rows = False
        # Rows of the devices asked for so far; others' later writes are not seen.
        self._devices: dict[tuple[str, int], _DeviceRows] = {}
        _instances.add(self)

    def get(self, key: RecordKey) -> Record | None:
        """The record with that key, read from the file."""
        found = self._valid(self._query(_SELECT_ONE, _key_row(key)))
        return found[0] if found else None

    def put(self, record: Record) -> None:
        """Adds a record, or replaces the one with its key. Once this returns, a killed process does not lose it."""
        with self._lock:
            self._query(_INSERT, row := _row_of(record))
            device = (record.key.device_name, record.key.sm_count)
            if device in self._devices:
                self._devices[device].add(row)

    def for_device(self, device_name: str, sm_count: int) -> list[Record]:
        """All records of a device, read from the file, failures and old revisions included."""
        return self._valid(self._query(_SELECT_DEVICE, (device_name, sm_count)))

    def best(
        self, problem: Problem, workload: Workload, device: Device, driver_version: str, nvrtc_version: str, benchmark_version: int
    ) -> Choice | None:
        """The fastest kernel known for a workload on a device, or None.

        In this order: same driver and compiler, exact workload; any, exact; same, nearest workload; any, nearest. Only specs that the
        families of today can make, and times of the same benchmark, count. The first call for a device reads its rows, later ones do not.
        """
        with self._lock:
            name = (device.name, device.sm_count)
            if name not in self._devices:
                self._devices[name] = _DeviceRows(self._query(_SELECT_DEVICE, name), self._valid)
            fastest = self._devices[name].fastest(problem, benchmark_version, device.target)
        toolchain = (driver_version, nvrtc_version)
        same = {w: found[toolchain] for w, found in fastest.items() if toolchain in found}
        anyone = {w: min(found.values(), key=_seconds) for w, found in fastest.items()}
        for candidates in (same, anyone):
            if workload in candidates:
                return Choice(candidates[workload], True, candidates is same)
        for candidates in (same, anyone):
            far, nearest = min(((distance(w, workload), w) for w in candidates), default=(math.inf, workload))
            if far <= FARTHEST:
                return Choice(candidates[nearest], False, candidates is same)
        return None

    def __len__(self) -> int:
        return int(self._query("SELECT count(*) FROM candidates")[0][0])

    def clear(self) -> int:
        """Removes all records; says how many."""
        with self._lock:
            count = len(self)
            self._query("DELETE FROM candidates")
            self._devices.clear()
            return count

    def _valid(self, rows: list[Row]) -> list[Record]:
        """The rows as records, without those that hold no valid one."""
        found, faults = [], []
        for row in rows:
            try:
                found.append(_record_of(row))
            except (ValueError, TypeError) as error:  # ArgumentError and JSON's error are ValueErrors
                faults.append(error)
        if faults and not self._warned_of_rows:
            self._warned_of_rows = True
            message = f"{self.path}: skipping rows that hold no valid record ({len(faults)} here; {faults[0]})"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return found

    def _query(self, statement: str, values: Row = ()) -> list[Row]:
        """Runs one statement as a transaction of its own: on the file, on a new one if it is damaged, in memory if there can be none."""
        with self._lock:
            if not self._in_memory:
                try:
                    return self._query_file(statement, values)
                except (OSError, UnsafeCacheError, sqlite3.DatabaseError) as error:
                    self._fall_back(error)
            assert self._connection is not None
            return self._connection.execute(statement, values).fetchall()

    def _query_file(self, statement: str, values: Row) -> list[Row]:
        self._connection = self._connection or self._open(thorough=False)
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
        self._close()
        self._connection = self._open(thorough=True)
        return self._connection.execute(statement, values).fetchall()

    def _open(self, thorough: bool) -> sqlite3.Connection:
        """Opens the file, made new if there is none or it is not sound. `thorough`: reads all of it to find damage."""
        make_safe_dir(self.path.parent)
        with _exclusive(self.path.parent):  # one process at a time makes the file or sets it aside
            connection = _connect(self.path)
            try:
                if fault := _fault(connection, thorough):
                    connection.close()
                    aside = _set_aside(self.path, fault)
                    message = f"{self.path} is no sound file of tuning records ({fault}): renamed to {aside.name}"
                    warnings.warn(message, RuntimeWarning, stacklevel=6)
                    connection = _connect(self.path)
                _prepare(connection, "WAL")
            except BaseException:
                connection.close()
                raise
            return connection

    def _fall_back(self, error: Exception) -> None:
        self._close()
        self._in_memory = True
        reason = f"{self.path} cannot hold tuning records ({error}): new ones stay in memory and are lost with this process"
        warnings.warn(f"{reason}. Set FLASHGEN_CACHE_DIR to a folder that you own and can write to", RuntimeWarning, stacklevel=5)
        self._connection = _sqlite(":memory:")
        _prepare(self._connection, "MEMORY")
        self._connection.executemany(_INSERT, _read_only_rows(self.path))

    def _close(self) -> None:
        if self._connection is not None and not self._in_memory:
            self._connection.close()
            self._connection = None


class _DeviceRows:
    """The rows of one device, by what `Records.best` looks for. Of tens of thousands only those that it may choose are made records."""

    def __init__(self, rows: list[Row], valid: Callable[[list[Row]], list[Record]]) -> None:
        self._valid = valid
        self._groups: dict[tuple[Problem, int], dict[Row, Row]] = defaultdict(dict)
        self._fastest: dict[tuple[Problem, int, Target], dict[Workload, dict[Toolchain, Record]]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Adds a row or replaces the one with its key."""
        try:
            group = (_problem_of(row[_AT["spec"]], row[_AT["spec_digest"]]), row[_AT["benchmark_version"]])
        except (ValueError, TypeError):
            self._valid([row])  # says that it is skipped
            return
        self._groups[group][row[: _AT["spec"]]] = row
        for known in [k for k in self._fastest if k[:2] == group]:
            del self._fastest[known]

    def fastest(self, problem: Problem, benchmark_version: int, target: Target) -> dict[Workload, dict[Toolchain, Record]]:
        """The fastest record of each workload and toolchain that can be used on `target`. Kept until the problem gets another row."""
        known = (problem, benchmark_version, target)
        if known not in self._fastest:
            self._fastest[known] = self._find_fastest(self._groups.get(known[:2], {}).values(), target)
        return self._fastest[known]

    def _find_fastest(self, rows: Iterable[Row], target: Target) -> dict[Workload, dict[Toolchain, Record]]:
        found: dict[Workload, dict[Toolchain, Record]] = defaultdict(dict)
        usable = {digest: _is_usable(spec, target) for digest, spec in {row[_AT["spec_digest"]]: row[_AT["spec"]] for row in rows}.items()}
        done = set()
        for row in sorted((row for row in rows if isinstance(row[_AT["seconds"]], float)), key=lambda row: row[_AT["seconds"]]):
            place = (row[_AT["driver_version"]], row[_AT["nvrtc_version"]], row[_AT["batch"] : _AT["len_kv"] + 1])
            if place not in done and usable[row[_AT["spec_digest"]]]:
                for record in self._valid([row]):
                    done.add(place)
                    found[record.key.workload][record.key.driver_version, record.key.nvrtc_version] = record
        return dict(found)


def _is_usable(spec: str, target: Target) -> bool:
    """Whether the family is still of the revision that was measured, and still takes the config."""
    try:
        return KernelSpec.from_json(json.loads(spec)).target == target
    except ArgumentError:
        return False


def _seconds(record: Record) -> float:
    return record.outcome.seconds if isinstance(record.outcome, Timing) else math.inf


def _require_text(name: str, value: object, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        raise ArgumentError(f"{name} must be {'' if empty else 'non-empty '}text; got {value!r}")


def _spec_text(spec: dict[str, Any]) -> str:
    try:
        return _canonical_json(spec)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"spec must hold JSON values; got {spec!r}") from error


@lru_cache(maxsize=4096)  # many rows are of one spec
def _problem_of(text: str, digest: str) -> Problem:
    """The problem of a spec's canonical JSON. Raises ArgumentError if it is no spec, or not the one of that digest."""
    spec = json.loads(text)
    kinds = {"family": str, "revision": int, "problem": dict, "config": dict, "target": str}
    if not isinstance(spec, dict) or spec.keys() != kinds.keys() or not all(isinstance(spec[name], kind) for name, kind in kinds.items()):
        raise ArgumentError(f"spec must have family, revision, problem, config and target, as KernelSpec.to_json gives them; got {text}")
    if digest != hashlib.sha256(text.encode()).hexdigest():
        raise ArgumentError(f"spec_digest must be the digest of the spec; got {digest!r}")
    return problem_from_json(spec["problem"])


def _key_row(key: RecordKey) -> Row:
    *before, workload, benchmark_version = astuple(key)
    return (*before, *workload, benchmark_version)


def _row_of(record: Record) -> Row:
    timing = astuple(record.outcome) if isinstance(record.outcome, Timing) else (None,) * 4
    failure = (record.outcome.kind.value, record.outcome.message) if isinstance(record.outcome, Failure) else (None, None)
    return (*_key_row(record.key), _spec_text(record.spec), *timing, *failure, record.registers, record.spill_bytes, record.shared_bytes)


def _record_of(row: Row) -> Record:
    """The reverse of `_row_of`. Raises ValueError or TypeError if the row holds no valid record."""
    name, sm_count, driver, nvrtc, digest, *sizes, benchmark = row[:11]
    key = RecordKey(name, sm_count, driver, nvrtc, digest, Workload(*sizes), benchmark)
    timing, failure = row[12:16], row[16:18]
    if any(v is not None for v in timing) == any(v is not None for v in failure):
        raise ArgumentError(f"outcome must be either a time or a failure; got {(*timing, *failure)}")
    outcome = Timing(*timing) if failure[0] is None else Failure(FailureKind(failure[0]), failure[1])
    return Record(key, json.loads(row[11]), outcome, *row[18:])


def _sqlite(database: str, uri: bool = False) -> sqlite3.Connection:
    """A connection whose statements commit by themselves. Text that is no UTF-8 spoils its row, not the query."""
    connection = sqlite3.connect(database, uri=uri, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    """Opens a file, made empty with mode 0600 if there is none. Raises OSError, UnsafeCacheError or sqlite3.DatabaseError."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    require_safe(path)
    return _sqlite(str(path))


def _prepare(connection: sqlite3.Connection, journal: str) -> None:
    """Makes the table if the file is empty."""
    connection.execute(f"PRAGMA journal_mode = {journal}")
    # In WAL mode a commit survives the death of the process without a sync; only a power cut may lose the last ones.
    connection.execute("PRAGMA synchronous = NORMAL")
    if not _version_and_table(connection)[1]:
        connection.executescript(f"BEGIN IMMEDIATE; {_TABLE}; PRAGMA user_version = {SCHEMA}; COMMIT")


def _version_and_table(connection: sqlite3.Connection) -> tuple[int, list[str]]:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version, [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]


def _fault(connection: sqlite3.Connection, thorough: bool) -> str | None:
    """Why a file is not one of ours: 'corrupt', or 'schema' and its number. None if it is, or if it is empty."""
    try:
        found = _version_and_table(connection)
        if found not in ((0, []), (SCHEMA, [_TABLE])):
            return f"schema{found[0]}"
        if thorough and connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            return "corrupt"
    except sqlite3.DatabaseError as error:
        if not _is_damage(error):
            raise
        return "corrupt"
    return None


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _set_aside(path: Path, reason: str) -> Path:
    """Renames a file and what SQLite keeps beside it to the first free '<name>.<reason>-N'. Returns the new path."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{reason}-{number}")):
        number += 1
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    return aside


def _read_only_rows(path: Path) -> list[Row]:
    """The rows of a file that cannot be written, if it is safe and can be read. SQLite needs `immutable` where the folder is read-only."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        with suppress(OSError, UnsafeCacheError, sqlite3.DatabaseError):
            require_safe(path.parent)
            require_safe(path)
            connection = _sqlite(f"{path.as_uri()}?{mode}", uri=True)
            try:
                if _version_and_table(connection) == (SCHEMA, [_TABLE]):
                    return connection.execute(_SELECT).fetchall()
            finally:
                connection.close()
    return []


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# SQLite connections must not be carried across a fork: its locks would be believed held where they are not. So all files are
# closed before one, under the locks that the fork then hands to both sides unlocked; parent and child open them again on use.
_instances: weakref.WeakSet[Records] = weakref.WeakSet()
_forking = threading.Lock()  # two threads may fork at once
_held: list[Records] = []


def _before_fork() -> None:
    _forking.acquire()
    _held.extend(_instances)
    for records in _held:
        records._lock.acquire()
        records._close()


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
