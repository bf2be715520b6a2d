"""Tuning records: round trips, the look-up rule, damage, many processes, threads and forks, and folders that cannot be used."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flashgen import records as module
from flashgen.codegen.config import Config
from flashgen.codegen.device import Device, find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem, Workload
from flashgen.codegen.spec import KernelSpec
from flashgen.records import Choice, Failure, FailureKind, Record, RecordKey, Records, Timing, distance

DEVICE = find_device("h200")
FAMILY = find_family("attention_forward")
PROBLEM = Problem(Dtype.BF16, 64)
WORKLOAD = Workload(2, 16, 16, 1024, 1024)
CONFIGS = FAMILY.legal_configs(PROBLEM, DEVICE.target)


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.1 * seconds, 7)


def make(
    seconds: float | Failure = 1e-3,
    workload: Workload = WORKLOAD,
    config: Config = CONFIGS[0],
    problem: Problem = PROBLEM,
    device: Device = DEVICE,
    spec: dict[str, Any] | None = None,
    **key: Any,
) -> Record:
    """A record; `seconds` may be a failure, `spec` may be the JSON of a spec that cannot be built today."""
    spec = spec or KernelSpec(FAMILY, problem, config, device.target).to_json()
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    fixed = {"driver_version": "13.0", "nvrtc_version": "13.0", "benchmark_version": 1, **key}
    full = RecordKey(device_name=device.name, sm_count=device.sm_count, spec_digest=digest, workload=workload, **fixed)
    return Record(full, spec, timing(seconds) if isinstance(seconds, float) else seconds, 128, 0, 65536)


def best(
    records: Records, workload: Workload = WORKLOAD, problem: Problem = PROBLEM, device: Device = DEVICE, version: int = 1
) -> Choice | None:
    return records.best(problem, workload, device, "13.0", "13.0", version)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache/records.sqlite3"


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def execute(path: Path, statement: str, *values: object) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        with connection:
            return connection.execute(statement, values).fetchall()
    finally:
        connection.close()


# Round trips


@pytest.mark.parametrize("outcome", [1e-3, *(Failure(kind, f"why:\n{kind}") for kind in FailureKind)], ids=str)
def test_round_trip(path: Path, outcome: float | Failure) -> None:
    record = make(outcome)
    if isinstance(outcome, Failure):
        record = dataclasses.replace(record, registers=None, spill_bytes=None, shared_bytes=None)
    Records(path).put(record)
    with no_warning():
        assert Records(path).get(record.key) == record
        assert Records(path).for_device(DEVICE.name, DEVICE.sm_count) == [record]
        assert len(Records(path)) == 1
        for change in (
            {"workload": Workload(1, 1, 1, 1, 1)},
            {"driver_version": "13.1"},
            {"nvrtc_version": "13.1"},
            {"sm_count": 1},
            {"benchmark_version": 2},
        ):
            assert Records(path).get(dataclasses.replace(record.key, **change)) is None


def test_put_replaces_the_row_of_its_key(path: Path) -> None:
    records = Records(path)
    records.put(make(1e-3))
    records.put(make(2e-3))
    records.put(make(3e-3, driver_version="13.1"))
    assert len(records) == 2
    found = records.get(make().key)
    assert found is not None
    assert found.outcome == timing(2e-3)


def test_clear(path: Path) -> None:
    records = Records(path)
    for config in CONFIGS[:3]:
        records.put(make(config=config))
    assert best(records) is not None
    assert records.clear() == 3
    assert (len(records), best(records), len(Records(path))) == (0, None, 0)


def test_file_is_lazy_private_and_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        records = Records()
        assert records.path == tmp_path / "cache/records.sqlite3"
        assert not records.path.parent.exists()
        records.put(make())
    finally:
        os.umask(before)
    assert records.path.parent.stat().st_mode & 0o777 == 0o700
    files = list(records.path.parent.iterdir())
    assert records.path in files
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert execute(records.path, "PRAGMA journal_mode") == [("wal",)]
    assert execute(records.path, "PRAGMA user_version") == [(module.SCHEMA,)]


def test_import_loads_no_torch() -> None:
    code = "import sys, flashgen.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0


BAD: dict[str, Callable[[], object]] = {
    "seconds": lambda: Timing(float("nan"), 1.0, 1.0, 7),
    "low": lambda: Timing(1.0, 0.0, 1.0, 7),
    "high": lambda: Timing(1.0, 1.0, float("inf"), 7),
    "seconds ": lambda: Timing(1.0, 1.1, 1.2, 7),
    "rounds": lambda: Timing(1.0, 1.0, 1.0, 0),
    "kind": lambda: Failure("compile", ""),  # type: ignore[arg-type]
    "message": lambda: Failure(FailureKind.WRONG, None),  # type: ignore[arg-type]
    "driver_version": lambda: make(driver_version=""),
    "nvrtc_version": lambda: make(nvrtc_version=13),
    "benchmark_version": lambda: make(benchmark_version=True),
    "sm_count": lambda: dataclasses.replace(make().key, sm_count=0),
    "workload": lambda: dataclasses.replace(make().key, workload=(1, 1, 1, 1, 1)),  # type: ignore[arg-type]
    "spec": lambda: make(spec={"family": "attention_forward"}),
    "spec ": lambda: dataclasses.replace(make(), spec={**make().spec, "config": {1, 2}}),
    "spec_digest": lambda: dataclasses.replace(make(), spec={**make().spec, "revision": 999}),
    "problem": lambda: make(spec={**make().spec, "problem": {}}),
    "key": lambda: dataclasses.replace(make(), key=None),  # type: ignore[arg-type]
    "outcome": lambda: dataclasses.replace(make(), outcome=1.0),  # type: ignore[arg-type]
    "registers": lambda: dataclasses.replace(make(), registers=-1),
    "spill_bytes": lambda: dataclasses.replace(make(), spill_bytes=1.5),  # type: ignore[arg-type]
    "shared_bytes": lambda: dataclasses.replace(make(), shared_bytes="1"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_by_name(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name.strip()} must "):
        BAD[name]()


# The look-up rule


def test_fastest_of_the_exact_workload(path: Path) -> None:
    records = Records(path)
    fast = make(1e-3, config=CONFIGS[1])
    for record in (make(2e-3, config=CONFIGS[0]), fast, make(3e-3, config=CONFIGS[2])):
        records.put(record)
    records.put(make(Failure(FailureKind.WRONG, "off by one"), config=CONFIGS[3]))
    records.put(make(1e-9, workload=Workload(2, 16, 16, 1024, 2048), config=CONFIGS[4]))
    for fresh in (records, Records(path)):
        assert best(fresh) == Choice(fast, exact_workload=True, same_toolchain=True)


def test_only_rows_that_may_speak(path: Path) -> None:
    records = Records(path)
    revised = {**make().spec, "revision": FAMILY.revision + 1}
    unknown = {**make().spec, "family": "no_such_family"}
    illegal = {**make().spec, "config": {**make().spec["config"], "block_kv": 17}}
    for record in (
        make(1e-9, problem=Problem(Dtype.FP16, 64)),
        make(1e-9, problem=Problem(Dtype.BF16, 64, mask=Mask.CAUSAL)),
        make(1e-9, device=find_device("h100")),
        make(1e-9, device=dataclasses.replace(DEVICE, sm_count=66)),
        make(1e-9, benchmark_version=2),
        make(1e-9, spec=revised),
        make(1e-9, spec=unknown),
        make(1e-9, spec=illegal),
        make(1e-9, spec={**make().spec, "target": "sm_80"}),
        make(Failure(FailureKind.DEFECT, "spills 8 B a thread")),
    ):
        records.put(record)
    for fresh in (records, Records(path)):
        with no_warning():
            assert best(fresh) is None
    assert len(records.for_device(DEVICE.name, DEVICE.sm_count)) == 8
    records.put(make(1.0, config=CONFIGS[1]))
    for fresh in (records, Records(path)):
        assert best(fresh) == Choice(make(1.0, config=CONFIGS[1]), True, True)


def test_raised_revision_silences_old_times(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records(path).put(make())
    assert best(Records(path)) is not None
    monkeypatch.setattr(type(FAMILY), "revision", FAMILY.revision + 1)
    assert best(Records(path)) is None


NEAR = Workload(2, 16, 16, 2048, 1024)


def test_order_of_fall_backs(path: Path) -> None:
    """(same, exact), (any, exact), (same, near), (any, near), None: each is used only once those before it are gone."""
    same_exact, any_exact = make(4e-3), make(3e-3, driver_version="12.9")
    same_near, any_near = make(2e-3, workload=NEAR), make(1e-3, workload=NEAR, nvrtc_version="12.9")
    order = [Choice(same_exact, True, True), Choice(any_exact, True, False), Choice(same_near, False, True), Choice(any_near, False, False)]
    for first in range(5):
        records = Records(path.with_name(f"{first}.sqlite3"))
        for choice in reversed(order[first:]):
            records.put(choice.record)
        assert best(records) == (order[first] if first < 4 else None)


def test_toolchain_is_driver_and_compiler(path: Path) -> None:
    records = Records(path)
    records.put(make(1e-3, driver_version="13.1", nvrtc_version="13.0"))
    records.put(make(2e-3, driver_version="13.0", nvrtc_version="13.1", config=CONFIGS[1]))
    choice = best(records)
    assert choice == Choice(make(1e-3, driver_version="13.1"), True, False)


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        (WORKLOAD, 0.0),
        (Workload(4, 8, 8, 1024, 1024), 0.0),  # batch * heads is the same
        (Workload(2, 16, 16, 4096, 1024), 2.0),
        (Workload(2, 16, 16, 1024, 256), 2.0),
        (Workload(8, 16, 16, 1024, 1024), 2.0),
        (Workload(2, 16, 4, 1024, 1024), 1.0),
        (Workload(2, 16, 4, 512, 2048), 3.0),
        (Workload(2, 16, 16, 0, 1024), 10.0),
        (Workload(0, 0, 0, 1024, 1024), 6.0),
    ],
)
def test_distance(workload: Workload, expected: float) -> None:
    assert distance(WORKLOAD, workload) == distance(workload, WORKLOAD)
    assert distance(WORKLOAD, workload) == pytest.approx(expected)


def test_nearest_wins_over_faster(path: Path) -> None:
    records = Records(path)
    near = make(5e-3, workload=NEAR)
    records.put(near)
    records.put(make(4e-3, workload=Workload(2, 16, 16, 4096, 1024)))
    records.put(make(6e-3, workload=NEAR, config=CONFIGS[1]))
    assert best(records) == Choice(near, False, True)


@pytest.mark.parametrize(("len_kv", "found"), [(8192, True), (8193, False)])
def test_too_far_is_none(path: Path, len_kv: int, found: bool) -> None:
    records = Records(path)
    records.put(make(workload=Workload(2, 16, 16, 1024, len_kv)))
    assert (best(records) is not None) == found


def test_far_rows_of_the_same_toolchain_give_way_to_near_ones(path: Path) -> None:
    records = Records(path)
    records.put(make(workload=Workload(2, 16, 16, 1024, 2**20)))
    near = make(workload=NEAR, driver_version="13.1")
    records.put(near)
    assert best(records) == Choice(near, False, False)


def test_warm_look_up_reads_no_file_and_hears_its_own_puts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(path)
    records.put(make(2e-3))
    assert best(records) is not None
    query, asked = records._query, []

    def count(statement: str, values: tuple[Any, ...] = ()) -> Any:
        asked.append(statement)
        return query(statement, values)

    monkeypatch.setattr(records, "_query", count)
    assert best(records) == Choice(make(2e-3), True, True)
    assert best(records, NEAR) == Choice(make(2e-3), False, True)
    assert best(records, problem=Problem(Dtype.FP16, 64)) is None
    assert asked == []
    faster = make(1e-3, config=CONFIGS[1])
    records.put(faster)
    assert best(records) == Choice(faster, True, True)
    records.put(make(Failure(FailureKind.LAUNCH, "illegal address"), config=CONFIGS[1]))
    assert best(records) == Choice(make(2e-3), True, True)
    assert all(statement.startswith("INSERT") for statement in asked)


def test_look_up_among_tens_of_thousands(path: Path) -> None:
    records = Records(path)
    workloads = [Workload(1, 32, 8, 64 + n, 4096) for n in range(100)]
    columns = len(module._COLUMNS.split(","))
    rows = [module._row_of(make(1e-3 + 1e-6 * n, w, c)) for (n, w), c in itertools.product(enumerate(workloads), CONFIGS[:4])]
    assert len(rows[0]) == columns
    records.put(make())
    connection = sqlite3.connect(path)
    for copy in range(50):  # 20000 rows, of 50 compilers
        connection.executemany(module._INSERT, [(*row[:3], f"11.{copy}", *row[4:]) for row in rows])
    connection.commit()
    connection.close()
    fresh = Records(path)
    begin = time.perf_counter()
    choice = best(fresh, workloads[3])
    cold = time.perf_counter() - begin
    assert choice is not None
    assert choice.exact_workload
    begin = time.perf_counter()
    for _ in range(20):
        best(fresh, workloads[3])
    warm = (time.perf_counter() - begin) / 20
    assert cold < 5
    assert warm < 0.02


# Damage

TAMPER = {
    "sizes are text": "UPDATE candidates SET batch = 'many'",
    "negative size": "UPDATE candidates SET len_q = -1",
    "name is no text": "UPDATE candidates SET driver_version = 7",
    "spec is torn": "UPDATE candidates SET spec = substr(spec, 1, 40)",
    "spec of another digest": "UPDATE candidates SET spec = replace(spec, '\"warps\":', '\"warpz\":')",
    "spec is a number": "UPDATE candidates SET spec = 7",
    "spec is null": "UPDATE candidates SET spec = NULL",
    "text that is no UTF-8": "UPDATE candidates SET spec = CAST(x'ff' AS TEXT)",
    "time is text": "UPDATE candidates SET seconds = 'fast'",
    "time is zero": "UPDATE candidates SET seconds = 0.0",
    "time is infinite": "UPDATE candidates SET seconds = 9e999",
    "no outcome": "UPDATE candidates SET seconds = NULL, low = NULL, high = NULL, rounds = NULL",
    "half an outcome": "UPDATE candidates SET rounds = NULL",
    "two outcomes": "UPDATE candidates SET failure = 'wrong', message = ''",
    "unknown failure": "UPDATE candidates SET seconds = NULL, low = NULL, high = NULL, rounds = NULL, failure = 'x', message = ''",
    "registers are text": "UPDATE candidates SET registers = 'x'",
}


@pytest.mark.parametrize("tamper", TAMPER)
def test_tampered_row_is_skipped_with_one_warning(path: Path, tamper: str) -> None:
    bad, good = make(1e-6), make(1e-3, config=CONFIGS[1])
    for record in (bad, good):
        Records(path).put(record)
    execute(path, f"{TAMPER[tamper]} WHERE spec_digest = ?", bad.key.spec_digest)
    records = Records(path)
    with pytest.warns(RuntimeWarning, match="no valid record") as caught:
        assert records.for_device(DEVICE.name, DEVICE.sm_count) == [good]
        assert records.get(bad.key) is None
        assert best(records) == Choice(good, True, True)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # best says so only if it meets the row
        assert best(Records(path)) == Choice(good, True, True)


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
    "later schema": ("schema2", lambda p: execute(p, "PRAGMA user_version = 2")),
    "other table": ("schema1", lambda p: execute(p, "ALTER TABLE candidates ADD COLUMN more")),
    "somebody's database": ("schema0", somebodys_database),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_or_foreign_file_is_set_aside(path: Path, damage: str) -> None:
    reason, spoil = DAMAGE[damage]
    for number in (1, 2):
        records = Records(path)
        records.put(make())
        records._close()  # else SQLite would mend the file from its write-ahead log
        spoil(path)
        before = path.read_bytes()
        records = Records(path)
        with pytest.warns(RuntimeWarning, match=f"renamed to {path.name}.{reason}-{number}") as caught:
            assert records.for_device(DEVICE.name, DEVICE.sm_count) == []
            assert best(records) is None
            records.put(make(2e-3))
        assert len(caught) == 1
        assert path.with_name(f"{path.name}.{reason}-{number}").read_bytes() == before
        with no_warning():
            assert Records(path).get(make().key) == make(2e-3)
        path.unlink()


def test_file_set_aside_keeps_what_its_log_holds(path: Path) -> None:
    """Another version's process has the file open, and rows in the write-ahead log; that goes along, and the other goes on."""
    other = Records(path)
    other.put(make())
    assert other._connection is not None
    other._connection.execute("PRAGMA user_version = 2")
    aside = path.with_name(f"{path.name}.schema2-1")
    with pytest.warns(RuntimeWarning, match=aside.name):
        assert len(Records(path)) == 0
    other.put(make(2e-3, config=CONFIGS[1]))
    other._close()
    assert execute(aside, "SELECT seconds FROM candidates ORDER BY seconds") == [(1e-3,), (2e-3,)]
    assert execute(aside, "PRAGMA integrity_check") == [("ok",)]
    with no_warning():
        assert len(Records(path)) == 0


def test_file_spoiled_while_it_is_open(path: Path) -> None:
    records = Records(path)
    for config in CONFIGS[:50]:
        records.put(make(config=config))
    execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    spoil_pages(path)
    with pytest.warns(RuntimeWarning, match="corrupt-1"):
        for config in CONFIGS[:50]:
            records.put(make(2e-3, config=config))
    assert len(Records(path)) == 50


def test_empty_file_is_a_new_one(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    with no_warning():
        Records(path).put(make())
        assert len(Records(path)) == 1


# Folders that cannot be used


def unusable(records: Records, reason: str, already: int = 0) -> None:
    """Asserts that records fall back to memory, with one warning that gives the file, the reason and the cure."""
    with pytest.warns(RuntimeWarning) as caught:
        for config in CONFIGS[:3]:
            records.put(make(config=config))
        records.put(make(1e-6, config=CONFIGS[1]))
        assert records.get(make(config=CONFIGS[1]).key) == make(1e-6, config=CONFIGS[1])
        assert best(records) == Choice(make(1e-6, config=CONFIGS[1]), True, True)
        assert len(records) == already + 3
    assert len(caught) == 1
    message = str(caught[0].message)
    assert all(part in message for part in (str(records.path), reason, "FLASHGEN_CACHE_DIR")), message
    assert records.clear() == already + 3


EARLIER = make(workload=Workload(1, 1, 1, 1, 1))


def test_linked_folder_is_neither_written_nor_trusted(path: Path, tmp_path: Path) -> None:
    Records(path).put(EARLIER)
    link = tmp_path / "link"
    link.symlink_to(path.parent)
    unusable(Records(link / path.name), "symbolic link")
    assert len(Records(path)) == 1


@pytest.mark.parametrize("spoil", ["folder", "file"])
def test_group_writable_is_neither_written_nor_trusted(path: Path, spoil: str) -> None:
    Records(path).put(EARLIER)
    changed = path if spoil == "file" else path.parent
    mode = changed.stat().st_mode
    changed.chmod(0o770)
    unusable(Records(path), "writable by its group")
    changed.chmod(mode)
    assert len(Records(path)) == 1


def test_linked_file_is_neither_written_nor_trusted(path: Path, tmp_path: Path) -> None:
    Records(tmp_path / "real.sqlite3").put(EARLIER)
    path.parent.mkdir(mode=0o700)
    path.symlink_to(tmp_path / "real.sqlite3")
    unusable(Records(path), "symbolic link")
    assert len(Records(tmp_path / "real.sqlite3")) == 1


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable(Records(tmp_path / "file/cache/records.sqlite3"), "Not a directory")


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
    Records(path).put(EARLIER)
    records = Records(path)
    connect_with(monkeypatch, lambda c: c.execute("PRAGMA max_page_count = 1"))
    big = make(Failure(FailureKind.COMPILE, "x" * 100_000), workload=Workload(1, 1, 1, 2, 2))
    with pytest.warns(RuntimeWarning, match="full.*FLASHGEN_CACHE_DIR") as caught:
        records.put(big)
        records.put(make())
    assert len(caught) == 1
    assert records.get(big.key) == big
    assert records.get(EARLIER.key) == EARLIER
    assert len(records) == 3
    monkeypatch.undo()
    assert Records(path).for_device(DEVICE.name, DEVICE.sm_count) == [EARLIER]


def test_read_only_file_is_still_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records(path).put(EARLIER)
    connect_with(monkeypatch, lambda c: None, read_only=True)
    unusable(Records(path), "readonly", already=1)
    monkeypatch.undo()
    assert Records(path).for_device(DEVICE.name, DEVICE.sm_count) == [EARLIER]


def test_locked_by_another_for_too_long(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(path)
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.1)
    records.put(EARLIER)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    unusable(records, "locked", already=1)
    other.execute("ROLLBACK")
    other.close()


def test_waits_for_another_writer(path: Path) -> None:
    records = Records(path)
    records.put(EARLIER)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.5, lambda: other.execute("COMMIT"))
    timer.start()
    with no_warning():
        records.put(make())
    timer.join()
    other.close()
    assert len(Records(path)) == 2


# Many at once


def put_some(records: Records, first: int, count: int) -> None:
    for number in range(first, first + count):
        records.put(make(workload=Workload(1, 1, 1, 1, number)))


def put_some_as_child(records: Records, first: int, count: int) -> None:
    warnings.simplefilter("error")
    put_some(records, first, count)


def numbers(records: Records) -> list[int]:
    return sorted(r.key.workload.len_kv for r in records.for_device(DEVICE.name, DEVICE.sm_count))


def test_threads_share_one(path: Path) -> None:
    records, failures = Records(path), []

    def use(first: int) -> None:
        try:
            put_some(records, first, 50)
            assert best(records) is None
            assert set(range(first, first + 50)) <= set(numbers(records))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(50 * n,)) for n in range(6)]
    with no_warning():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert numbers(records) == list(range(300))


def test_forked_children_and_parent_share_one(path: Path) -> None:
    """The parent's connection is open, and used by a thread, while it forks; it goes on and closes before the children do."""
    records = Records(path)
    put_some(records, 0, 10)
    busy = threading.Thread(target=put_some, args=(records, 1000, 200))
    busy.start()
    children = [multiprocessing.get_context("fork").Process(target=put_some_as_child, args=(records, 100 * n, 100)) for n in range(1, 5)]
    for child in children:
        child.start()
    busy.join()
    records._close()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 4
    assert numbers(records) == [*range(10), *range(100, 500), *range(1000, 1200)]
    assert execute(path, "PRAGMA integrity_check") == [("ok",)]


def test_no_connection_is_open_across_a_fork(path: Path) -> None:
    records = Records(path)
    records.put(make())
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(records._connection is not None))
    assert records._connection is not None
    child.start()
    child.join()
    assert child.exitcode == 0
    put_some(records, 5, 1)


def test_processes_make_one_file_at_once(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=put_some_as_child, args=(Records(path), 20 * n, 20)) for n in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 8
    assert numbers(Records(path)) == list(range(160))
    assert sorted(file.name for file in path.parent.iterdir() if file.suffix == ".sqlite3") == [path.name]


def test_processes_set_a_damaged_file_aside_once(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    garbage(path)
    path.chmod(0o600)

    def put(number: int) -> None:
        warnings.simplefilter("ignore")
        Records(path).put(make(workload=Workload(1, 1, 1, 1, number)))

    children = [multiprocessing.get_context("fork").Process(target=put, args=(n,)) for n in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 8
    assert numbers(Records(path)) == list(range(8))
    assert [file.name for file in path.parent.glob("*corrupt*")] == [f"{path.name}.corrupt-1"]


def put_for_ever(path: Path, first: int, reports: int) -> None:
    records = Records(path)
    for number in range(first, first + 10**6):
        records.put(make(workload=Workload(1, 1, 1, 1, number)))
        os.write(reports, f"{number}\n".encode())


def test_killed_writers_lose_nothing_reported(path: Path) -> None:
    generator, reported = random.Random(1), []
    reader = Records(path)
    for turn in range(10):
        reading, writing = os.pipe()
        writer = multiprocessing.get_context("fork").Process(target=put_for_ever, args=(path, turn * 10**6, writing))
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
        found = numbers(Records(path))
    assert set(reported) <= set(found)
    assert len(found) <= len(reported) + 10
    assert execute(path, "PRAGMA integrity_check") == [("ok",)]
    assert len(reported) > 100
