"""The command line without a GPU: output, JSON, exit codes, messages."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from flashgen.cli.tune import UNMEASURED
from flashgen.codegen.devices import find_device
from flashgen.codegen.modifier import modifiers
from flashgen.records.exchange import parse_records, to_text
from flashgen.records.store import Records
from tests.support.command_line import as_json, flashgen
from tests.support.made_records import CONFIGS, make
from tests.support.misuse import misuse

A_FEW = ("--budget-seconds", "0.5")  # of seconds, which end before the usual 32 kernels are compiled


def test_tune_without_a_gpu_predicts_and_says_so() -> None:
    out, err = flashgen("tune", "--head-dim", "8", "--seqlen", "1024", "--no-causal", *A_FEW)
    assert "nothing was timed" in out
    assert "NVIDIA H200" in out
    assert UNMEASURED not in out, "the model was fitted to this one"
    assert "bf16_d8_full" in out
    assert "compiling" in err


def test_the_help_of_modifiers_names_all_that_have_no_option_of_their_own() -> None:
    out, _ = flashgen("tune", "--help")
    text = " ".join(out.split())
    for name, modifier in modifiers().items():
        if not modifier.sizes and name not in ("softcap", "traced"):
            assert re.search(rf"[ ,]{name}[,.]", text), name


@pytest.mark.slow
def test_tune_as_json() -> None:
    result = as_json("tune", "--head-dim", "8", "--seqlen", "1024", "--seqlen", "2048", "--causal", "--device", "a100", *A_FEW)
    assert result["timed"] is False
    assert result["device_measured"] is False
    assert "A100" in result["device"]
    assert [row["workload"]["len_q"] for row in result["rows"]] == [1024, 2048]
    for row in result["rows"]:
        assert row["spill_bytes"] == 0
        assert row["registers"] > 0
        assert row["seconds"] > 0
        assert row["kernel"].endswith("sm_80")


@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.slow), ["--dry-run"]])
def test_a_prediction_with_no_measurement_behind_it_says_so(more: list[str]) -> None:
    where = ["--head-dim", "8", "--seqlen", "1024", "--causal", "--budget-seconds", "0.01", "--device", "RTX 4090"]
    assert UNMEASURED in flashgen("tune", *where, *more)[0]


def test_a_tiny_budget_still_ends_with_a_kernel() -> None:
    result = as_json("tune", "--head-dim", "8", "--seqlen", "1024", "--causal", "--budget-seconds", "0.01")
    assert result["complete"] is False
    assert result["rows"][0]["kernel"]


def test_dry_run_lists_candidates_and_refusals() -> None:
    result = as_json("tune", "--head-dim", "64", "--seqlen", "1024", "--no-causal", "--dry-run", "--exhaustive")
    cell = result["cells"][0]
    assert len(cell["candidates"]) >= 40
    assert cell["refused"]
    assert all(reasons for reasons in cell["refused"].values())
    assert "refuse" in flashgen("tune", "--head-dim", "64", "--seqlen", "1024", "--no-causal", "--dry-run")[0]


def test_show_prints_the_source_and_nothing_else() -> None:
    out, err = flashgen("show", "--head-dim", "64", "--causal", "--arch", "sm_80", "--set", "block_kv=96", "--set", "step_kv=32")
    assert out.startswith("// attention_forward_bf16_d64_causal_")
    assert "kBlockKv = 96, kStepKv = 32;" in out
    assert out.endswith("}\n")
    assert not err


def test_compile_reports() -> None:
    facts = as_json("compile", "--head-dim", "128", "--arch", "8.9")
    assert facts["kernel"].endswith("sm_89")
    assert facts["spill_bytes"] == 0
    assert facts["defects"] == []


def test_what_spills_is_neither_praised_nor_generated(tmp_path: Path) -> None:
    crowded = {"block_q": 64, "block_kv": 48, "step_kv": 48, "warps": 4, "query": "shared", "blocks_per_sm": 4}
    settings = [text for name, value in crowded.items() for text in ("--set", f"{name}={value}")]
    kernel = ["--head-dim", "64", "--no-causal", "--arch", "sm_90a", *GENERIC, *settings]
    assert "spills" in flashgen("compile", *kernel, code=1)[0]
    _, err = flashgen("generate", *kernel, "--out", str(tmp_path / "out"), code=1)
    assert re.match(r"flashgen: attention_forward_bf16_d64_full_\S+ is broken: spills \d+ B a thread", err)
    assert list(tmp_path.iterdir()) == []


def test_generate_then_read(tmp_path: Path) -> None:
    out, _ = flashgen("generate", "--head-dim", "8", "--causal", "--arch", "sm_80,sm_120a", "--out", str(tmp_path / "kernels"))
    paths = [Path(line) for line in out.splitlines()]
    assert sorted(p.suffix for p in paths) == [".cu", ".cu", ".cubin", ".cubin", ".json"]
    assert all(p.is_file() for p in paths)


def test_generate_looks_at_its_folder_before_it_compiles(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/manifest.json").write_text("{}")
    _, err = flashgen("generate", "--head-dim", "8", "--arch", "sm_80", "--out", str(tmp_path / "thesis"), code=2)
    assert err.startswith("flashgen: out must be a new folder, an empty one, or one as `flashgen generate` left it; got ")
    assert (tmp_path / "thesis/manifest.json").read_text() == "{}"
    assert not cache.exists() or not list(cache.glob("artifacts/??/*"))


def test_cache(tmp_path: Path) -> None:
    flashgen("compile", "--head-dim", "8", "--arch", "sm_80")
    facts = as_json("cache")
    assert facts["folder"] == os.environ["FLASHGEN_CACHE_DIR"]
    assert facts["kernels"] >= 1
    assert facts["kernel_bytes"] > 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own."""
    path = tmp_path / "cache"
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(path))
    return path


@pytest.mark.slow
def test_records_move_from_one_cache_to_another(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Records(cache / "records.sqlite3").add([make(), make(2e-3, config=CONFIGS[1]), make(device=find_device("h100"))])
    file = tmp_path / "records.json"
    assert flashgen("cache", "export", str(file))[0] == f"3 records exported to {file}\n"
    assert as_json("cache", "export", str(file), "--best", "--device-name", "NVIDIA H200") == {"file": str(file), "records": 1}
    text, err = flashgen("cache", "export", "-", "--head-dim", "64")
    assert (len(parse_records(text.encode()).records), err) == (3, "3 records exported\n")
    file.write_text(text)

    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "other"))
    expected = {"added": 3, "here_already": 0, "useless": {}, "bad": [], "dry_run": True}
    assert as_json("cache", "import", str(file), "--dry-run") == expected
    assert as_json("cache")["records"] == 0
    assert "3 records imported, 0 here already" in flashgen("cache", "import", str(file))[0]
    assert "0 records imported, 3 here already" in flashgen("cache", "import", str(file))[0]
    assert Records(tmp_path / "other/records.sqlite3").all() == Records(cache / "records.sqlite3").all()
    assert flashgen("cache", "export", "-")[0] == text


def test_bad_and_useless_records_are_told(cache: Path, tmp_path: Path) -> None:
    useless = make(benchmark_version=99)
    file = tmp_path / "records.json"
    file.write_text(to_text([make(), useless]).replace('"sm_count": 132', '"sm_count": "many"', 1))
    out, err = flashgen("cache", "import", str(file), code=2)
    assert not out
    assert err.startswith("flashgen: file must hold sound records only; got 1 bad of 2, and none were imported")
    assert "record 1: record field sm_count must be of type int" in err
    out, _ = flashgen("cache", "import", str(file), "--skip-bad")
    assert "0 records imported" in out
    assert "1 left out, which nothing here could use: measured by benchmark version 99" in out
    assert "left out as bad: record 1: record field sm_count" in out


def test_doctor(cache: Path) -> None:
    hidden = Path("/dev/nvidia0").exists()  # a driver whose GPUs are hidden from it: something is wrong
    report = json.loads(flashgen("doctor", "--json", code=int(hidden))[0])
    assert report["ok"] is not hidden
    findings = {finding["name"]: finding for finding in report["findings"]}
    assert list(findings)[:2] == ["flashgen", "driver"]
    assert findings["driver"]["status"] == ("wrong" if hidden else "note")
    assert {finding["status"] for name, finding in findings.items() if name != "driver"} <= {"ok", "note"}
    assert findings["compile"]["status"] == "ok"
    assert not cache.exists(), "looking makes nothing"

    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    out, err = flashgen("doctor", code=1)
    assert not err
    assert f"run chmod go-w {cache}" in out
    assert out.splitlines()[-1].startswith("3 wrong, " if hidden else "2 wrong, "), out  # the folder, and the kernels in it


GENERIC = ("--family", "attention_forward")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cache", "import", "/nowhere/records.json"], "file must be one that can be read; got /nowhere/records.json: No such file"),
        (["cache", "import", "/dev/null"], "file must be whole JSON"),
        (["cache", "export", "/nowhere/records.json"], "file must be in a folder that is there; got /nowhere/records.json"),
        (["cache", "export", "/dev/null"], "file must be a new or an ordinary one; got /dev/null"),
        (["cache", "export", "/tmp"], "file must be a new or an ordinary one; got /tmp"),
        (["cache", "export", "x.json", "--device-name", "h300"], "device_name must be left out where there are no records; got 'h300'"),
        (["compile", "--head-dim", "60"], "head_dim must be a multiple of 8 from 8 to 256; got 60"),
        (["compile", "--head-dim", "0"], "head_dim must be an integer from 1 to 2147483647; got 0"),
        (["compile", "--head-dim", "64", "--dtype", "fp8"], "dtype must be one of bf16, fp16, fp32; got 'fp8'"),
        (["compile", "--head-dim", "64", "--arch", "sm_75"], "arch must be one of sm_80,"),
        (["compile", "--head-dim", "64", "--arch", "; rm -rf /"], "arch must be one of sm_80,"),
        (["compile", "--head-dim", "64", "--set", "block_q"], "set must look like field=value; got 'block_q'"),
        (["compile", "--head-dim", "64", "--set", "warps=4", "--set", "warps=8"], "set must give each field once; got warps twice"),
        (["compile", "--head-dim", "64", *GENERIC, "--set", "speed=max"], "config field must be one of block_q,"),
        (
            ["compile", "--head-dim", "64", *GENERIC, "--set", "block_q={{7*7}}"],
            "config field block_q must be an integer in plain digits, such as 128; got '{{7*7}}'",
        ),
        (
            ["compile", "--head-dim", "64", *GENERIC, "--set", "query=disk"],
            "config field query must be one of shared, registers; got 'disk'",
        ),
        (
            ["compile", "--head-dim", "64", *GENERIC, "--set", "block_q=100", "--set", "stages=9"],
            "stages must be from 2 to 4; got 9; block_q must give",
        ),
        (
            ["compile", "--head-dim", "64", "--family", "best"],
            "family must be one of append_rows, attention_backward, attention_backward_pair_sm90, ",
        ),
        (["compile", "--head-dim", "64", "--arch", "sm_80", "--family", "attention_forward_sm90"], "target must be sm_90a; got sm_80"),
        (["tune", "--head-dim", "64", "--device", "h900"], "device must be one of a100,"),
        (["tune", "--head-dim", "64", "--device", "h200", "--arch", "sm_80"], "arch must be sm_90a, the architecture of device h200"),
        (["tune", "--head-dim", "64", "--seqlen", "0"], "seqlen must be an integer from 1"),
        (["tune", "--head-dim", "64", "--heads", "7", "--kv-heads", "2"], "heads_q must be a multiple of heads_kv"),
        (["tune", "--head-dim", "64", "--budget-seconds", "-1"], "budget_seconds must be > 0; got -1.0"),
        (["generate", "--head-dim", "64", "--arch", "sm_80,,sm_90", "--out", "x"], "arch must be one of"),
    ],
)
def test_misuse_exits_2_and_names_the_argument(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    err = misuse(monkeypatch, capsys, *arguments)
    assert message in err
    assert err.startswith("flashgen: ")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="needs a machine without a GPU: /dev/nvidia0 is there")
def test_verify_without_a_gpu_says_what_it_needs() -> None:
    _, err = flashgen("verify", "--head-dim", "64", code=1)
    assert "driver must be 580 or newer" in err
    assert ".;" not in err
