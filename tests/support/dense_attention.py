"""A call of attention beside PyTorch's own of the same tensors, whatever is done to its scores: out, lse and gradients, by the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flashgen.numerics.rule import judge

Scores = Callable[[Tensor], Tensor]  # of scaled scores [batch, heads_q, len_q, len_kv]: what the softmax is of


def dense(q: Tensor, k: Tensor, v: Tensor, of_scores: Scores, scale: float, of_p: torch.dtype) -> tuple[Tensor, Tensor]:
    """Out and lse; q, k, v: [batch, heads, length, head_dim]. P is rounded to `of_p`; a row that sees no key gives 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = of_scores(q.to(wide) @ k.to(wide).mT * scale)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    lse = scores.logsumexp(-1)
    p = torch.where(nothing, 0.0, scores.masked_fill(nothing, 0.0).softmax(-1))
    return (p.to(of_p).to(wide) @ v.to(wide)).to(v.dtype), lse


def require_right(
    call: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor], of_scores: Scores, scale: float | None = None, gradients: bool = False
) -> None:
    """Asserts that `call(q, k, v)`, which returns out and perhaps lse, is right for `given`: [batch, heads, length, head_dim] each."""
    scale = given[0].shape[-1] ** -0.5 if scale is None else scale
    dtype = given[0].dtype
    leaves = [tensor.detach().requires_grad_(gradients) for tensor in given]
    names = ("out", "lse")
    found = dict(zip(names, call(*leaves), strict=False))
    into = torch.randn(found["out"].shape, device=given[0].device).to(dtype)
    results = [found]
    for exact in (True, False):
        q, k, v = own = [tensor.detach().to(torch.float64 if exact else dtype).requires_grad_(gradients) for tensor in given]
        out, lse = dense(q, k, v, of_scores, scale, torch.float64 if exact else dtype)
        results.append({"out": out, "lse": lse})
        if gradients:
            results[-1] |= _gradients(out, own, into)
    if gradients:
        found |= _gradients(found["out"], leaves, into)
    ours, exactly, plain = ({name: result[name].detach() for name in found} for result in results)
    verdict = judge(ours, exactly, plain, None, {name: torch.float32 if name == "lse" else dtype for name in found})
    assert verdict.ok, verdict.message


def _gradients(out: Tensor, leaves: Sequence[Tensor], into: Tensor) -> dict[str, Tensor]:
    return dict(zip(("d_q", "d_k", "d_v"), torch.autograd.grad(out, leaves, into.to(out.dtype)), strict=True))
