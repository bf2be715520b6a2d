"""DDP with autocast and FSDP2 with recomputed attention, in two processes: losses as those of PyTorch's attention."""

from __future__ import annotations

import pytest
import torch

from flashgen.numerics.rule import judge
from tests.support.two_processes import losses_of_two_processes

pytestmark = pytest.mark.gpu


def test_losses_of_20_steps_are_those_of_pytorchs_attention() -> None:
    """On two GPUs through NCCL; a single one is shared, through Gloo."""
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    found = losses_of_two_processes(backend, "cuda", steps=20, width=256, length=512)
    for way in ("ddp", "fsdp2"):
        given, plain, exact = ({"loss": found[way, name]} for name in ("flashgen", "torch", "fp32"))
        verdict = judge(given, exact, plain, elements={"loss": torch.bfloat16})
        assert verdict.ok, f"{way}: {verdict.message}"
        assert found[way, "flashgen"][-1] < found[way, "flashgen"][0]
