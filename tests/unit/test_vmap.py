"""`flashgen.attention` with modifiers under torch.vmap, by plain PyTorch in place of kernels: each mapped call is what it is by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.errors import ArgumentError
from flashgen.launch.tensors import Tensors
from tests.support.plain_kernels import plain_in_place_of_kernels

MAPPED, BATCH, LENGTH, HEADS = 3, 2, 16, 4


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> list[Tensors]:
    return plain_in_place_of_kernels(monkeypatch)


def drawn(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes)))


Q = drawn(MAPPED, BATCH, LENGTH, HEADS, 16).bfloat16()
SEEN = drawn(BATCH, 1, LENGTH, LENGTH) > -1
OPTIONS: list[dict[str, Any]] = [
    {"alibi_slopes": drawn(BATCH, HEADS).abs()},
    {"alibi_slopes": drawn(HEADS).abs(), "sinks": drawn(HEADS)},
    {"prefix_len": torch.tensor([5, 0], dtype=torch.int32), "causal": True, "window": (3, 3)},
    {"document_ids": (torch.arange(LENGTH) > torch.tensor([[7], [2]])).int()},
    {"key_padding_mask": torch.arange(LENGTH) < torch.tensor([[16], [9]])},
    {"mask": SEEN, "bias": drawn(BATCH, HEADS, LENGTH, LENGTH).bfloat16(), "softcap": 2.0},
    {"mask": SEEN.expand(BATCH, HEADS, LENGTH, LENGTH), "bias": drawn(1, LENGTH)},
    {"bias": drawn(BATCH, 1, 1, LENGTH).expand(BATCH, HEADS, LENGTH, LENGTH).transpose(2, 3)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_batch_may_have_tensors_of_its_entries(options: dict[str, Any], given: list[Tensors]) -> None:
    def loss(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashgen.attention(q, q, q, **options)
        return out.float().square().sum()

    both = torch.vmap(lambda q: flashgen.attention(q, q, q, return_lse=True, **options))(Q)
    gradients = torch.vmap(torch.func.grad(loss))(Q)
    assert [one.workload.batch for one in given] == [MAPPED * BATCH] * 3
    for i, q in enumerate(Q):
        for one, wanted in zip(both, flashgen.attention(q, q, q, return_lse=True, **options), strict=True):
            assert torch.equal(one[i], wanted)
        assert torch.equal(gradients[i], torch.func.grad(loss)(q))


def test_what_all_entries_share_is_not_copied(given: list[Tensors]) -> None:
    shared = SEEN[:1].expand(BATCH, HEADS, LENGTH, LENGTH)
    torch.vmap(lambda q: flashgen.attention(q, q, q, mask=shared))(Q)
    assert given[0]["mask"].data_ptr() == shared.data_ptr()
    assert given[0]["mask"].stride()[0] == 0


def test_vmaps_of_vmaps_repeat_twice() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashgen.attention(q, q, q, **OPTIONS[0])
        return out

    assert torch.equal(torch.vmap(torch.vmap(call))(Q[None])[0], torch.vmap(call)(Q))


@pytest.mark.parametrize("operator", ["attention_output", "attention_forward", "attention"])
def test_operators_are_mapped_too(operator: str) -> None:
    more, slopes = (None,) * (operator == "attention"), OPTIONS[0]["alibi_slopes"]

    def call(q: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        modified = ("alibi", [], [], [*tensors]) if tensors else ()
        found: Any = getattr(torch.ops.flashgen, operator)(q, q, q, False, None, "bshd", *more, *modified)
        return found if isinstance(found, torch.Tensor) else found[0]

    for tensors in ((), (slopes,)):
        found = torch.vmap(call, (0, *(None for _ in tensors)))(Q, *tensors)
        assert torch.equal(found, torch.stack([call(q, *tensors) for q in Q]))
    with pytest.raises(ArgumentError, match=r"^tensors of modifiers must not be mapped by torch\.vmap"):
        torch.vmap(call)(Q, slopes.expand(MAPPED, BATCH, HEADS))


def test_errors_have_the_sizes_of_one_call() -> None:
    slopes = drawn(MAPPED * BATCH, HEADS)
    with pytest.raises(ArgumentError, match=r"^alibi_slopes must have the shape \(batch, heads_q\) = \(2, 4\), .*; got \(6, 4\)$"):
        torch.vmap(lambda q: flashgen.attention(q, q, q, alibi_slopes=slopes))(Q)
