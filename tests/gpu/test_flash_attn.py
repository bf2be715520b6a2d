"""FlashAttention's functions by flashgen on a GPU: models of transformers find them, and packed queries on pages wait for nobody."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flashgen.integrations import flash_attn

pytestmark = pytest.mark.gpu
_MODEL = """
import sys, torch
import flashgen.integrations.flash_attn as fa
if sys.argv[1] == "after":
    import transformers.utils
    assert not transformers.utils.is_flash_attn_2_available()
fa.install(flash_attn_3=True)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
assert is_flash_attn_2_available() and is_flash_attn_3_available()
sizes = dict(vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
ids = torch.randint(0, 128, (2, 70), device="cuda")
mask = torch.ones_like(ids)
mask[1, :20] = 0
results = {}
for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3"):
    torch.manual_seed(1)
    model = LlamaForCausalLM._from_config(LlamaConfig(**sizes, pad_token_id=0), attn_implementation=name, dtype=torch.bfloat16)
    model = model.cuda().to(torch.float32 if name == "eager" else torch.bfloat16)
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 20] = -100  # a token of padding, whose output means nothing, would predict it
    found = model(input_ids=ids, attention_mask=mask, labels=labels)
    found.loss.backward()
    results[name] = [found.logits.float()[mask.bool()]] + [p.grad.float() for p in model.parameters()]
for name in ("flash_attention_2", "flash_attention_3"):
    for exact, plain, own in zip(results["eager"], results["sdpa"], results[name]):
        assert (own - exact).norm() <= 1.5 * (plain - exact).norm() + 1e-4 * exact.norm(), (name, exact.shape)
print("right")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_of_transformers_finds_it(when: str) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", _MODEL, when], capture_output=True, text=True, check=False)
    assert done.stdout == "right\n", done.stderr[-3000:]


def test_packed_queries_on_pages_wait_for_nobody() -> None:
    """A CUDA graph, which nothing that waits could be part of, is replayed with other lengths."""
    generator = torch.Generator("cuda").manual_seed(3)
    q = torch.randn(48, 8, 64, generator=generator, device="cuda").half()
    k, v = (torch.randn(40, 16, 2, 64, generator=generator, device="cuda").half() for _ in "kv")
    table = torch.randperm(40, generator=generator, device="cuda").int().reshape(4, 10)
    ends_q, ends_k = (torch.tensor(ends, device="cuda", dtype=torch.int32) for ends in ([0, 1, 17, 17, 30], [0, 90, 130, 140, 160]))

    def call() -> torch.Tensor:
        out: torch.Tensor = flash_attn.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 32, 160, causal=True, block_table=table)
        return out

    with torch.no_grad():
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for other_q, other_k in (([0, 1, 17, 17, 30], [0, 90, 130, 140, 160]), ([0, 10, 11, 40, 48], [0, 10, 160, 300, 317])):
            ends_q.copy_(torch.tensor(other_q))
            ends_k.copy_(torch.tensor(other_k))
            graph.replay()
            for b in range(4):
                keys = other_k[b + 1] - other_k[b]
                own = [pages[table[b].long()].flatten(0, 1)[None, :keys] for pages in (k, v)]
                of_one = q[None, other_q[b] : other_q[b + 1]]
                if of_one.shape[1]:
                    wanted = flash_attn.flash_attn_func(of_one, own[0], own[1], causal=True)[0]
                    assert torch.allclose(out[other_q[b] : other_q[b + 1]].float(), wanted.float(), atol=2e-3)
