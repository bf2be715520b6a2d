"""tools/move_records.py: records move to the present revision where the machine code is the same, and only there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flashgen
from flashgen.build.nvrtc import compile_source, nvrtc_version
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.render import Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.records import sources
from flashgen.records.choice import tells_time
from flashgen.records.exchange import parse_records, to_text
from flashgen.records.record import BENCHMARK_VERSION
from flashgen.records.store import Record, Records
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, make
from tools import move_records

HERE = Path(flashgen.__file__).parent.parent
SMALL = CONFIGS[0]
OLD = FAMILY.revision - 1
MASK, THREADS = "templates/tile/common/mask.cuh", "    def threads(self, config: AttentionForwardConfig) -> int:"


def measured(revision: int = OLD, **changes: Any) -> Record:
    spec = {**KernelSpec(FAMILY, PROBLEM, changes.pop("config", SMALL), DEVICE.target).to_json(), "revision": revision}
    return make(1e-3, spec=spec, **{"nvrtc_version": nvrtc_version(), **changes})


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkout of the revision before, with changes of its files: (path, find, replace)."""

    def make_checkout(*changes: tuple[str, str, str]) -> Path:
        old = tmp_path / "old"
        for part in ("codegen", "templates"):
            shutil.copytree(HERE / part, old / "flashgen" / part, ignore=shutil.ignore_patterns("__pycache__"))
        (old / "flashgen/__init__.py").touch()
        revision = ("codegen/families/attention_forward/family.py", f"revision = {FAMILY.revision}", f"revision = {OLD}")
        for name, find, replace in (revision, *changes):
            text = (old / "flashgen" / name).read_text()
            assert find in text
            (old / "flashgen" / name).write_text(text.replace(find, replace))
        return old

    return make_checkout


def test_a_record_of_the_same_machine_code_moves(checkout: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, present = measured(), measured(FAMILY.revision, config=CONFIGS[1])
    foreign = measured(nvrtc_version="12.0", config=CONFIGS[2])
    file = tmp_path / "records.json"
    file.write_text(to_text([old, present, foreign]))
    before = checkout((MASK, "__device__", "/* of then */ __device__"))
    assert not tells_time(old, BENCHMARK_VERSION)

    move_records.main(["--old", str(before), "--dry-run", str(file)])
    assert file.read_text() == to_text([old, present, foreign])
    move_records.main(["--old", str(before), str(file)])
    moved, *rest = parse_records(file.read_bytes()).records
    assert rest == [present, foreign]
    assert moved == measured(FAMILY.revision)
    assert tells_time(moved, BENCHMARK_VERSION)
    out = capsys.readouterr().out
    assert "1 of 3 records would be moved" in out
    assert "1 of 3 records moved" in out
    assert "1 stay: of the present revision" in out
    assert f"1 stay: measured with NVRTC 12.0; the one here is {nvrtc_version()}" in out


@pytest.mark.slow
def test_a_record_of_other_machine_code_stays(checkout: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    file.write_text(to_text([measured()]))
    before = checkout((MASK, "-infinity()", "-1.0e30f"))
    done = move_records.move([measured()], before)
    assert (done.moved, done.stay) == ({}, {0: "another machine code"})
    move_records.main(["--old", str(before), str(file)])
    assert file.read_text() == to_text([measured()])


def test_the_user_s_own_records_are_added_to(checkout: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Records(tmp_path / "cache/records.sqlite3")
    monkeypatch.setattr(sources, "own_records", lambda: own)
    own.put(measured())
    before = checkout()
    for _ in range(2):
        move_records.main(["--old", str(before)])
        assert own.get(measured().key) == measured()
        assert own.get(measured(FAMILY.revision).key) == measured(FAMILY.revision)
        assert len(own) == 2


def test_another_launch_of_the_same_code_stays(checkout: Callable[..., Path]) -> None:
    other = "    def threads(self, config):\n        return 7\n\n    def then(self, config):"
    before = checkout(("codegen/families/attention_forward/family.py", THREADS, other))
    assert move_records.move([measured()], before).stay == {0: "launched with other threads, shared memory or parameters"}


def test_what_the_old_checkout_does_not_know_stays(checkout: Callable[..., Path]) -> None:
    (reason,) = move_records.move([measured(OLD - 1)], checkout()).stay.values()
    assert reason.startswith(f"revision of attention_forward must be {OLD}; got {OLD - 1}")


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlashgenError, match=r"old must be a checkout|cannot render"):
        move_records.move([measured()], tmp_path)


def test_a_file_of_bad_records_is_refused(checkout: Callable[..., Path], tmp_path: Path) -> None:
    values = json.loads(to_text([measured()]))
    values["records"][0]["sm_count"] = "many"
    (tmp_path / "bad.json").write_text(json.dumps(values))
    with pytest.raises(ArgumentError, match=r"^file must hold sound records only; got record 1: record field sm_count"):
        move_records.main(["--old", str(checkout()), str(tmp_path / "bad.json")])


def test_all_that_is_loaded_is_compared() -> None:
    spec = KernelSpec(FAMILY, PROBLEM, SMALL, DEVICE.target)
    source = render(spec)
    renamed = Source("another_name", source.text.replace(spec.name, "another_name"))
    cubin, other = (compile_source(s, "sm_90a").cubin for s in (source, renamed))
    parts = move_records.loaded_parts(cubin, spec.name)
    assert {".text.kernel", ".nv.info.kernel", ".nv.constant0.kernel", ".symtab"} <= {part[0] for part in parts}
    assert parts == move_records.loaded_parts(other, "another_name"), "a name is no code"
    code = next(part[-1] for part in parts if part[0] == ".text.kernel")
    at = cubin.index(code) + len(code) // 2
    spoiled = cubin[:at] + bytes([cubin[at] ^ 1]) + cubin[at + 1 :]
    assert move_records.loaded_parts(spoiled, spec.name) != parts
