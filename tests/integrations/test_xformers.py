"""xformers' memory_efficient_attention: refusals, installing, and each bias beside what it materializes to, in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.codegen.errors import ArgumentError
from tests.support.dense_attention import require_right

xformers = pytest.importorskip("flashgen.integrations.xformers", reason="needs xformers", exc_type=ImportError)
import xformers.ops as theirs  # noqa: E402
from xformers.ops.fmha import attn_bias as biases  # noqa: E402

QUERIES, KEYS = [4, 1, 9, 6], [11, 7, 9, 13]  # of sequences; as many or more keys
EVEN = [5] * 4
TABLE = torch.tensor([[3, 0], [1, 6], [7, 2], [5, 4]], dtype=torch.int32)  # pages of 8 keys


def blocks(queries: list[int] = QUERIES, keys: list[int] = KEYS) -> Any:
    return biases.BlockDiagonalMask.from_seqlens(queries, keys)


def padded(kind: Any, *more: Any, queries: list[int] = EVEN) -> Any:
    make = kind.from_seqlens_local if more else kind.from_seqlens
    return make(queries, 16, KEYS, *more)


def paged(kind: Any, queries: list[int] = EVEN) -> Any:
    return kind.from_seqlens(queries, KEYS, TABLE, 8)


def gappy(kind: Any, starts: list[int], queries: list[int] = EVEN) -> Any:
    return kind.from_seqlens(queries, starts, KEYS)


def paged_gappy(kind: Any) -> Any:
    return gappy(kind._UNPAGED_TYPE, [3, 17, 32, 50, 64]).make_paged(TABLE, 8, 16, kind)


APART, SHARED = [1, 13, 20, 30, 48], [30, 2, 5, 0, 48]  # where keys of sequences begin
DENSE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": biases.LowerTriangularMask,
    "causal-bias": lambda: biases.LowerTriangularMaskWithTensorBias(torch.randn(1, 2, 20, 48)),
    "bottom-right": biases.LowerTriangularFromBottomRightMask,
    "bottom-right-local": lambda: biases.LowerTriangularFromBottomRightLocalAttentionMask(7),
    "local": lambda: biases.LocalAttentionFromBottomRightMask(3, 5),
    "tensor": lambda: torch.randn(1, 2, 20, 48).to(torch.bfloat16),
}
PACKED: dict[str, Callable[[], Any]] = {
    "blocks": blocks,
    "causal": lambda: blocks().make_causal(),
    "causal-equal": lambda: blocks(QUERIES, QUERIES).make_causal(),
    "causal-bottom-right": lambda: blocks().make_causal_from_bottomright(),
    "local": lambda: blocks().make_local_attention(3),
    "local-equal": lambda: blocks(QUERIES, QUERIES).make_local_attention(3),
    "local-bottom-right": lambda: blocks().make_local_attention_from_bottomright(3),
}
CACHED: dict[str, Callable[[], Any]] = {
    "padded": lambda: padded(biases.BlockDiagonalPaddedKeysMask),
    "padded-causal": lambda: padded(biases.BlockDiagonalCausalWithOffsetPaddedKeysMask),
    "padded-causal-uneven": lambda: padded(biases.BlockDiagonalCausalWithOffsetPaddedKeysMask, queries=QUERIES),
    "padded-local": lambda: padded(biases.BlockDiagonalLocalAttentionPaddedKeysMask, 3, 2),
    "padded-causal-local": lambda: padded(biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask, 3),
    "gappy-apart": lambda: gappy(biases.BlockDiagonalGappyKeysMask, APART),
    "gappy-shared": lambda: gappy(biases.BlockDiagonalGappyKeysMask, SHARED),
    "gappy-shared-causal-uneven": lambda: gappy(biases.BlockDiagonalCausalWithOffsetGappyKeysMask, SHARED, QUERIES),
    "gappy-apart-causal-uneven": lambda: gappy(biases.BlockDiagonalCausalWithOffsetGappyKeysMask, APART, QUERIES),
    "paged": lambda: paged(biases.PagedBlockDiagonalPaddedKeysMask),
    "paged-causal": lambda: paged(biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask),
    "paged-causal-uneven": lambda: paged(biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, QUERIES),
    "paged-gappy": lambda: paged_gappy(biases.PagedBlockDiagonalGappyKeysMask),
    "paged-gappy-causal": lambda: paged_gappy(biases.PagedBlockDiagonalCausalWithOffsetGappyKeysMask),
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.manual_seed(1)


def tensors(len_q: int = 20, len_kv: int = 48, heads: int = 2) -> Any:
    """[batch, heads, length, head_dim]"""
    return [torch.randn(1, heads, length, 16).to(torch.bfloat16) for length in (len_q, len_kv, len_kv)]


def with_bias(bias: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def of_scores(scores: torch.Tensor) -> torch.Tensor:
        if bias is None:
            return scores
        shape = tuple(scores.shape)
        return scores + (bias if isinstance(bias, torch.Tensor) else bias.materialize(shape)[..., : shape[-1]]).to(scores.dtype)

    return of_scores


def require_bias(bias: Any, gradients: bool) -> None:
    """Out and lse of the functions for inference; gradients of the other."""
    len_q = bias.q_seqinfo.seqstart_py[-1] if hasattr(bias, "q_seqinfo") else 20
    is_packed = type(bias).__name__.startswith("BlockDiagonal")
    len_kv = bias.k_seqinfo.seqstart_py[-1] if is_packed else 64 if hasattr(bias, "page_size") else 48

    def inference(*given: Any) -> Any:
        q, k, v = (tensor.transpose(1, 2) for tensor in given)
        out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
        assert torch.equal(xformers.memory_efficient_attention_forward(q, k, v, bias), out)
        return out.transpose(1, 2), lse

    def training(*given: Any) -> Any:
        return (xformers.memory_efficient_attention(*(tensor.transpose(1, 2) for tensor in given), attn_bias=bias).transpose(1, 2),)

    given = tensors(len_q, len_kv)
    require_right(inference, given, with_bias(bias))
    if gradients:
        require_right(training, given, with_bias(bias), gradients=True)


def test_a_call_without_a_bias() -> None:
    require_bias(None, gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_dense_biases(name: str) -> None:
    require_bias(DENSE[name](), gradients=name in ("causal", "causal-bias"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_packed_biases(name: str) -> None:
    require_bias(PACKED[name](), gradients=name == "causal")


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
def test_biases_of_padded_keys_and_pages(name: str) -> None:
    require_bias(CACHED[name](), gradients=name in ("padded-causal", "gappy-apart-causal-uneven"))


def test_every_class_of_bias_is_known_and_none_that_derives() -> None:
    from flashgen.integrations.xformers_biases import _ROUTES

    classes = {kind for kind in vars(biases).values() if isinstance(kind, type) and issubclass(kind, biases.AttentionBias)}
    assert classes - {biases.AttentionBias, biases.LowerTriangularMask, biases.LowerTriangularMaskWithTensorBias} == set(_ROUTES)
    used = {type(make()) for cases in (DENSE, PACKED, CACHED) for make in cases.values()}
    assert set(_ROUTES) <= used

    class Own(biases.LowerTriangularMask):  # type: ignore[misc]
        pass

    with pytest.raises(ArgumentError, match=r"attn_bias must be None, a tensor, .*; got a value of type .*Own"):
        xformers.memory_efficient_attention(*(tensor.transpose(1, 2) for tensor in tensors()), attn_bias=Own())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": theirs.fmha.flash.FwOp}, "op must be None: flashgen chooses its kernels"),
        ({"output_dtype": torch.float32}, "output_dtype must be None or query's dtype torch.bfloat16; got torch.float32$"),
        ({"p": None}, "^p must be of type float; got None"),
        ({"attn_bias": blocks([20], [48]).to("meta")}, r"^attn_bias.q_seqinfo.seqstart must be on query's device cpu; got meta"),
        ({"p": "0"}, "^p must be of type float; got '0'"),
        ({"attn_bias": paged(biases.PagedBlockDiagonalPaddedKeysMask), "p": None}, "^p must be of type float; got None"),
        ({"attn_bias": torch.zeros(1, 20, 48)}, r"attn_bias must have query's 4 dimensions, .*; got torch.float32 of \(1, 20, 48\)"),
        ({"attn_bias": torch.ones(1, 2, 20, 48, dtype=torch.bool)}, "attn_bias must have .* be added to scores; got torch.bool"),
        ({"attn_bias": torch.zeros(1, 2, 20, 48, dtype=torch.float16)}, "torch.float32 or query's torch.bfloat16 .*; got torch.float16"),
        ({"attn_bias": torch.zeros(1, 2, 20, 40)}, "^attn_bias must"),
        ({"scale": 0.0}, "^scale must"),
        ({"p": 1.5}, "^p must"),
        ({"attn_bias": blocks([30], [48])}, "attn_bias must have blocks within query's 20 tokens; got 30"),
        ({"attn_bias": blocks([20], [50])}, "attn_bias must have blocks within key's 48 tokens; got 50"),
        ({"attn_bias": paged(biases.PagedBlockDiagonalPaddedKeysMask), "p": 0.1}, "p must be 0 beside PagedBlock.*inference; got 0.1"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    given = [tensor.transpose(1, 2) for tensor in tensors(len_kv=64 if "p" in arguments and len(arguments) == 2 else 48)]
    with pytest.raises(ArgumentError, match=message):
        xformers.memory_efficient_attention(*given, **arguments)


def test_shapes_dtypes_and_gradients_of_pages_are_refused() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(len_kv=64))
    with pytest.raises(ArgumentError, match=r"^key must be of type Tensor; got None"):
        xformers.memory_efficient_attention(q, None, v)
    with pytest.raises(ArgumentError, match=r"query, key and value must all have 3, 4 or 5 dimensions; got \[2, 4, 4\]"):
        xformers.memory_efficient_attention(q[0, 0], k, v)
    with pytest.raises(ArgumentError, match=r"key and value must have query's groups and heads"):
        xformers.memory_efficient_attention(q[:, :, None], k[:, :, None, :1], v[:, :, None, :1])
    for heads in (1, 3, 4):
        with pytest.raises(ArgumentError, match=rf"key and value must have query's heads.*; got \[\(2,\), \({heads},\), \({heads},\)\]"):
            xformers.memory_efficient_attention(q, *(tensor[:, :, :1].expand(-1, -1, heads, -1) for tensor in (k, v)))
    groups, bias = (tensor[:, :, None, :1].expand(-1, -1, 2, 3, -1) for tensor in (q, k, v)), torch.zeros(1, 3, 2, 20, 64)
    with pytest.raises(ArgumentError, match=r"attn_bias must have query's groups and heads \(2, 3\), or 1 of either; got \(3, 2\)"):
        xformers.memory_efficient_attention(*groups, bias)
    with pytest.raises(ArgumentError, match=r"^query must be torch.bfloat16 or torch.float16; got torch.float32"):
        xformers.memory_efficient_attention(q.float(), k.float(), v.float())
    with pytest.raises(ArgumentError, match=r"attn_bias must not be a PagedBlockDiagonalPaddedKeysMask, .* gradients"):
        xformers.memory_efficient_attention(q.requires_grad_(), k, v, paged(biases.PagedBlockDiagonalPaddedKeysMask))
    more = k.repeat(1, 2, 1, 1)[:, :80]
    with pytest.raises(ArgumentError, match=r"key and value must have as many tokens .*, 4 times its padding of 16; got 80"):
        xformers.memory_efficient_attention(q.detach(), more, more, padded(biases.BlockDiagonalPaddedKeysMask))
    with pytest.raises(ArgumentError, match="query and key must have a batch of 1 beside BlockDiagonalMask"):
        xformers.memory_efficient_attention(q.expand(2, -1, -1, -1), k, v, blocks())


@pytest.mark.slow
def test_without_heads_and_in_groups() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(heads=4))
    wanted = xformers.memory_efficient_attention(q, k, v)
    assert torch.equal(xformers.memory_efficient_attention(q[:, :, 1], k[:, :, 1], v[:, :, 1]), wanted[:, :, 1])
    bias = torch.randn(1, 20, 48)
    assert torch.equal(
        xformers.memory_efficient_attention(q[:, :, 1], k[:, :, 1], v[:, :, 1], bias),
        xformers.memory_efficient_attention(q[:, :, 1:2], k[:, :, 1:2], v[:, :, 1:2], bias[None])[:, :, 0],
    )
    groups = [tensor.unflatten(2, (2, 2)) for tensor in (q, k, v)]
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(*groups)
    assert torch.equal(out, wanted.unflatten(2, (2, 2)))
    assert lse.shape == (1, 2, 2, 20)
    single = [tensor[:, :, :1].expand(-1, -1, 4, -1) for tensor in (k, v)]
    whole = xformers.memory_efficient_attention(q, *(tensor.contiguous() for tensor in single))
    assert torch.equal(xformers.memory_efficient_attention(q, *single), whole)
    one = [tensor[:, :, :2, None].expand(-1, -1, -1, 2, -1) for tensor in (k, v)]
    shared = xformers.memory_efficient_attention(groups[0], *one)
    apart = xformers.memory_efficient_attention(groups[0], *(tensor.contiguous() for tensor in one))
    assert torch.equal(shared, apart)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_biases_of_groups_may_be_the_same_along_either(sizes: tuple[int, int]) -> None:
    q, k, v = (tensor.transpose(1, 2).unflatten(2, (2, 2)) for tensor in tensors(heads=4))
    bias, into = torch.randn(1, *sizes, 20, 48, requires_grad=True), torch.randn(q.shape).to(q.dtype)
    out, wanted = (xformers.memory_efficient_attention(q, k, v, each) for each in (bias, bias.expand(-1, 2, 2, -1, -1).contiguous()))
    assert torch.equal(out, wanted)
    found, of_whole = (torch.autograd.grad(result, bias, into)[0] for result in (out, wanted))
    assert found.any()
    torch.testing.assert_close(found, of_whole, atol=1e-5, rtol=1e-4)


def test_each_head_that_is_expanded_has_its_own_gradient() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors())
    expanded = [tensor[:, :, :1].clone().requires_grad_().expand(-1, -1, 2, -1) for tensor in (k, v)]
    whole = [tensor.detach().contiguous().requires_grad_() for tensor in expanded]
    into = torch.randn(q.shape).to(q.dtype)
    found, wanted = (torch.autograd.grad(xformers.memory_efficient_attention(q, *given), given, into) for given in (expanded, whole))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(xformers.memory_efficient_attention(q, *expanded), xformers.memory_efficient_attention(q, *whole))


@pytest.mark.slow
def test_gradients_of_expanded_heads_reach_what_was_expanded() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(heads=4))
    leaves = q.unflatten(2, (2, 2)).clone().requires_grad_(), *(t[:, :, :2, None].clone().requires_grad_() for t in (k, v))
    into = torch.randn(1, 20, 2, 2, 16).to(torch.bfloat16)
    found = []
    for is_one in (True, False):
        expanded = [leaf.expand(-1, -1, -1, 2, -1) for leaf in leaves[1:]]
        given = expanded if is_one else [tensor.contiguous() for tensor in expanded]
        found.append(torch.autograd.grad(xformers.memory_efficient_attention(leaves[0], *given), leaves, into))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_false_is_no_dropout() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors())
    wanted = xformers.memory_efficient_attention(q, k, v)
    assert torch.equal(xformers.memory_efficient_attention(q, k, v, p=False), wanted)
    assert torch.equal(xformers.memory_efficient_attention_forward_requires_grad(q, k, v, p=False)[0], wanted)


@pytest.mark.slow
def test_dropout_drops_and_repeats() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(48, 48))
    for bias in (None, blocks([20, 28], [20, 28])):
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            found.append(xformers.memory_efficient_attention(q, k, v, bias, 0.5))
        assert torch.equal(*found)
        assert not torch.equal(found[0], xformers.memory_efficient_attention(q, k, v, bias))


def test_install_and_uninstall() -> None:
    names = [name for name in xformers.__all__ if name.startswith("memory")]
    modules = (theirs, theirs.fmha)
    before = {(module, name): getattr(module, name, None) for module in modules for name in names}
    for _ in range(2):
        xformers.install()
    for (module, name), function in before.items():
        assert function is None or getattr(module, name) is getattr(xformers, name)
    xformers.uninstall()
    assert before == {(module, name): getattr(module, name, None) for module in modules for name in names}
    xformers.uninstall()


def test_what_others_have_installed_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own, name = theirs.memory_efficient_attention, "memory_efficient_attention"
    monkeypatch.setattr(theirs, name, own)  # which brings it back in the end
    xformers.install()
    monkeypatch.setattr(theirs, name, tensors)
    xformers.uninstall()
    assert theirs.memory_efficient_attention is tensors
    assert theirs.fmha.memory_efficient_attention is own


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "causal", "blocks"])
def test_within_torch_compile(name: str) -> None:
    bias = PACKED["causal"]() if name == "blocks" else DENSE[name]()
    len_q, len_kv = (20, 40) if name == "blocks" else (20, 48)
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(len_q, len_kv))
    compiled: Any = torch.compile(xformers.memory_efficient_attention, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v, bias), xformers.memory_efficient_attention(q, k, v, bias))
