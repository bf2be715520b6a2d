"""DDP with autocast and FSDP2 with recomputed attention, in two processes on the CPU: losses as those of PyTorch's attention."""

from __future__ import annotations

import pytest
import torch

from flashgen.numerics.rule import judge
from tests.support.two_processes import losses_of_two_processes


@pytest.mark.slow
def test_losses_of_two_processes_are_those_of_pytorchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    found = losses_of_two_processes("gloo", "cpu", steps=3, width=32, length=16)
    for way in ("ddp", "fsdp2"):
        given, plain, exact = ({"loss": found[way, name]} for name in ("flashgen", "torch", "fp32"))
        verdict = judge(given, exact, plain, elements={"loss": torch.bfloat16})
        assert verdict.ok, f"{way}: {verdict.message}"
        assert found[way, "flashgen"][-1] < found[way, "flashgen"][0]
