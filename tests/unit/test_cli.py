"""The command line without a GPU: output, JSON, exit codes, messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashgen.cli.tune import UNMEASURED

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}


def flashgen(*arguments: str, code: int = 0) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def as_json(*arguments: str) -> dict[str, Any]:
    value = json.loads(flashgen(*arguments, "--json")[0])
    assert isinstance(value, dict)
    return value


def test_tune_without_a_gpu_predicts_and_says_so() -> None:
    out, err = flashgen("tune", "--head-dim", "64", "--seqlen", "1024", "--no-causal")
    assert "nothing was timed" in out
    assert "NVIDIA H200" in out
    assert UNMEASURED not in out, "the model was fitted to this one"
    assert "bf16_d64_full" in out
    assert "compiling" in err


def test_tune_as_json() -> None:
    result = as_json("tune", "--head-dim", "64", "--seqlen", "1024", "--seqlen", "2048", "--causal", "--device", "a100")
    assert result["timed"] is False
    assert result["device_measured"] is False
    assert "A100" in result["device"]
    assert [row["workload"]["len_q"] for row in result["rows"]] == [1024, 2048]
    for row in result["rows"]:
        assert row["spill_bytes"] == 0
        assert row["registers"] > 0
        assert row["seconds"] > 0
        assert row["kernel"].endswith("sm_80")


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_prediction_with_no_measurement_behind_it_says_so(more: list[str]) -> None:
    where = ["--head-dim", "64", "--seqlen", "1024", "--causal", "--budget-seconds", "0.01", "--device", "RTX 4090"]
    assert UNMEASURED in flashgen("tune", *where, *more)[0]


def test_a_tiny_budget_still_ends_with_a_kernel() -> None:
    result = as_json("tune", "--head-dim", "72", "--seqlen", "1024", "--causal", "--budget-seconds", "0.01")
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
    out, err = flashgen("show", "--head-dim", "64", "--causal", "--arch", "sm_80", "--set", "block_kv=48")
    assert out.startswith("// attention_forward_bf16_d64_causal_")
    assert "constexpr int kBlockQ = 128, kBlockKv = 48;" in out
    assert out.endswith("}\n")
    assert not err


def test_compile_reports() -> None:
    facts = as_json("compile", "--head-dim", "128", "--arch", "8.9")
    assert facts["kernel"].endswith("sm_89")
    assert facts["spill_bytes"] == 0
    assert facts["defects"] == []


def test_compile_fails_on_spills() -> None:
    out, _ = flashgen("compile", "--head-dim", "256", "--arch", "sm_90a", "--set", "block_kv=96", code=1)
    assert "spills" in out


def test_generate_then_read(tmp_path: Path) -> None:
    out, _ = flashgen("generate", "--head-dim", "8", "--causal", "--arch", "sm_80,sm_120a", "--out", str(tmp_path / "kernels"))
    paths = [Path(line) for line in out.splitlines()]
    assert sorted(p.suffix for p in paths) == [".cu", ".cu", ".cubin", ".cubin", ".json"]
    assert all(p.is_file() for p in paths)


def test_cache(tmp_path: Path) -> None:
    flashgen("compile", "--head-dim", "8", "--arch", "sm_80")
    facts = as_json("cache")
    assert facts["folder"] == os.environ["FLASHGEN_CACHE_DIR"]
    assert facts["kernels"] >= 1
    assert facts["kernel_bytes"] > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "--head-dim", "60"], "head_dim must be a multiple of 8 from 8 to 256; got 60"),
        (["compile", "--head-dim", "0"], "head_dim must be an integer >= 1; got 0"),
        (["compile", "--head-dim", "64", "--dtype", "fp8"], "dtype must be one of bf16, fp16; got 'fp8'"),
        (["compile", "--head-dim", "64", "--arch", "sm_75"], "arch must be one of sm_80,"),
        (["compile", "--head-dim", "64", "--arch", "; rm -rf /"], "arch must be one of sm_80,"),
        (["compile", "--head-dim", "64", "--set", "block_q"], "set must look like field=value; got 'block_q'"),
        (["compile", "--head-dim", "64", "--set", "warps=4", "--set", "warps=8"], "set must give each field once; got warps twice"),
        (["compile", "--head-dim", "64", "--set", "speed=max"], "config field must be one of block_q,"),
        (["compile", "--head-dim", "64", "--set", "block_q={{7*7}}"], "config field block_q must be an integer; got '{{7*7}}'"),
        (["compile", "--head-dim", "64", "--set", "query=disk"], "config field query must be one of shared, registers; got 'disk'"),
        (
            ["compile", "--head-dim", "64", "--set", "block_q=100", "--set", "stages=9"],
            "stages must be from 1 to 4; got 9; block_q must give",
        ),
        (["tune", "--head-dim", "64", "--device", "h900"], "device must be one of a100,"),
        (["tune", "--head-dim", "64", "--device", "h200", "--arch", "sm_80"], "arch must be sm_90a, the architecture of device h200"),
        (["tune", "--head-dim", "64", "--seqlen", "0"], "seqlen must be an integer from 1"),
        (["tune", "--head-dim", "64", "--heads", "7", "--kv-heads", "2"], "heads_q must be a multiple of heads_kv"),
        (["tune", "--head-dim", "64", "--budget-seconds", "-1"], "budget_seconds must be > 0; got -1.0"),
        (["generate", "--head-dim", "64", "--arch", "sm_80,,sm_90", "--out", "x"], "arch must be one of"),
    ],
)
def test_misuse_exits_2_and_names_the_argument(arguments: list[str], message: str) -> None:
    out, err = flashgen(*arguments, code=2)
    assert message in err
    assert err.startswith("flashgen: ")
    assert not out


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="needs a machine without a GPU: /dev/nvidia0 is there")
def test_verify_without_a_gpu_says_what_it_needs() -> None:
    _, err = flashgen("verify", "--head-dim", "64", code=1)
    assert "driver must be 580 or newer" in err
