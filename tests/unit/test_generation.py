"""`flashgen generate` for a length: which config it writes, and that `flashgen.load` uses it in that length's bucket alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen import ahead
from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.gpu.driver import Gpu
from flashgen.cli.generate import generate
from flashgen.codegen.config import Config
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.problem import Mask
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.records import sources
from flashgen.records.choice import bucket
from flashgen.records.exchange import to_text
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Records
from flashgen.selection import bundle, compilation, imports, loaded, manifest
from flashgen.selection import loaded as selection_loaded
from flashgen.selection.bundle import Generated
from flashgen.selection.families import default_spec
from flashgen.selection.loaded import Kernels
from flashgen.selection.picks import model_picks
from flashgen.tuning import generation
from tests.support.made_artifacts import made_artifact
from tests.support.made_records import CONFIGS, DEVICE, FAMILY, PROBLEM, make

GPU = Gpu(0, DEVICE, "uuid", "13.0")
ONE, TWO = CONFIGS[1], CONFIGS[2]
ASKED = Workload(4, 32, 32, 3000, 3000)


@pytest.fixture(autouse=True)
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Config, int]:
    """There are no records and no GPU; compiling takes no time, and spills what this says."""
    own, spills = Records(tmp_path / "records.sqlite3"), dict[Config, int]()

    def compile_spec(spec: KernelSpec) -> Artifact:
        return made_artifact(spec, spills.get(spec.config, 0))

    monkeypatch.setattr(sources, "own_records", lambda: own)
    monkeypatch.setattr(sources, "shipped_records", lambda: ShippedRecords(tmp_path))
    monkeypatch.setattr(compilation, "compile_spec", compile_spec)
    monkeypatch.setattr(loaded, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(generation, "gpu_count", lambda: 0)
    return spills


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def ship(tmp_path: Path, *records: Any) -> None:
    (tmp_path / "gpu.json").write_text(to_text(records))


def written(out: Path, arch: str = "sm_90a", **options: Any) -> Generated:
    generate(out, arch, 64, **{"causal": False, "seqlen": [3000], "batch": 4, "heads": 32, **options})
    (kernel,) = bundle.read_bundle(out, DEVICE.target)
    return kernel


def test_the_config_that_records_choose_is_written_with_its_bucket(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ship(tmp_path, make(1e-3, ASKED, ONE), make(1e-3, bucket(ASKED), TWO))
    assert written(out)[::2] == (KernelSpec(FAMILY, PROBLEM, ONE, DEVICE.target), bucket(ASKED)), "the exact record"
    entry = json.loads((out / "manifest.json").read_text())["kernels"][0]
    assert entry["bucket"] == {"batch": 1, "heads_q": 128, "heads_kv": 128, "len_q": 4096, "len_kv": 4096}
    assert written(out, seqlen=[3001]).spec.config == TWO, "that of the bucket"
    said = capsys.readouterr().err
    assert "bf16_d64_full B4 H32 S3000 on NVIDIA H200: the config of the shipped record" in said


def test_the_user_s_record_comes_first(out: Path, tmp_path: Path) -> None:
    ship(tmp_path, make(1e-6, ASKED, ONE))
    sources.own_records().put(make(1.0, ASKED, TWO))
    assert written(out).spec.config == TWO


def test_an_older_record_gives_its_config(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources.own_records().put(make(1.0, ASKED, spec={**make(config=TWO).spec, "revision": FAMILY.revision - 1}))
    assert written(out).spec == KernelSpec(FAMILY, PROBLEM, TWO, DEVICE.target)
    assert "measured by an older version" in capsys.readouterr().err


def test_without_a_record_the_model_picks_for_the_bucket(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picks = list(model_picks(PROBLEM, ASKED, DEVICE))
    assert written(out).spec == picks[0]
    assert "no tuning record, the model's pick" in capsys.readouterr().err


def test_without_a_length_the_default_is_written_for_all(out: Path, tmp_path: Path) -> None:
    ship(tmp_path, make(1e-6, ASKED, ONE))
    generate(out, "sm_90a", 64, causal=False)
    (kernel,) = bundle.read_bundle(out, DEVICE.target)
    assert (kernel.spec, kernel.bucket) == (default_spec(PROBLEM, DEVICE.target), None)


def test_what_the_compiler_breaks_is_passed_over(out: Path, compiled: dict[Config, int]) -> None:
    sources.own_records().put(make(1.0, ASKED, ONE))
    picks = list(model_picks(PROBLEM, ASKED, DEVICE))
    compiled |= {ONE: 8, picks[0].config: 8}
    assert written(out).spec == next(spec for spec in picks if spec.config not in compiled)
    compiled |= {spec.config: 8 for spec in picks}
    with pytest.raises(FlashgenError, match=f"^{picks[-1].name} is broken: spills 8 B a thread"):
        written(out.with_name("other"))
    assert not out.with_name("other").exists()


def test_what_does_not_compile_is_passed_over(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.own_records().put(make(1.0, ASKED, ONE))
    compile_spec = compilation.compile_spec

    def refusing(spec: KernelSpec) -> Artifact:
        if spec.config == ONE:
            raise CompileError("no")
        return compile_spec(spec)

    monkeypatch.setattr(compilation, "compile_spec", refusing)
    assert written(out).spec == next(model_picks(PROBLEM, ASKED, DEVICE))


def test_the_records_of_a_named_device_count_for_its_architecture(out: Path) -> None:
    h100 = find_device("h100")
    sources.own_records().put(make(1.0, ASKED, TWO, device=h100))
    assert written(out, device="h100").spec.config == TWO
    assert written(out, arch="sm_80,sm_90a", device="h100").spec.config == TWO
    assert len(bundle.read_bundle(out, find_device("a100").target)) == 1
    assert written(out).spec.config != TWO
    with pytest.raises(ArgumentError, match=r"^device must be of sm_80; got NVIDIA H100 .*, of sm_90a"):
        written(out, arch="sm_80", device="h100")


def test_by_hand_and_by_family(out: Path) -> None:
    sources.own_records().put(make(1.0, ASKED, ONE))
    by_hand = written(out, family="attention_forward", settings=["stages=3"])
    assert by_hand.spec.config == dataclasses.replace(default_spec(PROBLEM, DEVICE.target, family=FAMILY.name).config, stages=3)  # type: ignore[call-arg]
    assert by_hand.bucket == bucket(ASKED)
    assert written(out, family="attention_forward_sm90").spec.family.name == "attention_forward_sm90"
    with pytest.raises(ArgumentError, match="pack_gqa must divide the 1 query heads"):
        written(out, family="attention_forward_sm90", settings=["pack_gqa=8"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seqlen": None}, r"^batch must come with a seqlen, for which the kernels are chosen; got 4 alone"),
        ({"seqlen": None, "batch": None, "heads": None, "seqlen_kv": 7}, r"^seqlen_kv must come with a seqlen, .*; got 7 alone"),
        ({"seqlen": [512, 1024]}, r"^seqlen must be given once, as a folder holds the kernels of one bucket; got 512, 1024"),
        ({"seqlen": [0]}, r"^seqlen must be an integer"),
        ({"heads": 3, "kv_heads": 2}, r"^heads_q must be a multiple of heads_kv"),
        ({"device": "h900"}, r"^device must be one of"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(out: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        written(out, **options)
    assert not out.exists()


# Loading


class FakeKernels(Kernels):
    """Loads nothing: a kernel is its spec and a clean report."""

    def load(self, spec: KernelSpec, gpu: Gpu) -> Any:
        return SimpleNamespace(spec=spec, gpu=gpu, artifact=SimpleNamespace(report=SimpleNamespace(defects=[])))


def test_what_is_loaded_counts_in_its_bucket_alone(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources.own_records().put(make(1.0, ASKED, ONE))
    mine, everywhere = written(out), out.with_name("everywhere")
    generate(everywhere, "sm_90a", 64, causal=False)
    monkeypatch.setattr(ahead, "_gpu", lambda device: GPU)
    monkeypatch.setattr(imports, "Kernel", lambda spec, artifact, gpu: SimpleNamespace(spec=spec, gpu=gpu))
    sources.own_records().put(make(1.0, Workload(4, 32, 32, 512, 512), TWO))
    short = Workload(4, 32, 32, 512, 512)
    try:
        kernels = FakeKernels()
        (loaded,) = ahead.load(out)
        for workload in (ASKED, bucket(ASKED), Workload(4, 32, 32, 4000, 2049)):
            assert kernels.choose(PROBLEM, workload, GPU) is loaded
        assert kernels.choose(PROBLEM, short, GPU).spec.config == TWO, "its own record speaks for another bucket"
        assert kernels.choose(dataclasses.replace(PROBLEM, mask=Mask.CAUSAL), ASKED, GPU) is not loaded
        (general,) = ahead.load(everywhere)
        assert kernels.choose(PROBLEM, short, GPU) is general
        assert kernels.choose(PROBLEM, ASKED, GPU) is loaded, "of both the one for the bucket"
        assert loaded.spec == mine.spec
    finally:
        ahead.unload()
    assert selection_loaded.imports.find(PROBLEM, ASKED, GPU) is None


def test_a_bucket_that_is_none_is_refused(out: Path) -> None:
    written(out)
    forged: list[Any] = [{"batch": 1}, [], "all", {"batch": 1, "heads_q": 3, "heads_kv": 3, "len_q": 4096, "len_kv": 4096}]
    for wrong in forged:
        entries = json.loads((out / "manifest.json").read_text())["kernels"]
        entries[0]["bucket"] = wrong
        (out / "manifest.json").write_bytes(manifest.to_bytes(entries))
        with pytest.raises(ArgumentError, match=r"^folder .*bucket"):
            bundle.read_bundle(out, DEVICE.target)
