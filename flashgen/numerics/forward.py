"""The oracle of the forward pass: attention in float64, and plain PyTorch attention. All of it runs on any device.

Tensors: q [batch, len_q, heads_q, head_dim], k [batch, len_kv, heads_kv, head_dim], v [batch, len_kv, heads_kv, head_dim_v],
any strides; out [batch, len_q, heads_q, head_dim_v]; lse [batch, heads_q, len_q], natural logarithm. Query head h reads
key/value head h // (heads_q // heads_kv). A causal mask is aligned bottom-right. A row that sees no key has out 0 and lse -inf.
sequences.py has those of packed sequences, caches.py those of caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

from .caches import cached_attention
from .link import Link, Rows, changed_scores, hidden_keys, joined_scores, kept_factors, links_of
from .oracle import Oracle, Sample
from .sequences import one_batch, packed_attention

_MATRIX_UNIT = 64  # rows and columns
_SCORES_AT_ONCE = 2**26  # elements: 512 MiB in float64, of which the softmax holds up to three


_Softmax = Callable[[Tensor], tuple[Tensor, Tensor]]  # of scaled scores: P, and the log-sum-exp


@dataclass(frozen=True)
class _Method:
    """One way to compute attention: on a part of the problem, and the element types of its results.

    attend: (q [n, rows, d], k [n, keys, d], v [n, keys, d_v], softmax_of, scale) -> out [n, rows, d_v], lse [n, rows],
            where `softmax_of` is `_Masks.softmax` of scores that are scaled.
    """

    attend: Callable[[Tensor, Tensor, Tensor, _Softmax, float], tuple[Tensor, Tensor]]
    out: torch.dtype
    lse: torch.dtype


@dataclass(frozen=True)
class _Masks:
    """What comes between the products: a causal mask, links of modifiers, and how many entries come before those of the batch for these."""

    causal: bool
    links: Sequence[Link]
    first_batch: int

    def softmax(self, rows: Rows, s: Tensor) -> tuple[Tensor, Tensor]:
        """P, as links leave it, and the log-sum-exp, of scaled scores [n, rows, len_kv], whose memory P takes."""
        s = changed_scores(s, rows, self.links)
        p, lse = softmax(s, hidden_keys(rows, self.causal, self.links), joined_scores(rows, self.links))
        kept = kept_factors(rows, self.links)
        return p if kept is None else p.mul_(kept), lse


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    rows: Tensor | None = None,
    links: Sequence[Link] = (),
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention in float64: (out, lse), both float64, in the module's shapes. `links`: of modifiers, for which `first_batch` is the first.

    `rows`: int64 [n, 3] of (batch, query head, query); then out is [n, head_dim_v] and lse [n] for these rows only.
    Memory beside the results stays bounded whatever the lengths. Raises ArgumentError for shapes that do not go together.
    """
    return _attention(_Method(_attend_exact, torch.float64, torch.float64), q, k, v, _Masks(causal, links, first_batch), scale, rows)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    rows: Tensor | None = None,
    links: Sequence[Link] = (),
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention as plain PyTorch does it in q's element type: scores and softmax in fp32, probabilities and output rounded.

    The same arguments, shapes and errors as `exact_attention`; out has q's element type, lse is fp32.
    """
    return _attention(_Method(_attend_plain, q.dtype, torch.float32), q, k, v, _Masks(causal, links, first_batch), scale, rows)


def sample_rows(workload: Workload, count: int, seed: int, causal: bool) -> Tensor:
    """`count` rows of a workload to judge where all of them are too many: int64 [n, 3] of (batch, query head, query), on the CPU.

    Always among them: the first and the last query of the first and of the last head, and under a causal mask the first query
    that sees a key. The rest is drawn with `seed`. Empty if the workload has no query. Raises ArgumentError for a count below 6.
    """
    require_int("count", count, 6)
    if not workload.batch * workload.heads_q * workload.len_q:
        return torch.empty(0, 3, dtype=torch.int64)
    queries = [0, workload.len_q - 1]
    if causal:
        queries.append(min(max(0, workload.len_q - workload.len_kv), workload.len_q - 1))
    fixed = [(b, h, i) for b, h in ((0, 0), (workload.batch - 1, workload.heads_q - 1)) for i in queries]
    generator = torch.Generator().manual_seed(seed)
    sizes = (workload.batch, workload.heads_q, workload.len_q)
    drawn = [torch.randint(size, (count - len(fixed),), generator=generator) for size in sizes]
    return torch.cat([torch.tensor(fixed, dtype=torch.int64), torch.stack(drawn, dim=1)])


def _attention(method: _Method, q: Tensor, k: Tensor, v: Tensor, masks: _Masks, scale: float, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    _require_shapes(q, k, v)
    if rows is None:
        return _attention_whole(method, q, k, v, masks, scale)
    if rows.dtype != torch.int64 or rows.ndim != 2 or rows.shape[1] != 3:
        raise ArgumentError(f"rows must be an int64 tensor [n, 3]; got {rows.dtype} {list(rows.shape)}")
    return _attention_rows(method, q, k, v, masks, scale, rows.to(q.device))


def _attention_whole(method: _Method, q: Tensor, k: Tensor, v: Tensor, masks: _Masks, scale: float) -> tuple[Tensor, Tensor]:
    (batch, len_q, heads_q, _), (_, len_kv, heads_kv, head_dim_v) = q.shape, v.shape
    group = heads_q // max(1, heads_kv)
    out = q.new_empty(batch, len_q, heads_q, head_dim_v, dtype=method.out)
    lse = q.new_empty(batch, heads_q, len_q, dtype=method.lse)
    # As many key/value heads at once as the budget allows, and of one head as many queries.
    at_once = max(1, min(len_q, _SCORES_AT_ONCE // max(1, len_kv * group)))
    heads = max(1, min(heads_kv, _SCORES_AT_ONCE // max(1, len_kv * group * at_once)))
    for b in range(batch):
        for head in range(0, heads_kv, heads):
            kv = slice(head, min(head + heads, heads_kv))
            mine = slice(kv.start * group, kv.stop * group)
            keys, values = k[b, :, kv].transpose(0, 1), v[b, :, kv].transpose(0, 1)
            for some in slices(len_q, at_once):
                queries = torch.arange(some.start, some.stop, device=q.device)
                members = torch.arange(mine.start, mine.stop, device=q.device).reshape(kv.stop - kv.start, group)
                of = Rows(queries.repeat(group), len_q, len_kv, masks.first_batch + b, members.repeat_interleave(len(queries), 1), heads_q)
                # The queries of a group, one head after the other, are rows of one product with their common keys.
                rows = q[b, some, mine].transpose(0, 1).reshape(kv.stop - kv.start, -1, q.shape[3])
                part, part_lse = method.attend(rows, keys, values, partial(masks.softmax, of), scale)
                out[b, some, mine] = part.reshape(mine.stop - mine.start, -1, head_dim_v).transpose(0, 1)
                lse[b, mine, some] = part_lse.reshape(mine.stop - mine.start, -1)
    return out, lse


def _attention_rows(method: _Method, q: Tensor, k: Tensor, v: Tensor, masks: _Masks, scale: float, rows: Tensor) -> tuple[Tensor, Tensor]:
    group, len_kv = q.shape[2] // max(1, k.shape[2]), k.shape[1]
    out, lse = q.new_empty(len(rows), v.shape[3], dtype=method.out), q.new_empty(len(rows), dtype=method.lse)
    heads_kv = rows[:, 0] * k.shape[2] + rows[:, 1] // max(1, group)  # of the whole batch
    for number in sorted(set(heads_kv.tolist())):
        b, head = divmod(number, k.shape[2])
        where = (heads_kv == number).nonzero()[:, 0]
        for some in slices(len(where), max(1, _SCORES_AT_ONCE // max(1, len_kv))):
            index = where[some]
            mine = q[b, rows[index, 2], rows[index, 1]]
            of = Rows(rows[index, 2], q.shape[1], len_kv, masks.first_batch + b, rows[index, 1][None], q.shape[2])
            part, part_lse = method.attend(mine[None], k[b, :, head][None], v[b, :, head][None], partial(masks.softmax, of), scale)
            out[index], lse[index] = part[0], part_lse[0]
    return out, lse


def _attend_exact(q: Tensor, k: Tensor, v: Tensor, softmax_of: _Softmax, scale: float) -> tuple[Tensor, Tensor]:
    p, lse = softmax_of((q.double() @ k.double().mT).mul_(scale))
    return p @ v.double(), lse


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, softmax_of: _Softmax, scale: float) -> tuple[Tensor, Tensor]:
    p, lse = softmax_of(product_in_fp32(q, k.mT).mul_(scale))
    return product_in_fp32(p.to(q.dtype), v).to(q.dtype), lse


def product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of 16-bit elements with an fp32 result.

    On a GPU the matrix units of the element type compute it: how they accumulate, which is a little less exact than fp32
    arithmetic, is part of what plain PyTorch errs by. Zeros fill small products up to a size for which PyTorch takes them.
    Elsewhere products of 16-bit elements are exact in fp32.
    """
    if not (a.is_cuda and a.numel() and b.numel()):
        return a.float() @ b.float()
    rows, columns = a.shape[1], b.shape[2]
    a = torch.nn.functional.pad(a, (0, 0, 0, -rows % _MATRIX_UNIT))
    b = torch.nn.functional.pad(b, (0, -columns % _MATRIX_UNIT))
    return torch.bmm(a, b.expand(len(a), -1, -1), out_dtype=torch.float32)[:, :rows, :columns]


def softmax(s: Tensor, hidden: Tensor, joined: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """P, in the place of the scores `s`, and the log-sum-exp. `hidden` [rows, keys]: which keys a row does not see.

    joined: a score that each row has beside those of its keys, [n, rows]

    Each row's maximum comes off first: the log-sum-exp of huge scores would be too coarse for that.
    """
    s.masked_fill_(hidden, -torch.inf)
    nothing = s.new_full((*s.shape[:-1], 1), -torch.inf)
    row_max = s.amax(dim=-1, keepdim=True) if s.shape[-1] else nothing
    if joined is not None:
        joined = joined.to(s.dtype)[..., None]
        row_max = torch.maximum(row_max, joined)
    # A row without keys: -inf - (-inf) would be NaN, -inf - 0 gives probability 0.
    s.sub_(row_max.masked_fill(row_max == -torch.inf, 0.0)).exp_()
    row_sum = s.sum(dim=-1, keepdim=True)
    if joined is not None:
        row_sum = row_sum + (joined - row_max).exp()
    lse = (row_max + row_sum.log())[..., 0]
    return s.div_(row_sum.masked_fill(row_sum == 0, 1.0)), lse


def slices(length: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover a length."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _require_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ArgumentError(f"{name} must have 4 dimensions (batch, length, heads, width); got {tensor.ndim}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ArgumentError(f"k must have q's batch {q.shape[0]} and width {q.shape[3]}; got {k.shape[0]} and {k.shape[3]}")
    if v.shape[:3] != k.shape[:3]:
        raise ArgumentError(f"v must have k's batch, length and heads {list(k.shape[:3])}; got {list(v.shape[:3])}")
    if q.shape[2] and (not k.shape[2] or q.shape[2] % k.shape[2]):
        raise ArgumentError(f"k must have a number of heads that divides q's {q.shape[2]}; got {k.shape[2]}")


class ForwardOracle(Oracle):
    """See the module's docstring."""

    def exact(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """See Oracle. Memory beside the results stays bounded whatever the lengths."""
        return self._named(exact_attention, problem, tensors, scalars, sample)

    def plain(
        self, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Sample | None = None
    ) -> dict[str, Tensor]:
        """See Oracle. out has the problem's element type, lse is fp32."""
        return self._named(plain, problem, tensors, scalars, sample)

    @staticmethod
    def _named(
        compute: Callable[..., tuple[Tensor, Tensor]],
        problem: Problem,
        tensors: Mapping[str, Tensor],
        scalars: Mapping[str, float],
        sample: Sample | None,
    ) -> dict[str, Tensor]:
        if problem.is_packed:
            out, lse = packed_attention(compute, problem, tensors, scalars, sample)
            return {"out": out, "lse": lse}
        if problem.is_cached:
            out, lse = cached_attention(compute, problem, tensors, scalars, sample)
            return {"out": out, "lse": lse}
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        links = links_of(problem, tensors, scalars)
        out, lse = compute(q, k, v, causal=problem.mask is Mask.CAUSAL, scale=scalars["scale"], rows=sample, links=links)
        return {"out": out, "lse": lse}

    def sample(self, problem: Problem, workload: Workload, count: int, seed: int) -> Sample:
        """See Oracle, and `sample_rows`."""
        if problem.is_packed:
            workload = replace(workload, batch=1, len_q=workload.tokens_q, len_kv=workload.tokens_kv)
        return sample_rows(workload, count, seed, problem.mask is Mask.CAUSAL)

    def sampled(self, outputs: Mapping[str, Tensor], sample: Sample) -> dict[str, Tensor]:
        """See Oracle."""
        batch, head, row = sample.to(outputs["out"].device).unbind(1)
        indices = {"out": (batch, row, head), "lse": (batch, head, row)}
        return {name: tensor[indices[name]] for name, tensor in one_batch(outputs).items()}

    def rows_of(self, touched: Mapping[str, Tensor]) -> Sample:
        """See Oracle."""
        touched = one_batch(touched)
        return (touched["out"].any(-1).transpose(1, 2) | touched["lse"]).nonzero()

    def unseen(self, problem: Problem, workload: Workload, exact: Mapping[str, Tensor], sample: Sample | None) -> dict[str, Tensor]:
        """See Oracle."""
        return rows_without_keys(exact)


def rows_without_keys(exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of out that see no key, whose lse says so."""
    nothing = exact["lse"] == -torch.inf
    return {"out": nothing if nothing.ndim == 1 else nothing.mT}


ORACLE = ForwardOracle()
