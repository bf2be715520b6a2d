"""What people see of kernels on the CPU: the command line and `flashgen.attention`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import flashgen
from flashgen.build.gpu.driver import DriverError
from flashgen.cli import app
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, render
from flashgen.codegen.target import find_target
from flashgen.launch import cpu
from flashgen.numerics import forward
from flashgen.selection.families import default_spec
from flashgen.tuning.on_cpu import CpuScreen
from flashgen.verification import cases, screen
from tests.support import command_line
from tests.support.faults import FAULTS
from tests.support.judging import judge_forward
from tests.support.runs import emulated_kernel


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(layout: str, causal: bool) -> None:
    q, k, v = (torch.randn(2, length, heads, 64, dtype=torch.bfloat16) for length, heads in ((70, 4), (150, 2), (150, 2)))
    given = (q, k, v) if layout == "bshd" else tuple(t.transpose(1, 2) for t in (q, k, v))
    with torch.no_grad():
        out, lse = flashgen.attention(*given, causal=causal, layout=layout, return_lse=True)
    ref, plain = (f(q, k, v, causal=causal, scale=64**-0.5) for f in (forward.exact_attention, forward.plain))
    verdict = judge_forward(out if layout == "bshd" else out.transpose(1, 2), lse, ref, plain, torch.bfloat16)
    assert verdict.ok, verdict.message
    assert (out if layout == "bshd" else out.transpose(1, 2)).is_contiguous(), "as q is"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("rising", [45.0, 100.0])  # natural: the row max is renewed several times
def test_large_values_in_rows_that_rise(rising: float) -> None:
    q, k, v = (torch.randn(1, length, heads, 64, dtype=torch.bfloat16) for length, heads in ((70, 2), (500, 1), (500, 1)))
    q[..., -1] = root = (rising * 64**0.5) ** 0.5
    k[..., -1] = torch.linspace(root, 0.0, 500)[None, :, None]  # keys are visited from the last to the first
    with torch.no_grad():
        out = flashgen.attention(q, k, v * 2.0**100)
        assert out.isfinite().all()
        assert torch.equal(out, flashgen.attention(q, k, v) * 2.0**100)


@pytest.mark.usefixtures("on_cpu")
def test_attention_of_nothing_and_without_keys() -> None:
    q, k = torch.randn(1, 0, 2, 64, dtype=torch.float16), torch.randn(1, 5, 2, 64, dtype=torch.float16)
    with torch.no_grad():
        assert flashgen.attention(q, k, k).shape == (1, 0, 2, 64)
        out, lse = flashgen.attention(k, k[:, :0], k[:, :0], return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.usefixtures("on_cpu")
def test_strides_and_addresses_are_checked() -> None:
    q = torch.randn(1, 16, 2, 64, dtype=torch.float16)
    with torch.no_grad():
        with pytest.raises(ArgumentError, match="k must be contiguous in its last dimension"):
            flashgen.attention(q, torch.randn(1, 16, 64, 2, dtype=torch.float16).transpose(2, 3), q)
        odd = torch.randn(16 * 2 * 64 + 1, dtype=torch.float16)[1:].view(1, 16, 2, 64)
        with pytest.raises(ArgumentError, match="v must begin at an address that is a multiple of 16 bytes"):
            flashgen.attention(q, q, odd)


def test_without_the_variable_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_CPU", raising=False)
    q = torch.randn(1, 16, 2, 64, dtype=torch.float16)
    with pytest.raises(ArgumentError, match=r"q must be on a CUDA device; got cpu\. FLASHGEN_CPU=1"):
        flashgen.attention(q, q, q)


@pytest.mark.slow
def test_verify_on_the_cpu() -> None:
    found = command_line.as_json("verify", "--device", "cpu", "--head-dim", "8", "--causal")
    assert found["failed"] == 0
    assert found["passed"] == 28, "all but those without keys, which the family does not take"


without_a_gpu = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="needs a machine without a GPU: /dev/nvidia0 is there")


@pytest.mark.slow
def test_verify_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SHAPES", cases.SCREENING)
    problem = Problem(Dtype.BF16, 8, 8, Mask.CAUSAL)
    results = flashgen.verify(problem, device="cpu")
    assert [case.verdict.ok for case in results] == [True] * 8  # two shapes at two magnitudes, and the special cases
    monkeypatch.setattr(screen, "whole_screen", lambda problem, device: screen.Screen(problem, device))  # once is enough for the rest
    config = default_spec(problem, find_target("sm_80")).config.replace_from_text({"stages": "3"})
    assert all(case.verdict.ok for case in flashgen.verify(problem, config, "sm_80", device="cpu"))
    with pytest.raises(ArgumentError, match="device must be a GPU's ordinal, None or 'cpu'; got 'gpu'"):
        flashgen.verify(problem, device="gpu")


@without_a_gpu
def test_verify_without_a_gpu_names_the_option() -> None:
    with pytest.raises(DriverError, match=r"driver must be 580 or newer.*; device='cpu' runs the same kernel without a GPU"):
        flashgen.verify(Problem(Dtype.BF16, 8))
    done = CliRunner().invoke(app, ["verify", "--head-dim", "8"])
    assert isinstance(done.exception, DriverError)
    assert str(done.exception).endswith("; --device cpu runs the same kernel without a GPU")


@pytest.mark.slow
@without_a_gpu
def test_tune_without_a_gpu_verifies_its_winners() -> None:
    patient = ("--budget-seconds", "600")  # the usual 45 would judge the machine
    found = command_line.as_json("tune", "--head-dim", "8", "--seqlen", "1024", *patient)
    assert found["verified_on_cpu"] == len({row["kernel"] for row in found["rows"]})
    assert found["not_verified"] == ""


def test_a_wrong_winner_is_found_and_a_spent_budget_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "mask-one-key-too-many")
    spec = fault.setting.spec(find_target("sm_90a"))
    assert CpuScreen(time.monotonic() + 100).fault(spec) == ""
    text = fault.apply(render(spec, Atoms.EMULATED), Atoms.EMULATED)
    monkeypatch.setattr(cpu, "load_emulated", lambda spec: emulated_kernel(spec, text))
    in_time = CpuScreen(time.monotonic() + 100)
    assert "error" in in_time.fault(spec)
    assert (in_time.verified, in_time.skipped) == (0, "")
    late = CpuScreen(time.monotonic() - 1)
    assert late.fault(spec) == ""
    assert (late.verified, late.skipped) == (0, "the budget had ended")


@pytest.mark.parametrize("options", [["--device", "gpu"], ["--device", "0", "--arch", "sm_80"]])
def test_verify_refuses(options: list[str]) -> None:
    _, err = command_line.flashgen("verify", "--head-dim", "8", *options, code=2)
    assert "must be" in err


def test_verify_marks_a_family_that_is_wrong_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SHAPES", cases.SCREENING)
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", "--pass", "softmax", "--family", "softmax_tilewise"])
    assert done.exit_code == 1
    assert done.stdout.endswith("failed\nsoftmax_tilewise is wrong on purpose: it must fail\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "--pass", "softmax"], "family must be given for softmax: one of softmax_online, softmax_safe, softmax_tilewise"),
        (["show"], "head_dim must be given for forward; got none"),
        (["show", "--pass", "softmax", "--head-dim", "64"], "head_dim must be left out for softmax, which has none; got 64"),
        (["tune", "--pass", "softmax", "--causal"], "causal must be left out for softmax, which has none; got True"),
        (["show", "--head-dim", "64", "--dtype", "fp32"], "dtype must be bf16 or fp16; got fp32"),
        (["tune", "--pass", "softmax", "--family", "softmax_tilewise"], "which is wrong on purpose"),
        (["generate", "--pass", "softmax", "--family", "softmax_tilewise", "--arch", "sm_80", "--out", "x"], "which is wrong on purpose"),
        (["debug", "--pass", "softmax", "--family", "softmax_tilewise"], "which is wrong on purpose"),
    ],
)
def test_operations_without_head_dims_and_wrong_families(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _, err = command_line.flashgen(*arguments, code=2)
    assert message in err
    assert not list(tmp_path.iterdir())
