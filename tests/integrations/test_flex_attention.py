"""FlexAttention's names: refusals, block masks beside PyTorch's own, and calls in the emulator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.attention import flex_attention as theirs

import flashgen
from flashgen.codegen.errors import ArgumentError
from flashgen.integrations import flex_attention as flex
from tests.support.dense_attention import require_right

Mod = Callable[..., Any]
MASKS: dict[str, Mod] = {
    "causal": lambda b, h, q, k: q >= k,
    "near": lambda b, h, q, k: (q - k).abs() < 20,
    "by-head": lambda b, h, q, k: (q >= k) | (h == 1),
    "by-entry": lambda b, h, q, k: q + 30 * b >= k,
}
SIZES = [(None, None, 40, 70, 16), (2, 2, 64, 64, (16, 32)), (1, 2, 1, 300, 128)]
LISTS = [f"{full}{which}_{what}" for full in ("", "full_") for which in ("kv", "q") for what in ("num_blocks", "indices")]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()  # one test's sizes are no reason for another one to have symbols
    torch.manual_seed(1)


def tensors(heads_q: int = 2, heads_kv: int = 2, len_q: int = 20, len_kv: int = 36) -> Any:
    sizes = ((heads_q, len_q), (heads_kv, len_kv), (heads_kv, len_kv))
    return [torch.randn(2, heads, length, 16).to(torch.bfloat16) for heads, length in sizes]


def modified(score_mod: Mod | None, mask_mod: Mod | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def of_scores(scores: torch.Tensor) -> torch.Tensor:
        at = [torch.arange(size).view([-1 if i == axis else 1 for i in range(4)]) for axis, size in enumerate(scores.shape)]
        changed = scores if score_mod is None else score_mod(scores, *at)
        return changed if mask_mod is None else changed.masked_fill(~mask_mod(*at), -torch.inf)

    return of_scores


def same_mask(found: Any, wanted: Any) -> None:
    for name in LISTS:
        one, other = getattr(found, name), getattr(wanted, name)
        assert (one is None) is (other is None), name
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other)), name
    assert (found.BLOCK_SIZE, found.seq_lengths, found.shape) == (wanted.BLOCK_SIZE, wanted.seq_lengths, wanted.shape)


def test_names_and_parameters_are_pytorchs() -> None:
    for name in ("flex_attention", "create_block_mask"):
        ours, own = (list(inspect.signature(getattr(module, name)).parameters.values()) for module in (flex, theirs))
        assert [(p.name, p.kind, p.default) for p in ours][: len(own)] == [(p.name, p.kind, p.default) for p in own]
    assert set(theirs.__all__) <= set(flex.__all__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel_options": {"BLOCK_Q": 3}}, "kernel_options must be FlexAttention's, which are .*; got 'BLOCK_Q'"),
        ({"kernel_options": 3}, "kernel_options must be a dict; got 3"),
        ({"return_aux": flex.AuxRequest(max_scores=True)}, "return_aux must not ask for max_scores"),
        ({"return_aux": flex.AuxRequest(lse=True), "return_lse": True}, "return_lse must be False beside return_aux"),
        ({"return_aux": True}, "return_aux must be an AuxRequest or None; got True"),
        ({"block_mask": 3}, "block_mask must be .*; got 3"),
        ({"score_mod": 3}, "score_mod must be .*; got 3"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        flex.flex_attention(*tensors(), **arguments)


def test_dtypes_are_named() -> None:
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match=r"^query must be torch.bfloat16 or torch.float16; got torch.float32"):
        flex.flex_attention(q.float(), k, v)


def test_heads_need_enable_gqa() -> None:
    with pytest.raises(ValueError, match="key must have query's 2 heads, or enable_gqa must be True; got 1 heads"):
        flex.flex_attention(*tensors(heads_kv=1))


@pytest.mark.parametrize(
    ("name", "value"), [("B", 0), ("H", 0), ("Q_LEN", -1), ("KV_LEN", 2.0), ("BLOCK_SIZE", 8), ("BLOCK_SIZE", (16,)), ("device", "meta")]
)
def test_refusals_of_block_masks_have_their_names(name: str, value: Any) -> None:
    given = {"B": 1, "H": 1, "Q_LEN": 32, "KV_LEN": 32, "device": "cpu", name: value}
    with pytest.raises(ArgumentError, match=f"^{name} must"):
        flex.create_block_mask(MASKS["causal"], **given)


@pytest.mark.parametrize(("name", "value"), [("compute_dq_write_order", True), ("dq_kv_order", False)])
def test_what_is_for_pytorchs_kernels_is_refused(name: str, value: bool) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be left out"):
        flex.create_block_mask(MASKS["causal"], 1, 1, 32, 32, "cpu", **{name: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_block_masks_are_pytorchs(name: str) -> None:
    for arguments in SIZES:
        same_mask(*(module.create_block_mask(MASKS[name], *arguments[:4], "cpu", arguments[4]) for module in (flex, theirs)))


@pytest.mark.slow
@pytest.mark.skipif("separate_full_blocks" not in inspect.signature(theirs.create_block_mask).parameters, reason="needs PyTorch 2.13")
def test_full_blocks_may_be_asked_in_too() -> None:
    arguments = (MASKS["causal"], 1, 1, 40, 70, "cpu", 16)
    same_mask(*(module.create_block_mask(*arguments, separate_full_blocks=False) for module in (flex, theirs)))


def test_a_call() -> None:
    def call(*given: Any) -> tuple[torch.Tensor, ...]:
        options: Any = {"kernel_options": {"fwd_BLOCK_M": 64}, "return_aux": flex.AuxRequest(lse=True)}
        out, aux = flex.flex_attention(*given, **options)
        assert aux.max_scores is None
        return out, aux.lse

    require_right(call, tensors(), modified(None, None))
    with torch.no_grad():
        q, k, v = tensors()
        both = flex.flex_attention(q, k, v, return_lse=True)
        assert torch.equal(both[0], flex.flex_attention(q, k, v))
        out, aux = flex.flex_attention(q, k, v, return_aux=flex.AuxRequest())
        assert torch.equal(out, both[0])
        assert aux == flex.AuxOutput()


@pytest.mark.slow
def test_results_and_gradients() -> None:
    slopes = torch.tensor([0.3, 0.1])

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (q - k)

    own = flashgen.block_mask(MASKS["near"], len_q=20, len_kv=36, device="cpu", block_size=16)
    for mask in (flex.create_block_mask(MASKS["near"], None, None, 20, 36, "cpu", 16), own):
        call = partial(flex.flex_attention, score_mod=score_mod, block_mask=mask, scale=0.5, enable_gqa=True, return_lse=True)
        require_right(call, tensors(heads_kv=1), modified(score_mod, MASKS["near"]), 0.5, gradients=True)


@pytest.mark.slow
def test_one_entry_of_keys_for_all_and_queries_before_heads_in_memory() -> None:
    q, k, v = tensors()
    wanted = flex.flex_attention(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))
    assert torch.equal(flex.flex_attention(q, k[:1], v[:1]), wanted)
    leaves = q.requires_grad_(), k[:1].clone().requires_grad_(), v[:1].clone().requires_grad_()
    found = torch.autograd.grad(flex.flex_attention(*leaves), leaves, torch.ones_like(wanted))
    assert [gradient.shape for gradient in found] == [leaf.shape for leaf in leaves]
    permuted = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    out = flex.flex_attention(permuted, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, flex.flex_attention(q.detach(), k, v))


STRIDES = [
    ((2 * 36 * 17, 36 * 17, 17, 1), 0),
    ((2 * 36 * 16, 36 * 16, 16, 1), 3),
    ((2 * 36 * 16, 16 * 36, 1, 36), 0),
    ((2 * 36 * 16, 36 * 16, 16, 1), 8),  # which is read where it lies
]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_that_kernels_cannot_read_are_copied(compiled: bool) -> None:
    for strides, begin in STRIDES:
        torch.compiler.reset()  # a graph is told by strides, not by where tensors begin
        call: Any = torch.compile(flex.flex_attention, fullgraph=True, backend="aot_eager") if compiled else flex.flex_attention
        given = [torch.randn(2 * 2 * 36 * 17 + begin, dtype=torch.bfloat16).as_strided((2, 2, 36, 16), strides, begin) for _ in range(3)]
        leaves: Any = [tensor.requires_grad_() for tensor in given]
        dense: Any = [tensor.contiguous().clone() for tensor in leaves]
        wanted = flex.flex_attention(*dense)
        found = call(*leaves)
        assert torch.equal(found, wanted)
        of = torch.randn_like(wanted)
        both = [torch.autograd.grad(out, leaves, of, retain_graph=True) for out in (found, wanted)]
        assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Views of value in place of results, and the queries and keys that the kernel would have had."""
    found: list[torch.Tensor] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        for tensor in (q, k, v):
            if tensor.stride(1) % 8 or tensor.stride(2) % 8 or tensor.data_ptr() % 16:
                raise ArgumentError("cannot be read")
        found[:] = q, k
        return v

    monkeypatch.setattr(flex, "_attention", attention)
    return found


def test_copies_keep_the_order_of_heads_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = without_kernels(monkeypatch)
    for width, begin in ((20, 0), (16, 3)):
        rows = torch.randn(2 * 6 * 4 * width + begin).bfloat16()[begin:].view(2, 6, 4, width)[..., :16].transpose(1, 2)
        flex.flex_attention(rows, rows, rows)
        assert found[0].stride(1) < found[0].stride(2)
        assert torch.equal(found[0], rows)


def test_what_begins_at_an_unaligned_address_is_copied_wherever_its_storage_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    found = without_kernels(monkeypatch)
    q = torch.frombuffer(bytearray(2 * 4 * 6 * 16 * 2 + 32), dtype=torch.bfloat16, offset=2)[: 2 * 4 * 6 * 16].view(2, 4, 6, 16)
    assert q.storage_offset() == 0
    flex.flex_attention(q, q, q)
    assert torch.equal(found[0], q)


def test_one_entry_of_keys_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = without_kernels(monkeypatch)
    key = torch.randn(1, 4, 6, 20).bfloat16()[..., :16]
    flex.flex_attention(torch.randn(64, 4, 6, 16).bfloat16(), key, key)
    assert found[1].shape[0] == 64
    assert found[1].untyped_storage().nbytes() == key.numel() * 2


def test_graphs_copy_what_begins_at_unaligned_places() -> None:
    """Inductor takes a clone away whose strides are those of the tensor."""
    given = torch.randn(2 * 2 * 20 * 16 + 3).bfloat16()[3:].view(2, 2, 20, 16)
    graphs: list[Any] = []

    def compile_nothing(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(lambda *_: [given])

    for dynamic in (False, True):
        torch.compiler.reset()
        backend: Any = aot_autograd(fw_compiler=compile_nothing)
        torch.compile(flex.flex_attention, fullgraph=True, dynamic=dynamic, backend=backend)(given, given, given)
        (node,) = (node for node in graphs.pop().graph.nodes if "flashgen" in str(node.target))
        for argument in node.args[:3]:
            assert argument.meta["val"].storage_offset() == 0
            assert argument.meta["val"].stride() != given.stride()


@pytest.mark.slow
def test_within_torch_compile() -> None:
    q, k, v = tensors()
    mask = flex.create_block_mask(MASKS["causal"], None, None, 20, 36, "cpu", 16)
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend="eager")

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * 1.5

    with torch.no_grad():
        both = [call(q, k, v, score_mod, mask, return_aux=flex.AuxRequest(lse=True)) for call in (compiled, flex.flex_attention)]
    (out, aux), (wanted, wanted_aux) = both
    assert torch.equal(out, wanted)
    assert torch.equal(aux.lse, wanted_aux.lse)


@pytest.mark.slow
def test_one_block_of_keys_within_inductor() -> None:
    """PyTorch 2.11's makes int64 numbers of a tensor of uint8 that takes numbers by a scatter of one column."""
    q, k, v = tensors()
    mask = flex.create_block_mask(MASKS["causal"], None, None, 20, 36, "cpu", 64)
    assert mask.kv_indices.shape[-1] == 1
    with torch.no_grad():
        found = torch.compile(flex.flex_attention, fullgraph=True)(q, k, v, block_mask=mask)
        assert torch.equal(found, flex.flex_attention(q, k, v, block_mask=mask))


@pytest.mark.slow
def test_within_torch_compile_with_sizes_that_become_symbols() -> None:
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend="eager")
    for batch, heads, len_q, len_kv in ((1, 2, 20, 36), (2, 3, 24, 40), (3, 4, 17, 33)):
        q, k, v = (torch.randn(batch, heads, length, 16).to(torch.bfloat16) for length in (len_q, len_kv, len_kv))
        mask = flex.create_block_mask(MASKS["by-entry"], batch, heads, len_q, len_kv, "cpu", 16)
        own = flashgen.block_mask(MASKS["by-entry"], batch=batch, heads=heads, len_q=len_q, len_kv=len_kv, device="cpu", block_size=16)
        with torch.no_grad():
            wanted = flex.flex_attention(q, k, v, block_mask=mask)
            if batch < 3:  # a mask comes once sizes of queries are symbols, and is one of numbers
                compiled(q, k, v)
                continue
            for each in (mask, own):
                assert torch.equal(compiled(q, k, v, block_mask=each), wanted)
