"""The user's tuning records, in SQLite. What one is: `record.py`; which one is taken: `record_choice.py`. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from flashgen.build.cache_dir import cache_dir
from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError, FlashgenError, shown
from flashgen.codegen.plain import canonical, keys, parse, to_plain
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from .choice import Choice, Entry, Known, choose, distance, known_of
from .former_schema import NO_SIZES
from .record import Failure, FailureKind, Record, RecordKey, Timing
from .sqlite_file import KEY, RecordFile, StoredRow

__all__ = ["Choice", "Failure", "FailureKind", "Record", "RecordKey", "Records", "Timing", "distance"]


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
        self.generation = 0  # raised whenever what `known` says may have changed
        # Rows, by key, of the devices that `known` was asked for, and what it found in them; others' later writes are not seen.
        self._rows: dict[tuple[str, int], dict[tuple[Any, ...], StoredRow]] = {}
        self._known: dict[tuple[Problem, Device, int, frozenset[str]], Known] = {}

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
            self.generation += 1
            device = (record.key.device_name, record.key.sm_count)
            if device in self._rows:
                self._rows[device][row.key] = row
                self._known.clear()

    def add(self, records: Iterable[Record]) -> int:
        """Adds the records whose keys are not here yet, all or none, and says how many; those that are here stay as they are.

        Raises FlashgenError where they could only be kept in memory.
        """
        rows = [_row_of(record) for record in records]
        with self._file.lock:
            added = self._file.add(rows)
            self.generation += 1
            self._rows.clear()
            self._known.clear()
        if self._file.in_memory:
            raise FlashgenError(f"{self.path} cannot be written: the records were not kept")
        return added

    def all(self) -> list[Record]:
        """All records of all devices, read from the file, in order of their keys."""
        return sorted(self._valid(self._file.all()), key=lambda record: astuple(record.key))

    def for_device(self, device_name: str, sm_count: int) -> list[Record]:
        """All records of a device, read from the file, failures and old revisions included."""
        return list(self._valid(self._file.of_device(device_name, sm_count)))

    def best(
        self,
        problem: Problem,
        workload: Workload,
        device: Device,
        driver_version: str,
        nvrtc_version: str,
        benchmark_version: int,
        excluded: frozenset[str] = frozenset(),
    ) -> Choice | None:
        """The fastest kernel of today that is known for a workload on a device, or None: see `choose` for the order."""
        known = self.known(problem, device, benchmark_version, excluded)
        return choose(known.present, workload, (driver_version, nvrtc_version))

    def known(self, problem: Problem, device: Device, benchmark_version: int, excluded: frozenset[str] = frozenset()) -> Known:
        """What the records say of a problem on a device: see `known_of`. `excluded`: names of families that do not count.

        The first call for a device reads its rows, later ones do not.
        """
        wanted = (problem, device, benchmark_version, excluded)
        with self._file.lock:
            if wanted not in self._known:
                name = (device.name, device.sm_count)
                if name not in self._rows:
                    self._rows[name] = {row.key: row for row in self._file.of_device(*name)}
                entries = (entry for row in self._rows[name].values() if (entry := _entry_of(row)))
                self._known[wanted] = known_of(entries, problem, device.target, benchmark_version, excluded, self._skip)
            return self._known[wanted]

    def __len__(self) -> int:
        return len(self._file)

    def clear(self) -> int:
        """Removes all records; says how many. Raises FlashgenError where those on disk must stay."""
        with self._file.lock:
            self._rows.clear()
            self._known.clear()
            self.generation += 1
            removed = self._file.clear()
        if self._file.in_memory and self.path.exists():
            raise FlashgenError(f"{self.path} cannot be written: its records stay")
        return removed

    def _valid(self, rows: Iterable[StoredRow]) -> Iterator[Record]:
        for row in rows:
            with self._skipping():
                yield _record_of(row)

    @contextmanager
    def _skipping(self) -> Iterator[None]:
        """Goes on after a row that holds no valid record, with a warning the first time."""
        try:
            yield
        except ArgumentError as error:
            self._skip(error)

    def _skip(self, error: ArgumentError) -> None:
        if not self._warned:
            self._warned = True
            message = f"{self.path}: skipping each row that holds no valid record (the first: {error})"
            warnings.warn(message, RuntimeWarning, stacklevel=5)


_OUTCOME = (*keys(Timing), *keys(Failure))
_COLUMNS = tuple(name for name in keys(Workload) if name in StoredRow._fields)  # of a workload


def _key_values(key: RecordKey) -> tuple[Any, ...]:
    values = {**to_plain(key), **_sizes(to_plain(key.workload))}
    return tuple(values[name] for name in KEY)


def _sizes(workload: dict[str, Any]) -> dict[str, Any]:
    """A workload's JSON values as columns: those that have one of their own, and all others in one."""
    others = {name: value for name, value in workload.items() if name not in _COLUMNS}
    return {**{name: workload[name] for name in _COLUMNS}, "sizes": canonical(others)}


def _row_of(record: Record) -> StoredRow:
    values = record.to_json()
    values |= dict.fromkeys(_OUTCOME) | _sizes(values.pop("workload")) | values.pop("outcome")
    return StoredRow(**{**values, "spec": canonical(record.spec)})


def _entry_of(row: StoredRow) -> Entry | None:
    """The row's time, before it is checked; None if there is none, or of values that cannot be compared."""
    if not isinstance(row.seconds, float) or type(row.benchmark_version) is not int or not isinstance(row.spec, str):
        return None
    conditions = (row.driver_version, row.nvrtc_version, row.batch, row.heads_q, row.heads_kv, row.len_q, row.len_kv, row.sizes)
    return Entry(row.seconds, row.benchmark_version, conditions, row.spec, partial(_record_of, row))


def _record_of(row: StoredRow) -> Record:
    """The reverse of `_row_of`. Raises ArgumentError if the row holds no valid record."""
    values = row._asdict()
    workload = {name: values.pop(name) for name in _COLUMNS} | _object_of(values.pop("sizes"))
    outcome = {name: value for name in _OUTCOME if (value := values.pop(name)) is not None}
    return Record.from_json({**values, "workload": workload, "outcome": outcome, "spec": _spec_of(row.spec)})


def _object_of(text: Any) -> dict[str, Any]:
    if text == NO_SIZES:
        return {}
    sizes = parse(text, "sizes") if isinstance(text, str) else text
    if not isinstance(sizes, dict):
        raise ArgumentError(f"sizes must be a JSON object; got {shown(text)}")
    return sizes


def _spec_of(text: Any) -> Any:
    if not isinstance(text, str):
        raise ArgumentError(f"spec must be text of JSON; got {type(text).__name__}")
    return parse(text, "spec")
