"""Block masks that flashgen makes: their states beside FlexAttention's and the whole mask, faults that show, and calls with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask

import flashgen
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.render import Atoms
from flashgen.codegen.spec import KernelSpec
from flashgen.launch import block_masks, cpu, made_block_masks
from tests.support.fault import Fault, Setting
from tests.support.plan import few_of
from tests.support.runs import emulated_kernel, emulated_text

Mod = Callable[..., Any]
B, H, S = 2, 3, 330


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


def drawn(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed))


IDS = (torch.arange(S)[:, None] >= torch.tensor([[[130, 140, 325]], [[20, 200, 256]]])).sum(-1)
GATES = drawn(H, 2 * S, seed=1).bfloat16()[:, ::2]  # every other element
COUNTS = (drawn(S, seed=2) * 4).to(torch.int8)
SEEN = drawn(6, 11, seed=3) < 0.4
FUNCTIONS: dict[str, Mod] = {
    "documents": lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q >= k),
    "by-head": lambda b, h, q, k: (q >= k) | (h == 1),
    "window": lambda b, h, q, k: (q - k).abs() < 70,
    "both": lambda b, h, q, k: (q + b * 128) // 64 + h >= k // 64,
    "sums": lambda b, h, q, k: q + k < 460,
    "gates": lambda b, h, q, k: (GATES[h, k] > 0.005) & ((q * k) % 7 != 3),
    "apart": lambda b, h, q, k: (COUNTS[q] == 0) & (COUNTS[k] == 1) & (q // 100 == k // 30),
    "blocks": lambda b, h, q, k: SEEN[q // 64, k // 32],
    "all": lambda b, h, q, k: q >= -1,
    "nothing": lambda b, h, q, k: q < -k,
}
SIZES = (128, (64, 32), (16, 128), (256, 48), 512)
LENGTHS = ((S, S), (150, 300), (256, 128), (1, 17), (300, 0))


def whole(mask_mod: Mod, batch: int, heads: int, lengths: tuple[int, int]) -> torch.Tensor:
    """The mask, a number for each query and key."""
    at = torch.meshgrid(*(torch.arange(size) for size in (batch, heads, *lengths)), indexing="ij")
    return mask_mod(*at).expand(batch, heads, *lengths)  # type: ignore[no-any-return]


def states_of(mask: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """What blocks of a whole mask are."""
    of_q, of_kv = block_size
    rows, columns = (max(1, -(-length // size)) for length, size in zip(mask.shape[2:], block_size, strict=True))
    found = torch.zeros(*mask.shape[:2], rows, columns, dtype=torch.uint8)
    for row, column in itertools.product(range(rows), range(columns)):
        block = mask[:, :, row * of_q : (row + 1) * of_q, column * of_kv : (column + 1) * of_kv].flatten(2)
        if block.shape[2]:
            found[:, :, row, column] = block.any(-1).byte() + block.all(-1).byte()
    return found


def made(name: str, size: int | Sequence[int] = 128, lengths: tuple[int, int] = (S, S)) -> flashgen.BlockMask:
    return flashgen.block_mask(FUNCTIONS[name], batch=B, heads=H, len_q=lengths[0], len_kv=lengths[1], device="cpu", block_size=size)


def both_sizes(size: int | Sequence[int]) -> tuple[int, int]:
    of_q, of_kv = (size, size) if isinstance(size, int) else size
    return of_q, of_kv


@pytest.mark.parametrize("name", few_of(FUNCTIONS, "documents", "by-head", "gates", "apart"))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_states_are_those_of_the_whole_mask(name: str, lengths: tuple[int, int]) -> None:
    for size in SIZES:
        found = made(name, size, lengths)
        wanted = states_of(whole(FUNCTIONS[name], B, H, lengths), both_sizes(size))
        assert found.states.shape[2:] == wanted.shape[2:] == found.blocks
        assert torch.equal(found.states.expand_as(wanted), wanted), (name, size)
        assert found.block_size == both_sizes(size)


def listed(mask: FlexBlockMask) -> torch.Tensor:
    """FlexAttention's, as states."""
    return block_masks._states(mask)


@pytest.mark.parametrize("name", few_of(FUNCTIONS, "documents", "by-head", "gates", "apart"))
@pytest.mark.parametrize("size", [128, (64, 32)], ids=str)
def test_states_are_flexattentions(name: str, size: int | tuple[int, int]) -> None:
    """But of blocks that go beyond the end, of which there never is all for FlexAttention."""
    found, theirs = made(name, size), listed(create_block_mask(FUNCTIONS[name], B, H, S, S, device="cpu", BLOCK_SIZE=size))
    of_q, of_kv = both_sizes(size)
    inside = torch.ones_like(theirs, dtype=torch.bool)
    inside[..., S // of_q :, :] = inside[..., S // of_kv :] = False
    ours = found.states.expand_as(theirs)
    assert torch.equal(ours[inside], theirs[inside])
    assert torch.equal(ours > 0, theirs > 0)
    assert found.sparsity() == pytest.approx(float((found.states == 0).float().mean() * 100))


def test_what_the_function_does_not_look_at_is_one() -> None:
    shapes = {name: tuple(made(name).states.shape[:2]) for name in ("documents", "by-head", "window", "both")}
    assert shapes == {"documents": (B, 1), "by-head": (1, H), "window": (1, 1), "both": (B, H)}


def test_numbers_and_tensors_count_as_they_are_when_it_is_made() -> None:
    def of(limit: int, table: torch.Tensor) -> Mod:
        return lambda b, h, q, k: (q - k < limit) & (table[k] > 0)

    table = torch.ones(S)
    first = flashgen.block_mask(of(70, table), len_q=S, len_kv=S, device="cpu")
    loaded = made_block_masks._emulated.cache_info().currsize
    kept, table[:128] = first.states.clone(), 0
    second = flashgen.block_mask(of(200, table), len_q=S, len_kv=S, device="cpu")
    assert made_block_masks._emulated.cache_info().currsize == loaded, "other numbers need no other kernel"
    assert torch.equal(first.states, kept)
    for mask, limit, seen in ((first, 70, torch.ones(S)), (second, 200, table)):
        assert torch.equal(mask.states, states_of(whole(of(limit, seen), 1, 1, (S, S)), (128, 128)))


FAULTS = {
    "a-part-taken-for-all": ("documents", "seen.all ? kAllSeen : kPartSeen", "kAllSeen"),
    "all-taken-for-a-part": ("by-head", "seen.all ? kAllSeen : kPartSeen", "kPartSeen"),
    "no-look-where-parts-tell-less": ("apart", "if (seen.some && !seen.all) seen = look_at", "if (false) seen = look_at"),
    "beyond-the-last-query": ("sums", "min(first_query + p.block_q, p.len_q)", "first_query + p.block_q"),
    "beyond-the-last-key": ("sums", "min(first_key + p.block_kv, p.len_kv)", "first_key + p.block_kv"),
    "heads-for-batches": ("both", "return {batch, heads - batch * p.mask_heads,", "return {heads - batch * p.mask_heads, batch,"),
    "rows-for-columns": ("window", "row * p.block_q, first_key = column", "column * p.block_q, first_key = row"),
    "sizes-swapped": ("documents", "first_key = column * p.block_kv", "first_key = column * p.block_q"),
    "only-the-first-warp": ("documents", "block_index() * kWarps + warp_index()", "block_index() * kWarps"),
}


@pytest.mark.parametrize("name", few_of(FAULTS, "a-part-taken-for-all"))
def test_a_fault_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, find, replace = FAULTS[name]

    def faulty(spec: KernelSpec) -> Any:
        return emulated_kernel(spec, Fault(name, find, replace, Setting(spec.config, ())).apply(emulated_text(spec), Atoms.EMULATED))

    monkeypatch.setattr(cpu, "load_emulated", faulty)
    made_block_masks._emulated.cache_clear()
    try:
        size, lengths = (64, 32), (300, 200)
        found = made(function, size, lengths)
    finally:
        made_block_masks._emulated.cache_clear()
    wanted = states_of(whole(FUNCTIONS[function], B, H, lengths), size)
    assert not torch.equal(found.states.expand_as(wanted), wanted)


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0), k)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.detach().double() - wanted.detach()).abs().max()) <= 2**-6 * max(1.0, float(wanted.detach().abs().max()))


def check(seen: torch.Tensor, heads_kv: int = 1, head_dim: int = 16, **keywords: Any) -> None:
    """Results and gradients of a call are those of float64."""
    batch, heads, len_q, len_kv = seen.shape
    q = stacked(batch, len_q, heads, head_dim, seed=3).requires_grad_()
    k = stacked(batch, len_kv, heads_kv, head_dim, seed=4).requires_grad_()
    doubles = [t.detach().double().requires_grad_() for t in (q, k)]
    out, wanted = flashgen.attention(q, k, k, **keywords), exact(doubles[0], doubles[1], seen)
    assert close(out, wanted)
    into = torch.randn_like(out)
    found, right = torch.autograd.grad(out, (q, k), into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("name", "size"),
    few_of(
        itertools.product(("documents", "by-head", "both", "apart"), (128, (64, 32), (16, 128))), ("documents", 128), ("both", (64, 32))
    ),
)
def test_calls_see_what_the_function_says(name: str, size: int | tuple[int, int]) -> None:
    check(whole(FUNCTIONS[name], B, H, (S, S)), block_mask=made(name, size))


@pytest.mark.slow
def test_other_lengths_head_dims_and_batches() -> None:
    lengths = (150, 300)
    mask = flashgen.block_mask(FUNCTIONS["window"], len_q=150, len_kv=300, device="cpu")
    check(whole(FUNCTIONS["window"], 3, H, lengths), head_dim=40, heads_kv=H, block_mask=mask)


@pytest.mark.parametrize("lengths", [(0, 40), (40, 0), (0, 0)])
def test_calls_without_queries_or_keys(lengths: tuple[int, int]) -> None:
    len_q, len_kv = lengths
    mask = flashgen.block_mask(FUNCTIONS["window"], len_q=len_q, len_kv=len_kv, device="cpu")
    q, k = torch.ones(1, len_q, 2, 16).bfloat16(), torch.ones(1, len_kv, 2, 16).bfloat16()
    out = flashgen.attention(q, k, k, block_mask=mask)
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.slow
def test_beside_other_masks() -> None:
    seen = whole(FUNCTIONS["window"], B, H, (S, S))
    check(seen & whole(FUNCTIONS["documents"], B, H, (S, S)), block_mask=made("window"), mask_mod=FUNCTIONS["documents"])
    check(seen & whole(lambda b, h, q, k: q >= k, B, H, (S, S)), block_mask=made("window"), causal=True)


def test_states_count_and_not_what_the_function_says() -> None:
    """A mask of a caller's own: all of a block of 2 is seen, and nothing of one of 0."""
    states = torch.tensor([[2, 0, 1], [1, 1, 0], [0, 2, 0]], dtype=torch.uint8)[None, None]
    mask = flashgen.BlockMask(states, FUNCTIONS["window"], (128, 128), (S, S))
    of_blocks = states.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :S, :S]
    check((of_blocks == 2) | ((of_blocks == 1) & whole(FUNCTIONS["window"], B, H, (S, S))), block_mask=mask)


def test_a_captured_tensor_that_changes_counts_in_blocks_that_are_seen_in_part() -> None:
    """As in FlexAttention: the blocks are those of the time when the mask was made."""
    table = torch.ones(S)
    table[::2] = 0
    table[256:] = 1
    mask = flashgen.block_mask(lambda b, h, q, k: table[k] > 0, len_q=S, len_kv=S, device="cpu")
    q = stacked(1, S, 1, 16)
    before = flashgen.attention(q, q, q, block_mask=mask)
    table.copy_(1 - table)
    seen = table > 0
    seen[256:] = True
    after = flashgen.attention(q, q, q, block_mask=mask)
    assert not torch.equal(before, after)
    assert close(after, exact(q.double(), q.double(), seen.expand(1, 1, S, S)))


@pytest.mark.slow
def test_within_torch_compile() -> None:
    torch.compiler.reset()
    mask = made("documents")

    def call(q: torch.Tensor, mask: flashgen.BlockMask) -> torch.Tensor:
        return flashgen.attention(q, q, q, block_mask=mask)

    q = stacked(B, S, H, 16).requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, wanted = compiled(q, mask), call(q, mask)
    assert torch.equal(out, wanted)
    assert torch.equal(*(torch.autograd.grad(each.float().sum(), q)[0] for each in (out, wanted)))
    other = flashgen.BlockMask(mask.states.flip(-1).contiguous(), mask.mask_mod, mask.block_size, mask.seq_lengths)
    assert torch.equal(compiled(q, other), call(q, other))
    assert not torch.equal(compiled(q, other), wanted)
    with pytest.raises(Exception, match=r"outside of torch\.compile"):
        torch.compile(lambda: made("window").states, fullgraph=True, backend="eager")()
    assert torch.equal(torch.compile(lambda: made("window"), backend="eager")().states, made("window").states)
    torch.compiler.reset()


def test_states_made_in_inference_mode_can_be_kept_for_a_backward_pass() -> None:
    with torch.inference_mode():
        mask = made("documents")
    assert not mask.states.is_inference()


def masked(**changes: Any) -> Callable[[], object]:
    usual = {"mask_mod": FUNCTIONS["window"], "len_q": S, "len_kv": S, "device": "cpu"}
    return lambda: flashgen.block_mask(**{**usual, **changes})


def called(mask: Callable[[], Any]) -> Callable[[], object]:
    q = stacked(B, S, H, 16)
    return lambda: flashgen.attention(q, q, q, block_mask=mask())


def fields(**changes: Any) -> Callable[[], object]:
    usual = {"states": torch.ones(1, 1, 3, 3).byte(), "mask_mod": FUNCTIONS["window"], "block_size": (128, 128), "seq_lengths": (S, S)}
    return lambda: flashgen.BlockMask(**{**usual, **changes})


def of_heads() -> object:
    return flashgen.block_mask(FUNCTIONS["by-head"], heads=5, len_q=S, len_kv=S, device="cpu")


def in_a_mode() -> object:
    with FakeTensorMode():
        return made("window")


EMPTY, META = torch.ones(0), torch.ones(S, device="meta")
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no-function": (masked(mask_mod=3), r"mask_mod must be a function \(batch, head, query, key\); got 3"),
    "branch": (masked(mask_mod=lambda b, h, q, k: q if q > k else k), "mask_mod must not "),
    "no-bool": (masked(mask_mod=lambda b, h, q, k: q - k), "mask_mod must return a bool"),
    "batch": (masked(mask_mod=FUNCTIONS["documents"]), "batch must be given for a mask_mod that differs by it; got None"),
    "heads": (masked(mask_mod=FUNCTIONS["by-head"], batch=2), "heads must be given for a mask_mod that differs by it; got None"),
    "no-batch": (masked(batch=0), "batch must be an integer from 1 to .*; got 0"),
    "size": (masked(block_size=(128, 8)), r"block_size must be one or two multiples of 16 up to 32768; got \(128, 8\)"),
    "large-size": (masked(block_size=2**16), r"block_size must be one or two multiples of 16 up to 32768; got \(65536, 65536\)"),
    "sizes": (masked(block_size=(128,)), r"block_size must be one or two multiples of 16 up to .*; got \(128,\)"),
    "length": (masked(len_kv=-1), "len_kv must be an integer from 0 to .*; got -1"),
    "device": (masked(device="meta"), "device must be a CUDA device; got meta"),
    "no-device": (masked(device="somewhere"), "device must be a CUDA device; got 'somewhere'"),
    "captured-elsewhere": (
        masked(mask_mod=lambda b, h, q, k: META[q] > 0),
        "tensors that mask_mod captures must be on cpu, the device of the mask; got meta",
    ),
    "captured-empty": (
        masked(mask_mod=lambda b, h, q, k: EMPTY[q] > 0),
        r"tensors that mask_mod captures must have elements; got .*\(0,\)",
    ),
    "many-blocks": (masked(len_q=2**28, len_kv=2**28, block_size=16), "block_size must make at most 2147483647 blocks, .*; got "),
    "in-a-mode": (in_a_mode, "block_mask must be called outside of PyTorch's modes and transforms"),
    "float-states": (fields(states=torch.ones(1, 1, 3, 3)), r"states must be uint8 .*\(batch or 1, heads or 1, 3, 3\); got torch.float32"),
    "few-states": (fields(states=torch.ones(1, 1, 2, 3).byte()), r"states must be .*; got torch.uint8 of \(1, 1, 2, 3\)"),
    "no-mask-mod": (fields(mask_mod=None), "mask_mod must be a function .*; got None"),
    "other-lengths": (called(lambda: made("window", 128, (S, 200))), rf"block_mask must be for lengths \({S}, {S}\), .*; got \({S}, 200\)"),
    "other-heads": (called(of_heads), f"block_mask must be for batch {B} and heads {H}, .*; got batch 1, heads 5"),
    "no-mask": (called(lambda: torch.ones(3)), "block_mask must be what flashgen.block_mask gives, or a BlockMask of torch.nn.*; got "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=f"^{message}"):
        make()


def test_the_cpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHGEN_CPU")
    with pytest.raises(ArgumentError, match=r"^device must be a CUDA device; got cpu\. FLASHGEN_CPU=1 in the environment"):
        masked()()
