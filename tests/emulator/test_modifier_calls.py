"""`flashgen.attention` with modifiers, on CPU tensors: results and gradients, PyTorch's ways to ask for them, refusals.
Windows: test_window_calls.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import flashgen
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.launch.asked import asked
from tests.support.plan import few_of


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()


def stacked(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(seed))


def slopes(*sizes: int) -> torch.Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(9))


def cut_short(*sizes: int) -> torch.Tensor:
    """A tensor whose storage holds but half of it."""
    tensor = stacked(*sizes)
    tensor.untyped_storage().resize_(tensor.numel())
    return tensor


OF_KEYS = r"key_padding_mask must have the shape \(batch, len_kv\) = \(1, 16\), or one that broadcasts to it"


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    chunk: int | None = None,
    prefix_len: torch.Tensor | None = None,
) -> torch.Tensor:
    """In the tensors' own type, which autograd differentiates."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * q.shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (torch.arange(q.shape[1]) + k.shape[1] - q.shape[1])[:, None] - torch.arange(k.shape[1])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().expand(q.shape[0], -1)[:, :, None, None] * distance.abs()
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance > window[0]) | (distance < -window[1])
    if chunk is not None:
        keys = torch.arange(k.shape[1])
        hidden = hidden | ((distance + keys) // chunk != keys // chunk)
    if prefix_len is not None:
        hidden = hidden & (torch.arange(k.shape[1]) >= prefix_len[:, None, None, None])
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if mask is not None:
        hidden = hidden | ~mask
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    p = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(q.shape[2] // k.shape[2], 2))


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.detach().double() - wanted.detach()).abs().max()) <= 2**-6 * max(1.0, float(wanted.detach().abs().max()))


SLOW = pytest.mark.slow
PREFIX = torch.tensor([17, 3], dtype=torch.int32)
# All that a bias may be: of both types, the same along some axes, and with any strides.
BIASES = {
    "full": stacked(2, 4, 33, 40),
    "fp32": stacked(2, 4, 33, 40).float(),
    "of-batch": stacked(2, 1, 33, 40),
    "of-heads": stacked(4, 33, 40),
    "of-keys": stacked(2, 4, 1, 40).float(),
    "of-queries": stacked(33, 1),
    "one": stacked(1),
    "turned": stacked(40, 33, 4, 2).permute(3, 2, 1, 0),
    "every-other": stacked(2, 4, 33, 80).float()[..., ::2],
    "expanded": stacked(4, 1, 1).expand(4, 33, 40),
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"softcap": 2.0, "alibi_slopes": slopes(4)}, marks=SLOW),
        {"sinks": torch.tensor([3.0, -2.0, 5.0, 0.0]), "causal": True},
        {"bias": stacked(4, 33, 40), "mask": stacked(2, 1, 1, 40) > -1},
        {"chunk": 9, "causal": True},
        {"prefix_len": PREFIX, "causal": True, "mask": stacked(2, 1, 1, 40) > -1},
        pytest.param({"prefix_len": PREFIX, "window": (5, 0), "sinks": slopes(4)}, marks=SLOW),
        pytest.param({"prefix_len": PREFIX, "chunk": 9, "causal": True, "softcap": 2.0}, marks=SLOW),
        pytest.param({"prefix_len": PREFIX}, marks=SLOW),
        pytest.param({"chunk": 9}, marks=SLOW),
        pytest.param({"chunk": 9, "window": (5, 2), "softcap": 2.0, "sinks": slopes(4)}, marks=SLOW),
        *(pytest.param({"bias": bias}, marks=SLOW, id=f"bias-{name}") for name, bias in BIASES.items()),
        *(pytest.param({"mask": bias > -1, "causal": True}, marks=SLOW, id=f"mask-{name}") for name, bias in BIASES.items()),
        pytest.param({"bias": stacked(33, 40), "sinks": slopes(4), "window": (9, 3), "alibi_slopes": slopes(4)}, marks=SLOW),
        pytest.param({"sinks": torch.tensor([3.0, -2.0, 5.0, 0.0], dtype=torch.bfloat16), "window": (9, 3)}, marks=SLOW),
        pytest.param({"softcap": 30.0, "causal": True}, marks=SLOW),
        {"softcap": 1.5, "bias": stacked(4, 33, 40)},
        pytest.param({"softcap": 1.5, "bias": stacked(4, 1, 40).float(), "sinks": slopes(4), "mask": stacked(33, 40) > -1}, marks=SLOW),
        pytest.param({"alibi_slopes": slopes(2, 4), "causal": True}, marks=SLOW),
        pytest.param({"alibi_slopes": slopes(1, 4), "window": (9, 3)}, marks=SLOW),
        pytest.param({"alibi_slopes": slopes(2, 4), "window": (9, 3), "softcap": 1.5}, marks=SLOW),
    ],
    ids=lambda options: "-".join(options),
)
def test_results_and_gradients_are_those_of_float64(options: dict[str, Any]) -> None:
    leaves = [t.requires_grad_() for t in (stacked(2, 33, 4, 16), stacked(2, 40, 2, 16, seed=1), stacked(2, 40, 2, 16, seed=2))]
    learnable = [name for name in ("sinks", "bias") if name in options]
    options = {**options, **{name: options[name].detach().requires_grad_() for name in learnable}}
    leaves += [options[name] for name in learnable]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    of_doubles: dict[str, Any] = {**options, **{name: double for name, double in zip(learnable, doubles[3:], strict=True)}}  # noqa: C416
    out, wanted = flashgen.attention(*leaves[:3], **options), exact(doubles[0], doubles[1], doubles[2], **of_doubles)
    assert close(out, wanted)
    into = torch.randn_like(out)
    found, right = torch.autograd.grad(out, leaves, into), torch.autograd.grad(wanted, doubles, into.double())
    assert [close(*both) for both in zip(found, right, strict=True)] == [True] * len(leaves)
    assert [gradient.dtype for gradient in found] == [leaf.dtype for leaf in leaves]


@pytest.mark.slow
def test_chunks_in_pytorchs_ways() -> None:
    q = stacked(2, 33, 4, 16)

    def call(q: torch.Tensor, chunk: int) -> torch.Tensor:
        return flashgen.attention(q, q, q, causal=True, chunk=chunk)

    for dynamic in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert all(torch.equal(compiled(q, chunk), call(q, chunk)) for chunk in (7, 20))
    gradient = gradient_of(q, causal=True, chunk=7)
    assert torch.equal(torch.func.grad(lambda q: call(q, 7).float().sum())(q), gradient)
    assert torch.equal(torch.vmap(lambda q: call(q, 7))(q[:, None])[:, 0], call(q, 7))
    assert torch.equal(flashgen.attention(q, q, q, causal=True, chunk=33), flashgen.attention(q, q, q, causal=True))
    torch.library.opcheck(torch.ops.flashgen.attention_forward.default, (q, q, q, True, None, "bshd", "chunk", [7]))
    leaf = q.clone().requires_grad_()
    torch.library.opcheck(torch.ops.flashgen.attention.default, (leaf, q, q, True, None, "bshd", None, "chunk,window", [7, 5, 0]))


def test_queries_before_the_first_key_are_in_no_chunk() -> None:
    q, k = stacked(1, 20, 2, 16), stacked(1, 12, 2, 16, seed=1)
    out, lse = flashgen.attention(q, k, k, chunk=100, return_lse=True)
    assert not out[:, :8].any()
    assert (lse[:, :, :8] == -torch.inf).all()
    assert torch.isfinite(lse[:, :, 8:]).all()


@pytest.mark.slow
def test_prefixes_in_pytorchs_ways() -> None:
    q, lengths = stacked(2, 33, 4, 16), PREFIX.clone()

    def call(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, q, q, causal=True, prefix_len=lengths)

    plain, gradient = call(q, lengths), gradient_of(q, causal=True, prefix_len=lengths)
    compiled, leaf = torch.compile(call, fullgraph=True, backend="aot_eager"), q.clone().requires_grad_()
    found = compiled(leaf, lengths)
    found.float().sum().backward()
    assert torch.equal(found, plain)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient)
    assert torch.equal(torch.func.grad(lambda q: call(q, lengths).float().sum())(q), gradient)
    assert torch.equal(torch.vmap(lambda q: call(q, lengths))(q[None])[0], plain)
    modified: tuple[Any, ...] = ("prefix_len", [], [], [lengths])
    torch.library.opcheck(torch.ops.flashgen.attention_forward.default, (q, q, q, True, None, "bshd", *modified))
    torch.library.opcheck(torch.ops.flashgen.attention.default, (leaf.detach().requires_grad_(), q, q, True, None, "bshd", None, *modified))
    lengths.fill_(1)
    assert torch.equal(call(q, lengths), call(q, torch.ones_like(PREFIX))), "lengths are read in each call"


@pytest.mark.slow
def test_a_prefix_opens_masks_alone() -> None:
    q = stacked(2, 16, 2, 16)
    lengths = torch.tensor([-3, 100], dtype=torch.int32)
    causal, full = flashgen.attention(q, q, q, causal=True), flashgen.attention(q, q, q)
    found = flashgen.attention(q, q, q, causal=True, prefix_len=lengths)
    assert torch.equal(found[0], causal[0])
    assert close(found[1], full[1])
    assert close(flashgen.attention(q, q, q, prefix_len=lengths), full)
    valid = torch.ones(2, 16, dtype=torch.bool)
    valid[:, 3:] = False
    padded = flashgen.attention(q, q, q, causal=True, prefix_len=lengths.clamp(min=5), key_padding_mask=valid)
    assert close(padded, flashgen.attention(q, q, q, key_padding_mask=valid))


def gradient_of(q: torch.Tensor, **options: Any) -> torch.Tensor:
    leaf = q.clone().requires_grad_()
    flashgen.attention(leaf, leaf, leaf, **options).float().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_pytorchs_ways_to_ask_for_it() -> None:
    q, own = stacked(2, 33, 4, 16), slopes(4)
    options: dict[str, Any] = {"alibi_slopes": own, "softcap": 2.0}
    plain, gradient = flashgen.attention(q, q, q, **options), gradient_of(q, **options)

    def call(q: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, q, q, alibi_slopes=own, softcap=2.0)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaf = q.clone().requires_grad_()
    found = compiled(leaf, own)
    found.float().sum().backward()
    assert torch.equal(found, plain)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient)
    assert torch.equal(torch.func.grad(lambda q: call(q, own).float().sum())(q), gradient)
    assert torch.equal(torch.vmap(lambda q: call(q, own))(q[:, None])[:, 0], plain)
    with pytest.raises(ArgumentError, match=r"^tensors of modifiers must not be mapped by torch\.vmap"):
        torch.vmap(call)(q[:, None], slopes(2, 4))


@pytest.mark.slow
def test_sinks_have_gradients_in_all_of_pytorchs_ways() -> None:
    q, sinks = stacked(2, 33, 4, 16), torch.tensor([3.0, -2.0, 5.0, 0.0])

    def call(sinks: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q, q, q, causal=True, sinks=sinks)

    leaf = sinks.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(call(leaf).float().sum(), leaf)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(leaf).float().sum(), leaf)[0], wanted)
    assert torch.equal(torch.func.grad(lambda sinks: call(sinks).float().sum())(sinks), wanted)
    again = torch.utils.checkpoint.checkpoint(call, leaf, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again.float().sum(), leaf)[0], wanted)
    with pytest.raises(FlashgenError, match="no second derivative"):
        torch.autograd.grad(torch.autograd.grad(call(leaf).float().sum(), leaf, create_graph=True)[0].sum(), leaf)

    def of_one(q: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.grad(lambda sinks: flashgen.attention(q, q, q, sinks=sinks).float().sum())(sinks)
        return found

    with pytest.raises(ArgumentError, match=r"^gradients of modifiers' tensors must not be mapped by torch\.vmap"):
        torch.vmap(of_one)(q[:, None])


def test_a_mask_and_padding_are_taken_together() -> None:
    q, valid, mask = stacked(2, 16, 2, 16), stacked(2, 16) > -1, stacked(16, 16) > -1
    both = flashgen.attention(q, q, q, mask=mask, key_padding_mask=valid)
    assert torch.equal(both, flashgen.attention(q, q, q, mask=mask & valid[:, None, None]))
    assert torch.equal(flashgen.attention(q, q, q, key_padding_mask=torch.ones_like(valid)), flashgen.attention(q, q, q))
    assert not flashgen.attention(q, q, q, mask=torch.zeros(1, dtype=torch.bool)).any()


def test_padding_is_the_same_without_gradients_and_for_who_traces() -> None:
    """Without gradients a call leaves the mask as it is until a plan is made."""
    q, valid = stacked(2, 16, 2, 16), stacked(2, 16) > -1
    wanted = flashgen.attention(q, q, q, key_padding_mask=valid)
    with torch.no_grad():
        assert torch.equal(flashgen.attention(q, q, q, key_padding_mask=valid), wanted)
        columns = valid.t().contiguous().t()
        assert torch.equal(flashgen.attention(q, q, q, key_padding_mask=columns, dropout_p=0.0, return_lse=True)[0], wanted)
        mapped = torch.vmap(lambda q: flashgen.attention(q, q, q, key_padding_mask=valid))(q[None])
        assert torch.equal(mapped[0], wanted)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(q)
            assert flashgen.attention(fake, fake, fake, key_padding_mask=mode.from_tensor(valid)).shape == q.shape
        traced = make_fx(lambda q, valid: flashgen.attention(q, q, q, key_padding_mask=valid))(q, valid)
        assert torch.equal(traced(q, ~valid), flashgen.attention(q, q, q, key_padding_mask=~valid))
        assert not torch.equal(traced(q, ~valid), wanted)


@pytest.mark.slow
def test_padding_has_its_name_for_who_traces() -> None:
    q, valid = stacked(1, 16, 2, 16), stacked(1, 9) > 0

    def call(q: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flashgen.attention(q, q, q, key_padding_mask=valid)
        return out

    of_one = lambda q: call(q, valid)  # noqa: E731
    for how in (torch.compile(call, backend="aot_eager"), make_fx(call), lambda q, _: torch.vmap(of_one)(q[None])):
        for context in (torch.no_grad(), torch.enable_grad()):
            with context, pytest.raises(ArgumentError, match=OF_KEYS):
                how(q, valid)


def test_vmap_takes_no_tensor_of_another_batch() -> None:
    """The mapped dimension joins the batch, so that kernels would take a tensor of both for one of the entries that are mapped."""
    q = stacked(3, 1, 16, 2, 16)
    for options, shape in (
        ({"prefix_len": torch.zeros(3, dtype=torch.int32), "causal": True}, r"\(batch\) = \(1,\), .*; got \(3,\)"),
        ({"alibi_slopes": slopes(3, 2)}, r"\(batch, heads_q\) = \(1, 2\), .*; got \(3, 2\)"),
        ({"bias": stacked(3, 1, 1, 16)}, r"\(batch, heads_q, len_q, len_kv\) = \(1, 2, 16, 16\), .*; got \(3, 1, 1, 16\)"),
    ):
        for call in (torch.no_grad()(flashgen.attention), flashgen.attention):
            with pytest.raises(ArgumentError, match=f"^{next(iter(options))} must have the shape {shape}"):
                torch.vmap(lambda q, call=call, options=options: call(q, q, q, **options))(q)


def test_operators_negate_views_that_are_to_be_negated() -> None:
    _, (found,) = asked("alibi", tensors=[torch._neg_view(slopes(2))])
    assert found.equal(-slopes(2))
    assert not found.is_neg()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("alibi_slopes", (2,)), ("sinks", (2,)), ("bias", (16, 16))])
def test_views_that_are_to_be_negated_are(name: str, sizes: tuple[int, ...]) -> None:
    """As imag gives them of a conjugated tensor."""
    q, values = stacked(1, 16, 2, 16).requires_grad_(), slopes(*sizes)
    negated = torch.complex(values, values).conj().imag
    assert negated.is_neg()
    found = [flashgen.attention(q, q, q, **{name: tensor}) for tensor in (negated, -values)]  # type: ignore[call-overload]
    assert torch.equal(*found)
    assert torch.equal(*(torch.autograd.grad(out.float().square().sum(), q)[0] for out in found))


def test_ordered_gradients_of_a_bias_that_is_the_same_for_many_scores_are_refused() -> None:
    q, bias = stacked(2, 16, 2, 16), stacked(16, 16).requires_grad_()
    out = flashgen.attention(q, q, q, bias=bias, deterministic=True)
    with pytest.raises(ArgumentError, match=r"deterministic must be False for the gradient of a bias that is the same for many scores"):
        out.sum().backward()
    own = stacked(2, 2, 16, 16).requires_grad_()
    flashgen.attention(q, q, q, bias=own, deterministic=True).sum().backward()
    assert own.grad is not None


@pytest.mark.parametrize(("keys", "options"), few_of([(0, {}), (3, {"window": (-9, 9)})], (3, {"window": (-9, 9)})), ids=["none", "hidden"])
def test_a_row_without_keys_is_its_sink(keys: int, options: dict[str, Any]) -> None:
    q, k, sinks = stacked(2, 5, 2, 16), stacked(2, keys, 2, 16), torch.tensor([1.0, -3.0], requires_grad=True)
    out, lse = flashgen.attention(q, k, k, sinks=sinks, return_lse=True, **options)
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand(2, 2, 5))
    (found,) = torch.autograd.grad(lse.sum(), sinks)
    assert found.tolist() == [10.0, 10.0]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1,), (5, 1), (2, 2, 1, 1)])
def test_a_bias_of_keys_that_are_not_there_has_a_gradient_of_zero(sizes: tuple[int, ...]) -> None:
    q, k, bias = stacked(2, 5, 2, 16), stacked(2, 0, 2, 16), stacked(*sizes).requires_grad_()
    out = flashgen.attention(q, k, k, bias=bias)
    (found,) = torch.autograd.grad(out.sum(), bias)
    assert found.shape == sizes
    assert not found.any()


@pytest.mark.slow
def test_sinks_of_minus_infinity_change_nothing() -> None:
    """Nor gradients, of which a row that sees no key has none."""
    q, mask = stacked(2, 5, 2, 16).requires_grad_(), torch.arange(5)[:, None] != 2
    minus_infinity = torch.full((2,), -torch.inf, requires_grad=True)
    out, plain = flashgen.attention(q, q, q, mask=mask, sinks=minus_infinity), flashgen.attention(q, q, q, mask=mask)
    assert torch.equal(out, plain)
    of_q, of_sinks = torch.autograd.grad(out.float().sum(), (q, minus_infinity))
    assert torch.equal(of_q, gradient_of(q.detach(), mask=mask))
    assert of_sinks.tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_operators_keep_their_contracts() -> None:
    q = stacked(1, 16, 2, 16)
    modified: tuple[Any, ...] = ("alibi,sinks,softcap", [], [2.0], [slopes(2), slopes(2).requires_grad_()])
    out, lse = torch.ops.flashgen.attention_forward(q, q, q, False, None, "bshd", *modified)
    given = (q, q, q, out.detach(), lse.detach(), out.detach(), None, False, None, "bshd", None)
    of_tensors = (*modified[:3], [tensor.detach() for tensor in modified[3]])
    torch.library.opcheck(torch.ops.flashgen.attention_tensors_backward.default, (*given, *of_tensors))
    operators = torch.ops.flashgen
    torch.library.opcheck(operators.attention_forward.default, (q, q, q, False, None, "bshd", *modified))
    leaf = q.clone().requires_grad_()
    torch.library.opcheck(operators.attention.default, (leaf, q, q, True, None, "bshd", None, *modified))
    with_bias: tuple[Any, ...] = ("bias", [], [], [stacked(2, 16, 16, seed=3).requires_grad_()])
    torch.library.opcheck(operators.attention.default, (leaf, q, q, True, None, "bshd", None, *with_bias))


def test_derivatives_that_slopes_do_not_have_are_refused() -> None:
    q, own = stacked(1, 16, 2, 16), slopes(2)
    with forward_ad.dual_level(), pytest.raises(FlashgenError, match="no forward-mode derivative"):
        flashgen.attention(q, q, q, alibi_slopes=forward_ad.make_dual(own, torch.ones(2)))
    with pytest.raises(ArgumentError, match=r"^alibi_slopes must not require grad"):
        torch.func.grad(lambda own: flashgen.attention(q, q, q, alibi_slopes=own).float().sum())(own)
    with pytest.raises(ArgumentError, match=r"^alibi_slopes must not require grad"):
        torch.ops.flashgen.attention(q, q, q, False, None, "bshd", None, "alibi", [], [], [own.requires_grad_()])


def test_operators_want_all_values_of_modifiers() -> None:
    q, operators = stacked(1, 16, 2, 16), torch.ops.flashgen
    for names, numbers, tensors in (("softcap", [], []), ("alibi", [], []), ("alibi", [1.0], [slopes(2)])):
        with pytest.raises(ArgumentError, match=r"^(numbers|tensors) must be those of "):
            operators.attention_forward(q, q, q, False, None, "bshd", names, [], numbers, tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, r"softcap must be from 1\.1755e-38 to 2\.3587e\+38, or None for no cap; got 0\.0"),
        ({"softcap": -1.0}, r"softcap must be from .*; got -1\.0"),
        ({"softcap": float("nan")}, r"softcap must be from .*; got nan"),
        ({"softcap": 10**400}, r"softcap must be from .*; got 1000"),
        ({"softcap": True}, "softcap must be a number or None, which stands for no cap; got True"),
        ({"softcap": "50"}, "softcap must be a number or None, which stands for no cap; got '50'"),
        ({"softcap": 1e-30, "scale": 1e20}, r"scale / softcap must be from .*; got 1e\+50"),
        ({"alibi_slopes": [1.0, 2.0]}, "alibi_slopes must be of type Tensor; got"),
        ({"alibi_slopes": slopes(3)}, r"alibi_slopes must have the shape \(batch, heads_q\) = \(1, 2\), or one that .*; got \(3,\)"),
        ({"alibi_slopes": slopes(2, 2)}, r"alibi_slopes must have the shape .*; got \(2, 2\)"),
        ({"alibi_slopes": torch.tensor(1.0)}, r"alibi_slopes must have the shape .*; got \(\)"),
        ({"alibi_slopes": slopes(2).double()}, r"alibi_slopes must be torch\.float32; got torch\.float64"),
        ({"alibi_slopes": slopes(2).to("meta")}, "alibi_slopes must be on q's device cpu; got meta"),
        ({"alibi_slopes": slopes(4)[::2]}, r"alibi_slopes must be contiguous in its last dimension \(stride 1\); got stride 2"),
        ({"alibi_slopes": slopes(2).requires_grad_()}, "alibi_slopes must not require grad, as it has no gradient here: detach it; got"),
        ({"chunk": 0}, "chunk must be a whole number of keys from 1 to 2147483646, or None for no chunks; got 0"),
        ({"chunk": -5}, "chunk must be a whole number of keys from 1 .*; got -5"),
        ({"chunk": 8.0}, r"chunk must be a whole number of keys from 1 .*; got 8\.0"),
        ({"chunk": True}, "chunk must be a whole number of keys from 1 .*; got True"),
        ({"chunk": 2**31}, "chunk must be a whole number of keys from 1 .*; got 2147483648"),
        ({"prefix_len": 5}, "prefix_len must be of type Tensor; got 5"),
        ({"prefix_len": torch.tensor([5])}, r"prefix_len must be torch\.int32; got torch\.int64"),
        ({"prefix_len": PREFIX}, r"prefix_len must have the shape \(batch\) = \(1,\), or one that .*; got \(2,\)"),
        ({"prefix_len": PREFIX[:1].to("meta")}, "prefix_len must be on q's device cpu; got meta"),
        ({"bias": 1.0}, "bias must be of type Tensor; got"),
        ({"bias": stacked(15, 16)}, r"bias must have the shape \(batch, heads_q, len_q, len_kv\) = .*, or one that broadcasts to it; got"),
        ({"bias": stacked(1, 1, 1, 16, 16)}, r"bias must have the shape .*; got \(1, 1, 1, 16, 16\)"),
        ({"bias": slopes(16, 16).half()}, r"bias must be torch\.bfloat16; got torch\.float16"),
        ({"mask": slopes(16, 16)}, r"mask must be torch\.bool; got torch\.float32"),
        ({"mask": stacked(3, 1, 16, 16) > 0}, r"mask must have the shape .*; got \(3, 1, 16, 16\)"),
        ({"key_padding_mask": stacked(16) > 0}, r"key_padding_mask must have the shape \(batch, len_kv\); got \(16,\)"),
        ({"key_padding_mask": slopes(1, 16)}, r"key_padding_mask must be torch\.bool; got torch\.float32"),
        ({"key_padding_mask": slopes(1, 16).to_sparse()}, r"key_padding_mask must be dense \(torch\.strided\); got torch\.sparse_coo"),
        ({"key_padding_mask": UninitializedBuffer()}, "key_padding_mask must have elements; got a UninitializedBuffer"),
        ({"bias": UninitializedParameter()}, "bias must have elements; got a UninitializedParameter"),
        ({"bias": cut_short(16)}, "bias must have a storage that holds its elements, at least 32 bytes; got one of 16$"),
        (
            {"alibi_slopes": slopes(2), "score_mod": lambda s, *_: s / 2},
            "score_mod must only add to the score beside alibi_slopes, [^;]*; got [^;]*$",
        ),
        ({"dropout_p": slopes(2)}, "dropout_p must be a number from 0 to 1; got a value of type torch.Tensor"),
        ({"dropout_p": np.zeros(2)}, "dropout_p must be a number from 0 to 1; got a value of type numpy.ndarray"),
        ({"mask": stacked(16, 16), "key_padding_mask": stacked(1, 16) > 0}, r"mask must be torch\.bool; got torch\.bfloat16"),
        (
            {"mask": stacked(16, 16) > 0, "key_padding_mask": stacked(1, 9) > 0},
            r"key_padding_mask must have the shape \(batch, len_kv\), as mask; got \(1, 9\) beside a mask of \(16, 16\)",
        ),
        ({"key_padding_mask": stacked(1, 9) > 0}, OF_KEYS + r"; got \(1, 9\)"),
        ({"key_padding_mask": stacked(2, 16) > 0, "bias": stacked(16)}, OF_KEYS + r"; got \(2, 16\)"),
        ({"key_padding_mask": stacked(2, 16) > 0, "mask": stacked(16, 1) > 0}, OF_KEYS + r"; got \(2, 16\)"),
        ({"key_padding_mask": stacked(1, 9) > 0, "mask_mod": lambda b, h, q, k: q >= k}, OF_KEYS + r"; got \(1, 9\)"),
        ({"key_padding_mask": stacked(1, 16) > 0, "mask": stacked(2, 1, 1, 16) > 0}, r"mask must have the shape .*; got \(2, 1, 1, 16\)"),
        ({"key_padding_mask": (stacked(1, 16) > 0).to("meta")}, "key_padding_mask must be on q's device cpu; got meta"),
        ({"dropout_p": False}, "dropout_p must be a number from 0 to 1; got False"),
        ({"sinks": [1.0, 2.0]}, "sinks must be of type Tensor; got"),
        ({"sinks": slopes(3)}, r"sinks must have the shape \(heads_q\) = \(2,\), or one that .*; got \(3,\)"),
        ({"sinks": slopes(1, 2)}, r"sinks must have the shape .*; got \(1, 2\)"),
        ({"sinks": slopes(2).double()}, r"sinks must be torch\.float32; got torch\.float64"),
        ({"alibi_slopes": slopes(2), "scale": 1e-30}, r"scale, or softcap, must be at least .* with alibi_slopes; got 1e-30"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], message: str) -> None:
    q = stacked(1, 16, 2, 16)
    with pytest.raises(ArgumentError, match=f"^{message}"):
        flashgen.attention(q, q, q, **options)
    if "must not require grad" not in message:
        with torch.no_grad(), pytest.raises(ArgumentError, match=f"^{message}"):
            flashgen.attention(q, q, q, **options)
