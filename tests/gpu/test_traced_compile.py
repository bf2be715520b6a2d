"""`score_mod` and `mask_mod` within torch.compile on a GPU: Inductor, gradients, CUDA graphs, other lengths and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen

pytestmark = pytest.mark.gpu


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(stacked(4, 1024, seed=7), requires_grad=False)
        self.documents = torch.nn.Buffer(torch.arange(512, device="cuda") // 100)
        self.weight = 0.5

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scaled = v.detach().float().abs().mean()  # a tensor of the graph

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + self.table[h, i - j + 512] * self.weight + scaled

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (self.documents[i] == self.documents[j])

        return flashgen.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_forward(mode: str) -> None:
    torch.compiler.reset()
    module = Attention()
    compiled = torch.compile(module, fullgraph=True, mode=mode)
    q, k, v = stacked(2, 300, 4, 64), stacked(2, 300, 2, 64, seed=1), stacked(2, 300, 2, 64, seed=2)
    for weight in (0.5, 1.0, 2.0):
        module.weight = weight
        for _ in range(4):
            torch.testing.assert_close(compiled(q, k, v).clone(), module(q, k, v))
    module.table.data.mul_(2)
    torch.testing.assert_close(compiled(q, k, v).clone(), module(q, k, v))


def test_a_training_step_of_any_length() -> None:
    torch.compiler.reset()
    module = Attention()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for length in (200, 333, 500):
        leaves = [stacked(1, length, heads, 64, seed=seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]
        into = stacked(1, length, 4, 64, seed=9)
        # In the graph and outside of it Inductor and PyTorch sum up `scaled` in other orders.
        pairs = zip(*(torch.autograd.grad(call(*leaves), leaves, into) for call in (compiled, module)), strict=True)
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
