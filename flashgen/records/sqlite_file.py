"""The SQLite file of tuning records, as plain rows: how it is made, kept safe, mended, and shared by threads, processes and forks."""

from __future__ import annotations

import os
import sqlite3
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flashgen.build.cache_dir import UnsafeCacheError, make_safe_dir, require_safe
from flashgen.build.lock import locked

from .former_schema import former_contents, former_select, move_on

SCHEMA = 2  # raise when the table, or what it means, changes
BUSY_SECONDS = 10.0  # how long to wait for another process that writes or makes the file

T = TypeVar("T")


class StoredRow(NamedTuple):
    """One row. Whoever may write the file decides what is in it, so the values may be anything that SQLite can hold."""

    device_name: Any
    sm_count: Any
    driver_version: Any
    nvrtc_version: Any
    spec_digest: Any
    batch: Any
    heads_q: Any
    heads_kv: Any
    len_q: Any
    len_kv: Any
    sizes: Any  # of the workload beside these, as JSON
    benchmark_version: Any  # the last one of the key
    spec: Any
    seconds: Any
    low: Any
    high: Any
    rounds: Any
    failure: Any
    message: Any
    registers: Any
    spill_bytes: Any
    shared_bytes: Any

    @property
    def key(self) -> tuple[Any, ...]:
        """The values that no two rows share."""
        return self[: len(KEY)]


KEY = StoredRow._fields[: StoredRow._fields.index("benchmark_version") + 1]
_COLUMNS = ", ".join(StoredRow._fields)
_KEY = ", ".join(KEY)
_TABLE = f"CREATE TABLE candidates ({_COLUMNS}, PRIMARY KEY ({_KEY}))"
_INTO = f"INTO candidates VALUES ({', '.join('?' * len(StoredRow._fields))})"
_SELECT = f"SELECT {_COLUMNS} FROM candidates"

# What a file holds: its version and the SQL of its tables.
_EMPTY: tuple[int, list[str]] = (0, [])
_OURS = (SCHEMA, [_TABLE])
# Files of the schema before lack one column: they are moved on where they are opened.
_FORMER = former_contents(_COLUMNS, _KEY)


class RecordFile:
    """The rows in one file. Safe to use from several threads and processes at once, and across fork.

    The file is made on first use, with mode 0600. One that is damaged or of another schema is renamed aside; where none can be
    written or the folder is not safe, rows are kept in memory. Each of these gives one RuntimeWarning, never an error.
    """

    # Of all files of the process at once, since a fork waits for all of them. Also for what a caller keeps in step with a file.
    lock = threading.RLock()

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._connection: sqlite3.Connection | None = None
        self._in_memory = False
        with self.lock:
            _files.add(self)

    def find(self, key: tuple[Any, ...]) -> StoredRow | None:
        """The row with that key."""
        found = self._run(_statement(f"{_SELECT} WHERE ({_KEY}) = ({', '.join('?' * len(KEY))})", key))
        return StoredRow(*found[0]) if found else None

    def of_device(self, device_name: str, sm_count: int) -> list[StoredRow]:
        """All rows of a device."""
        statement = _statement(f"{_SELECT} WHERE device_name = ? AND sm_count = ?", (device_name, sm_count))
        return [StoredRow(*values) for values in self._run(statement)]

    def all(self) -> list[StoredRow]:
        """All rows."""
        return [StoredRow(*values) for values in self._run(_statement(_SELECT))]

    def put(self, row: StoredRow) -> None:
        """Adds a row, or replaces the one with its key. Once this returns, a killed process does not lose it."""
        self._run(_statement(f"INSERT OR REPLACE {_INTO}", row))

    def add(self, rows: Sequence[StoredRow]) -> int:
        """Adds the rows whose keys are not here yet, in one transaction; says how many. Those that are here stay as they are."""
        return self._run(partial(_add, rows))

    def __len__(self) -> int:
        return int(self._run(_statement("SELECT count(*) FROM candidates"))[0][0])

    def clear(self) -> int:
        """Removes all rows; says how many."""
        with self.lock:
            count = len(self)
            self._run(_statement("DELETE FROM candidates"))
            return count

    def close(self) -> None:
        """Closes the file until its next use. Rows that are kept in memory stay."""
        with self.lock:
            if self._connection is not None and not self._in_memory:
                self._connection.close()
                self._connection = None

    @property
    def in_memory(self) -> bool:
        """Whether rows are lost with this process, because the file cannot be used: known once it was tried."""
        return self._in_memory

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Does one piece of work: on the file, on a new one if it is damaged, in memory if there can be none."""
        with self.lock:
            if not self._in_memory:
                try:
                    return self._run_on_file(work)
                except (OSError, UnsafeCacheError, sqlite3.DatabaseError) as error:
                    self._fall_back(error)
            assert self._connection is not None
            return work(self._connection)

    def _run_on_file(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._connection = self._connection or self._open(thorough=False)
        try:
            return work(self._connection)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
        self.close()
        self._connection = self._open(thorough=True)
        return work(self._connection)

    def _open(self, thorough: bool) -> sqlite3.Connection:
        """Opens the file, made new if there is none or it is not sound. `thorough`: reads all of it to find damage."""
        make_safe_dir(self.path.parent)
        with locked(self.path.parent, str(self.path.parent), BUSY_SECONDS):  # one process at a time makes the file or sets it aside
            connection = _connect_file(self.path)
            try:
                if fault := _fault(connection, thorough, moves_on=True):
                    connection.close()
                    aside = _set_aside(self.path, fault)
                    message = f"{self.path} is no sound file of tuning records ({fault}): renamed to {aside.name}"
                    warnings.warn(message, RuntimeWarning, stacklevel=6)
                    connection = _connect_file(self.path)
                _prepare(connection, "WAL")
            except BaseException:
                connection.close()
                raise
            return connection

    def _fall_back(self, error: Exception) -> None:
        self.close()
        self._in_memory = True
        reason = f"{self.path} cannot hold tuning records ({error}): new ones stay in memory and are lost with this process"
        warnings.warn(f"{reason}. Set FLASHGEN_CACHE_DIR to a folder that you own and can write to", RuntimeWarning, stacklevel=5)
        self._connection = _connect(":memory:")
        _prepare(self._connection, "MEMORY")
        self._connection.executemany(f"INSERT {_INTO}", _read_only_rows(self.path))


def _statement(text: str, values: tuple[Any, ...] = ()) -> Callable[[sqlite3.Connection], list[tuple[Any, ...]]]:
    """One statement, a transaction of its own, as work for a file."""
    return lambda connection: connection.execute(text, values).fetchall()


def _add(rows: Sequence[StoredRow], connection: sqlite3.Connection) -> int:
    connection.execute("BEGIN IMMEDIATE")
    try:
        added = connection.executemany(f"INSERT OR IGNORE {_INTO}", rows).rowcount
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # after a full disk SQLite has rolled back by itself
            connection.execute("ROLLBACK")
        raise
    return max(0, added)  # -1 if there are no rows


def fault_of(path: Path) -> str | None:
    """Why a file that is there cannot be used: 'corrupt', or 'schema' and its number; None if it is sound. Reads all, changes nothing.

    Raises OSError, UnsafeCacheError or sqlite3.DatabaseError if it cannot be read.
    """
    require_safe(path)
    with closing(_connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return _fault(connection, thorough=True)


def _connect(database: str, uri: bool = False) -> sqlite3.Connection:
    """A connection whose statements commit by themselves. Text that is no UTF-8 spoils its row, not the query."""
    connection = sqlite3.connect(database, uri=uri, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    return connection


def _connect_file(path: Path) -> sqlite3.Connection:
    """Opens a file, made empty with mode 0600 if there is none. Raises OSError, UnsafeCacheError or sqlite3.DatabaseError."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    require_safe(path)
    return _connect(str(path))


def _prepare(connection: sqlite3.Connection, journal: str) -> None:
    """Makes the table if the file is empty."""
    connection.execute(f"PRAGMA journal_mode = {journal}")
    # In WAL mode a commit survives the death of the process without a sync; only a power cut may lose the last ones.
    connection.execute("PRAGMA synchronous = NORMAL")
    if _contents(connection) == _EMPTY:
        connection.executescript(f"BEGIN IMMEDIATE; {_TABLE}; PRAGMA user_version = {SCHEMA}; COMMIT")


def _contents(connection: sqlite3.Connection) -> tuple[int, list[str]]:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version, [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]


def _fault(connection: sqlite3.Connection, thorough: bool, moves_on: bool = False) -> str | None:
    """Why a file is not one of ours: 'corrupt', or 'schema' and its number. None if it is, or if it is empty.

    moves_on: whether one of the schema before becomes one of this one.
    """
    try:
        found = _contents(connection)
        if found not in (_EMPTY, _OURS, _FORMER):
            return f"schema{found[0]}"
        if thorough and connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            return "corrupt"
        if moves_on and found == _FORMER:
            move_on(connection, _TABLE, _COLUMNS, SCHEMA)
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


def _read_only_rows(path: Path) -> list[tuple[Any, ...]]:
    """The rows of a file that cannot be written, if it is safe and can be read. SQLite needs `immutable` where the folder is read-only."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        with suppress(OSError, UnsafeCacheError, sqlite3.DatabaseError):
            require_safe(path.parent)
            require_safe(path)
            with closing(_connect(f"{path.as_uri()}?{mode}", uri=True)) as connection:
                if (found := _contents(connection)) in (_OURS, _FORMER):
                    return connection.execute(_SELECT if found == _OURS else former_select(_COLUMNS)).fetchall()
    return []


# SQLite connections must not be carried across a fork: its locks would be believed held where they are not. So all files are
# closed before one, under the lock, which the fork then hands to both sides unlocked; parent and child open them again on use.
_files: weakref.WeakSet[RecordFile] = weakref.WeakSet()


def _before_fork() -> None:
    RecordFile.lock.acquire()
    for file in _files:
        file.close()


os.register_at_fork(before=_before_fork, after_in_parent=RecordFile.lock.release, after_in_child=RecordFile.lock.release)
