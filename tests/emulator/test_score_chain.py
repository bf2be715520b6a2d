"""Room for another link in the score chain: a sliding window in place of the causal link, with no change to any forward kernel."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from flashgen.numerics.forward import product_in_fp32
from flashgen.selection.families import family_of
from tests.support.judging import judge_forward
from tests.support.plan import to_run
from tests.support.runs import LIMITS, compile_ahead, emulated_kernel, emulated_text

PROBLEM = Problem(Dtype.FP16, 64, 64, Mask.CAUSAL)
CONFIGS = {
    "generic": AttentionForwardConfig(64, 64, 32, 4, 3, QueryPlace.SHARED, FirstProduct.QK),
    "sm90": AttentionForwardSm90Config(2, 64, 2, 2, 1),
    "packed": AttentionForwardSm90Config(2, 64, 2, 2, 1, pack_gqa=2),
}
# Keys from query + causal_offset - left to query + causal_offset + right. With a negative end rows at one side see no key.
WINDOWS = {"both-sides": (20, 30), "later-keys": (-20, 60), "earlier-keys": (90, -40)}
QUICK = [("generic", "both-sides"), ("sm90", "later-keys"), ("packed", "earlier-keys")]
CASES = [*QUICK, ("generic", "later-keys"), ("generic", "earlier-keys"), ("sm90", "both-sides")]
LENGTHS = ((150, 300), (200, 90), (70, 70))
LINK = """struct Causal {
    static constexpr bool kHidesFirstKeys = true;
    int causal_offset;

    __device__ __forceinline__ KeyRange keys(int query) const {
        return {max(0, query + causal_offset - LEFT), query + causal_offset + RIGHT + 1};
    }
    __device__ __forceinline__ bool visible(int query, int key) const { return keys(query).begin <= key && key < keys(query).end; }
    __device__ __forceinline__ QueryRange queries(int, int) const { return {0, 0x7fffffff, 0, 0x7fffffff}; }
};
"""


def spec_of(config: str) -> KernelSpec:
    return KernelSpec(family_of(CONFIGS[config]), PROBLEM, CONFIGS[config], find_target("sm_90a"))


def windowed(spec: KernelSpec, left: int, right: int) -> Source:
    """The text of a causal kernel whose causal link is a window."""
    source = emulated_text(spec)
    link = LINK.replace("LEFT", f"({left})").replace("RIGHT", f"({right})")
    text, found = re.subn(r"struct Causal \{\n.*?\n\};\n", link, source.text, flags=re.DOTALL)
    assert found == 1
    return Source(source.entry, text)


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    wanted = {(params["config"], params["window"]) for params in to_run(request)}
    compile_ahead(windowed(spec_of(config), *WINDOWS[window]) for config, window in CASES if (config, window) in wanted)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, exact: bool) -> tuple[Tensor, Tensor]:
    """[batch, heads, length, head_dim] each, in float64 or as plain PyTorch computes it."""
    s = (q.double() @ k.double().mT if exact else q.float() @ k.float().mT).mul(scale).masked_fill(~visible, -torch.inf)
    row_max = s.amax(-1, keepdim=True)
    p = (s - row_max.masked_fill(row_max == -torch.inf, 0)).exp()
    row_sum = p.sum(-1, keepdim=True)
    lse = (row_max + row_sum.log())[..., 0]
    p = p / row_sum.masked_fill(row_sum == 0, 1)
    if exact:
        return (p @ v.double()).transpose(1, 2), lse
    out = product_in_fp32(p.to(q.dtype).flatten(0, 1), v.flatten(0, 1)).to(q.dtype)
    return out.unflatten(0, p.shape[:2]).transpose(1, 2), lse


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("config", "window"), [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in CASES])
def test_a_window_is_a_link(config: str, window: str, lengths: tuple[int, int]) -> None:
    spec, (left, right), (len_q, len_kv) = spec_of(config), WINDOWS[window], lengths
    tensors = Tensors.random(PROBLEM, Workload(1, 4, 2, len_q, len_kv), torch.Generator().manual_seed(5))
    run_on_cpu(emulated_kernel(spec, windowed(spec, left, right)), tensors, limits=LIMITS)
    last_of_causal = torch.arange(len_q)[:, None] + len_kv - len_q
    keys = torch.arange(len_kv)
    visible = (keys >= last_of_causal - left) & (keys <= last_of_causal + right)
    q, k, v = (tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    exact, plain = (attention(q, k, v, visible, 64**-0.5, exact) for exact in (True, False))
    verdict = judge_forward(tensors["out"], tensors["lse"], exact, plain, torch.float16)
    assert verdict.ok, verdict.message
