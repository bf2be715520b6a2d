"""Huge logits: inputs whose scores reach the end of fp32 and beyond, and what a kernel must make of them. No tests.

Each row is judged among its like, since a bound that a huge row needs would hide what an ordinary one loses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics.forward import exact_attention, plain
from flashgen.numerics.oracle import TORCH_DTYPES
from tests.support.judging import judge_forward

LARGEST = float(torch.finfo(torch.float32).max)
ORDINARY = 2.0**20  # of a scaled score: below, fp32 rounds it by less than what the rule sees
CLEAR = (
    2.0**-16
)  # of the sum of a score's absolute products: by so much the highest score must exceed the others to be so after any rounding
KINDS = ("constant", "random", "mixed", "rising", "falling", "negative")


@dataclass(frozen=True)
class Variant:
    """A family with one of its ways to keep a row's maximum: a config field and its value."""

    family: str
    field: str
    value: str

    def __str__(self) -> str:
        return f"{self.family}-{self.value}"

    @property
    def workload(self) -> Workload:
        """Rows of several warps, keys of several tiles of the family."""
        return Workload(1, 2, 1, 70, 330 if self.family == "attention_forward" else 410)

    def refusals(self, target: Target) -> list[str]:
        """Why the family cannot run on a target."""
        return find_family(self.family).refusals(Problem(Dtype.BF16, 64), target)

    def specs(self, target: Target, every: bool) -> Iterator[KernelSpec]:
        """Both dtypes and masks, or one of the four, which the two families do not share."""
        family = find_family(self.family)
        every_kind, (one, other) = itertools.product(ELEMENTS, Mask), zip(ELEMENTS, Mask, strict=True)
        for dtype, mask in every_kind if every else (one if self.family == "attention_forward" else other,):
            problem = Problem(dtype, 64, 64, mask)
            config = family.default(problem, target).replace_from_text({self.field: self.value})
            yield KernelSpec(family, problem, config, target)


VARIANTS = (
    *(Variant("attention_forward", "first", value) for value in ("scores", "output")),
    *(Variant("attention_forward_sm90", "reference", value) for value in ("lazy", "maximum")),
)


@dataclass(frozen=True)
class HugeCase:
    """Inputs of one kind, q and k multiplied by `magnitude`."""

    problem: Problem
    workload: Workload
    kind: str
    magnitude: float
    scale: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.problem.name} {self.workload.name} {self.kind} {self.magnitude:g} scale {self.scale:g}"

    def make(self, device: str) -> Tensors:
        """The inputs, and outputs full of NaN."""
        tensors = Tensors.random(self.problem, self.workload, torch.Generator(device).manual_seed(1))
        q, k = tensors["q"], tensors["k"]
        if self.kind == "constant":
            for tensor in (q, k, tensors["v"]):
                tensor.fill_(self.magnitude)
            return tensors
        keys = torch.arange(k.shape[1], device=device, dtype=torch.float32)[None, :, None, None]
        if self.kind in ("rising", "falling", "negative"):  # along the keys, or with every score below 0
            q.abs_()
            k.abs_()
            if self.kind == "negative":
                k.neg_()
            else:
                k.copy_(k.float() * ((keys + 1) / k.shape[1] if self.kind == "rising" else 1 - keys / k.shape[1]))
        q.copy_((q.float() * self.magnitude).clamp(-_largest(q), _largest(q)))
        k.copy_((k.float() * self.magnitude).clamp(-_largest(k), _largest(k)))
        if self.kind == "mixed":  # every other query has ordinary scores
            q[:, ::2] = (q[:, ::2].float() / self.magnitude / self.magnitude).to(q.dtype)
        return tensors

    def rejections(self, tensors: Tensors) -> list[str]:
        """What is wrong with what a kernel wrote; empty if nothing is.

        A score that overflows only in some orders of its additions may count as finite or not. A row all of whose scores
        are -inf gives 0 and -inf.
        """
        causal, scale, found = self.problem.mask is Mask.CAUSAL, self.scale, []
        ref, pt = (how(tensors["q"], tensors["k"], tensors["v"], causal=causal, scale=scale) for how in (exact_attention, plain))
        out, ref_out, pt_out = (t.transpose(1, 2) for t in (tensors["out"], ref[0], pt[0]))
        lse, (_, ref_lse), (_, pt_lse) = tensors["lse"], ref, pt
        scores, bounds = _scores(tensors, causal)
        unseen = ref_lse == -torch.inf
        finite = bounds.amax(-1) * max(1.0, scale) < 0.99 * LARGEST
        beyond = ((scores * max(1.0, scale) > 1.01 * LARGEST) & ((bounds - scores) / 2 < 0.99 * LARGEST)).any(-1)
        nothing = (out == 0).all(-1) & (lse == -torch.inf)
        if wrong := int((beyond & ~out.isnan().all(-1)).sum()):
            found.append(f"{wrong} of {int(beyond.sum())} rows whose scores overflow are not NaN")
        other = ~finite & ~beyond & ~out.isnan().all(-1) & ~(nothing & (pt_lse == -torch.inf)) & ~pt_out.isnan().any(-1)
        ordinary = (scores.amax(-1) * scale).abs() < ORDINARY
        for name, rows in (("ordinary", finite & ordinary | unseen), ("huge", finite & ~ordinary & ~unseen), ("barely finite", other)):
            if rows.any():
                verdict = judge_forward(
                    out[rows], lse[rows], (ref_out[rows], ref_lse[rows]), (pt_out[rows], pt_lse[rows]), tensors["q"].dtype
                )
                if not verdict.ok:
                    found.append(f"{int(rows.sum())} {name} rows: {verdict.message}")
        first, second = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).topk(2, dim=-1).values.unbind(-1)
        clear = finite & ~unseen & ((first - second - CLEAR * bounds.amax(-1)) * scale > 64)
        v = tensors["v"].transpose(1, 2).repeat_interleave(tensors["q"].shape[2] // tensors["k"].shape[2], 1)
        winners = v.gather(2, scores.argmax(-1)[..., None].expand(*scores.shape[:-1], v.shape[-1]))
        if wrong := int((clear & (out != winners).any(-1)).sum()):
            found.append(f"{wrong} of {int(clear.sum())} rows with one clear maximum are not the value of its key")
        return found


def _largest(tensor: torch.Tensor) -> float:
    return float(torch.finfo(tensor.dtype).max)


def cases(problem: Problem, workload: Workload, every: bool) -> Iterator[HugeCase]:
    """From 100 to the type's maximum in every kind, and scales far from 1; or some of them."""
    largest = float(torch.finfo(TORCH_DTYPES[problem.dtype]).max)
    powers = (1e2, 1e3, 3e4, 6e4) if problem.dtype is Dtype.FP16 else (1e2, 3e4, 133120.0, 1e7, 1e12, 1e16, 1e18, 1e19, 3e19)
    usual = problem.head_dim**-0.5
    for kind in KINDS:
        for magnitude in (*powers, largest) if every else powers[1::3]:
            yield HugeCase(problem, workload, kind, magnitude, usual)
        for scale in (1e-9, 1e12, 1e29) if every else (1e12,):
            if kind != "constant" or scale > usual:
                yield HugeCase(problem, workload, kind, powers[1], scale)


def _scores(tensors: Tensors, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, [batch, head, query, key]: q k^T, -inf where masked, and the sums of its absolute products, 0 there."""
    group = tensors["q"].shape[2] // tensors["k"].shape[2]
    q, k = tensors["q"].double().transpose(1, 2), tensors["k"].double().transpose(1, 2).repeat_interleave(group, 1)
    scores, bounds = q @ k.mT, q.abs() @ k.abs().mT
    rows, keys = scores.shape[-2:]
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu(keys - rows + 1)
    return (scores.masked_fill(hidden, -torch.inf), bounds.masked_fill(hidden, 0.0)) if causal else (scores, bounds)
