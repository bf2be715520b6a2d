"""xformers' biases with blocks on a GPU that is made up: what kernels get without views of tensors, and that a changed bias is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen import kvcache, varlen
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.operands import Call
from flashgen.launch import gpu, packed_arguments
from flashgen.launch.private_names import knows_tensors
from flashgen.operators import plans
from tools.call_overhead import ON

xformers = pytest.importorskip("flashgen.integrations.xformers", reason="needs xformers", exc_type=ImportError)
from xformers.ops.fmha import attn_bias as biases  # noqa: E402

of_biases: Any = pytest.importorskip("flashgen.integrations.xformers_biases", exc_type=ImportError)

GPU = Gpu(0, find_device("h200"), "uuid", "580.1")
HEADS, HEAD_DIM = 2, 16
Launches = list[tuple[Call, tuple[int, ...]]]


class Bound:
    """What a call is bound to: it notes the call, and the addresses of all but outputs."""

    numbers = None

    def __init__(self, call: Call, launches: Launches) -> None:
        self._call, self._launches = call, launches

    def enqueue(self, _: None, stream: int, q: int, k: int, v: int, out: int, lse: int, *others: int) -> None:
        self._launches.append((self._call, (q, k, v, *others)))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found: Launches = []
    patches: tuple[tuple[Any, str, Any], ...] = (
        (gpu, "gpu", lambda index: GPU),
        (gpu, "bind_chosen", lambda call, on: Bound(call, found)),
        (gpu, "require_context", lambda index: None),
        (gpu, "current_device", lambda: 0),
        (gpu, "current_stream", lambda index: 77),
        (gpu, "empty_strided", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)),
        (plans, "_LOCAL", plans._OfThread()),
        (torch.Tensor, "device", ON),
        (torch.Tensor, "is_cuda", True),
    )
    for owner, name, value in patches:
        monkeypatch.setattr(owner, name, value)
    return found


def padded(kind: Any, *more: Any, queries: int = 5) -> Any:
    make = kind.from_seqlens_local if more else kind.from_seqlens
    return make([queries] * 4, 16, [11, 7, 9, 13], *more)


def paged(kind: Any, queries: int = 5) -> Any:
    table = torch.tensor([[3, 0], [1, 6], [7, 2], [5, 4]], dtype=torch.int32)
    if "Gappy" in kind.__name__:
        return kind._UNPAGED_TYPE.from_seqlens([5] * 4, [3, 17, 32, 50, 64], [11, 7, 9, 13]).make_paged(table, 8, 16, kind)
    return kind.from_seqlens([queries] * 4, [11, 7, 9, 13], table, 8)


def blocks() -> Any:
    return biases.BlockDiagonalMask.from_seqlens([5] * 4, [16] * 4)


GAPPY = paged(biases.PagedBlockDiagonalGappyKeysMask)  # xformers makes it on the device of its tensors
BIASES: dict[str, Callable[[], Any]] = {
    "blocks": blocks,
    "blocks, causal": lambda: blocks().make_causal_from_bottomright(),
    "blocks, local": lambda: blocks().make_local_attention_from_bottomright(3),
    "padded": lambda: padded(biases.BlockDiagonalPaddedKeysMask),
    "padded, causal": lambda: padded(biases.BlockDiagonalCausalWithOffsetPaddedKeysMask),
    "padded, one query": lambda: padded(biases.BlockDiagonalCausalWithOffsetPaddedKeysMask, queries=1),
    "padded, local": lambda: padded(biases.BlockDiagonalLocalAttentionPaddedKeysMask, 3, 2),
    "paged": lambda: paged(biases.PagedBlockDiagonalPaddedKeysMask),
    "paged, causal": lambda: paged(biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask),
    "paged, one query": lambda: paged(biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, queries=1),
    "paged, gappy": lambda: GAPPY,
}


def tensors(bias: Any, gap: int = 0) -> list[torch.Tensor]:
    rows = bias.q_seqinfo.seqstart_py[-1], 64, 64
    return [torch.zeros(1, n, HEADS, HEAD_DIM + gap, dtype=torch.bfloat16)[..., :HEAD_DIM] for n in rows]


def called(launches: Launches, bias: Any, given: list[torch.Tensor]) -> tuple[Any, ...]:
    """What was launched, but for tensors that the call has made, and the shapes of out and lse."""
    launches.clear()
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(*given, bias)
    ((call, addresses),) = launches
    return call, addresses, out.shape, out.stride(), lse.shape


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("gap", [0, 8])
def test_kernels_get_what_they_get_of_views(name: str, gap: int, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = BIASES[name]()
    given = tensors(bias, gap)
    without = [called(launches, bias, given) for _ in range(3)]  # planned, known, and known by one look

    def views(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        out, lse = attention_varlen(q[0], k[0], v[0], **keywords)
        return out[None], lse[None]

    attention_varlen = of_biases.attention_varlen
    monkeypatch.setattr(of_biases, "cached_run_at_hand", lambda *_: None)
    monkeypatch.setattr(of_biases, "attention_varlen", views)
    monkeypatch.setattr(plans, "_LOCAL", plans._OfThread())
    assert without == [called(launches, bias, given)] * 3


@pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")
@pytest.mark.parametrize("name", [name for name in BIASES if "blocks" in name or "one query" in name])  # prompts go by views
def test_a_known_call_makes_no_views(name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = BIASES[name]()
    given = tensors(bias)
    for _ in range(3):
        called(launches, bias, given)
    for method in ("view", "unsqueeze", "squeeze", "__getitem__", "transpose"):
        monkeypatch.setattr(torch.Tensor, method, None)
    assert xformers.memory_efficient_attention(*given, bias).ndim == 4


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "longest of blocks": ("blocks", lambda bias: setattr(bias.k_seqinfo, "max_seqlen", 15)),
    "boundaries of blocks": ("blocks", lambda bias: setattr(bias.k_seqinfo, "seqstart", bias.k_seqinfo.seqstart.clone())),
    "a window": ("blocks, local", lambda bias: setattr(bias, "_window_size", 4)),
    "lengths": ("padded", lambda bias: setattr(bias.k_seqinfo, "seqlen", bias.k_seqinfo.seqlen.clone())),
    "an end of a window": ("padded, local", lambda bias: setattr(bias, "window_left", 4)),
    "a table": ("paged", lambda bias: setattr(bias, "block_tables", bias.block_tables.clone())),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_bias_is_seen(name: str, launches: Launches) -> None:
    of, change = CHANGES[name]
    bias = BIASES[of]()
    given = tensors(bias)
    before = [called(launches, bias, given) for _ in range(3)]
    kept = [bias.k_seqinfo.seqstart, bias.k_seqinfo.__dict__.get("seqlen"), getattr(bias, "block_tables", None)]
    change(bias)
    after = [called(launches, bias, given) for _ in range(3)]
    assert before == [before[0]] * 3
    assert after == [after[0]] * 3
    assert before[0] != after[0]
    del kept


def test_changed_sizes_are_seen(launches: Launches) -> None:
    bias = BIASES["padded"]()
    given = tensors(bias)
    for _ in range(3):
        called(launches, bias, given)
    bias.k_seqinfo.padding = 8  # of keys that are 4 times 16
    with pytest.raises(ArgumentError, match=r"key and value must have as many tokens as attn_bias says, 4 times its padding of 8; got 64"):
        called(launches, bias, given)
    bias.k_seqinfo.padding = 16
    bias.q_seqinfo.max_seqlen = 4  # of 5 queries each: no longer even
    assert called(launches, bias, given)[0].problem.sequences is not None
    bias = BIASES["blocks"]()
    given = tensors(bias)
    for _ in range(3):
        called(launches, bias, given)
    bias.q_seqinfo.seqstart_py[-1] = 21
    with pytest.raises(ArgumentError, match=r"attn_bias must have blocks within query's 20 tokens; got 21"):
        called(launches, bias, given)


@pytest.mark.parametrize("name", ["blocks", "padded", "paged"])
def test_where_values_are_checked_operators_get_views(name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    bias = BIASES[name]()
    is_packed, asked = name == "blocks", []

    def forward(q: torch.Tensor, *rest: Any) -> Any:
        asked.append(tuple(q.shape))
        return torch.zeros(q.shape, dtype=q.dtype), torch.zeros((HEADS, 20) if is_packed else (4, HEADS, 5))

    monkeypatch.setattr(packed_arguments, "values_are_checked", True)
    monkeypatch.setattr(*(varlen, "attention_varlen_forward") if is_packed else (kvcache, "attention_cached_forward"), forward)
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(*tensors(bias), bias)
    assert (out.shape, lse.shape) == ((1, 20, HEADS, HEAD_DIM), (1, HEADS, 20))
    assert asked == [(20, HEADS, HEAD_DIM) if is_packed else (4, 5, HEADS, HEAD_DIM)]
    assert not launches
