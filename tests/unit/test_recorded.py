"""`flashgen generate --from-records`: the kernels that records choose, for which workloads each is, and the package that they become."""

from __future__ import annotations

import dataclasses
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from flashgen.build.artifact import Artifact
from flashgen.cli.generate import generate
from flashgen.codegen.config import Config
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.records import sources
from flashgen.records.exchange import to_text
from flashgen.records.record import Failure, FailureKind
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Records
from flashgen.selection import bundle, compilation
from flashgen.selection.bundle import Generated
from flashgen.selection.picks import picks
from flashgen.selection.wheels import PackageName
from flashgen.tuning import generation
from tests.support.made_artifacts import made_artifact
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, make

ONE, TWO = CONFIGS[1], CONFIGS[2]
SHORT, LONG = Workload(4, 32, 32, 512, 512), Workload(4, 32, 32, 3000, 3000)
CAUSAL = dataclasses.replace(PROBLEM, mask=Mask.CAUSAL)


@pytest.fixture(autouse=True)
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Config, int]:
    """There are no records and no GPU; compiling takes no time, and spills what this says."""
    own, spills = Records(tmp_path / "records.sqlite3"), dict[Config, int]()

    def compile_spec(spec: KernelSpec) -> Artifact:
        return made_artifact(spec, spills.get(spec.config, 0))

    monkeypatch.setattr(sources, "own_records", lambda: own)
    monkeypatch.setattr(sources, "shipped_records", lambda: ShippedRecords(tmp_path))
    monkeypatch.setattr(compilation, "compile_spec", compile_spec)
    monkeypatch.setattr(generation, "gpu_count", lambda: 0)
    return spills


def ship(tmp_path: Path, *records: Any) -> None:
    (tmp_path / "gpu.json").write_text(to_text(records))


def written(tmp_path: Path, arch: str | None = None, device: str | None = "h200", **options: Any) -> list[Generated]:
    generate(tmp_path / "out", arch, from_records=True, device=device, **options)
    return bundle.read_bundle(tmp_path / "out", DEVICE.target)


def found(kernels: list[Generated]) -> dict[tuple[Problem, Config], tuple[Workload, ...]]:
    assert all(kernel.bucket is None for kernel in kernels)
    return {(kernel.spec.problem, kernel.spec.config): kernel.workloads for kernel in kernels}


def test_each_record_s_kernel_is_written_once_with_its_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Workload(1, 16, 16, 1024, 1024)
    sources.own_records().put(make(1e-3, SHORT, ONE))
    ship(tmp_path, make(1e-6, SHORT, TWO), make(1e-3, LONG, TWO), make(1e-3, other, ONE), make(1e-3, other, CONFIGS[0], problem=CAUSAL))
    kernels = written(tmp_path)
    assert found(kernels) == {(PROBLEM, ONE): (other, SHORT), (PROBLEM, TWO): (LONG,), (CAUSAL, CONFIGS[0]): (other,)}, "own ones first"
    assert capsys.readouterr().err == "NVIDIA H200: records of 4 workloads of 2 problems\n"
    for kernel in kernels:  # as a call of that very workload chooses
        for workload in kernel.workloads:
            assert next(picks(kernel.spec.problem, workload, DEVICE, ("", ""))).choice.spec(DEVICE.target) == kernel.spec


def test_failures_and_families_that_go_by_name_do_not_count(tmp_path: Path) -> None:
    ship(tmp_path, make(1e-3, LONG, TWO), make(Failure(FailureKind.DEFECT, "spills"), SHORT, ONE))
    assert found(written(tmp_path)) == {(PROBLEM, TWO): (LONG,)}


def test_what_the_compiler_breaks_is_passed_over(tmp_path: Path, compiled: dict[Config, int]) -> None:
    ship(tmp_path, make(1e-3, LONG, ONE), make(1e-3, Workload(4, 32, 32, 4000, 4000), TWO))
    compiled[ONE] = 8
    assert found(written(tmp_path)) == {(PROBLEM, TWO): (LONG, Workload(4, 32, 32, 4000, 4000))}, "the next best record's"


def test_options_narrow_the_problems(tmp_path: Path) -> None:
    fp16 = Problem(Dtype.FP16, 64)
    ship(tmp_path, *(make(1e-3, LONG, CONFIGS[0], problem=problem) for problem in (PROBLEM, CAUSAL, fp16)))
    assert len(written(tmp_path)) == 3
    assert {kernel.spec.problem for kernel in written(tmp_path, dtype="fp16")} == {fp16}
    assert {kernel.spec.problem for kernel in written(tmp_path, causal=False, head_dim=64, passes="forward")} == {PROBLEM, fp16}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"head_dim": 128}, r"^head_dim must be one of 64; got 128"),
        ({"passes": "backward"}, r"^pass must be one of forward; got 'backward'"),
        ({"causal": True, "dtype": "fp16"}, r"^causal must be one of False; got True"),
        ({"passes": "sideways"}, r"^pass must be one of"),
        ({"deterministic": True}, r"^deterministic must be one of False"),
        ({"seqlen": [512]}, r"^seqlen must be left out with from_records"),
        ({"window": "7:0"}, r"^window must be left out with from_records"),
        ({"settings": ["stages=3"]}, r"^set must be left out with from_records"),
        ({"device": "a100"}, r"^device must be one that there are tuning records of; got NVIDIA A100"),
        ({"arch": "sm_80"}, r"^device must be of sm_80; got NVIDIA H200, of sm_90a"),
    ]
    for options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            written(tmp_path, **options)


def test_a_device_without_records_has_those_of_one_like_it(tmp_path: Path) -> None:
    ship(tmp_path, make(1e-3, LONG, TWO))
    assert found(written(tmp_path, device="h100")) == {(PROBLEM, TWO): (LONG,)}
    assert found(written(tmp_path, "sm_90a", None)) == {(PROBLEM, TWO): (LONG,)}
    assert find_device("h100").target == DEVICE.target


def test_defaults_for_all_lengths_say_what_records_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generate(tmp_path / "out", "sm_90a", 64, causal=False)
    assert capsys.readouterr().err == ""
    ship(tmp_path, make(1e-3, LONG, TWO), make(1e-3, SHORT, TWO))
    generate(tmp_path / "out", "sm_90a", 64, causal=False)
    said = capsys.readouterr().err
    assert said.startswith(
        "bf16_d64_full on NVIDIA H200: the default config for all lengths, though records of 2 workloads may know faster"
    )


# Packages


def test_a_package_holds_the_folder_and_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ship(tmp_path, make(1e-3, LONG, TWO))
    for _ in range(2):  # one of the same name is replaced
        generate(tmp_path / "wheels", from_records=True, device="h200", wheel="My.Kernels==1.2")
    (file,) = (tmp_path / "wheels").iterdir()
    assert capsys.readouterr().out.splitlines()[0] == str(file)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "site")
    metadata = next((tmp_path / "site").glob("*.dist-info/METADATA")).read_text()
    assert "Name: My-Kernels\nVersion: 1.2\n" in metadata.replace("My.Kernels", "My-Kernels")
    assert "Requires-Dist: flashgen==0.1.0\n" in metadata
    assert "Root-Is-Purelib: true" in next((tmp_path / "site").glob("*.dist-info/WHEEL")).read_text()
    (kernel,) = bundle.read_bundle(tmp_path / "site/my_kernels/kernels", DEVICE.target)
    assert (kernel.spec, kernel.workloads) == (KernelSpec(FAMILY, PROBLEM, TWO, DEVICE.target), (LONG,))
    assert "sm_90a" in (tmp_path / "site/my_kernels/__init__.py").read_text()


@pytest.mark.parametrize(
    "name", ["", "torch", "flashgen", "json", "class", "../x", "a b", "-x", "1x", "x==", "x==one", "x==1;y", "x\n", 'x"',
             "jinja2", "Jinja2==1.0", "typer", "nvidia", "cuda-python", "flash-attn", "hatchling", "pluggy", "Pillow", "PIL"]
)  # fmt: skip
def test_names_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^wheel must "):
        generate(tmp_path / "wheels", "sm_90a", 64, wheel=name)
    assert not (tmp_path / "wheels").exists()


def test_names_of_installed_packages_are_refused_but_of_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))
    generate(tmp_path / "wheels", "sm_90a", 64, causal=False, wheel="My.Kernels")
    (file,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(file) as archive:
        archive.extractall(site)
    assert PackageName.parse("my-kernels==2").module == "my_kernels", "which may be written anew"
    for folder, name, module in (("a-1.dist-info", "some-project", "its_module"), ("b-1.dist-info", "of-that-module", "my_kernels")):
        (site / folder).mkdir()
        (site / folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (site / folder / "top_level.txt").write_text(f"{module}\n")
        for taken in (name, module):
            with pytest.raises(ArgumentError, match=r"^wheel must be a name that no other package has; got "):
                PackageName.parse(taken)


def test_a_package_without_a_version_has_flashgen_s() -> None:
    assert (PackageName.parse("a-B.c").module, PackageName.parse("a").version) == ("a_b_c", "0.1.0")


def test_without_hatchling_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hatchling.builders.wheel", None)
    with pytest.raises(FlashgenError, match=r"pip install 'flashgen\[wheel\]'"):
        generate(tmp_path / "wheels", "sm_90a", 64, causal=False, wheel="x")


def test_json_lists_the_workloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ship(tmp_path, make(1e-3, LONG, TWO))
    generate(tmp_path / "out", from_records=True, device="h200", json=True)
    facts = json.loads(capsys.readouterr().out)
    (name,) = facts["kernels"]
    assert facts["workloads"] == {name: [{"batch": 4, "heads_q": 32, "heads_kv": 32, "len_q": 3000, "len_kv": 3000}]}
