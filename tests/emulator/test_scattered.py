"""Masks of a mask_mod that leave some tiles alone, on CPU tensors: each form of a condition by which tiles are known, and faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.codegen.render import Atoms
from flashgen.codegen.spec import KernelSpec
from flashgen.launch import cpu
from tests.support.fault import Fault, Setting
from tests.support.plan import few_of
from tests.support.runs import emulated_kernel, emulated_text

Mod = Callable[..., Any]
LENGTH, BLOCK = 330, 64


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed))


IDS = (torch.arange(LENGTH)[:, None] >= torch.tensor([[[130, 140, 325]], [[20, 200, 256]]])).sum(-1)  # ends within tiles and at some
BLOCKS = drawn(6, 6, seed=1) < 0.55
LEVELS = (drawn(4, LENGTH, seed=2) * 5).int()
FUNCTIONS: dict[str, Mod] = {
    "documents": lambda b, h, q, k: IDS[b, q] == IDS[b, k],
    "others": lambda b, h, q, k: IDS[b, q] != IDS[b, k],
    "later-documents": lambda b, h, q, k: (IDS[b, q] < IDS[b, k]) | ~(IDS[b, q] <= IDS[b, k] + 1),
    "blocks": lambda b, h, q, k: BLOCKS[q // BLOCK, k // 64],
    "blocks-in-part": lambda b, h, q, k: BLOCKS[q // 128, k // 128] & (BLOCKS[k // 128, q // 128] | ((q + k) % 2 == 0)),
    "narrow-blocks": lambda b, h, q, k: BLOCKS[q // 60, k // 70],
    "rows": lambda b, h, q, k: LEVELS[h, q] > 1,
    "columns": lambda b, h, q, k: (LEVELS[h, k] > 1) & (k >= 200),
    "of-a-head": lambda b, h, q, k: ((h % 2 == 0) & (q >= k)) | ((h % 2 == 1) & (LEVELS[h, q] == LEVELS[h, k])),
    "mixed": lambda b, h, q, k: (q * k) % 5 < 2,
    "nothing": lambda b, h, q, k: IDS[b, q] < 0 * k,
}


def exact(q: torch.Tensor, k: torch.Tensor, mask_mod: Mod) -> torch.Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    at = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    hidden = ~mask_mod(*at).expand(scores.shape)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0), k)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.detach().double() - wanted.detach()).abs().max()) <= 2**-6 * max(1.0, float(wanted.detach().abs().max()))


@pytest.mark.parametrize("name", few_of(FUNCTIONS, "blocks-in-part"))
def test_results_and_gradients_are_those_of_float64(name: str) -> None:
    q, k = ((drawn(2, LENGTH, 4, 16, seed=seed) - 0.5).mul(8).bfloat16().requires_grad_() for seed in (3, 4))
    doubles = [t.detach().double().requires_grad_() for t in (q, k)]
    out, wanted = flashgen.attention(q, k, k, mask_mod=FUNCTIONS[name]), exact(doubles[0], doubles[1], FUNCTIONS[name])
    assert close(out, wanted)
    into = torch.randn_like(out)
    found, right = torch.autograd.grad(out, (q, k), into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True, True]


FAULTS = {
    "equal-by-one-side": ("documents", "some && a.lowest == a.highest && b.lowest == b.highest", "some && a.lowest == a.highest"),
    "equal-ends-left-out": ("documents", "a.lowest <= b.highest && b.lowest <= a.highest", "a.lowest < b.highest && b.lowest < a.highest"),
    "only-the-first-lanes": ("documents", "for (int distance = 1; distance < 32; distance *= 2) {\n        const i64", None),
    "both-for-either": ("blocks-in-part", "{a.some || b.some, a.all || b.all}", "{a.some && b.some, a.all && b.all}"),
    "unknown-taken-for-seen": ("blocks-in-part", "kUnknown{true, false}", "kUnknown{true, true}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, find, replace = FAULTS[name]
    replace = find.replace("< 32", "< 2") if replace is None else replace

    def faulty(spec: KernelSpec) -> EmulatedKernel:
        return emulated_kernel(spec, Fault(name, find, replace, Setting(spec.config, ())).apply(emulated_text(spec), Atoms.EMULATED))

    monkeypatch.setattr(cpu, "load_emulated", faulty)
    width = 24 + 8 * [*FAULTS].index(name)  # of its own: kernels that are loaded stay
    q, k = ((drawn(2, LENGTH, 4, width, seed=seed) - 0.5).mul(8).bfloat16() for seed in (3, 4))
    assert not close(flashgen.attention(q, k, k, mask_mod=FUNCTIONS[functions]), exact(q.double(), k.double(), FUNCTIONS[functions]))
