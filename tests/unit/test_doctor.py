"""The doctor's checks, each on a machine that is well and on ones that are not; and that nothing ends it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import warnings
from collections import namedtuple
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flashgen
from flashgen import doctor
from flashgen.build.artifact import EntryReport, Report
from flashgen.build.emulator.compiler import CxxCompiler, CxxCompilerMissingError
from flashgen.build.gpu.driver import DriverError, DriverState, Gpu
from flashgen.build.nvrtc import CompilerMissingError, nvrtc_version
from flashgen.build.store.store import ArtifactStore
from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.workload import Workload
from flashgen.doctor import Check, Finding, Status, machine, stored, trial
from flashgen.doctor.machine import TorchState
from flashgen.records import sources
from flashgen.records.record import Failure, FailureKind
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Records
from flashgen.selection import compilation
from flashgen.selection.families import default_spec
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, make

GPU = Gpu(0, DEVICE, "uuid", "580.1")
OK, NOTE, WRONG = Status


def seems(finding: Finding, status: Status, found: str, meaning: str = "", cure: str = "") -> None:
    """Asserts the status and what the texts contain; what is not ok has all three."""
    assert finding.status is status, finding
    assert found in finding.found
    assert meaning in finding.meaning
    assert cure in finding.cure
    assert bool(finding.meaning) == bool(finding.cure) == (status is not OK), finding


# Running a check


def test_an_exception_is_a_finding() -> None:
    def breaks(name: str) -> Finding:
        raise ZeroDivisionError("by zero")

    seems(Check("x", breaks).run(), WRONG, "ZeroDivisionError: by zero", "the check itself failed", "report it")


def test_an_error_of_ours_is_a_finding_with_its_message() -> None:
    def breaks(name: str) -> Finding:
        raise FlashgenError("driver must be newer: update it")

    seems(Check("x", breaks).run(), WRONG, "driver must be newer: update it", "does not work here", "what the message says")


def test_a_warning_makes_a_note() -> None:
    def warns(name: str) -> Finding:
        warnings.warn("records.sqlite3 was renamed", RuntimeWarning, stacklevel=2)
        return Finding(name, OK, "found")

    def of_a_library(name: str) -> Finding:
        warnings.warn("old spelling", DeprecationWarning, stacklevel=2)
        return Finding(name, OK, "found")

    seems(Check("x", warns).run(), NOTE, "found", "there was a warning: records.sqlite3 was renamed", "warning")
    seems(Check("x", of_a_library).run(), OK, "found")


def test_without_a_gpu_every_check_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_count", lambda: 0)
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    monkeypatch.setattr(machine, "driver_state", lambda: DriverState(None, None, "no libcuda"))
    findings = {check.name: check.run() for check in doctor.checks()}
    assert [name for name, finding in findings.items() if finding.name != name] == []
    assert [f for f in findings.values() if f.status is WRONG] == []
    seems(findings["driver"], NOTE, "no NVIDIA driver", "ranks by prediction, and generate, compile and show work in full", "driver 580")
    seems(findings["compile"], OK, "bf16_d64_causal for sm_90a: rendered in")


def test_with_gpus_each_is_looked_at_and_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Gpu(2, dataclasses.replace(DEVICE, name="other"), "uuid2", "580.1")
    gpus = {0: GPU, 1: dataclasses.replace(GPU, ordinal=1), 2: other}

    def gpu(ordinal: int) -> Gpu:
        if ordinal == 3:
            raise DriverError("finding the GPU failed")
        return gpus[ordinal]

    monkeypatch.setattr(doctor, "gpu_count", lambda: 4)
    monkeypatch.setattr(doctor, "gpu", gpu)
    monkeypatch.setattr(machine, "gpu", gpu)
    names = [check.name for check in doctor.checks()]
    assert [name for name in names if name.startswith("GPU ")] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert [name for name in names if name.startswith("launch")] == ["launch on GPU 0", "launch on GPU 1", "launch on GPU 2"]
    for kind in ("target", "records"):
        assert [name for name in names if name.startswith(f"{kind} of")] == [f"{kind} of NVIDIA H200", f"{kind} of other"]
    seems(
        next(check for check in doctor.checks() if check.name == "GPU 3").run(), WRONG, "finding the GPU failed", "does not work", "message"
    )


# The machine

NEW, OLD = DriverState("580.159.04", 13000, None), DriverState("570.1", 12080, None)
DRIVERS: dict[str, tuple[DriverState, str | None, Status, str, str]] = {
    "well": (NEW, None, OK, "580.159.04, supports CUDA 13.0", ""),
    "newer": (DriverState(None, 14010, None), None, OK, "supports CUDA 14.1", ""),
    "none": (DriverState(None, None, "no libcuda"), "", NOTE, "no NVIDIA driver", "driver 580 or newer"),
    "too old": (OLD, None, WRONG, "570.1, supports CUDA 12.8; kernels of CUDA 13 need driver 580", "sudo apt install nvidia-driver-580"),
    "no library": (DriverState("580.1", None, "no libcuda"), None, WRONG, "libcuda.so.1 cannot be loaded (no libcuda)", "--gpus all"),
    "hidden": (DriverState("580.1", 13000, "CUDA_ERROR_NO_DEVICE"), "", WRONG, "CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
    "no device": (DriverState("580.1", 13000, "CUDA_ERROR_NO_DEVICE"), None, WRONG, "CUDA_ERROR_NO_DEVICE", "nvidia-smi"),
    "no fabric": (DriverState("580.1", 13000, "CUDA_ERROR_SYSTEM_NOT_READY"), None, WRONG, "NOT_READY", "nvidia-fabricmanager"),
    "else": (DriverState("580.1", 13000, "CUDA_ERROR_UNKNOWN"), "0", WRONG, "CUDA_ERROR_UNKNOWN", "nvidia-smi"),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_driver(name: str) -> None:
    state, visible, status, found, cure = DRIVERS[name]
    seems(machine.judge_driver("driver", state, visible), status, found, cure=cure)


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda ordinal: GPU)
    monkeypatch.setattr(machine, "memory_bytes", lambda ordinal: 150_000_000_000)
    seems(machine.graphics_card("GPU 0", 0), OK, "NVIDIA H200: compute capability 9.0, 132 SMs, 139.7 GiB of memory")


def with_target(name: str, capability: tuple[int, int]) -> Gpu:
    target = dataclasses.replace(DEVICE.target, name=name, capability=capability)
    return dataclasses.replace(GPU, device=dataclasses.replace(DEVICE, target=target))


def test_target(monkeypatch: pytest.MonkeyPatch) -> None:
    seems(machine.target("t", GPU), OK, "sm_90a, from its target file")
    seems(machine.target("t", with_target("sm_75", (7, 5))), WRONG, "sm_75: ", "no kernel family runs", "Ampere")
    seems(machine.target("t", with_target("sm_130", (13, 0))), WRONG, "sm_130, which NVRTC", "no kernel can be compiled", "pip install -U")
    monkeypatch.setattr(machine, "target_for_capability", lambda capability: None)
    seems(machine.target("t", GPU), NOTE, "sm_90a has no target file", "guesses", "docs/adding-an-architecture.md")


def test_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = machine.nvrtc("NVRTC")
    seems(finding, OK, f"{nvrtc_version()}, from /")
    path = re.search(r"from (\S+);", finding.found)
    assert path
    assert Path(path[1]).is_file()
    assert "libnvrtc" in path[1]
    monkeypatch.setattr(machine, "nvrtc_architectures", lambda: (80, 90))
    seems(machine.nvrtc("NVRTC"), NOTE, "sm_80 to sm_90", "cannot compile for sm_86, ", "pip install -U")
    monkeypatch.setattr(machine, "nvrtc_version", lambda: "12.8")
    seems(machine.nvrtc("NVRTC"), WRONG, "12.8", "made for NVRTC 13", "pip install -U 'nvidia-cuda-nvrtc>=13,<14'")

    def missing() -> tuple[int, ...]:
        raise CompilerMissingError("NVRTC cannot be loaded (why): pip install it")

    monkeypatch.setattr(machine, "nvrtc_architectures", missing)
    seems(machine.nvrtc("NVRTC"), WRONG, "NVRTC cannot be loaded (why)", "nothing can be compiled", "pip install")


def test_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    seems(machine.bindings("cuda-python"), OK, f"cuda-bindings {metadata.version('cuda-bindings')}")
    monkeypatch.setattr(metadata, "version", lambda name: "12.9.1")
    seems(machine.bindings("cuda-python"), WRONG, "cuda-bindings 12.9.1", "made for version 13", "pip install 'cuda-python>=13,<14'")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    seems(machine.bindings("cuda-python"), WRONG, "not installed", "nothing can be compiled", "pip install 'cuda-python>=13,<14'")


@pytest.mark.parametrize(
    ("state", "gpus", "status", "found"),
    [
        (TorchState("2.13.0", "13.0", 1), 1, OK, "2.13.0, built for CUDA 13.0; sees 1 GPU"),
        (TorchState("2.13.0", "13.0", 8), 8, OK, "sees 8 GPUs"),
        (TorchState("2.13.0+cpu", None, 0), 0, OK, "2.13.0+cpu, built without CUDA"),
        (TorchState("2.13.0", "13.0", 0), 0, OK, "2.13.0, built for CUDA 13.0"),
        (TorchState("2.13.0+cpu", None, 0), 1, WRONG, "built without CUDA"),
        (TorchState("2.13.0", "13.2", 0), 2, WRONG, "does not see the driver's 2 GPUs"),
        (TorchState("2.13.0", "13.0", 1), 2, NOTE, "sees 1 of the driver's 2 GPUs"),
        ("No module named 'torch'", 0, WRONG, "cannot be imported: No module named 'torch'"),
    ],
)
def test_torch(state: TorchState | str, gpus: int, status: Status, found: str) -> None:
    seems(machine.judge_torch("PyTorch", state, gpus), status, found, cure="pip install" if status is WRONG else "")


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(machine.torch_state(), TorchState)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch" in str(machine.torch_state())
    seems(machine.torch("PyTorch"), WRONG, "cannot be imported", "flashgen.attention does not work", "pip install 'torch")
    seems(trial.launching("launch", GPU), NOTE, "not tried", "not known", "see PyTorch")


def test_kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cxx_compiler", lambda: CxxCompiler(Path("/usr/bin/g++"), "g++ 13.2.0 for x86_64"))
    monkeypatch.setattr(tempfile, "tempdir", "/noexec")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "/cache")
    for allowed, status, *found in (
        ({"/noexec", "/cache"}, OK, "g++ 13.2.0 for x86_64"),
        ({"/cache"}, OK, "g++ 13.2.0 for x86_64; /noexec is mounted noexec"),
        (set(), NOTE, "/noexec is mounted noexec, /cache is mounted noexec", "verify --device cpu", "set TMPDIR"),
    ):
        monkeypatch.setattr(machine, "allows_programs", lambda folder, allowed=allowed: str(folder) in allowed)
        seems(machine.cpu("c"), status, *found)

    def missing() -> None:
        raise CxxCompilerMissingError("a C++ compiler must be there; got g++: not found")

    monkeypatch.setattr(machine, "cxx_compiler", missing)
    seems(machine.cpu("c"), NOTE, "g++: not found", "verify --device cpu", "apt install g++")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name in machine.VARIABLES or name.startswith("FLASHGEN_")]:
        monkeypatch.delenv(name)
    seems(machine.environment("e"), OK, "none set")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "/c")
    seems(machine.environment("e"), OK, "CUDA_VISIBLE_DEVICES=1, FLASHGEN_CACHE_DIR=/c")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    seems(machine.environment("e"), NOTE, "XDG_CACHE_HOME=relative", "ignored", "absolute")
    monkeypatch.setenv("FLASHGEN_CACHEDIR", "/x")
    seems(machine.environment("e"), NOTE, "FLASHGEN_CACHEDIR=/x", "does not read FLASHGEN_CACHEDIR", "it reads FLASHGEN_CACHE_DIR")


def test_all_variables_that_are_read_are_known() -> None:
    root = Path(flashgen.__file__).parent
    files = [path for folder in (root, *(root / name for name in ("build", "codegen"))) for path in folder.rglob("*.py")]
    read = {name for path in files for name in re.findall(r'environ[.\w]*[\[(]"(\w+)"', path.read_text())}
    assert read == set(machine.VARIABLES)


# What is on disk


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test, in which store and records are."""
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(path))
    known = ArtifactStore(), Records(), ShippedRecords(tmp_path / "shipped")
    places = ((compilation, "store"), (sources, "own_records"), (sources, "shipped_records"))
    for (place, name), value in zip(places, known, strict=True):
        monkeypatch.setattr(place, name, lambda value=value: value)
    return path


def test_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seems(stored.folder("f"), OK, f"{cache} (by FLASHGEN_CACHE_DIR), writable, ")
    assert list(cache.iterdir()) == []
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(cache / "a/b"))
    seems(stored.folder("f"), OK, f"{cache}/a/b (by FLASHGEN_CACHE_DIR), not made yet, ")
    assert list(cache.iterdir()) == []


def link_it(cache: Path) -> None:
    cache.rename(cache.with_name("real"))
    cache.symlink_to("real")


@pytest.mark.parametrize(
    ("spoil", "found", "cure"),
    [
        (lambda c: c.chmod(0o777), "is writable by its group or by others (mode 0777)", "run chmod go-w"),
        (link_it, "is a symbolic link", "set FLASHGEN_CACHE_DIR"),
        (lambda c: c.rmdir() or c.touch(mode=0o600), "cannot be used: Not a directory", "set FLASHGEN_CACHE_DIR"),
    ],
)
def test_folder_that_is_refused(cache: Path, spoil: Callable[[Path], object], found: str, cure: str) -> None:
    spoil(cache)
    seems(stored.folder("f"), WRONG, found, "lost", cure)
    if cache.is_dir():
        seems(stored.kernels("k"), WRONG, found, "lost", cure)


def test_folder_of_another_owner_or_without_permission(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user + 1)
        seems(stored.folder("f"), WRONG, f"belongs to user {user}", "it is not used", "a folder of your own")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", fail_with(PermissionError(13, "Permission denied")))
        seems(stored.folder("f"), WRONG, "cannot be used: Permission denied", "compiled again", "set FLASHGEN_CACHE_DIR")
    with monkeypatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(cache / "below"))
        patch.setattr(os, "access", lambda path, mode: False)
        seems(stored.folder("f"), WRONG, f"cannot be made: {cache} is no folder that can be written", "", "set FLASHGEN_CACHE_DIR")


def fail_with(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_folder_with_little_space(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 100 * 2**20))
    seems(stored.folder("f"), NOTE, "100 MiB free", "little space", "free some")


def test_kernels(cache: Path) -> None:
    seems(stored.kernels("k"), OK, "0 kernels")
    compilation.compile_spec(default_spec(trial.PROBLEM, DEVICE.target))
    seems(stored.kernels("k"), OK, "1 kernels, 0.2 MiB")
    (cubin,) = cache.rglob("kernel.cubin")
    cubin.write_bytes(b"torn")
    seems(stored.kernels("k"), NOTE, f"1 are damaged, the first {cubin.parent}: ", "compiled again", "flashgen cache clear")


def test_kernels_that_cannot_be_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArtifactStore, "usage", fail_with(PermissionError(13, "Permission denied")))
    seems(stored.kernels("k"), WRONG, f"{cache} cannot be read: Permission denied", "compiled again", "set FLASHGEN_CACHE_DIR")


def test_records(cache: Path) -> None:
    seems(stored.records("r"), OK, "none yet")
    assert list(cache.iterdir()) == []
    sources.own_records().add([make(), make(config=CONFIGS[1])])
    seems(stored.records("r"), OK, "2 of NVIDIA H200")
    path = sources.own_records().path
    sources.own_records()._file.close()
    path.write_bytes(b"no database" * 1000)
    seems(stored.records("r"), WRONG, f"{path} cannot be used (corrupt)", "are not used", "flashgen cache import FILE")
    assert "0 own" in stored.records_of("r", GPU).found
    assert path.read_bytes() == b"no database" * 1000, "looking does not set it aside"
    path.chmod(0o666)
    seems(stored.records("r"), WRONG, "is writable by its group", "are not used", "flashgen cache import FILE")


def test_a_record_file_that_is_locked_is_a_finding(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.own_records().put(make())
    monkeypatch.setattr(stored, "fault_of", fail_with(sqlite3.OperationalError("database is locked")))
    seems(stored.records("r"), WRONG, "cannot be used (database is locked)", "are not used", "cache import")


def test_records_of_a_gpu(cache: Path) -> None:
    here = ("580.1", nvrtc_version())
    versions: dict[str, Any] = {"driver_version": here[0], "nvrtc_version": here[1]}
    seems(stored.records_of("r", GPU), NOTE, "0 own, 0 shipped; 0 times", "the model picks", "flashgen tune")
    useless = [make(spec={**make().spec, "revision": FAMILY.revision + 1}), make(Failure(FailureKind.WRONG, ""))]
    seems(stored.judge_records("r", useless, [], here), NOTE, "2 own, 0 shipped; 0 times", "the model picks", "flashgen tune")
    older = make(driver_version="570.1")
    seems(stored.judge_records("r", [], [older], here), NOTE, "0 own, 1 shipped; 1 times", "measured by others", "flashgen tune")
    many = [make(workload=Workload(1, 8, 8, n, n), **versions) for n in range(1, 12)]
    sources.own_records().add([*useless, older, *many])
    finding = stored.records_of("r", GPU)
    seems(finding, OK, "14 own, 0 shipped; 12 times can be used, 11 of them of this driver and compiler")
    assert finding.found.splitlines()[1].startswith("bf16_d64_full at B1 H8 S1, B1 H8 S2, ")
    assert finding.found.endswith(" and 4 more")


# From end to end


def test_compile_that_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trial._compiled(DEVICE.target)
    spilling = SimpleNamespace(report=Report({"kernel": EntryReport(255, 16, 16)}))
    monkeypatch.setattr(trial, "_compiled", lambda target: SimpleNamespace(**{**vars(made), "artifact": spilling}))
    seems(trial.compiling("c", DEVICE.target), WRONG, "spills 16 B a thread", "this compiler", "pip install")


def test_launches() -> None:
    def case(ok: bool) -> Any:
        return SimpleNamespace(workload=Workload(1, 1, 1, 1, 1), verdict=SimpleNamespace(ok=ok, message="out of bounds"))

    seems(trial.judge_launches("l", [case(True), case(True)], 0.25), OK, "bf16_d64_causal: 2 of 2 workloads right, in 250 ms")
    seems(trial.judge_launches("l", [case(True), case(False)], 0.25), WRONG, "1 of 2 workloads right, in 250 ms; B1 H1 S1: out of", "wrong")


def test_a_gpu_that_pytorch_does_not_see_is_not_launched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "torch_state", lambda: TorchState("2.13.0", "13.0", 1))
    on = dataclasses.replace(GPU, ordinal=1)
    seems(trial.launching("l", on), NOTE, "not tried: PyTorch cannot use this GPU", "not known", "see PyTorch")
