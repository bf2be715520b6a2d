"""Block masks on a GPU, FlexAttention's and flashgen's own: results and gradients beside plain PyTorch in float64, of seeded random sizes;
CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flashgen
from flashgen.launch.block_masks import _states

pytestmark = pytest.mark.gpu
Mod = Callable[..., Any]
BLOCKS = (torch.rand(40, 40, generator=torch.Generator().manual_seed(1)) < 0.4).cuda() if torch.cuda.is_available() else torch.ones(40, 40)
IDS = (torch.arange(4096) // 150).to(BLOCKS.device)
FUNCTIONS: dict[str, Mod] = {
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "by-entry": lambda b, h, q, k: (q - k).abs() < 90 * (b + 1),
    "by-head": lambda b, h, q, k: (q >= k) | (h % 2 == 1),
    "blocks": lambda b, h, q, k: BLOCKS[q // 64, k // 64],
    "parts": lambda b, h, q, k: BLOCKS[q // 128, k // 128] & (BLOCKS[k // 128, q // 128] | ((q + k) % 2 == 0)),
}


def exact(mask_mod: Mod, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    at = torch.meshgrid(*(torch.arange(size, device=q.device) for size in scores.shape), indexing="ij")
    hidden = ~mask_mod(*at).expand(scores.shape)
    nothing = hidden.all(-1, keepdim=True)
    return torch.where(nothing, 0.0, scores.masked_fill(hidden & ~nothing, -torch.inf).softmax(-1)) @ v


def own(name: str, batch: int, heads: int, lengths: tuple[int, int], size: Any) -> flashgen.BlockMask:
    return flashgen.block_mask(FUNCTIONS[name], batch=batch, heads=heads, len_q=lengths[0], len_kv=lengths[1], block_size=size)


def made(name: str, batch: int, heads: int, lengths: tuple[int, int], size: Any) -> BlockMask:
    by = {"by-entry": (batch, None), "by-head": (None, heads)}.get(name, (None, None))
    return create_block_mask(FUNCTIONS[name], *by, *lengths, device="cuda", BLOCK_SIZE=size)


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients(name: str, head_dim: int) -> None:
    draw = random.Random(f"{name} {head_dim}")
    for _ in range(4):
        dtype, heads = draw.choice((torch.bfloat16, torch.float16)), draw.choice(((4, 4), (4, 2), (6, 1)))
        batch, lengths = draw.randint(1, 3), (draw.randint(1, 900), draw.randint(1, 900))
        size = draw.choice((128, (64, 128), (16, 48), 256))
        mask: Any = draw.choice((made, own))(name, batch, heads[0], lengths, size)
        shapes = ((batch, heads[0], lengths[0], head_dim), *((batch, heads[1], lengths[1], head_dim),) * 2)
        given = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
        floats = [t.detach().double().requires_grad_() for t in given]
        out, wanted = flashgen.attention(*given, layout="bhsd", block_mask=mask), exact(FUNCTIONS[name], *floats)
        into = torch.randn_like(out)
        found = torch.autograd.grad(out, given, into)
        right = torch.autograd.grad(wanted, floats, into.double())
        for one, other in zip((out, *found), (wanted, *right), strict=True):
            apart = float((one.detach().double() - other.detach()).abs().max())
            assert apart <= 2**-6 * max(1.0, float(other.detach().abs().max())), (dtype, heads, batch, lengths, size)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["blocks", "parts"])
def test_sums_of_many_heads_are_zeroed_in_time(name: str, head_dim: int) -> None:
    """Those that the preprocess kernel leaves to the main one: of heads whose work tiles are more than run at once."""
    shapes = ((3, 100, 700, head_dim), *((3, 50, 520, head_dim),) * 2)
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    floats = [t.detach().double().requires_grad_() for t in given]
    wanted = exact(FUNCTIONS[name], *floats)
    into = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    right = torch.autograd.grad(wanted, floats, into.double())
    out = flashgen.attention(*given, layout="bhsd", block_mask=own(name, 3, 100, (700, 520), 128))
    for _ in range(20):
        torch.full((1 << 28,), torch.nan, device="cuda")  # what buffers are made of
        for one, other in zip(torch.autograd.grad(out, given, into, retain_graph=True), right, strict=True):
            assert float((one.double() - other).abs().max()) <= 2**-6 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_own_states_are_flexattentions(name: str) -> None:
    for lengths, size in (((1024, 2048), 128), ((512, 384), (64, 128)), ((896, 640), (128, 32))):
        ours, theirs = own(name, 3, 4, lengths, size).states, _states(made(name, 3, 4, lengths, size))
        assert torch.equal(*torch.broadcast_tensors(ours, theirs)), (lengths, size)


def test_a_graph_makes_masks_of_what_is_captured_when_it_runs() -> None:
    q, limit = torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16), torch.tensor([100], device="cuda")

    def make() -> flashgen.BlockMask:
        return flashgen.block_mask(lambda b, h, q, k: (q - k).abs() < limit[0], len_q=512, len_kv=512)

    flashgen.attention(q, q, q, block_mask=make())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, q, q, block_mask=make())
    for length in (40, 300):
        limit.fill_(length)
        graph.replay()
        assert torch.equal(out, flashgen.attention(q, q, q, block_mask=make()))


def test_tiles_are_found_again_where_a_mask_has_changed() -> None:
    q, k, v = (torch.randn(1, 2, 700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    states = (torch.rand(1, 1, 6, 6, device="cuda") * 3).to(torch.uint8)
    width = torch.tensor([200], device="cuda")
    mask = flashgen.BlockMask(states, lambda b, h, i, j: (i - j).abs() < width[0], (128, 128), (700, 700))

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        state = states[0, 0, i // 128, j // 128]
        return (state == 2) | ((state == 1) & ((i - j).abs() < width[0]))

    for change in (lambda: None, lambda: states.add_(1).remainder_(3), lambda: width.fill_(40), lambda: states.fill_(1)):
        change()
        wanted = exact(seen, *[t.double() for t in (q, k, v)])
        right = torch.autograd.grad(wanted.sum(), (q, k, v))
        for _ in range(2):  # the second call takes what the first one found
            out = flashgen.attention(q, k, v, layout="bhsd", block_mask=mask)
            found = torch.autograd.grad(out.sum(), (q, k, v))
            for one, other in zip((out, *found), (wanted, *right), strict=True):
                assert float((one.double() - other).abs().max()) <= 2**-6 * max(1.0, float(other.abs().max()))


def test_a_mask_that_a_graph_makes_is_of_its_last_replay() -> None:
    q, limit = torch.randn(1, 512, 2, 64, device="cuda", dtype=torch.bfloat16), torch.tensor([100], device="cuda")

    def make() -> flashgen.BlockMask:
        return flashgen.block_mask(lambda b, h, q, k: (q - k).abs() < limit[0], len_q=512, len_kv=512)

    flashgen.attention(q, q, q, block_mask=make())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = make()
    for length in (40, 300, 7):
        limit.fill_(length)
        graph.replay()
        for _ in range(2):
            assert torch.equal(flashgen.attention(q, q, q, block_mask=mask), flashgen.attention(q, q, q, block_mask=make()))


def test_a_graph_replays_it() -> None:
    q = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    mask = made("parts", 1, 2, (512, 512), 128)
    wanted = flashgen.attention(q, q, q, layout="bhsd", block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, q, q, layout="bhsd", block_mask=mask)
    q.mul_(-1)
    graph.replay()
    q.mul_(-1)
    graph.replay()
    assert torch.equal(out, wanted)


def test_another_stream_makes_its_own_table() -> None:
    q = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    mask = made("documents", 1, 2, (512, 512), 128)
    wanted = flashgen.attention(q, q, q, layout="bhsd", block_mask=mask)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = flashgen.attention(q, q, q, layout="bhsd", block_mask=mask)
    torch.cuda.synchronize()
    assert torch.equal(found, wanted)
