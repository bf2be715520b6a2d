"""The oracle of the backward pass: gradients in float64, and as autograd of plain PyTorch attention gives them. On any device.

Tensors are those of forward.py, with gradients of the same shapes. Of a row that sees no key, and of a key that no row sees, gradients
are 0. A sample's row r of a query head stands for query r, and for key r of the head's key/value head, as far as there are so many.
Those of packed sequences are tokens.

A gradient of a modifier's operand may be a sum over all rows of a head, or of all heads. What plain PyTorch happens to err by in one such
number says little, as errors cancel by chance: in its place stand three standard deviations of it, by the rounding of dP.

A gradient of which each score has an element is dS itself. Plain PyTorch has it in the element type, in which dS enters products, whatever
the type of the operand: delta, which kernels have from the rounded out, is no more exact where one key has nearly all of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.codegen.modifier import drops, modifier_gradients, opens_keys
from flashgen.codegen.modifiers.traced import CAPTURED_TENSOR
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

from .forward import exact_attention, product_in_fp32, sample_rows, slices, softmax
from .link import Link, Rows, add_gradients, changes_of_scores, hidden_keys, hiding_links, joined_scores, kept_factors, links_of
from .oracle import Oracle, Sample
from .sequences import dense_parts, gradients_in_one_batch, packed_attention

_SCORES_AT_ONCE = 2**25  # elements: 256 MiB in float64, of which there are up to five
_OF_CAPTURED = f"d_{CAPTURED_TENSOR}"  # what names of captured tensors' gradients begin with
_DEVIATIONS = 3  # of a sum over rows that plain PyTorch may be off by

# (q [rows, d], k [keys, d], v [keys, d_v], d_out [rows, d_v], d_lse [rows], chain, scale) -> d_q, d_k, d_v.
_Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, "_Chain", float], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class _Chain:
    """What comes between the products, of these rows.

    sums:    gradients of links' operands, by name, to which those of the rows are added
    squares: the same of the squares of what the rounding of dP changes in them, where it is rounded
    """

    rows: Rows
    causal: bool
    links: Sequence[Link]
    sums: Mapping[str, Tensor]
    squares: Mapping[str, Tensor]

    def d_scores(self, s: Tensor, d_p: Tensor, d_lse: Tensor, scale: float, rounded_off: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """P of scaled scores `s` [rows, keys], as links leave it, in their place, and dS in that of what they leave of dP.

        rounded_off: what dP has lost
        """
        joined = joined_scores(self.rows, self.links)
        changed, changes = changes_of_scores(s[None], self.rows, self.links)
        p, lse = softmax(changed, hidden_keys(self.rows, self.causal, self.links), joined)
        kept = kept_factors(self.rows, self.links)
        if kept is not None:
            d_p.mul_(kept[0])
            rounded_off = None if rounded_off is None else rounded_off.mul_(kept[0])
        delta = (p[0] * d_p).sum(-1, keepdim=True).sub_(d_lse[:, None])
        rounding = (p[0] * rounded_off).sum(-1) if rounded_off is not None else torch.zeros_like(delta[:, 0])
        if joined is not None:
            of_joined = (joined.to(lse.dtype) - lse).exp()  # P
            for link in self.links:
                link.add_joined(self.sums, -of_joined * (delta[:, 0] + rounding), self.rows)
                link.add_joined(self.squares, (of_joined * rounding).square(), self.rows)
        d_p.sub_(delta).mul_(p[0])
        error = None if rounded_off is None else rounded_off.sub_(rounding[:, None]).mul_(p[0])  # of dS
        add_gradients(changes, self.sums, d_p, self.rows, self.squares, error)
        return p[0] if kept is None else p[0].mul_(kept[0]), d_p.mul_(scale)


def _exact(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor, chain: _Chain, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, d_out = q.double(), k.double(), v.double(), d_out.double()
    p, d_s = chain.d_scores((q @ k.mT).mul_(scale), d_out @ v.mT, d_lse.double(), scale)
    return d_s @ k, d_s.mT @ q, p.mT @ d_out


def _plain(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_lse: Tensor, chain: _Chain, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Autograd of `plain` in forward.py: what enters or leaves a matrix product has the element type, the softmax is in fp32."""
    product = _product(d_out, v.mT)
    d_p = product.to(q.dtype).float()
    p, d_s = chain.d_scores(_product(q, k.mT).mul_(scale), d_p, d_lse, scale, product.sub_(d_p))
    rounded, p = d_s.to(q.dtype), p.to(q.dtype)
    return tuple(_product(*factors) for factors in ((rounded, k), (rounded.mT, q), (p.mT, d_out)))  # type: ignore[return-value]


def _product(a: Tensor, b: Tensor) -> Tensor:
    return product_in_fp32(a[None], b[None])[0]


def _head(
    gradients: _Gradients,
    tensors: Mapping[str, Tensor],
    causal: bool,
    links: Sequence[Link],
    scale: float,
    batch: int,
    head: int,
    rounded: torch.dtype | None,
    sums: Mapping[str, Tensor],
    squares: Mapping[str, Tensor],
    first_batch: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """d_q [group, len_q, d], d_k [len_kv, d] and d_v [len_kv, d_v] of one key/value head, summed up in float64.

    rounded: the element type that each query head's d_k and d_v have before they are summed up in fp32, None where they are exact
    sums, squares: see `_Chain`; first_batch: entries before those of the batch, for links
    """
    q, d_out, lse_like = tensors["q"][batch], tensors["d_out"][batch], tensors["lse"][batch]
    k, v = tensors["k"][batch, :, head], tensors["v"][batch, :, head]
    d_lse = tensors["d_lse"][batch] if "d_lse" in tensors else torch.zeros_like(lse_like)
    group, len_q, len_kv = q.shape[1] // tensors["k"].shape[2], q.shape[0], k.shape[0]
    wide = torch.float64 if rounded is None else torch.float32
    d_q = q.new_zeros(group, len_q, q.shape[2], dtype=wide)
    d_k, d_v = k.new_zeros(k.shape, dtype=wide), v.new_zeros(v.shape, dtype=wide)
    for member in range(group):
        at = head * group + member
        part_k, part_v = torch.zeros_like(d_k), torch.zeros_like(d_v)
        for some in slices(len_q, max(1, _SCORES_AT_ONCE // max(1, len_kv))):
            queries = torch.arange(some.start, some.stop, device=q.device)
            rows = Rows(queries, len_q, len_kv, first_batch + batch, torch.full_like(queries, at)[None], q.shape[1])
            chain = _Chain(rows, causal, links, sums, squares)
            d_q[member, some], of_k, of_v = gradients(q[some, at], k, v, d_out[some, at], d_lse[at, some], chain, scale)
            part_k += of_k
            part_v += of_v
        d_k += part_k if rounded is None else part_k.to(rounded).float()
        d_v += part_v if rounded is None else part_v.to(rounded).float()
    return d_q, d_k, d_v


class BackwardOracle(Oracle):
    """See the module's docstring."""

    def derive(self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        """See Oracle. out and lse are those of q, k and v."""
        if problem.is_packed:
            out, lse = packed_attention(exact_attention, problem, tensors, scalars, None)
        else:
            q, k, v = (tensors[name] for name in ("q", "k", "v"))
            links = links_of(problem, tensors, scalars)
            out, lse = exact_attention(q, k, v, causal=problem.mask is Mask.CAUSAL, scale=scalars["scale"], links=links)
        tensors["out"].copy_(out)
        tensors["lse"].copy_(lse)

    def exact(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """See Oracle. The softmax is computed again, not taken from lse and out, so that it does not inherit their rounding."""
        return self._compute(_exact, problem, tensors, scalars, sample, None)

    def plain(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """See Oracle, and `_plain`."""
        return self._compute(_plain, problem, tensors, scalars, sample, tensors["q"].dtype)

    def _compute(
        self,
        gradients: _Gradients,
        problem: Problem,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, float],
        sample: Sample | None,
        rounded: torch.dtype | None,
    ) -> dict[str, Tensor]:
        (heads_q, _), (heads_kv, _) = tensors["q"].shape[-2:], tensors["k"].shape[-2:]
        batch = 1 if problem.is_packed else len(tensors["q"])
        group, element = heads_q // max(1, heads_kv), rounded or torch.float64
        whole = {f"d_{name}": tensors[name].new_zeros(tensors[name].shape, dtype=element) for name in ("q", "k", "v")}
        wide = torch.float64 if rounded is None else torch.float32
        learned = modifier_gradients(problem)
        like = {one.name: tensors[one.name.removeprefix("d_")] for one in learned}
        sums, squares = ({name: operand.new_zeros(operand.shape, dtype=wide) for name, operand in like.items()} for _ in range(2))
        heads = [(b, h) for b in range(batch) for h in range(heads_kv)]
        if sample is not None:
            of_batches = range(batch) if sums else None  # over which gradients of modifiers' operands are sums
            some = sorted({(b, h // group) for entry, h, _ in sample.tolist() for b in of_batches or (entry,)})
            heads = heads if any(one.free for one in learned) else some  # of free ones an element may be any heads'
        causal, scale = problem.mask is Mask.CAUSAL, scalars["scale"]
        for first_batch, given, found in dense_parts(problem, tensors, whole, None if sums else sample):
            links = links_of(problem, given, scalars)
            for b, h in heads:
                d_q, d_k, d_v = _head(gradients, given, causal, links, scale, b, h, rounded, sums, squares, first_batch)
                found["d_q"][b, :, h * group : (h + 1) * group] = d_q.transpose(0, 1)
                found["d_k"][b, :, h], found["d_v"][b, :, h] = d_k, d_v
        for one in learned:
            total = sums[one.name] + _DEVIATIONS * squares[one.name].sqrt()
            own = like[one.name].dtype if one.free else rounded if one.is_strided else total.dtype
            whole[one.name] = total if rounded is None else total.to(own)
        return whole if sample is None else self.sampled(whole, sample)

    def sample(self, problem: Problem, workload: Workload, count: int, seed: int) -> Sample:
        """See Oracle, and the module's docstring. Rows are drawn from few key/value heads: each needs the whole of its head."""
        if problem.is_packed:
            workload = replace(workload, batch=1, len_q=workload.tokens_q, len_kv=workload.tokens_kv)
        rows = sample_rows(workload, count, seed, problem.mask is Mask.CAUSAL)
        longer = Workload(workload.batch, workload.heads_q, workload.heads_kv, workload.len_kv, workload.len_kv)
        rows = torch.cat([rows, sample_rows(longer, count, seed + 1, problem.mask is Mask.CAUSAL)])
        if len(rows):
            ends = (rows[:, 0] == 0) & (rows[:, 1] == 0)
            rows[~ends, 0], rows[~ends, 1] = workload.batch - 1, workload.heads_q - 1
        return rows

    def sampled(self, outputs: Mapping[str, Tensor], sample: Sample) -> dict[str, Tensor]:
        """See Oracle."""
        outputs = gradients_in_one_batch(outputs)
        batch, head, row = sample.to(outputs["d_q"].device).unbind(1)
        group = outputs["d_q"].shape[2] // max(1, outputs["d_k"].shape[2])
        found = {}
        for name, heads in (("d_q", head), ("d_k", head // max(1, group)), ("d_v", head // max(1, group))):
            there = row < outputs[name].shape[1]
            found[name] = outputs[name][batch[there], row[there], heads[there]]
        for name in outputs.keys() - found.keys():
            there = row < outputs["d_q"].shape[1]
            if name.startswith(_OF_CAPTURED):
                found[name] = outputs[name]
            elif outputs[name].ndim == 4:
                each = zip((batch, head, row), outputs[name].shape, strict=False)  # which may be 1 along these
                found[name] = outputs[name][tuple(index[there].clamp(max=size - 1) for index, size in each)]
            else:
                found[name] = outputs[name][head.unique()]
        return found

    def rows_of(self, touched: Mapping[str, Tensor]) -> Sample:
        """See Oracle."""
        touched = gradients_in_one_batch(touched)
        rows = {name: touched[name].any(-1).transpose(1, 2) for name in ("d_q", "d_k", "d_v")}
        group = rows["d_q"].shape[1] // max(1, rows["d_k"].shape[1])
        found = [rows["d_q"].nonzero()]
        for name in ("d_k", "d_v"):
            of_keys = rows[name].nonzero()
            of_keys[:, 1] *= group
            found.append(of_keys)
        for name in touched.keys() - rows.keys():  # of a modifier: a number for each score, or for each head
            mask = touched[name]
            if name.startswith(_OF_CAPTURED):  # a sum over many rows of any
                continue
            found.append(mask.any(-1).nonzero() if mask.ndim == 4 else torch.nn.functional.pad(mask.nonzero(), (1, 1)))
        rows_of_any: Tensor = torch.cat(found).unique(dim=0)
        return rows_of_any

    def unseen(self, problem: Problem, workload: Workload, exact: Mapping[str, Tensor], sample: Sample | None) -> dict[str, Tensor]:
        """See Oracle. So it is with keys that no row sees."""
        # What others hide some may see, and only the device knows sequences: whom nobody sees adds nothing to d_v, as no other key does.
        if opens_keys(problem) or problem.is_packed:
            nothing = (exact["d_v"] == 0).all(-1)
            return {"d_v": nothing} if drops(problem) else {"d_k": nothing, "d_v": nothing}  # whose P are all dropped has a d_k
        w, device = workload, exact["d_q"].device
        queries = torch.ones(w.len_q, dtype=torch.bool, device=device)  # that see no key
        keys = torch.ones(w.len_kv, dtype=torch.bool, device=device)  # that no query sees
        links = hiding_links(problem, operation_of(problem).scalars(problem, w))
        for some in slices(w.len_q, max(1, _SCORES_AT_ONCE // max(1, w.len_kv))):
            rows = Rows(torch.arange(some.start, some.stop, device=device), w.len_q, w.len_kv)
            hidden = hidden_keys(rows, problem.mask is Mask.CAUSAL, links)
            queries[some] = hidden.all(1)
            keys &= hidden.all(0)
        of = {"d_q": queries, "d_k": keys, "d_v": keys}
        if sample is not None:
            rows_of = sample[:, 2].to(device)
            return {name: nothing[rows_of[rows_of < len(nothing)]] for name, nothing in of.items()}
        heads = {"d_q": w.heads_q, "d_k": w.heads_kv, "d_v": w.heads_kv}
        return {name: nothing[None, :, None].expand(w.batch, -1, heads[name]) for name, nothing in of.items()}


ORACLE = BackwardOracle()
