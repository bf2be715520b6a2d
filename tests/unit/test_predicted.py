"""Tuning for a device that is only named: what records say of it is shown as measured and wins, the rest is predicted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flashgen import tuning
from flashgen.build.artifact import Artifact
from flashgen.cells import cells_of
from flashgen.cli.tune import _print_result
from flashgen.codegen.family import find_family
from flashgen.codegen.spec import KernelSpec
from flashgen.records import sources
from flashgen.records.exchange import to_text
from flashgen.records.record import BENCHMARK_VERSION
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Records
from flashgen.selection import compilation
from flashgen.selection.families import default_spec
from flashgen.tuning import Request, TuneResult, predicted
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, make

LOG = (
    "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
    "ptxas info : 0 bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads\nptxas info : Used 100 registers"
)
REQUEST = Request(cells_of(64, causal=False, seqlens=(1024, 4096)), device="h200")
FIRST, SECOND = REQUEST.cells
ODD = CONFIGS[5]  # which neither model nor default would take


class Screen:
    """Judges nothing, and finds `wrong` configs wrong."""

    wrong: Any = None
    verified, skipped = 0, ""

    def __init__(self, deadline: float) -> None:
        pass

    def fault(self, spec: KernelSpec) -> str:
        return "off by one" if spec.config == self.wrong else ""


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for shipped records; there are none of the user's, compiling takes no time and the CPU verifies nothing."""
    own = Records(tmp_path / "records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: own)
    monkeypatch.setattr(sources, "shipped_records", lambda: ShippedRecords(tmp_path))
    monkeypatch.setattr(compilation, "compile_spec", lambda spec: Artifact(spec.name, "sm_90a", "", b"", LOG.format(spills=0), "13.0"))
    monkeypatch.setattr(predicted, "CpuScreen", Screen)
    return tmp_path


def ship(folder: Path, *records: Any) -> None:
    (folder / "gpu.json").write_text(to_text(records))


def tuned(**changes: Any) -> TuneResult:
    return tuning.run(dataclasses.replace(REQUEST, **changes))


def test_what_was_measured_wins_and_the_rest_is_predicted(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tuned()
    assert [row.measured for row in before.rows] == [False, False]
    ship(shipped, make(1.5, FIRST.workload, ODD), make(1.0, FIRST.workload, CONFIGS[6], driver_version="12.9", nvrtc_version="12.9"))
    result = tuned()
    first, second = result.rows
    assert first.spec == KernelSpec(FAMILY, PROBLEM, CONFIGS[6], DEVICE.target)
    assert (first.seconds, first.measured, first.gain) == (1.0, True, None)
    assert second == before.rows[1], "no record of another workload tells this one's time"
    assert [row["measured"] for row in result.to_json()["rows"]] == [True, False]
    assert not result.timed
    _print_result(result)
    lines = capsys.readouterr().out.splitlines()
    assert "time is" in lines[0]
    assert " 1000000.0  measured " in lines[1]
    assert " predicted " in lines[2]
    assert "1 of 2 times were measured on such a GPU and come from the tuning records." in lines


def test_the_user_s_record_comes_before_the_shipped_one(shipped: Path) -> None:
    ship(shipped, make(1e-6, FIRST.workload, CONFIGS[6]))
    sources.own_records().put(make(1.0, FIRST.workload, ODD))
    assert tuned().rows[0].seconds == 1.0


@pytest.mark.parametrize(
    "change",
    [{"spec": {**make(config=ODD).spec, "revision": FAMILY.revision - 1}}, {"benchmark_version": BENCHMARK_VERSION - 1}],
    ids=["revision", "benchmark"],
)
def test_older_times_are_none(shipped: Path, change: dict[str, Any]) -> None:
    ship(shipped, make(1e-6, FIRST.workload, **{"config": ODD, **change}))
    assert not tuned().rows[0].measured


def test_what_was_not_asked_for_does_not_win(shipped: Path) -> None:
    ship(shipped, make(1e-6, FIRST.workload, ODD))
    assert not tuned(family="attention_forward_sm90").rows[0].measured
    assert not tuned(family="attention_forward", settings={"warps": "8"}).rows[0].measured
    assert tuned(family="attention_forward").rows[0].measured


def test_a_measured_kernel_that_is_broken_here_does_not_win(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(shipped, make(1e-6, FIRST.workload, ODD))
    monkeypatch.setattr(Screen, "wrong", ODD)
    result = tuned()
    assert not result.rows[0].measured
    (wrong,) = [each for each in result.rows[0].candidates if each.spec.config == ODD]
    assert (wrong.seconds, wrong.failure) == (1e-6, "wrong on the CPU: off by one")
    sound = [each for each in result.rows[0].candidates if each.spec.config != ODD]
    assert {(each.seconds, each.failure, each.registers, each.tried) for each in sound} == {(None, "", 100, True)}
    assert result.rows[0].default in [each.spec for each in sound]
    monkeypatch.setattr(Screen, "wrong", None)

    def compile_spec(spec: KernelSpec) -> Artifact:
        return Artifact(spec.name, "sm_90a", "", b"", LOG.format(spills=8 * (spec.config == ODD)), "13.0")

    monkeypatch.setattr(compilation, "compile_spec", compile_spec)
    assert not tuned().rows[0].measured


def test_the_default_measured_gains_nothing(shipped: Path) -> None:
    default = default_spec(PROBLEM, DEVICE.target)
    ship(shipped, make(1.0, FIRST.workload, spec=default.to_json()))
    assert (tuned().rows[0].measured, tuned().rows[0].gain) == (True, 1.0)


@pytest.mark.parametrize("family", ["attention_forward", "attention_forward_sm90"])
def test_a_family_asked_for_is_the_only_one(shipped: Path, family: str) -> None:
    """Though a record of the other one says that it is faster."""
    other = "attention_forward" if family == "attention_forward_sm90" else "attention_forward_sm90"
    config = find_family(other).default(PROBLEM, DEVICE.target)
    ship(shipped, make(1e-9, FIRST.workload, config))
    result = tuned(family=family)
    specs = [row.spec for row in result.rows if row.spec]
    assert [spec.family.name for spec in specs] == [family, family]
    assert all(row.gain is not None and row.gain >= 1 for row in result.rows), (
        "the default of the family itself is what they are compared with"
    )
    assert next(row.spec.family.name for row in tuned().rows if row.spec) == other
