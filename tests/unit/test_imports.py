"""Which imported kernel takes a call: tuned ones by the rule of records, others by their bucket; and folders that wait for their GPU."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flashgen
from flashgen.build.gpu.driver import Gpu
from flashgen.build.nvrtc import CompilerMissingError
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Mask
from flashgen.codegen.render import jinja_environment
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.records.choice import bucket
from flashgen.selection import bundle, compilation, imports, loaded, manifest
from flashgen.selection.bundle import Generated
from flashgen.selection.families import default_spec
from flashgen.selection.imports import Imports
from flashgen.selection.loaded import Kernels
from tests.support.made_artifacts import made_artifact
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM

GPU = Gpu(0, DEVICE, "uuid", "13.0")
OTHER_GPU = Gpu(1, find_device("a100"), "uuid", "13.0")
SHORT, LONG = Workload(4, 32, 32, 512, 512), Workload(4, 32, 32, 3000, 3000)
FAR = Workload(1, 1, 1, 1, 100_000)


def kernel(number: int = 0, gpu: Gpu = GPU) -> Any:
    return SimpleNamespace(spec=KernelSpec(FAMILY, PROBLEM, CONFIGS[number], DEVICE.target), gpu=gpu)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Imports:
    own = Imports(changed=lambda: None)
    monkeypatch.setattr(loaded, "imports", own)
    return own


def test_a_tuned_kernel_speaks_for_its_workload_and_for_what_is_near(imported: Imports) -> None:
    short, long, same_bucket = kernel(0), kernel(1), kernel(2)
    imported.add(short, workloads=[SHORT])
    imported.add(long, workloads=[LONG])
    imported.add(same_bucket, workloads=[dataclasses.replace(LONG, len_kv=4000)])
    assert imported.find(PROBLEM, SHORT, GPU) is short
    assert imported.find(PROBLEM, LONG, GPU) is long
    assert imported.find(PROBLEM, dataclasses.replace(SHORT, len_q=700, len_kv=700), GPU) is short
    assert imported.find(PROBLEM, dataclasses.replace(LONG, len_q=2049), GPU) is same_bucket, "that is nearer to their bucket"
    assert imported.find(PROBLEM, LONG, GPU, any_length=True) is same_bucket
    assert imported.find(PROBLEM, FAR, GPU) is None
    assert imported.find(dataclasses.replace(PROBLEM, mask=Mask.CAUSAL), LONG, GPU) is None
    assert imported.find(PROBLEM, LONG, OTHER_GPU) is None
    assert imported.find(PROBLEM, LONG, GPU, excluded=frozenset([FAMILY.name])) is None
    assert imported.workloads(PROBLEM, GPU) == {SHORT, LONG, dataclasses.replace(LONG, len_kv=4000)}


def test_a_kernel_for_the_bucket_comes_between_and_one_for_all_sizes_last(imported: Imports) -> None:
    tuned, of_bucket, general = kernel(0), kernel(1), kernel(2)
    imported.add(general)
    imported.add(of_bucket, bucket(LONG))
    imported.add(tuned, workloads=[LONG])
    assert imported.find(PROBLEM, LONG, GPU) is tuned
    assert imported.find(PROBLEM, dataclasses.replace(LONG, len_q=2049), GPU) is of_bucket
    assert imported.find(PROBLEM, dataclasses.replace(LONG, len_q=1500), GPU) is tuned, "which is near"
    assert imported.find(PROBLEM, FAR, GPU) is general


def test_a_workload_of_its_own_does_not_speak_for_its_bucket(imported: Imports) -> None:
    """What a call chooses is kept for its bucket: another length of it must not change what the tuned workload gets, nor the reverse."""
    tuned, of_bucket = kernel(0), kernel(1)
    imported.add(of_bucket, bucket(LONG))
    imported.add(tuned, workloads=[LONG])
    other = dataclasses.replace(LONG, len_q=2100)
    for first, second in ((LONG, other), (other, LONG)):
        kernels = Kernels()
        assert [kernels.choose(PROBLEM, one, GPU) for one in (first, second, first)] == [
            tuned if one == LONG else of_bucket for one in (first, second, first)
        ]


def test_without_a_compiler_a_kernel_for_other_sizes_is_taken(imported: Imports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "why_no_compile", lambda: "NVRTC cannot be loaded")
    short, long = kernel(0), kernel(1)
    imported.add(short, workloads=[SHORT])
    imported.add(long, bucket(LONG))
    assert Kernels().choose(PROBLEM, FAR, GPU) is long
    assert Kernels().choose(PROBLEM, Workload(4, 32, 32, 1, 1), GPU) is short
    causal = dataclasses.replace(PROBLEM, mask=Mask.CAUSAL)
    said = r"^bf16_d64_causal B4 H32 S512: none of the loaded kernels takes it, and none can be compiled here, as NVRTC cannot be loaded"
    with pytest.raises(CompilerMissingError, match=said):
        Kernels().choose(causal, SHORT, GPU)


def test_what_keeps_from_compiling_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compilation.why_no_compile.__wrapped__
    assert found() is None
    monkeypatch.setitem(sys.modules, "jinja2", None)
    jinja_environment.cache_clear()
    assert str(found()).startswith("jinja2 cannot be imported")
    jinja_environment.cache_clear()


# Folders that are registered


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(imports, "Kernel", lambda spec, artifact, gpu: SimpleNamespace(spec=spec, gpu=gpu))
    spec = default_spec(PROBLEM, DEVICE.target)
    bundle.write(tmp_path / "kernels", [Generated(spec, made_artifact(spec), workloads=(LONG, SHORT))])
    return tmp_path / "kernels"


def test_a_registered_folder_is_read_before_the_first_choice(imported: Imports, folder: Path) -> None:
    flashgen.register_kernels(folder)
    assert imported.is_pending(GPU)
    assert not Kernels().is_chosen(PROBLEM, LONG, GPU), "loading it is not for a CUDA graph's capture"
    found = imported.find(PROBLEM, LONG, GPU)
    assert found is not None
    assert found.spec == default_spec(PROBLEM, DEVICE.target)
    assert not imported.is_pending(GPU)
    assert imported.find(PROBLEM, SHORT, GPU) is found
    flashgen.unload()
    assert not imported.is_pending(GPU)
    assert imported.find(PROBLEM, LONG, GPU) is None


def test_a_folder_for_another_architecture_is_named_at_the_first_call(imported: Imports, folder: Path, tmp_path: Path) -> None:
    flashgen.register_kernels(folder)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"^folder {folder} must hold a kernel for sm_80; got kernels for sm_90a"):
            imported.find(PROBLEM, LONG, OTHER_GPU)
    assert imported.find(PROBLEM, LONG, GPU) is not None
    spec = default_spec(PROBLEM, OTHER_GPU.device.target)
    bundle.write(tmp_path / "others", [Generated(spec, made_artifact(spec))])
    flashgen.register_kernels(tmp_path / "others")
    assert imported.find(PROBLEM, LONG, OTHER_GPU) is not None, "one folder that has some is enough"
    assert imported.find(PROBLEM, LONG, GPU) is not None


def test_a_folder_that_is_spoiled_is_told_each_time(imported: Imports, folder: Path) -> None:
    next(folder.glob("*.cubin")).write_bytes(b"")
    flashgen.register_kernels(folder)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"^folder {folder} must "):
            imported.find(PROBLEM, LONG, GPU)


def test_a_folder_beside_a_spoiled_one_is_loaded_once(imported: Imports, folder: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    changes: list[bool] = []
    imported._changed = lambda: changes.append(True)
    for one in (folder, spoiled):
        flashgen.register_kernels(one)
    for _ in range(3):
        with pytest.raises(ArgumentError, match=rf"^folder must hold .*; got {spoiled}: "):
            imported.find(PROBLEM, LONG, GPU)
    assert len(changes) == 3, "twice registered, one kernel added"
    shutil.copytree(folder, spoiled, dirs_exist_ok=True)
    assert imported.find(PROBLEM, LONG, GPU) is not None, "once it is mended"
    assert not imported.is_pending(GPU)


def test_a_relative_folder_is_of_where_it_was_registered(imported: Imports, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    flashgen.register_kernels(folder.name)
    monkeypatch.chdir("/")
    assert imported.find(PROBLEM, LONG, GPU) is not None


def test_workloads_of_a_folder_are_read_back_and_altered_ones_refused(folder: Path) -> None:
    (found,) = bundle.read_bundle(folder, DEVICE.target)
    assert found.workloads == (LONG, SHORT)
    file = folder / "manifest.json"
    (entry,) = manifest.read_manifest(file.read_bytes())
    wrong: Any
    for wrong in ([], None, "all", {"batch": 1}, [{"batch": 1}], [7]):
        file.write_bytes(manifest.to_bytes([{**entry, "workloads": wrong}]))
        with pytest.raises(ArgumentError, match=r"^folder "):
            bundle.read_bundle(folder, DEVICE.target)
    file.write_bytes(manifest.to_bytes([{**entry, "bucket": dataclasses.asdict(bucket(LONG))}]))
    with pytest.raises(ArgumentError, match=r"^folder .* must "):
        bundle.read_bundle(folder, DEVICE.target)
