"""Packed sequences in oracles: which tokens are of which, each computed by itself, and what is drawn to be verified.

Tensors: q [tokens_q, heads_q, head_dim], k and v [tokens_kv, heads_kv, ..]; cu_seqlens_q and cu_seqlens_kv [batch + 1], seqused_q and
seqused_kv [batch], int32; out as q, lse [heads_q, tokens_q]. Rows of a sample are (0, query head, token).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from flashgen.codegen.modifier import modifier_operands
from flashgen.codegen.operands import Axis
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.workload import Workload

from .link import links_of

Attention = Callable[..., tuple[Tensor, Tensor]]  # of dense q, k and v: out and lse
_SPREAD = 64.0  # of drawn lengths: the longest to the shortest, about


@dataclass(frozen=True)
class SequenceTokens:
    """The tokens of a sequence, `number` of its batch, that are used."""

    number: int
    queries: slice
    keys: slice


def sequences_of(tensors: Mapping[str, Tensor]) -> list[SequenceTokens]:
    """All of a batch, as kernels see them: boundaries are clamped to the tokens there are, and do not fall."""
    queries, keys = (_used(tensors, side, len(tensors[of])) for side, of in (("q", "q"), ("kv", "k")))
    return [SequenceTokens(number, *both) for number, both in enumerate(zip(queries, keys, strict=True))]


def _used(tensors: Mapping[str, Tensor], side: str, tokens: int) -> list[slice]:
    ends = tensors[f"cu_seqlens_{side}"].cpu().clamp(0, tokens).cummax(0).values.tolist()
    lengths = [end - begin for begin, end in pairwise(ends)]
    if f"seqused_{side}" in tensors:
        used = tensors[f"seqused_{side}"].tolist()
        lengths = [max(0, min(one, length)) for one, length in zip(used, lengths, strict=True)]
    return [slice(begin, begin + length) for begin, length in zip(ends, lengths, strict=False)]


def packed_attention(
    attention: Attention, problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float], sample: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gives out and lse, or those of a sample, by the attention of one dense sequence at a time. Tokens outside have out 0 and lse -inf."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    nothing = attention(q[None, :0], k[None, :0], v[None, :0], causal=False, scale=1.0)
    if sample is None:
        out, lse = (one.new_zeros(shape) for one, shape in zip(nothing, ((*q.shape[:2], v.shape[2]), (q.shape[1], len(q))), strict=True))
    else:
        sample = sample.to(q.device)
        out, lse = nothing[0].new_zeros(len(sample), v.shape[2]), nothing[1].new_zeros(len(sample))
    lse.fill_(-torch.inf)
    for one in sequences_of(tensors):
        own = {"causal": problem.mask is Mask.CAUSAL, "scale": scalars["scale"], "first_batch": one.number}
        dense = [q[one.queries][None], k[one.keys][None], v[one.keys][None]]
        links = links_of(problem, _of_sequence(problem, tensors, one), scalars)
        if sample is None:
            part, part_lse = attention(*dense, links=links, **own)
            out[one.queries], lse[:, one.queries] = part[0], part_lse[0]
        else:
            (where,) = ((sample[:, 2] >= one.queries.start) & (sample[:, 2] < one.queries.stop)).nonzero(as_tuple=True)
            if len(where):
                rows = sample[where] - torch.tensor([0, 0, one.queries.start], device=q.device)
                out[where], lse[where] = attention(*dense, links=links, rows=rows, **own)
    return out, lse


def one_batch(outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Outputs of dense sequences as they are, those of packed ones as the one entry of a batch, whose rows are all tokens."""
    return outputs if outputs["out"].ndim == 4 else {name: tensor[None] for name, tensor in outputs.items()}


def _of_sequence(problem: Problem, tensors: Mapping[str, Tensor], one: SequenceTokens) -> dict[str, Tensor]:
    """The operands of modifiers with as many queries and keys as the sequence has: they count from 0 in each.

    Elements of scores are 0 beyond those that there are.
    """
    lengths = {Axis.LEN_Q: one.queries.stop - one.queries.start, Axis.LEN_KV: one.keys.stop - one.keys.start}
    found = dict(tensors)
    for operand in modifier_operands(problem):
        for dim, axis in enumerate(operand.axes):
            if axis in lengths:
                found[operand.name] = _of_length(found[operand.name], dim, lengths[axis])
    return found


def _of_length(tensor: Tensor, dim: int, length: int) -> Tensor:
    """The first elements along a dimension, with zeros behind them if there are fewer; one element is that of all."""
    size = tensor.shape[dim]
    if size == 1:
        return tensor.expand(*(length if i == dim else -1 for i in range(tensor.ndim)))
    there = tensor.narrow(dim, 0, min(length, size))
    beyond = there.new_zeros([max(0, length - size) if i == dim else n for i, n in enumerate(there.shape)])
    return torch.cat([there, beyond], dim) if length > size else there


def dense_parts(
    problem: Problem, tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], sample: Tensor | None
) -> Iterator[tuple[int, Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """Dense sequences as they are; packed ones, as far as a sample asks for them, as a batch of one each.

    Gives the number of the first entry of the batch, its tensors, and where in `whole` its gradients go.
    """
    if not problem.is_packed:
        yield 0, tensors, whole
        return
    asked = None if sample is None else sample[:, 2]
    for one in sequences_of(tensors):
        if asked is None or any(bool(((asked >= rows.start) & (asked < rows.stop)).any()) for rows in (one.queries, one.keys)):
            yield one.number, {**_of_sequence(problem, tensors, one), **_rows_of(tensors, one)}, _rows_of(whole, one)


def _rows_of(tensors: Mapping[str, Tensor], one: SequenceTokens) -> dict[str, Tensor]:
    """What a sequence has of these tensors, as views with an axis of one entry of a batch."""
    rows = {**dict.fromkeys(("q", "out", "d_out", "d_q"), one.queries), **dict.fromkeys(("k", "v", "d_k", "d_v"), one.keys)}
    found = {name: tensors[name][own][None] for name, own in rows.items() if name in tensors}
    return found | {name: tensors[name][:, one.queries][None] for name in ("lse", "d_lse") if name in tensors}


def gradients_in_one_batch(outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Gradients of packed sequences as those of the one entry of a batch, whose rows are all tokens."""
    if outputs["d_q"].ndim == 4:
        return outputs
    return {name: tensor[None] if name in ("d_q", "d_k", "d_v") else tensor for name, tensor in outputs.items()}


def drawn_sequences(problem: Problem, workload: Workload, generator: torch.Generator) -> dict[str, Tensor]:
    """Boundaries and used lengths of packed sequences, int32 by operand name; none where sequences are dense.

    Lengths are log-uniform and take all tokens; a sequence has queries about as its share of keys, and where there are as many in all, as
    many. Of sequences but the first, every fourth is a token long and every fourth is empty, as far as there are others that take their
    tokens. A sixteenth of a sequence is not used.
    """
    if not problem.is_packed:
        return {}
    w, device = workload, generator.device
    drawn = torch.rand(2, w.batch, generator=generator, device=device, dtype=torch.float64)
    of_queries = (drawn[0] * math.log(_SPREAD)).exp()
    of_keys = of_queries if w.tokens_q == w.tokens_kv else of_queries * (drawn[1] - 0.5).exp()
    number, found = torch.arange(w.batch, device=device), dict[str, Tensor]()
    for side, tokens, own in (("q", w.tokens_q, of_queries), ("kv", w.tokens_kv, of_keys)):
        few = (number % 4 == 2).to(own)
        own = own.masked_fill(number % 4 >= 2, 0.0)
        lengths = few + own / own.sum().clamp(min=0.5) * (tokens - few.sum()).clamp(min=0)
        ends = lengths.cumsum(0).add_(0.5).floor_().clamp_(max=tokens).int()
        ends[w.batch - 1 :] = tokens
        boundaries = torch.cat([ends.new_zeros(1), ends])
        length = boundaries.diff()
        found |= {f"cu_seqlens_{side}": boundaries, f"seqused_{side}": length - length // 16}
    return found


def equal_sequences(tensors: Mapping[str, Tensor], workload: Workload) -> dict[str, Tensor]:
    """Boundaries of sequences that are equally long, of all tokens that make whole ones: what takes the place of those drawn."""
    device, w = tensors["q"].device, workload
    number = torch.arange(w.batch + 1, dtype=torch.int32, device=device)
    return {f"cu_seqlens_{side}": number * (tokens // w.batch) for side, tokens in (("q", w.tokens_q), ("kv", w.tokens_kv))}
