"""Tuning records: round trips, values that are refused, the look-up rule, and rows that are skipped."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from flashgen.codegen.devices import Device, find_device
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.records.record import BENCHMARK_VERSION
from flashgen.records.sqlite_file import StoredRow
from flashgen.records.store import Choice, Failure, FailureKind, Records, Timing, distance
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, WORKLOAD, in_order, make, timing


def best(
    records: Records, workload: Workload = WORKLOAD, problem: Problem = PROBLEM, device: Device = DEVICE, version: int = BENCHMARK_VERSION
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
            {"benchmark_version": BENCHMARK_VERSION + 1},
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


def test_file_is_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    records = Records()
    assert records.path == tmp_path / "cache/records.sqlite3"
    assert not records.path.parent.exists()
    records.put(make())
    assert records.path.exists()


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    records = Records(tmp_path / "file/cache/records.sqlite3")
    with pytest.warns(RuntimeWarning, match="FLASHGEN_CACHE_DIR") as caught:
        for record in (make(), make(1e-4, config=CONFIGS[1]), fastest := make(1e-6, config=CONFIGS[1])):
            records.put(record)
        assert records.get(fastest.key) == fastest
        assert best(records) == Choice(fastest, True, True)
        assert records.clear() == 2
    assert len(caught) == 1


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
    "value": lambda: dataclasses.replace(make(), spec={**make().spec, "config": {"warps": {1, 2}}}),
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


# Many added at once


def test_added_all_at_once_and_what_is_here_stays(path: Path) -> None:
    records = Records(path)
    own = make(1e-3)
    records.put(own)
    assert best(records) == Choice(own, True, True)
    others = [make(5e-4), make(2e-3, config=CONFIGS[1]), make(1e-4, workload=NEAR)]
    assert records.add(others) == 2
    assert records.add(others) == 0
    assert records.add([]) == 0
    for fresh in (records, Records(path)):
        assert fresh.get(own.key) == own
        assert fresh.all() == in_order(own, *others[1:])
        assert best(fresh) == Choice(own, True, True)
        assert best(fresh, NEAR) == Choice(others[2], True, True), "what was added is heard at once"


def test_adding_where_nothing_can_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning), pytest.raises(FlashgenError, match="cannot be written: the records were not kept"):
        Records(tmp_path / "file/cache/records.sqlite3").add([make()])


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
        make(1e-9, benchmark_version=BENCHMARK_VERSION + 1),
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


@pytest.mark.parametrize("any_workload", [NEAR, Workload(2, 16, 16, 1536, 1024)], ids=["same", "nearer"])
def test_order_of_fall_backs(path: Path, any_workload: Workload) -> None:
    """(same, exact), (any, exact), (same, near), (any, near), None: each is used only once those before it are gone."""
    same_exact, any_exact = make(4e-3), make(3e-3, driver_version="12.9")
    same_near, any_near = make(2e-3, workload=NEAR), make(1e-3, workload=any_workload, nvrtc_version="12.9")
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


def test_warm_look_up_reads_no_file_and_hears_its_own_puts(path: Path) -> None:
    records = Records(path)
    records.put(make(2e-3))
    assert best(records) is not None
    Records(path).clear()
    Records(path).put(make(1e-9, problem=Problem(Dtype.FP16, 64)))
    assert best(records) == Choice(make(2e-3), True, True)
    assert best(records, NEAR) == Choice(make(2e-3), False, True)
    assert best(records, problem=Problem(Dtype.FP16, 64)) is None
    faster = make(1e-3, config=CONFIGS[1])
    records.put(faster)
    assert best(records) == Choice(faster, True, True)
    records.put(make(Failure(FailureKind.LAUNCH, "illegal address"), config=CONFIGS[1]))
    assert best(records) == Choice(make(2e-3), True, True)


@pytest.mark.slow
def test_look_up_among_tens_of_thousands(path: Path) -> None:
    workloads = [Workload(1, 32, 8, 64 + n, 4096) for n in range(100)]
    records = Records(path)
    for (n, workload), config in itertools.product(enumerate(workloads), CONFIGS[:4]):
        records.put(make(1e-3 + 1e-6 * n, workload, config))
    with closing(sqlite3.connect(path)) as connection, connection:
        rows = [StoredRow(*values) for values in connection.execute("SELECT * FROM candidates")]
        for copy in range(50):  # 20000 more rows, of 50 compilers
            copies = [row._replace(nvrtc_version=f"11.{copy}") for row in rows]
            connection.executemany(f"INSERT INTO candidates VALUES ({', '.join('?' * len(StoredRow._fields))})", copies)
    begin = time.process_time()  # of this process alone, however busy the machine is
    choice = best(records, workloads[3])
    cold = time.process_time() - begin
    assert len(records) == 51 * 400
    assert choice is not None
    assert choice.exact_workload
    assert choice.same_toolchain
    begin = time.process_time()
    for n in range(20):
        assert best(records, Workload(1, 32, 8, 32 + n, 4096)) is not None
    warm = (time.process_time() - begin) / 20
    assert cold < 5
    assert warm < 0.02


# Rows that hold no valid record

TAMPER = {
    "sizes are text": "UPDATE candidates SET batch = 'many'",
    "negative size": "UPDATE candidates SET len_q = -1",
    "name is no text": "UPDATE candidates SET driver_version = 7",
    "spec is torn": "UPDATE candidates SET spec = substr(spec, 1, 40)",
    "spec of another digest": "UPDATE candidates SET spec = replace(spec, '\"warps\":', '\"warpz\":')",
    "spec is a number": "UPDATE candidates SET spec = 7",
    "spec is too deep": "UPDATE candidates SET spec = replace(hex(zeroblob(50000)), '0', '[')",
    "spec is a blob": "UPDATE candidates SET spec = CAST(substr(spec, 1, 40) AS BLOB)",
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
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"{TAMPER[tamper]} WHERE spec_digest = ?", (bad.key.spec_digest,))
    records = Records(path)
    with pytest.warns(RuntimeWarning, match="no valid record") as caught:
        assert records.for_device(DEVICE.name, DEVICE.sm_count) == [good]
        assert records.get(bad.key) is None
        assert best(records) == Choice(good, True, True)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # best says so only if it meets the row
        assert best(Records(path)) == Choice(good, True, True)


# Many at once


def use(records: Records, first: int) -> None:
    """Puts records that `first` tells apart, and reads them back."""
    for number in range(first, first + 50):
        records.put(make(workload=Workload(1, 1, 1, 1, number)))
    choice = best(records, Workload(1, 1, 1, 1, first))
    assert choice is not None
    assert choice.exact_workload
    assert set(range(first, first + 50)) <= set(numbers(records))


def numbers(records: Records) -> list[int]:
    return sorted(r.key.workload.len_kv for r in records.for_device(DEVICE.name, DEVICE.sm_count))


def test_threads_and_forked_children_share_one(path: Path) -> None:
    records = Records(path)
    use(records, 0)
    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("error", RuntimeWarning)  # ours; Python may warn of forks beside threads
        threads = [pool.submit(use, records, 50 * n) for n in range(1, 5)]
        children = [multiprocessing.get_context("fork").Process(target=use, args=(records, 50 * n)) for n in range(5, 9)]
        for child in children:
            child.start()
    for child in children:
        child.join(30)
    assert [thread.exception() for thread in threads] == [None] * 4
    assert [child.exitcode for child in children] == [0] * 4
    assert numbers(records) == list(range(450))
