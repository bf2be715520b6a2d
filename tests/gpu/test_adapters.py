"""FlexAttention's, xformers' and diffusers' names on a GPU: seeded random sizes beside plain PyTorch, gradients too, by the rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

from flashgen.integrations import flex_attention as flex
from tests.support.dense_attention import require_right

pytestmark = pytest.mark.gpu
Mod = Callable[..., Any]
SLOPES = torch.tensor([0.5, 0.3, 0.1, 0.02, 0.4, 0.05])
IDS = torch.arange(4096) // 150
MODS: dict[str, Mod | None] = {
    "none": None,
    "relative": lambda s, b, h, q, k: s + (q - k) * 0.01,
    "slopes": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs() * 0.1,
    "cap": lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0),
    "half": lambda s, b, h, q, k: torch.where(k % 2 == 0, s, s * 0.5),
}
MASKS: dict[str, Mod | None] = {
    "none": None,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 100),
    "documents": lambda b, h, q, k: IDS[q] == IDS[k],
    "by-entry": lambda b, h, q, k: (q - k).abs() < 90 * (b + 1),
    "by-head": lambda b, h, q, k: (q >= k) | (h % 2 == 1),
}


@pytest.fixture(scope="module", autouse=True)
def on_gpu() -> None:
    global SLOPES, IDS
    SLOPES, IDS = SLOPES.cuda(), IDS.cuda()


def modified(score_mod: Mod | None, mask_mod: Mod | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def of_scores(scores: torch.Tensor) -> torch.Tensor:
        at = [
            torch.arange(size, device=scores.device).view([-1 if i == axis else 1 for i in range(4)])
            for axis, size in enumerate(scores.shape)
        ]
        changed = scores if score_mod is None else score_mod(scores, *at)
        return changed if mask_mod is None else changed.masked_fill(~mask_mod(*at), -torch.inf)

    return of_scores


@pytest.mark.parametrize(
    ("mod", "mask"),
    [("none", "none"), ("none", "causal"), ("relative", "window"), ("slopes", "documents"), ("cap", "by-entry"), ("half", "by-head")],
)
def test_flex_attention(mod: str, mask: str) -> None:
    draw = random.Random(f"{mod} {mask}")
    torch.manual_seed(draw.randrange(1000))
    score_mod, mask_mod = MODS[mod], MASKS[mask]
    for compiled in (False, True):
        dtype, (heads_q, heads_kv) = draw.choice((torch.bfloat16, torch.float16)), draw.choice(((4, 4), (4, 2), (6, 1)))
        batch, len_q, len_kv = draw.randint(1, 3), draw.randint(1, 900), draw.randint(1, 900)
        shapes = (heads_q, len_q), (heads_kv, len_kv), (heads_kv, len_kv)
        given = [torch.randn(batch, heads, length, 64, device="cuda").to(dtype) for heads, length in shapes]
        made: Any = None
        if mask_mod is not None:
            size = draw.choice((128, (64, 128), 256))
            made, own = (module.create_block_mask(mask_mod, batch, heads_q, len_q, len_kv, "cuda", size) for module in (flex, theirs))
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices", "full_q_num_blocks"):
                assert torch.equal(getattr(made, name), getattr(own, name)), name
        function: Any = torch.compile(flex.flex_attention, fullgraph=True) if compiled else flex.flex_attention

        def call(*leaves: Any, of: Any = made, function: Any = function) -> Any:
            out, aux = function(*leaves, score_mod, of, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
            return out, aux.lse

        require_right(call, given, modified(score_mod, mask_mod), gradients=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", ["none", "keys", "bias"])
def test_diffusers_backend(masked: str, is_causal: bool) -> None:
    backend = pytest.importorskip("flashgen.integrations.diffusers", reason="needs diffusers", exc_type=ImportError)
    if masked != "none" and is_causal:
        pytest.skip("both are refused")
    given = [torch.randn(2, 4, length, 64, device="cuda", dtype=torch.bfloat16) for length in (300, 500, 500)]
    keys, bias = torch.rand(2, 500, device="cuda") < 0.8, torch.randn(1, 4, 300, 500, device="cuda")
    mask = {"none": None, "keys": keys, "bias": bias}[masked]
    later = torch.arange(500, device="cuda") > torch.arange(300, device="cuda")[:, None]
    scores: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda s: s.masked_fill(later, -torch.inf) if is_causal else s,
        "keys": lambda s: s.masked_fill(~keys[:, None, None], -torch.inf),
        "bias": lambda s: s + bias,
    }

    def call(*leaves: Any) -> Any:
        q, k, v = (leaf.transpose(1, 2) for leaf in leaves)
        return (backend.attention_of_backend(q, k, v, mask, is_causal=is_causal).transpose(1, 2),)

    require_right(call, given, scores[masked], gradients=True)
