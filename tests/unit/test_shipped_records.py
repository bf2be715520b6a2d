"""The records that come with the package: the look-up among them, and its place after the user's own."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.build.artifact import EntryReport, Report
from flashgen.build.gpu.driver import Gpu
from flashgen.build.nvrtc import nvrtc_version
from flashgen.codegen.devices import find_device
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.records import sources
from flashgen.records.choice import choose
from flashgen.records.exchange import parse_records, to_text
from flashgen.records.record import BENCHMARK_VERSION
from flashgen.records.shipped import FOLDER, ShippedRecords
from flashgen.records.store import Choice, Failure, FailureKind, Record, Records
from flashgen.selection.families import families_for
from flashgen.selection.loaded import Kernels
from flashgen.selection.picks import picks, recorded_workloads
from flashgen.selection.ranking import ranked
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, WORKLOAD, make

NEAR = Workload(2, 16, 16, 2048, 1024)


def best(shipped: ShippedRecords, workload: Workload = WORKLOAD, problem: Problem = PROBLEM) -> Choice | None:
    return choose(shipped.known(problem, DEVICE, BENCHMARK_VERSION).present, workload, ("13.0", "13.0"))


def ship(folder: Path, *records: Record, name: str = "gpu") -> ShippedRecords:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(to_text(records))
    return ShippedRecords(folder)


def test_all_that_is_shipped_is_sound_and_found() -> None:
    files = list(FOLDER.glob("*.json"))
    assert files, "records come with the package"
    h200 = find_device("h200")
    known = ShippedRecords().for_device(h200.name, h200.sm_count)
    assert len(known) > 100
    assert {record.spec["family"] for record in known} >= {"attention_forward_sm90"}
    for file in files:
        contents = parse_records(file.read_bytes())
        assert contents.bad == [], file
        assert to_text(contents.records) == file.read_text(), "byte for byte as it was written"


def test_without_files_there_is_none(tmp_path: Path) -> None:
    assert best(ShippedRecords(tmp_path)) is None
    assert best(ShippedRecords(tmp_path / "nowhere")) is None


@pytest.mark.parametrize("first", range(5))
def test_same_order_of_fall_backs_as_own_records(tmp_path: Path, first: int) -> None:
    order = [
        Choice(make(4e-3), True, True),
        Choice(make(3e-3, driver_version="12.9"), True, False),
        Choice(make(2e-3, workload=NEAR), False, True),
        Choice(make(1e-3, workload=NEAR, nvrtc_version="12.9"), False, False),
    ]
    shipped = ship(tmp_path, *(choice.record for choice in reversed(order[first:])))
    own = Records(tmp_path / "cache/records.sqlite3")
    own.add([choice.record for choice in order[first:]])
    expected = order[first] if first < 4 else None
    assert best(shipped) == own.best(PROBLEM, WORKLOAD, DEVICE, "13.0", "13.0", BENCHMARK_VERSION) == expected


def test_only_records_that_may_speak(tmp_path: Path) -> None:
    shipped = ship(
        tmp_path,
        make(1e-9, problem=Problem(Dtype.FP16, 64)),
        make(1e-9, device=find_device("h100")),
        make(1e-9, benchmark_version=BENCHMARK_VERSION + 1),
        make(1e-9, spec={**make().spec, "revision": FAMILY.revision + 1}),
        make(1e-9, spec={**make().spec, "target": "sm_80"}),
        make(Failure(FailureKind.DEFECT, "spills 8 B a thread"), config=CONFIGS[1]),
        make(1e-9, workload=Workload(2, 16, 16, 1024, 2**20)),
    )
    assert best(shipped) is None
    assert best(ship(tmp_path, make(2e-3), make(1e-3, config=CONFIGS[1]), name="more")) == Choice(make(1e-3, config=CONFIGS[1]), True, True)


def test_files_are_read_once_on_first_use(tmp_path: Path) -> None:
    shipped = ship(tmp_path / "shipped", make())
    ship(tmp_path / "shipped", make(1e-9, config=CONFIGS[1]), name="later")  # after the object was made, before its first use
    assert best(shipped) == Choice(make(1e-9, config=CONFIGS[1]), True, True)
    shutil.rmtree(tmp_path / "shipped")
    assert best(shipped, NEAR) == Choice(make(1e-9, config=CONFIGS[1]), False, True)
    assert best(shipped, problem=Problem(Dtype.FP16, 64)) is None


def test_a_spoiled_file_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ship(tmp_path, make())
    (tmp_path / "torn.json").write_text(to_text([make(1e-9)])[:-9])
    (tmp_path / "half.json").write_text(to_text([make(1e-9, config=CONFIGS[1])]).replace("NVIDIA H200", ""))
    assert best(ShippedRecords(tmp_path)) == Choice(make(), True, True)
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert "half.json: 1 bad records are left out; the first: record 1: device_name must" in caplog.text
    assert "torn.json is left out: file must be whole JSON" in caplog.text


# Their place in the choice of a kernel


class FakeKernels(Kernels):
    """Loads nothing: a kernel is its spec and a compiler's report, which `broken` specs spoil."""

    broken: tuple[dict[str, Any], ...] = ()

    def load(self, spec: KernelSpec, gpu: Gpu) -> Any:
        report = Report({"kernel": EntryReport(128, 8 if spec.to_json() in self.broken else 0)})
        return SimpleNamespace(spec=spec, artifact=SimpleNamespace(report=report))


GPU = Gpu(0, DEVICE, "uuid", "13.0")
HERE: dict[str, Any] = {"nvrtc_version": nvrtc_version()}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    records = Records(tmp_path / "cache/records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: records)
    return records


def chosen(kernels: Kernels, workload: Workload = WORKLOAD) -> dict[str, Any]:
    return kernels.choose(PROBLEM, workload, GPU).spec.to_json()


def test_own_records_win_and_shipped_ones_come_before_the_model(
    tmp_path: Path, own: Records, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashgen")
    preferred = ranked(PROBLEM, WORKLOAD, DEVICE, families_for(PROBLEM, DEVICE.target)[:1])
    model, fast, slow = (c.to_json() for c in (preferred[0].config, *CONFIGS[:2]))
    assert len({str(config) for config in (model, fast, slow)}) == 3
    monkeypatch.setattr(sources, "shipped_records", lambda: ShippedRecords(tmp_path / "nowhere"))
    assert chosen(FakeKernels())["config"] == model
    assert "no tuning record for NVIDIA H200" in caplog.text

    shipped = ship(tmp_path, make(1e-9, config=CONFIGS[0], **HERE))
    monkeypatch.setattr(sources, "shipped_records", lambda: shipped)
    assert chosen(FakeKernels())["config"] == fast
    assert "using the shipped record for B2 H16 S1024" in caplog.text

    caplog.clear()
    own.put(make(5.0, workload=NEAR, config=CONFIGS[1], **{**HERE, "driver_version": "12.9"}))
    assert chosen(FakeKernels())["config"] == slow, "however slow, however far: it was measured here"
    assert f"using the own record of another driver or compiler for {NEAR.name}" in caplog.text

    caplog.clear()
    own.put(make(5.0, config=CONFIGS[1], **HERE))
    assert chosen(FakeKernels())["config"] == slow
    assert caplog.text == ""


def test_a_record_whose_kernel_this_compiler_breaks_is_passed_over(
    tmp_path: Path, own: Records, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashgen")
    foreign, shipped = make(1e-3, config=CONFIGS[-1], nvrtc_version="12.9"), ship(tmp_path, make(1e-3, config=CONFIGS[-2], **HERE))
    own.put(foreign)
    monkeypatch.setattr(sources, "shipped_records", lambda: shipped)
    assert chosen(FakeKernels()) == foreign.spec
    kernels = FakeKernels()
    kernels.broken = (foreign.spec,)
    assert chosen(kernels)["config"] == CONFIGS[-2].to_json()
    assert "not using the own record of another driver or compiler" in caplog.text


def test_a_gpu_takes_the_configs_of_one_like_it_and_no_times(
    tmp_path: Path, own: Records, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flashgen")
    shipped = ship(tmp_path, make(1e-9, config=CONFIGS[-1], **HERE))
    monkeypatch.setattr(sources, "shipped_records", lambda: shipped)
    h100, pcie = (Gpu(0, find_device(name), "uuid", "13.0") for name in ("h100", "h100-pcie"))
    found = {gpu: FakeKernels().choose(PROBLEM, WORKLOAD, gpu).spec.config for gpu in (h100, pcie)}
    assert found[h100] == CONFIGS[-1]
    assert found[pcie] != CONFIGS[-1], "it has fewer SMs"
    assert "using the config of the shipped record of NVIDIA H200 for B2 H16 S1024; try `flashgen tune`" in caplog.text
    assert "no tuning record for NVIDIA H100 PCIe" in caplog.text
    (pick,) = picks(PROBLEM, WORKLOAD, h100.device, ("13.0", nvrtc_version()), any_length=True)
    assert pick.choice.older, "no time of another GPU stands for one of this GPU"
    assert not pick.choice.is_of_older_version
    assert WORKLOAD in recorded_workloads(PROBLEM, h100.device)

    broken = FakeKernels()
    broken.broken = (make(config=CONFIGS[-1]).spec,)
    assert broken.choose(PROBLEM, WORKLOAD, h100).spec.config != CONFIGS[-1]
    own.put(make(5.0, config=CONFIGS[0], device=h100.device, **HERE))
    assert FakeKernels().choose(PROBLEM, WORKLOAD, h100).spec.config == CONFIGS[0], "however slow: it was measured here"


def test_once_chosen_nothing_is_read(tmp_path: Path, own: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = ship(tmp_path / "shipped", make(1e-9, config=CONFIGS[-2], **HERE))
    monkeypatch.setattr(sources, "shipped_records", lambda: shipped)
    kernels = FakeKernels()
    first = chosen(kernels)
    shutil.rmtree(tmp_path / "shipped")
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read"))
    assert chosen(kernels) == first
    assert chosen(kernels, NEAR) == first, "another bucket, from memory"
