"""Masks in blocks: the kernels of every family that has them, in the emulator, by the numerics rule, and faults that show; then calls with
FlexAttention's block masks, on CPU tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

import flashgen
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_backward_persistent_sm90.config import AttentionBackwardPersistentSm90Config
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax, Scheduler
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.problem import Mask
from flashgen.codegen.program import KernelLaunch, Program
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch import block_masks, cpu
from flashgen.launch.tensors import Tensors
from flashgen.traced.modifier import modifier_in_call
from tests.support.fault import Fault
from tests.support.named_kernels import NamedKernel, compile_wanted, fault_of, judged, planned_cases, planned_faults, why_caught
from tests.support.plan import few_of
from tests.support.runs import emulated_kernel, emulated_text

Mod = Callable[..., Any]
BLOCKS = torch.zeros(2, 2, 9, 9, dtype=torch.uint8)
TABLE = torch.zeros(2, 2)


def named(mask_mod: Mod) -> str:
    return name_of_functions(modifier_in_call(None, mask_mod).modifier)


def in_blocks(queries: int, keys: int) -> Mod:
    def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
        state = BLOCKS[b, h, q // queries, k // keys]
        return (state == 2) | ((state == 1) & ((q + k) % 3 != 0))

    return seen


EVEN, WIDE = named(in_blocks(64, 64)), named(in_blocks(32, 128))
ODD = named(in_blocks(30, 50))
MIXED = named(lambda b, h, q, k: (BLOCKS[b, h, q // 64, k // 32] > 0) & (BLOCKS[b, h, q % 7, k % 5] > TABLE[h, q // 48] * 2))
EXACT = AttentionForwardSm90Config(1, 64, 2, 1, 1, RowMax.EXACT, ping_pong=False, scheduler=Scheduler.DYNAMIC)
STAGES = AttentionBackwardPersistentSm90Config(64, stages=3)
KERNELS = {
    "generic": NamedKernel("attention_forward", 64, Mask.FULL, False, (EVEN,)),
    "generic-odd": NamedKernel("attention_forward", 40, Mask.CAUSAL, False, (ODD,)),
    "generic-mixed": NamedKernel("attention_forward", 64, Mask.FULL, False, (MIXED,)),
    "sm90": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, (EVEN,)),
    "sm90-wide": NamedKernel("attention_forward_sm90", 128, Mask.CAUSAL, False, (WIDE,), EXACT),
    "sm90-odd": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, (ODD,), EXACT),
    "sm90-mixed": NamedKernel("attention_forward_sm90", 64, Mask.FULL, False, (MIXED, "softcap")),
    "backward": NamedKernel("attention_backward", 64, Mask.FULL, False, (EVEN,)),
    "backward-wide": NamedKernel("attention_backward", 72, Mask.CAUSAL, True, (WIDE,)),
    "backward-mixed": NamedKernel("attention_backward", 64, Mask.FULL, False, (MIXED,)),
    "backward-sm90": NamedKernel("attention_backward_sm90", 64, Mask.FULL, False, (EVEN,)),
    "backward-sm90-wide": NamedKernel("attention_backward_sm90", 128, Mask.FULL, False, (WIDE,)),
    "backward-sm90-odd": NamedKernel("attention_backward_sm90", 64, Mask.CAUSAL, False, (ODD,)),
    "backward-sm90-mixed": NamedKernel("attention_backward_sm90", 64, Mask.FULL, False, (MIXED,)),
    "backward-persistent": NamedKernel("attention_backward_persistent_sm90", 64, Mask.FULL, False, (EVEN,)),
    "backward-persistent-wide": NamedKernel("attention_backward_persistent_sm90", 128, Mask.FULL, False, (WIDE,)),
    "backward-persistent-odd": NamedKernel("attention_backward_persistent_sm90", 64, Mask.CAUSAL, False, (ODD,)),
    "backward-persistent-stages": NamedKernel("attention_backward_persistent_sm90", 64, Mask.FULL, False, (EVEN,), STAGES),
}
LENGTHS = ((150, 300), (300, 170), (70, 70))


def drawn(spec: KernelSpec, lengths: tuple[int, int]) -> Tensors:
    return Tensors.random(spec.problem, Workload(2, 2, 1, *lengths), torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once(request: pytest.FixtureRequest) -> None:
    compile_wanted(request, KERNELS)


@pytest.mark.parametrize(("kernel", "lengths"), planned_cases(itertools.product(KERNELS, LENGTHS), KERNELS, 1.5))
def test_queries_see_keys_of_blocks(kernel: str, lengths: tuple[int, int]) -> None:
    spec = KERNELS[kernel].spec()
    verdict = judged(spec, emulated_text(spec), drawn(spec, lengths))
    assert verdict.ok, verdict.message


_FIRST = "if (j % kAlike == 0) {"
_PARTS = "? column : row, kRowsAreKeys ? row : column);\n                    }"
_BIT = "(j - first) * 4 + e & 1"
_ORDERED = "        griddepcontrol_wait();  // for the order of key tiles\n"
FAULTS = [
    fault_of("partial-taken-for-full", "parts.part0 & ", "parts.part0 | ", "sm90"),
    fault_of("partial-taken-for-full", "parts.part0 & ", "parts.part0 | ", "backward-sm90"),
    fault_of("rows-of-the-next-block", _PARTS, _PARTS.replace("row", "row + 16", 1), "generic"),
    fault_of("only-the-first-columns-block", _FIRST, "if (j == 0) {", "sm90-mixed"),
    fault_of("only-the-first-columns-block", _FIRST, "if (j == 0) {", "backward-sm90-wide"),
    fault_of("score-of-the-neighbour", _BIT, "(j - first) * 4 + (e ^ 1) & 1", "backward"),
    fault_of("score-of-the-neighbour", _BIT, "(j - first) * 4 + (e ^ 2) & 1", "sm90-odd"),
    fault_of("key-tiles-of-one-rank", "counts[other] == own && other < row", "false", "backward-persistent"),
    fault_of("key-tiles-of-one-rank", "counts[other] == own && other < row", "false", "backward-sm90"),
    fault_of("key-tile-lost-on-the-way", "static_cast<u32>(work.key_tile)", "0u", "backward-persistent"),
    fault_of("order-before-it-is-there", _ORDERED, "", "backward-persistent"),
    fault_of("hidden-taken-for-seen", "some |= own, all &= own;", "some |= own;", "sm90"),
    fault_of("a-row-left-out", "by_length[shorter] = row;", "by_length[shorter] = max(row, 1);", "sm90-wide"),
]


@pytest.mark.parametrize(("kernel", "planted"), planned_faults(FAULTS, KERNELS))
def test_a_fault_of_blocks_shows(kernel: str, planted: Fault) -> None:
    spec = KERNELS[kernel].spec()
    lengths = (1030, 300) if "by_length[" in planted.find else (300, 300)
    tensors = drawn(spec, lengths)
    assert why_caught(KERNELS[kernel], planted, lambda text: judged(spec, text, tensors))


def test_rows_of_many_tiles_are_handed_out_longest_first() -> None:
    spec = KERNELS["sm90-wide"].spec()
    tensors = drawn(spec, (1030, 300))
    assert [launch.suffix for launch in spec.family.program(spec.config, tensors.call(), device_of_target(spec.target)).launches] == [
        "_tiles",
        "_order",
        "",
    ]
    assert judged(spec, emulated_text(spec), tensors).ok


def test_the_longest_row_is_last() -> None:
    spec, (heads, rows, words) = KERNELS["sm90-wide"].spec(), (3, 700, 2)
    seen = torch.randint(0, 2**31, (heads, rows, words, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    order = torch.full((heads, rows), -1, dtype=torch.int32)
    launch = KernelLaunch(heads, {"seen_rows": rows, "seen_words": words}, suffix="_order")
    given = {"seen_tiles": cpu.view_of("seen_tiles", seen), "tile_order": cpu.view_of("tile_order", order, writable=True)}
    emulated_kernel(spec, emulated_text(spec)).launch(Program((launch,)), given)
    counts = [[sum(int(word).bit_count() for word in row) for row in head] for head in seen[..., 0].tolist()]
    assert order.tolist() == [sorted(range(rows), key=lambda row: (head[row], row)) for head in counts]  # at once


B, H, S = 2, 2, 330
IDS = (torch.arange(S)[:, None] >= torch.tensor([[[130, 140, 325]], [[20, 200, 256]]])).sum(-1)
FUNCTIONS: dict[str, tuple[Mod, int | None, int | None]] = {
    "documents": (lambda b, h, q, k: (IDS[b, q] == IDS[b, k]) & (q >= k), B, None),
    "by-head": (lambda b, h, q, k: (q >= k) | (h == 1), None, H),
    "window": (lambda b, h, q, k: (q - k).abs() < 70, None, None),
    "both": (lambda b, h, q, k: (q + b * 64) // 64 + h >= k // 64, B, H),
}
SIZES = (128, (64, 32), (16, 128), 512)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def block_mask(name: str, size: int | tuple[int, int] = 128) -> BlockMask:
    mask_mod, batch, heads = FUNCTIONS[name]
    return create_block_mask(mask_mod, batch, heads, S, S, device="cpu", BLOCK_SIZE=size)


def visible(mask_mod: Mod, batch: int = B, heads: int = H, length: int = S) -> torch.Tensor:
    at = torch.meshgrid(*(torch.arange(size) for size in (batch, heads, length, length)), indexing="ij")
    seen: torch.Tensor = mask_mod(*at)
    return seen.expand(batch, heads, length, length)


def exact(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0), k)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.detach().double() - wanted.detach()).abs().max()) <= 2**-6 * max(1.0, float(wanted.detach().abs().max()))


def check(seen: torch.Tensor, **keywords: Any) -> None:
    """Results and gradients of a call are those of float64."""
    q, k = (stacked(B, S, H, 16, seed=seed).requires_grad_() for seed in (3, 4))
    doubles = [t.detach().double().requires_grad_() for t in (q, k)]
    out, wanted = flashgen.attention(q, k, k, **keywords), exact(doubles[0], doubles[1], seen)
    assert close(out, wanted)
    into = torch.randn_like(out)
    found, right = torch.autograd.grad(out, (q, k), into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True, True]


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("name", "size"),
    few_of(itertools.product(FUNCTIONS, SIZES), ("documents", (16, 128))),
)
def test_block_masks(name: str, size: int | tuple[int, int]) -> None:
    check(visible(FUNCTIONS[name][0]), block_mask=block_mask(name, size))


@pytest.mark.usefixtures("on_the_cpu")
def test_what_is_listed_counts_and_not_what_the_function_says() -> None:
    """As in FlexAttention: all of a full block is seen, and nothing of one that is not listed. The lists may hold less than all blocks."""
    counts, lists = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[2, 7], [0, 1], [0, 0]]]])
    full, listed = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[0, 9], [5, 5], [1, 2]]]])
    made = BlockMask.from_kv_blocks(counts, lists, full, listed, 128, lambda b, h, q, k: (q + k) % 2 == 0, (S, S), compute_q_blocks=False)
    of_blocks = torch.tensor([[2, 0, 1], [1, 1, 0], [0, 2, 0]]).repeat_interleave(128, 0).repeat_interleave(128, 1)[:S, :S]
    even = (torch.arange(S)[:, None] + torch.arange(S)) % 2 == 0
    check(((of_blocks == 2) | ((of_blocks == 1) & even)).expand(B, H, S, S), block_mask=made)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.slow
def test_lists_without_a_function() -> None:
    counts, lists = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[2, 7], [0, 1], [0, 0]]]])
    listed = torch.tensor([[0, 0, 1], [1, 1, 0], [0, 0, 0]]).repeat_interleave(128, 0).repeat_interleave(128, 1)[:S, :S]
    made = BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=128, seq_lengths=(S, S))
    check((listed == 1).expand(B, H, S, S), block_mask=made)


THIRDS: Mod = lambda b, h, q, k: (q - k) % 3 == 0  # noqa: E731
BESIDE: dict[str, tuple[Mod, dict[str, Any]]] = {
    "causal": (lambda b, h, q, k: q >= k, {"causal": True}),
    "mask_mod": (THIRDS, {"mask_mod": THIRDS}),
    "compiled-modifier": (THIRDS, {"score_mod": flashgen.compile_modifier(lambda score, b, h, q, k: score, THIRDS)}),
}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", few_of(BESIDE, "mask_mod"))
def test_beside_other_masks_and_functions(name: str) -> None:
    mask_mod, keywords = BESIDE[name]
    check(visible(FUNCTIONS["window"][0]) & visible(mask_mod), block_mask=block_mask("window"), **keywords)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.slow
def test_a_mask_that_hides_nothing_goes_with_any_length() -> None:
    whole = BlockMask.from_kv_blocks(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), BLOCK_SIZE=2**30)
    q = stacked(1, 40, 2, 16)
    assert close(flashgen.attention(q, q, q, block_mask=whole), flashgen.attention(q, q, q))


@pytest.mark.usefixtures("on_the_cpu")
def test_a_mask_is_read_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    states = block_masks._states

    def noted(mask: BlockMask) -> torch.Tensor:
        read.append(mask)
        return states(mask)

    monkeypatch.setattr(block_masks, "_states", noted)
    q, made = stacked(1, S, H, 16), block_mask("window")
    first = flashgen.attention(q, q, q, block_mask=made)
    assert torch.equal(first, flashgen.attention(q, q, q, block_mask=made))
    assert read == [made]
    made.kv_num_blocks[..., -1:].zero_()
    hidden = flashgen.attention(q, q, q, block_mask=made)
    assert not torch.equal(first, hidden)
    made.mask_mod = noop_mask
    assert not torch.equal(hidden, flashgen.attention(q, q, q, block_mask=made))
    assert len(read) == 3


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.slow
def test_within_torch_compile() -> None:
    torch.compiler.reset()
    made = block_mask("documents")

    def call(q: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        return flashgen.attention(q, q, q, block_mask=mask)

    q = stacked(B, S, H, 16).requires_grad_()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, wanted = compiled(q, made), call(q, made)
    assert torch.equal(out, wanted)
    assert torch.equal(*(torch.autograd.grad(each.float().sum(), q)[0] for each in (out, wanted)))
    torch.compiler.reset()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no-block-mask": (lambda: torch.ones(3, 3), "block_mask must be what flashgen.block_mask gives, or a BlockMask .*; got .*Tensor"),
    "another-length": (
        lambda: create_block_mask(noop_mask, None, None, 512, S, device="cpu"),
        rf"block_mask must be for lengths \({S}, {S}\), those of the call: .*; got \(512, {S}\)",
    ),
    "a-slice": (lambda: block_mask("documents")[:1], "block_mask must have a mask_mod, which a slice of one has lost"),
    "small-blocks": (lambda: block_mask("window", 8), r"block_mask must have a BLOCK_SIZE of multiples of 16; got \(8, 8\)"),
    "other-heads": (
        lambda: create_block_mask(FUNCTIONS["by-head"][0], None, 3, S, S, device="cpu"),
        r"block_mask must have kv_num_blocks of the shape \(1 or 2, 1 or 2, 3\), .*; got \(1, 3, 3\)",
    ),
    "fewer-rows": (
        lambda: BlockMask.from_kv_blocks(torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 3).int(), seq_lengths=(S, S)),
        r"block_mask must have kv_num_blocks of the shape .*, for 3 blocks of queries; got \(1, 1, 2\)",
    ),
    "another-device": (
        lambda: block_mask("window").to("meta"),
        "block_mask must be on q's device cpu; got meta",
    ),
}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", REFUSED)
def test_a_block_mask_that_does_not_fit_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    q = stacked(B, S, H, 16)
    with pytest.raises(ArgumentError, match=message):
        flashgen.attention(q, q, q, block_mask=make())
