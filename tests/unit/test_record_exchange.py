"""Tuning records as JSON files: round trips, files and records that are refused, what an import keeps, adds and leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.family import families, find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.workload import Workload
from flashgen.records.exchange import import_into, of_device, of_head_dim, parse_records, to_text, winners
from flashgen.records.record import BENCHMARK_VERSION, Failure, FailureKind, Record
from flashgen.records.store import Records
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, in_order, make

NEAR = Workload(2, 16, 16, 2048, 1024)
SOUND = [make(1e-3), make(1.1e-3, config=CONFIGS[1]), make(Failure(FailureKind.WRONG, "off by one"), config=CONFIGS[2])]
SPEC = make().spec


def file_of(*records: Record) -> bytes:
    return to_text(records).encode()


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "cache/records.sqlite3")


def changed(change: Callable[[dict[str, Any]], object], record: Record | None = None) -> dict[str, Any]:
    """The JSON of a sound record after a change."""
    values: dict[str, Any] = json.loads(json.dumps((record or make()).to_json()))
    change(values)
    return values


def with_entry(entry: Any) -> bytes:
    """A file of one sound record and this entry."""
    whole = json.loads(file_of(make(config=CONFIGS[3])))
    whole["records"].append(entry)
    return json.dumps(whole).encode()


def test_round_trip_is_exact() -> None:
    contents = parse_records(file_of(*SOUND))
    assert contents.records == SOUND
    assert contents.bad == []
    assert parse_records(file_of()).records == []
    assert len(to_text(SOUND).splitlines()) == len(SOUND) + 2, "one record a line"


FILES: dict[str, tuple[bytes, str]] = {
    "cut off": (file_of(*SOUND)[:-30], "must be whole JSON"),
    "empty": (b"", "must be whole JSON"),
    "no JSON": (b"SQLite format 3\0", "must be whole JSON"),
    "no UTF-8": (b'{"format": "\xff"}', "must be whole JSON"),
    "too deep": (b"[" * 100_000, "must be whole JSON"),
    "a list": (b"[]", "must be of the format 'flashgen tuning records'"),
    "somebody's": (b'{"schema": 1, "kernels": []}', "must be of the format 'flashgen tuning records'"),
    "later schema": (file_of().replace(b'"schema": 1', b'"schema": 2'), "must be of schema 1; got 2: another version"),
    "no schema": (file_of().replace(b'"schema": 1, ', b""), "must be of schema 1; got None"),
    "a field more": (file_of().replace(b'"schema"', b'"note": "", "schema"'), "must have the fields format, schema, records; got "),
    "NaN": (file_of(make()).replace(b"0.001,", b"NaN,"), "must be whole JSON; got NaN, which is no number"),
    "beyond a float": (file_of(make()).replace(b"0.001,", b"1e999,"), "must be whole JSON; got 1e999, which is no number"),
    "key twice": (file_of(make()).replace(b'"sm_count"', b'"sm_count": 7, "sm_count"'), "must be whole JSON; got the key 'sm_count' twice"),
    "half a character": (file_of(make()).replace(b"NVIDIA", b"\\ud800"), "must be whole JSON; got .*surrogates not allowed"),
    "no records": (file_of().replace(b'"records"', b'"rows"'), "must have the fields format, schema, records; got format, schema, rows"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_none_of_ours_is_refused(name: str) -> None:
    data, message = FILES[name]
    with pytest.raises(ArgumentError, match=f"^file {message}"):
        parse_records(data)


def forged_family(values: dict[str, Any]) -> None:
    values.update(make(spec={**SPEC, "family": "no_such_family"}).to_json())


BAD: dict[str, tuple[Any, str]] = {
    "no object": ([1, 2], r"record must have the fields device_name, .*; got \[1, 2\]"),
    "field missing": (changed(lambda v: v.pop("sm_count")), "record must have the fields"),
    "field unknown": (changed(lambda v: v.update(speed=1)), "record must have the fields"),
    "name is no text": (changed(lambda v: v.update(device_name=7)), "record field device_name must be of type str; got 7"),
    "size is text": (changed(lambda v: v["workload"].update(batch="2")), "workload field batch must be of type int; got '2'"),
    "workload is a list": (changed(lambda v: v.update(workload=[1, 1, 1, 1, 1])), "workload must have the fields"),
    "time is negative": (changed(lambda v: v["outcome"].update(low=-1.0)), "low must be a finite number of seconds > 0"),
    "time is an int": (changed(lambda v: v["outcome"].update(high=1)), "outcome field high must be of type float; got 1"),
    "time is zero": (changed(lambda v: v["outcome"].update(seconds=0.0)), "seconds must be a finite"),
    "times out of order": (changed(lambda v: v["outcome"].update(low=1.0)), "seconds must be from low"),
    "no outcome": (changed(lambda v: v.update(outcome=None)), "outcome must have the fields seconds"),
    "two outcomes": (
        changed(lambda v: v["outcome"].update(failure="wrong", message="")),
        "outcome must have the fields seconds, low, high, rounds; got .*, failure, message",
    ),
    "unknown failure": (
        changed(lambda v: v.update(outcome={"failure": "x", "message": ""})),
        "outcome field failure must be one of compile, ",
    ),
    "failure is a list": (
        changed(lambda v: v.update(outcome={"failure": [], "message": ""})),
        "outcome field failure must be one of compile, ",
    ),
    "another spec": (changed(lambda v: v["spec"]["config"].update(warps=8)), "spec_digest must be the digest of the spec"),
    "another digest": (changed(lambda v: v.update(spec_digest="0" * 64)), "spec_digest must be the digest of the spec"),
    "spec is no object": (changed(lambda v: v.update(spec=[])), "record field spec must be of type dict"),
    "problem is torn": (changed(lambda v: v["spec"].update(problem={})), "problem must have the fields pass"),
    "problem of a later version": (
        changed(lambda v: v["spec"]["problem"].update(window=128)),
        "problem must have the fields .*; got .*, window",
    ),
    "unknown family": (changed(forged_family), f"family must be one of {', '.join(families())}; got 'no_such_family'"),
    "registers are text": (changed(lambda v: v.update(registers="many")), "record field registers must be of type int"),
    "key twice": (make(2e-3, config=CONFIGS[3]).to_json(), "key must be of one record; got it twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_refused_with_the_reason_and_nothing_is_imported(records: Records, name: str) -> None:
    entry, reason = BAD[name]
    contents = parse_records(with_entry(entry))
    with pytest.raises(
        ArgumentError, match=rf"^file must hold sound records only; got 1 bad of 2, and none .*--skip-bad.*\n  record 2: {reason}"
    ):
        import_into(records, contents, BENCHMARK_VERSION)
    assert records.all() == []
    done = import_into(records, contents, BENCHMARK_VERSION, skip_bad=True)
    assert (done.added, len(done.bad)) == (1, 1)
    assert records.all() == [make(config=CONFIGS[3])]


def test_of_many_bad_records_the_first_are_shown(records: Records) -> None:
    contents = parse_records(json.dumps({"format": "flashgen tuning records", "schema": 1, "records": list(range(12))}).encode())
    with pytest.raises(ArgumentError, match=r"(?s)12 bad of 12.*record 5: .*\n  and 7 more$"):
        import_into(records, contents, BENCHMARK_VERSION)


def test_import_adds_what_is_new_and_keeps_what_was_measured_here(records: Records) -> None:
    own = make(9e-3)
    records.put(own)
    contents = parse_records(file_of(*SOUND))
    dry = import_into(records, contents, BENCHMARK_VERSION, dry_run=True)
    assert records.all() == [own]
    done = import_into(records, contents, BENCHMARK_VERSION)
    assert (dry.added, dry.here_already, dry.dry_run) == (done.added, done.here_already, True) == (2, 1, True)
    assert records.get(own.key) == own, "the file's 1 ms does not replace the 9 ms measured here"
    assert len(records) == 3
    again = import_into(records, contents, BENCHMARK_VERSION)
    assert (again.added, again.here_already) == (0, 3)
    assert len(records) == 3


def test_import_is_heard_at_once(records: Records) -> None:
    problem, workload = Problem(Dtype.BF16, 64), make().key.workload
    assert records.best(problem, workload, DEVICE, "13.0", "13.0", BENCHMARK_VERSION) is None
    import_into(records, parse_records(file_of(*SOUND)), BENCHMARK_VERSION)
    choice = records.best(problem, workload, DEVICE, "13.0", "13.0", BENCHMARK_VERSION)
    assert choice is not None
    assert choice.record == SOUND[0]


def test_what_nothing_could_use_is_left_out_and_said(records: Records) -> None:
    illegal = {**SPEC, "config": {**SPEC["config"], "block_kv": 17}}
    old = [make(spec={**SPEC, "revision": FAMILY.revision + 1}, workload=w) for w in (NEAR, make().key.workload)]
    useless = [*old, make(benchmark_version=BENCHMARK_VERSION + 1), make(spec=illegal)]
    useful = [
        make(nvrtc_version="12.9", driver_version="570.1"),  # of another compiler: may still be the next best
        make(device=find_device("a100"), spec={**SPEC, "target": "sm_80"}),
        make(spec={**SPEC, "target": "sm_130"}),  # of a GPU without a target file
    ]
    done = import_into(records, parse_records(file_of(*useless, *useful)), BENCHMARK_VERSION)
    assert done.added == 3
    assert sorted(done.useless.values()) == [1, 1, 2]
    reasons = "; ".join(done.useless)
    assert f"of revision {FAMILY.revision + 1} of attention_forward; the one here is {FAMILY.revision}" in reasons
    assert f"measured by benchmark version {BENCHMARK_VERSION + 1}; the one here is {BENCHMARK_VERSION}" in reasons
    assert "of a kernel that attention_forward no longer makes: config" in reasons
    assert records.all() == in_order(*useful)


def test_import_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning), pytest.raises(FlashgenError, match="cannot be written"):
        import_into(Records(tmp_path / "file/records.sqlite3"), parse_records(file_of(*SOUND)), BENCHMARK_VERSION)


def test_choices_by_device_and_head_dim() -> None:
    wide = make(problem=Problem(Dtype.BF16, 128), spec={**SPEC, "problem": {**SPEC["problem"], "head_dim": 128, "head_dim_v": 128}})
    other = make(device=find_device("h100"))
    every = [*SOUND, wide, other]
    assert of_device(every, "NVIDIA H100 80GB HBM3") == [other]
    assert of_head_dim(every, 128) == [wide]
    with pytest.raises(ArgumentError, match=r"^device_name must be one of NVIDIA H100 80GB HBM3, NVIDIA H200; got 'h200'"):
        of_device(every, "h200")
    with pytest.raises(ArgumentError, match=r"^head_dim must be one of 64, 128; got 96"):
        of_head_dim(every, 96)
    with pytest.raises(ArgumentError, match=r"^head_dim must be left out where there are no records; got 96"):
        of_head_dim([], 96)


def test_winners_are_one_of_each_cell() -> None:
    fast, near, other = make(1e-3), make(5e-3, workload=NEAR), make(4e-3, nvrtc_version="13.1")
    stale = make(1e-9, spec={**SPEC, "revision": FAMILY.revision + 1})
    assert winners([make(2e-3, config=CONFIGS[1]), fast, *SOUND[1:], near, other, stale], BENCHMARK_VERSION) == [fast, near, other]


def test_a_family_that_is_taken_by_name_has_winners_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = make(2e-3, config=CONFIGS[1]), make(1e-3)
    hopper = make(5e-4, config=find_family("attention_forward_sm90").default(PROBLEM, DEVICE.target))
    assert winners([slow, fast, hopper], BENCHMARK_VERSION) == [hopper]
    monkeypatch.setattr(type(FAMILY), "automatic", False)
    assert winners([slow, fast, hopper], BENCHMARK_VERSION) == [fast, hopper]
