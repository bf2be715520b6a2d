"""What a tune on a GPU tells of a cell, from records: nothing is launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashgen.build.gpu.driver import Gpu
from flashgen.build.nvrtc import nvrtc_version
from flashgen.cells import cells_of
from flashgen.codegen.family import find_family
from flashgen.codegen.spec import KernelSpec
from flashgen.progress import Progress
from flashgen.records import sources
from flashgen.records.store import Failure, FailureKind, Records
from flashgen.selection.families import default_spec
from flashgen.tuning import Request
from flashgen.tuning.timed import TimedRun, _tried, run_timed
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, make

GPU = Gpu(0, DEVICE, "uuid", "580.1")


@pytest.mark.parametrize("family", [None, "attention_forward", "attention_forward_sm90"])
def test_the_winner_is_of_the_family_asked_for(family: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Records(tmp_path / "records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: own)
    request = Request(cells_of(64, causal=False, seqlens=(1024,)), family=family)
    (cell,) = request.cells
    run = TimedRun(GPU, Progress(), float("inf"), 1)
    for name, seconds in (("attention_forward", 1e-3), ("attention_forward_sm90", 2e-3)):
        default = default_spec(PROBLEM, DEVICE.target, family=name).config
        other = next(config for config in find_family(name).legal_configs(PROBLEM, DEVICE.target) if config != default)
        for config, factor in ((default, 3.0), (other, 1.0)):
            own.put(make(factor * seconds, cell.workload, config, driver_version=GPU.driver_version, nvrtc_version=nvrtc_version()))
    specs = [KernelSpec.from_json(record.spec) for record in own.all()]
    row = run.row(request, cell, {spec: own.get(run.key(cell, spec)) for spec in specs})
    assert row.spec is not None
    assert row.spec.family.name == (family or "attention_forward")
    assert row.seconds == (2e-3 if family == "attention_forward_sm90" else 1e-3)
    assert row.gain == pytest.approx(6.0 if family is None else 3.0), (
        "against the default of the family asked for, else of the one preferred"
    )


def test_candidates_are_told_as_recorded() -> None:
    (cell,) = cells_of(64, causal=False, seqlens=(1024,))
    specs = [KernelSpec(FAMILY, PROBLEM, config, DEVICE.target) for config in CONFIGS[:3]]
    records = [make(1e-3, cell.workload, CONFIGS[0]), make(Failure(FailureKind.WRONG, "off by <1>"), cell.workload, CONFIGS[1]), None]
    measured, failed, untried = [_tried(cell, spec, record, DEVICE) for spec, record in zip(specs, records, strict=True)]
    assert [each.spec for each in (measured, failed, untried)] == specs
    assert (measured.seconds, measured.low, measured.high, measured.failure) == (1e-3, 0.9 * 1e-3, 1.1 * 1e-3, "")
    assert measured.predicted == FAMILY.predict(PROBLEM, CONFIGS[0], cell.workload, DEVICE, 128).seconds, "with the compiler's registers"
    assert (failed.seconds, failed.failure, failed.tried) == (None, "wrong: off by <1>", True)
    assert (untried.seconds, untried.registers, untried.failure, untried.tried) == (None, None, "", False)


def test_a_tune_whose_records_are_complete_tells_of_all_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Records(tmp_path / "records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: own)
    request = Request(cells_of(64, causal=False, seqlens=(1024,)), family=FAMILY.name, settings={"warps": "8"})
    (cell,) = request.cells
    default, by_hand = request.candidates(cell, DEVICE)
    versions: dict[str, Any] = {"driver_version": GPU.driver_version, "nvrtc_version": nvrtc_version()}
    own.put(make(1e-3, cell.workload, default.config, **versions))
    own.put(make(Failure(FailureKind.COMPILE, "no"), cell.workload, by_hand.config, **versions))
    result = run_timed(request, GPU, Progress())
    (row,) = result.rows
    assert (result.timed, result.complete, row.default, row.spec) == (True, True, default, default)
    assert [(each.spec, each.seconds, each.failure) for each in row.candidates] == [(default, 1e-3, ""), (by_hand, None, "compile: no")]
    assert result.failures == {by_hand.name: "compile: no"}
