"""transformers' models with flashgen's kernels in the emulator, beside eager fp32 and PyTorch's attention, by the numerics rule."""

from __future__ import annotations

import pytest

from tests.support.model_checks import compared, compared_tokens, judged_padding, judged_pass
from tests.support.tiny_models import ARCHITECTURES, CPU, Architecture

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=lambda each: each.name)
def test_logits_and_gradients(architecture: Architecture) -> None:
    verdict = judged_pass(compared(architecture, CPU, "cpu"), 2, 14)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES.values() if each.generates], ids=lambda each: each.name)
def test_tokens(architecture: Architecture, cache: str) -> None:
    assert compared_tokens(compared(architecture, CPU, "cpu"), cache, 1, 9, 4) >= 1


@pytest.mark.parametrize("name", ["llama", "llama4", "bert"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_padding(name: str, grad: bool) -> None:
    verdict = judged_padding(compared(ARCHITECTURES[name], CPU, "cpu"), 2, 14, [4, 0], "left", grad)
    assert verdict.ok, verdict.message
