"""Masks, biases, prefixes and traced functions of calls on KV caches, on machines without a GPU: what they mean, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen
from flashgen.codegen.errors import ArgumentError
from flashgen.launch.tensors import Tensors
from flashgen.operators.append import append_to_cache
from tests.unit.test_kvcache import KEYS, LENGTHS, added, ints, on_cpu, paged, tensors

__all__ = ["on_cpu"]  # a fixture

BATCH, HEADS, LEN_Q = 3, 4, 2
PADDING = ints(3, 0, 2)


def seen(*sizes: int, seed: int = 7) -> torch.Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < 0.6


def numbers(*sizes: int, dtype: torch.dtype = torch.bfloat16, seed: int = 8) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


RELATIVE, LENGTHS_IN_MEMORY = numbers(HEADS, KEYS, dtype=torch.float32), ints(*LENGTHS)


def relative(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score + RELATIVE[head, key] + query


def others_alone(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key + query + head + batch) % 3 != 0


def until(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """As a causal mask is, were all sequences of that length: no window of the call."""
    return key <= query + 9


def by_length(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key + 4 < LENGTHS_IN_MEMORY[batch]


MODIFIERS: dict[str, dict[str, Any]] = {
    "mask": {"mask": seen(BATCH, HEADS, LEN_Q, KEYS)},
    "mask of all heads": {"mask": seen(BATCH, 1, LEN_Q, KEYS), "causal": True},
    "mask of keys": {"mask": seen(KEYS)},
    "mask, transposed": {"mask": seen(BATCH, HEADS, KEYS, LEN_Q).mT, "window": (9, 1)},
    "tree mask": {"tree_mask": seen(LEN_Q, LEN_Q, seed=9)},
    "tree mask of each head": {"tree_mask": seen(BATCH, HEADS, LEN_Q, LEN_Q), "mask": seen(LEN_Q, KEYS)},
    "bias": {"bias": numbers(BATCH, HEADS, LEN_Q, KEYS), "softcap": 3.0},
    "fp32 bias": {"bias": numbers(HEADS, 1, KEYS, dtype=torch.float32)},
    "prefix": {"prefix_len": ints(5, 3, -4), "causal": True},
    "prefix, window": {"prefix_len": ints(2, 30, 9), "window": (4, 0)},
    "score_mod": {"score_mod": relative},
    "mask_mod": {"mask_mod": others_alone, "causal": True},
    "mask_mod of a window's form": {"mask_mod": until},
    "both": {"score_mod": relative, "mask_mod": by_length, "sinks": numbers(HEADS, dtype=torch.float32)},
}


def of_sequence(options: dict[str, Any], number: int, keys: int) -> dict[str, Any]:
    """What a call of one sequence with so many keys is given: what a call on a cache says of it."""
    found = dict(options)
    for name in ("mask", "bias"):
        if name in options:
            whole = options[name].expand(BATCH, HEADS, LEN_Q, KEYS)
            found[name] = whole[number : number + 1, ..., :keys].clone()
    if "tree_mask" in options:
        last = min(LEN_Q, keys)
        mask = found.get("mask", torch.ones(1, HEADS, LEN_Q, keys, dtype=torch.bool)).clone()
        mask[..., keys - last :] &= found.pop("tree_mask").expand(BATCH, HEADS, LEN_Q, LEN_Q)[number : number + 1, ..., LEN_Q - last :]
        found["mask"] = mask
    if "prefix_len" in options:
        found["prefix_len"] = options["prefix_len"][number : number + 1]
    if "score_mod" in options:
        found["score_mod"] = lambda s, b, h, q, k: options["score_mod"](s, b + number, h, q, k)
    if "mask_mod" in options:
        found["mask_mod"] = lambda b, h, q, k: options["mask_mod"](b + number, h, q, k)
    return found


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("form", [tensors, paged])
@pytest.mark.parametrize("options", MODIFIERS.values(), ids=MODIFIERS)
def test_each_sequence_is_a_call_of_its_own(options: dict[str, Any], form: Callable[[], dict[str, Any]]) -> None:
    """Queries and keys are counted from 0 in it, behind its padding; a tree mask is aligned to its end."""
    lengths = (17, 1, 24)
    given, dense = {**form(), "cache_seqlens": ints(*lengths), "cache_leftpad": PADDING}, tensors()
    out, lse = flashgen.attention_with_kvcache(**given, **options, return_lse=True)
    for number, (begin, end) in enumerate(zip(PADDING.tolist(), lengths, strict=True)):
        k, v = (dense[name][number : number + 1, begin:end] for name in ("k_cache", "v_cache"))
        one = flashgen.attention(dense["q"][number : number + 1], k, v, **of_sequence(options, number, end - begin), return_lse=True)
        torch.testing.assert_close(out[number], one[0][0])
        torch.testing.assert_close(lse[number], one[1][0])


def test_operands_are_views_of_what_is_given(on_cpu: list[Tensors]) -> None:
    """And functions have a mask as wide as there is room for, but no ALiBi and no window, which go by lengths."""
    mask, tree = seen(BATCH, 1, KEYS, LEN_Q).mT, seen(LEN_Q, LEN_Q)
    flashgen.attention_with_kvcache(**paged(), mask=mask, tree_mask=tree, prefix_len=ints(1, 2, 3))
    (found,) = on_cpu
    assert found.problem.modifiers == ("boolean_mask", "prefix_len", "tree_mask")
    assert found["mask"].data_ptr() == mask.data_ptr()
    assert found["mask"].stride() == (mask.stride(0), 0, 1, LEN_Q)
    assert found["tree_mask"].stride() == (0, 0, LEN_Q, 1)
    slopes, whole = torch.rand(HEADS), seen(LEN_Q, KEYS)
    no_alibi: dict[str, Any] = {"score_mod": lambda s, b, h, q, k: s - slopes[h] * (q + KEYS - LEN_Q - k).abs()}
    flashgen.attention_with_kvcache(**paged(), **no_alibi, mask_mod=lambda b, h, q, k: whole[q, k])
    assert [name.split("(")[0] for name in on_cpu[1].problem.modifiers] == ["boolean_mask", "traced"]
    assert on_cpu[1]["mask"].data_ptr() == whole.data_ptr()
    del on_cpu[1]
    flashgen.attention_with_kvcache(**paged(), mask_mod=until)
    assert "window" not in on_cpu[1].problem.modifiers
    assert on_cpu[1].workload.window_right == on_cpu[0].workload.window_right, "where queries are only the device knows"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", ["mask", "tree mask", "prefix", "both"])
def test_new_keys_come_first(kind: str) -> None:
    """And so what is said of keys is said of new ones, too."""
    new, cache, options = added(), tensors(), MODIFIERS[kind]
    out = flashgen.attention_with_kvcache(**{**paged(), **new}, **options)
    of_cache, of_new = [cache[name] for name in ("k_cache", "v_cache")], [new[name] for name in ("k", "v")]
    rotary = new["rotary_cos"], new["rotary_sin"], None, None, True, options.get("causal", False)
    lengths, q = append_to_cache(*of_cache, *of_new, new["cache_seqlens"], None, cache["q"], *rotary)
    after = {**cache, "q": q, "cache_seqlens": lengths}
    torch.testing.assert_close(out, flashgen.attention_with_kvcache(**after, **options))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mask": True}, r"^mask must be of type Tensor; got True"),
    ({"mask": seen(LEN_Q, KEYS).float()}, r"^mask must be torch\.bool; got torch\.float32"),
    ({"mask": seen(LEN_Q, LEN_Q)}, r"^mask must have the shape \(batch, heads_q, len_q, len_kv\) = \(3, 4, 2, 24\), or .*; got \(2, 2\)"),
    ({"mask": seen(LEN_Q, KEYS).to("meta")}, r"^mask must be on q's device cpu; got meta"),
    ({"mask": seen(LEN_Q, KEYS).to_sparse()}, r"^mask must be one dense tensor"),
    ({"tree_mask": seen(LEN_Q, KEYS)}, r"^tree_mask must have the shape \(batch, heads_q, len_q, len_q\) = \(3, 4, 2, 2\), or .*; got "),
    ({"tree_mask": [[True]]}, r"^tree_mask must be of type Tensor; got "),
    ({"tree_mask": seen(LEN_Q, LEN_Q).int()}, r"^tree_mask must be torch\.bool; got torch\.int32"),
    ({"bias": numbers(LEN_Q, KEYS, dtype=torch.float16)}, r"^bias must be torch\.bfloat16; got torch\.float16"),
    ({"bias": numbers(LEN_Q, 7)}, r"^bias must have the shape .*; got \(2, 7\)"),
    ({"bias": 1.0}, r"^bias must be of type Tensor; got 1\.0"),
    ({"prefix_len": ints(1, 2)}, r"^prefix_len must have the shape \(batch\) = \(3,\).*; got \(2,\)"),
    ({"prefix_len": ints(1, 2, 3).long()}, r"^prefix_len must be torch\.int32; got torch\.int64"),
    ({"prefix_len": 3}, r"^prefix_len must be of type Tensor; got 3"),
    ({"score_mod": 1}, r"^score_mod must be a function of \(score, batch, head, query, key\); got 1"),
    ({"mask_mod": lambda b, h, q: q > 0}, r"^mask_mod "),
    (
        {"score_mod": lambda s, b, h, q, k: s * k, "alibi_slopes": torch.ones(4)},
        r"^score_mod must only add to the score beside alibi_slopes",
    ),
    ({"block_mask": True}, r"^block_mask must be left out of flashgen\.attention_with_kvcache: .*use mask_mod"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
@pytest.mark.parametrize("more", [{}, added()])
def test_bad_arguments_are_named(options: dict[str, Any], message: str, more: dict[str, Any]) -> None:
    given: dict[str, Any] = {**paged(), **more}
    before = given["k_cache"].clone()
    with pytest.raises(ArgumentError, match=message):
        flashgen.attention_with_kvcache(**given, **options)
    assert given["k_cache"].equal(before), "nothing is appended"


def test_a_gradient_is_refused() -> None:
    table = torch.ones(HEADS, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"^bias must not require grad, as attention_with_kvcache has no gradients"):
        flashgen.attention_with_kvcache(**paged(), bias=numbers(LEN_Q, KEYS).requires_grad_())
    captures: dict[str, Any] = {"score_mod": lambda s, b, h, q, k: s + table[h]}
    with pytest.raises(ArgumentError, match=r"^what score_mod and mask_mod capture must not require grad"):
        flashgen.attention_with_kvcache(**paged(), **captures)
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"^q must be on a CUDA device"):
        flashgen.attention_with_kvcache(**paged(), **captures)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", ["mask", "tree", "functions"])
def test_a_compiled_call_takes_other_sizes(kind: str) -> None:
    torch.compiler.reset()
    graphs = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    def options(len_q: int) -> dict[str, Any]:
        kinds: dict[str, dict[str, Any]] = {
            "mask": {"mask": seen(BATCH, HEADS, len_q, KEYS), "prefix_len": ints(1, 0, 5), "causal": True},
            "tree": {"tree_mask": seen(len_q, len_q), "bias": numbers(len_q, KEYS)},
            "functions": {"score_mod": relative, "mask_mod": by_length},
        }
        return kinds[kind]

    call = torch.compile(flashgen.attention_with_kvcache, fullgraph=True, backend=count, dynamic=True)
    for len_q in (5, 6, 7):
        given: dict[str, Any] = {**paged(), **options(len_q), "q": tensors(len_q)["q"]}
        torch.testing.assert_close(call(**given), flashgen.attention_with_kvcache(**given))
    assert len(graphs) == 1
