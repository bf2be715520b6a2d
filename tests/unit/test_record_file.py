"""The file of tuning records: damage, folders that cannot be used, and many processes, threads and forks at once."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from flashgen.records import sqlite_file as record_file
from flashgen.records.sqlite_file import SCHEMA, RecordFile, StoredRow, fault_of

FORK = multiprocessing.get_context("fork")


def row(number: int, registers: int = 128) -> StoredRow:
    """A row; its key differs from others' in the last length, which is `number`."""
    key = ("NVIDIA H200", 132, "13.0", "13.0", "digest", 1, 16, 16, 1024, number, "{}", 1)
    return StoredRow(*key, "{}", 1e-3, 0.9e-3, 1.1e-3, 7, None, None, registers, 0, 65536)


def rows_of(file: RecordFile) -> list[StoredRow]:
    return sorted(file.of_device("NVIDIA H200", 132), key=lambda row: int(row.len_kv))


def numbers(file: RecordFile) -> list[int]:
    return [row.len_kv for row in rows_of(file)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache/records.sqlite3"


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def execute(path: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement).fetchall()


def test_rows_come_back(path: Path) -> None:
    file = RecordFile(path)
    for put in (row(1), row(2), row(2, registers=64), row(3)._replace(device_name="other"), row(4)._replace(sm_count=66)):
        file.put(put)
    with no_warning():
        for reader in (file, RecordFile(path)):
            assert len(reader) == 4
            assert rows_of(reader) == [row(1), row(2, registers=64)]
            assert reader.find(row(2).key) == row(2, registers=64)
            assert reader.find(row(5).key) is None
        assert file.clear() == 4
        assert len(RecordFile(path)) == 0


def test_rows_added_at_once(path: Path) -> None:
    file = RecordFile(path)
    file.put(row(2))
    assert file.add([row(1), row(2, registers=64), row(3)]) == 2
    assert file.add([row(1), row(3)]) == 0
    assert rows_of(RecordFile(path)) == [row(1), row(2), row(3)]
    assert len(file.all()) == 3
    assert not file.in_memory


def test_rows_added_by_many_processes_at_once(path: Path) -> None:
    def child(number: int) -> None:
        with no_warning():
            RecordFile(path).add([row(n) for n in range(100)] + [row(1000 + number)])

    run_children(child, 6)
    assert numbers(RecordFile(path)) == [*range(100), *range(1000, 1006)]


def test_file_is_lazy_and_private(path: Path) -> None:
    before = os.umask(0)
    try:
        file = RecordFile(path)
        assert not path.parent.exists()
        file.put(row(1))
    finally:
        os.umask(before)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    files = list(path.parent.iterdir())
    assert path in files
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert execute(path, "PRAGMA journal_mode") == [("wal",)]
    assert execute(path, "PRAGMA user_version") == [(SCHEMA,)]


# Files of the schema before


FORMER = """
    CREATE TABLE candidates (device_name, sm_count, driver_version, nvrtc_version, spec_digest, batch, heads_q, heads_kv, len_q, len_kv,
    benchmark_version, spec, seconds, low, high, rounds, failure, message, registers, spill_bytes, shared_bytes, PRIMARY KEY (device_name,
    sm_count, driver_version, nvrtc_version, spec_digest, batch, heads_q, heads_kv, len_q, len_kv, benchmark_version))
"""


def former_file(path: Path, *rows: StoredRow) -> None:
    """A file as versions with schema 1 wrote it."""
    path.parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(" ".join(FORMER.split()))
        connection.execute("PRAGMA user_version = 1")
        place = StoredRow._fields.index("sizes")
        for one in rows:
            connection.execute(f"INSERT INTO candidates VALUES ({', '.join('?' * (len(one) - 1))})", one[:place] + one[place + 1 :])
    path.chmod(0o600)


def test_a_file_of_the_schema_before_is_moved_on(path: Path) -> None:
    former_file(path, row(1), row(2))
    assert fault_of(path) is None
    with no_warning():
        file = RecordFile(path)
        assert rows_of(file) == [row(1), row(2)]
        file.put(row(2, registers=64))
        file.put(row(2)._replace(sizes='{"window_left":7}'))
        file.close()
        assert len(RecordFile(path)) == 3
    assert execute(path, "PRAGMA user_version") == [(SCHEMA,)]
    assert [child.name for child in path.parent.iterdir() if not child.name.endswith((".lock", "-wal", "-shm"))] == [path.name]


def test_a_file_of_the_schema_before_that_is_damaged_is_set_aside(path: Path) -> None:
    former_file(path, *map(row, range(200)))
    spoil_pages(path)
    with pytest.warns(RuntimeWarning, match=f"renamed to {path.name}.corrupt-1"):
        assert rows_of(RecordFile(path)) == []


def test_rows_of_the_schema_before_are_read_where_nothing_can_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    former_file(path, row(1))

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(record_file, "move_on", full)
    with pytest.warns(RuntimeWarning, match="disk is full"):
        assert rows_of(RecordFile(path)) == [row(1)]
    assert execute(path, "PRAGMA user_version") == [(1,)]


# Damage


def somebodys_database(path: Path) -> None:
    path.unlink()
    execute(path, "CREATE TABLE t (x)")
    path.chmod(0o600)


def garbage(path: Path) -> None:
    path.write_bytes(b"this is no database at all" * 100)


def spoil_pages(path: Path) -> None:
    """Leaves the first page, so that the file opens, and spoils the others, so that reading it fails."""
    data = path.read_bytes()
    path.write_bytes(data[:4096] + b"\xaa" * (len(data) - 4096))


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "garbage": ("corrupt", garbage),
    "spoiled pages": ("corrupt", spoil_pages),
    "cut off": ("corrupt", lambda p: p.write_bytes(p.read_bytes()[:5000])),
    "later schema": ("schema3", lambda p: execute(p, "PRAGMA user_version = 3")),
    "other table": ("schema2", lambda p: execute(p, "ALTER TABLE candidates ADD COLUMN more")),
    "somebody's database": ("schema0", somebodys_database),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_or_foreign_file_is_set_aside(path: Path, damage: str) -> None:
    reason, spoil = DAMAGE[damage]
    for number in (1, 2):
        file = RecordFile(path)
        file.put(row(1))
        file.close()  # else SQLite would mend the file from its write-ahead log
        spoil(path)
        before = path.read_bytes()
        with pytest.warns(RuntimeWarning, match=f"renamed to {path.name}.{reason}-{number}") as caught:
            assert rows_of(file) == []
            file.put(row(2))
        assert len(caught) == 1
        assert path.with_name(f"{path.name}.{reason}-{number}").read_bytes() == before
        with no_warning():
            assert rows_of(RecordFile(path)) == [row(2)]
        path.unlink()


def test_file_set_aside_keeps_what_its_log_holds(path: Path) -> None:
    """Another version's process has the file open, and rows in the write-ahead log; that goes along, and the other goes on."""
    RecordFile(path).put(row(1))
    aside = path.with_name(f"{path.name}.schema3-1")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("UPDATE candidates SET registers = 1")
        other.execute("PRAGMA user_version = 3")
        with pytest.warns(RuntimeWarning, match=aside.name):
            assert len(RecordFile(path)) == 0
        other.execute("UPDATE candidates SET spill_bytes = 2")
    assert execute(aside, "SELECT registers, spill_bytes FROM candidates") == [(1, 2)]
    assert execute(aside, "PRAGMA integrity_check") == [("ok",)]
    with no_warning():
        assert len(RecordFile(path)) == 0


def test_file_spoiled_while_it_is_open(path: Path) -> None:
    file = RecordFile(path)
    for number in range(200):
        file.put(row(number))
    execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    spoil_pages(path)
    with pytest.warns(RuntimeWarning, match="corrupt-1"):
        for number in range(200):
            file.put(row(number))
    assert numbers(RecordFile(path)) == list(range(200))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_fault_is_told_and_nothing_changed(path: Path, damage: str) -> None:
    reason, spoil = DAMAGE[damage]
    file = RecordFile(path)
    file.put(row(1))
    assert fault_of(path) is None
    file.close()
    spoil(path)
    before = path.read_bytes()
    assert fault_of(path) == reason
    assert path.read_bytes() == before
    assert not list(path.parent.glob(f"{path.name}.*-1"))


def test_empty_file_is_a_new_one(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    with no_warning():
        RecordFile(path).put(row(1))
        assert len(RecordFile(path)) == 1


# Folders that cannot be used

EARLIER = row(0)


def unusable(file: RecordFile, reason: str, already: Iterable[StoredRow] = ()) -> None:
    """Asserts that rows are kept in memory, with one warning that gives the file, the reason and the cure."""
    with pytest.warns(RuntimeWarning) as caught:
        for put in (row(1), row(2), row(3), row(2, registers=64)):
            file.put(put)
        file.close()
        assert file.find(row(2).key) == row(2, registers=64)
        assert rows_of(file) == [*already, row(1), row(2, registers=64), row(3)]
    assert len(caught) == 1
    message = str(caught[0].message)
    said = re.fullmatch(rf"{re.escape(str(file.path))} cannot hold tuning records \((.+)\): .* FLASHGEN_CACHE_DIR .*", message)
    assert said, message
    assert reason in said[1], "the path, too, may hold that word"
    count = len(file)
    assert (file.clear(), len(file)) == (count, 0)


def test_linked_folder_is_neither_written_nor_trusted(path: Path, tmp_path: Path) -> None:
    RecordFile(path).put(EARLIER)
    link = tmp_path / "link"
    link.symlink_to(path.parent)
    unusable(RecordFile(link / path.name), "symbolic link")
    assert rows_of(RecordFile(path)) == [EARLIER]


def test_linked_file_is_neither_written_nor_trusted(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.sqlite3"
    RecordFile(real).put(EARLIER)
    path.parent.mkdir(mode=0o700)
    path.symlink_to(real)
    unusable(RecordFile(path), "symbolic link")
    assert rows_of(RecordFile(real)) == [EARLIER]


@pytest.mark.parametrize("spoil", ["folder", "file"])
def test_group_writable_is_neither_written_nor_trusted(path: Path, spoil: str) -> None:
    RecordFile(path).put(EARLIER)
    changed = path if spoil == "file" else path.parent
    mode = changed.stat().st_mode
    changed.chmod(0o770)
    unusable(RecordFile(path), "writable by its group")
    changed.chmod(mode)
    assert rows_of(RecordFile(path)) == [EARLIER]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable(RecordFile(tmp_path / "file/cache/records.sqlite3"), "Not a directory")


def connect_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[sqlite3.Connection], object], read_only: bool = False) -> None:
    """Lets SQLite itself fail on files: connections to one are read-only, or changed once they are open."""
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def changed(database: str, *args: Any, uri: bool = False, **kwargs: Any) -> sqlite3.Connection:
        if uri or database == ":memory:":
            return connect(database, *args, uri=uri, **kwargs)
        connection = connect(f"{Path(database).as_uri()}?mode=ro" if read_only else database, *args, uri=read_only, **kwargs)
        change(connection)
        return connection

    monkeypatch.setattr(sqlite3, "connect", changed)


def test_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordFile(path).put(EARLIER)
    file, big = RecordFile(path), row(9)._replace(message="x" * 100_000)
    connect_with(monkeypatch, lambda c: c.execute("PRAGMA max_page_count = 1"))
    with pytest.warns(RuntimeWarning, match=r"is full\).*FLASHGEN_CACHE_DIR") as caught:
        file.put(big)
        file.put(row(1))
    assert len(caught) == 1
    assert rows_of(file) == [EARLIER, row(1), big]
    monkeypatch.undo()
    assert rows_of(RecordFile(path)) == [EARLIER]


def test_full_disk_while_the_file_is_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_with(monkeypatch, lambda c: c.execute("PRAGMA max_page_count = 1"))
    unusable(RecordFile(path), "full")
    assert not any(os.path.samefile(path, link) for link in open_files())


def test_locked_by_another_while_it_is_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "BUSY_SECONDS", 0.1)
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        unusable(RecordFile(path), "locked")


def test_damaged_file_that_cannot_be_set_aside(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir(mode=0o700)
    garbage(path)
    path.chmod(0o600)
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    unusable(RecordFile(path), "Permission denied")
    assert path.read_bytes() == before
    assert not any(os.path.samefile(path, link) for link in open_files())


def test_an_interrupt_while_the_file_is_opened_ends_the_call_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(record_file, "_prepare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        file.put(row(1))
    monkeypatch.undo()
    assert not any(os.path.samefile(path, link) for link in open_files())
    with no_warning():
        file.put(row(2))
        assert numbers(RecordFile(path)) == [2]


def test_rows_are_added_all_or_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordFile(path).put(EARLIER)
    file, rows = RecordFile(path), [row(n)._replace(message="x" * 1000) for n in range(1, 1000)]
    connect_with(monkeypatch, lambda c: c.execute("PRAGMA max_page_count = 100"))  # room for some of them
    with pytest.warns(RuntimeWarning, match="is full"):
        file.add(rows)
    assert file.in_memory
    monkeypatch.undo()
    assert rows_of(RecordFile(path)) == [EARLIER]


def test_read_only_file_is_still_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordFile(path).put(EARLIER)
    connect_with(monkeypatch, lambda c: None, read_only=True)
    unusable(RecordFile(path), "readonly", already=[EARLIER])
    monkeypatch.undo()
    assert rows_of(RecordFile(path)) == [EARLIER]


def test_locked_by_another_for_too_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "BUSY_SECONDS", 0.1)
    file = RecordFile(path)
    file.put(EARLIER)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        unusable(file, "locked", already=[EARLIER])


def test_waits_for_another_writer(path: Path) -> None:
    file = RecordFile(path)
    file.put(row(1))
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, lambda: other.execute("COMMIT"))
        timer.start()
        with no_warning():
            file.put(row(2))
        timer.join()
    assert numbers(RecordFile(path)) == [1, 2]


# Many at once


def put_some(file: RecordFile, first: int, count: int) -> None:
    for number in range(first, first + count):
        file.put(row(number))


def run_children(target: Callable[[int], object], count: int, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Forks children that call `target` with their number, and asserts that they end well."""
    children = [FORK.Process(target=target, args=(number,)) for number in range(count)]
    for child in children:
        child.start()
    meanwhile()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * count


def test_forked_children_and_parent_share_one(path: Path) -> None:
    """The parent's connection is open, and used by a thread, while it forks; it goes on and closes before the children do."""
    file = RecordFile(path)
    put_some(file, 0, 10)
    busy = threading.Thread(target=put_some, args=(file, 1000, 200))

    def child(number: int) -> None:
        with no_warning():
            put_some(file, 100 + 100 * number, 100)

    def close() -> None:
        busy.join()
        file.close()

    busy.start()
    run_children(child, 4, meanwhile=close)
    assert numbers(file) == [*range(10), *range(100, 500), *range(1000, 1200)]
    assert execute(path, "PRAGMA integrity_check") == [("ok",)]


def test_no_connection_is_open_across_a_fork(path: Path) -> None:
    file = RecordFile(path)
    file.put(row(1))
    assert any(os.path.samefile(path, link) for link in open_files())

    def child(number: int) -> None:
        assert not any(os.path.samefile(path, link) for link in open_files())

    run_children(child, 1)
    file.put(row(2))
    assert numbers(file) == [1, 2]


def open_files() -> list[Path]:
    return [link for link in Path("/proc/self/fd").iterdir() if link.exists()]


def test_processes_make_one_file_at_once(path: Path) -> None:
    def child(number: int) -> None:
        with no_warning():
            put_some(RecordFile(path), 20 * number, 20)

    run_children(child, 8)
    assert numbers(RecordFile(path)) == list(range(160))
    assert [file.name for file in path.parent.iterdir() if file.suffix == ".sqlite3"] == [path.name]


def test_processes_set_a_damaged_file_aside_once(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    garbage(path)
    path.chmod(0o600)

    def child(number: int) -> None:
        warnings.simplefilter("ignore")
        RecordFile(path).put(row(number))

    run_children(child, 8)
    assert numbers(RecordFile(path)) == list(range(8))
    assert [file.name for file in path.parent.glob("*corrupt*")] == [f"{path.name}.corrupt-1"]


def put_for_ever(path: Path, first: int, reports: int) -> None:
    file = RecordFile(path)
    for number in range(first, first + 10**6):
        file.put(row(number))
        os.write(reports, f"{number}\n".encode())


def test_killed_writers_lose_nothing_reported(path: Path) -> None:
    generator, reported = random.Random(1), []
    reader = RecordFile(path)
    for turn in range(10):
        reading, writing = os.pipe()
        writer = FORK.Process(target=put_for_ever, args=(path, turn * 10**6, writing))
        writer.start()
        os.close(writing)
        with os.fdopen(reading) as reports, no_warning():
            assert reports.readline()
            reported.append(turn * 10**6)
            len(reader)  # a reader keeps the file open while the writer dies
            time.sleep(generator.uniform(0, 0.15))
            writer.kill()
            writer.join()
            reported += [int(line) for line in reports if line.endswith("\n")]
            assert set(reported) <= set(numbers(reader))
    with no_warning():
        found = numbers(RecordFile(path))
    assert set(reported) <= set(found)
    assert len(found) <= len(reported) + 10
    assert execute(path, "PRAGMA integrity_check") == [("ok",)]
    assert len(reported) > 100
