"""Whole calls of `flashgen.attention_with_kvcache` that are judged: on caches most of which get new keys first, and rotated queries.

A case has the lengths that sequences have in the end. What is appended is judged by itself, to the bit where nothing is rotated; attention
then by its oracle, on the cache and the queries as they were written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import flashgen
from flashgen.codegen.problem import Mask
from flashgen.codegen.workload import OPEN
from flashgen.launch.tensors import Tensors
from flashgen.numerics.append import rotated
from flashgen.numerics.caches import cached_keys
from flashgen.operators.append import append_to_cache
from tests.support.cached_cases import TRACED, CachedCase, random_cached_cases
from tests.support.packed_cases import guarded_ints

FLOATS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half the distance of numbers next to 1


@dataclass(frozen=True)
class AppendedCase:
    """case: with the keys that sequences have once new ones are there; new: how many each gets, 0 for none.

    rotary_dim: 0 for no rotation; fp32: whether its tables are
    """

    case: CachedCase
    new: int
    rotary_dim: int
    interleaved: bool
    fp32: bool

    @property
    def name(self) -> str:
        """For people."""
        kind = f"{'gptj' if self.interleaved else 'neox'}{self.rotary_dim}{'-fp32' if self.fp32 else ''}"
        return f"{self.case.name}-new{self.new}" + (f"-{kind}" if self.rotary_dim else "")

    def make(self, device: str) -> tuple[Tensors, dict[str, Any]]:
        """The tensors with all keys that sequences have in the end, and the call that gets there, whose cache lacks the new ones."""
        case, tensors = self.case, self.case.make(device)
        call: dict[str, Any] = {"q": tensors["q"], "k_cache": tensors["k"], "v_cache": tensors["v"], "scale": case.scale}
        call |= {"causal": case.problem.mask is Mask.CAUSAL, **_of_modifiers(case, tensors)}
        call["cache_seqlens"] = guarded_ints([length - self.new for length in case.lengths], device)
        if case.padding is not None:
            call["cache_leftpad"] = tensors["cache_leftpad"]
        if case.table is not None:
            by_entry = len(case.table[0]) == 1 and case.seed % 2
            call |= {"cache_batch_idx": tensors["block_table"][:, 0]} if by_entry else {"block_table": tensors["block_table"]}
        if self.new:
            where = [(page[-self.new :], row[-self.new :]) for page, row in cached_keys({**tensors, "cache_leftpad": _none(tensors)})]
            for name, cache in (("k", tensors["k"]), ("v", tensors["v"])):
                call[name] = torch.stack([cache[page, row] for page, row in where])
                for page, row in where:
                    cache[page, row] = torch.nan
        if self.rotary_dim:
            room = case.page_size * (1 if case.table is None else len(case.table[0]))
            cosines, sines = usual_tables(room + case.len_q, self.rotary_dim, device)
            dtype = torch.float32 if self.fp32 else tensors["q"].dtype
            call |= {"rotary_cos": cosines.to(dtype), "rotary_sin": sines.to(dtype), "rotary_interleaved": self.interleaved}
        return tensors, call

    def rejections(self, tensors: Tensors, call: dict[str, Any], found: tuple[Tensor, Tensor]) -> list[str]:
        """Why what a call gave, and what it left in the cache, is rejected. call: as it was before, with copies of the cache."""
        q, wrong = tensors["q"], list[str]()
        if self.new or self.rotary_dim:
            q, appended = self._appended(call)
            wrong = [
                f"{name} is not what the operator that appends makes of it" for name in "kv" if not _same(tensors[name], appended[name])
            ]
            wrong += self._wrong_rotation(call, q, appended)
        tensors["out"].copy_(found[0])
        tensors["lse"].copy_(found[1])
        return wrong + self.case.rejections(tensors.replacing(q=q))

    def by_query(self, call: dict[str, Any]) -> bool:
        """Whether each query has a position of its own."""
        return bool(call["causal"] or "window" in call or "chunk" in call)

    def _appended(self, call: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Queries, and the cache, as the operator that appends gives them."""
        table = call.get("block_table")
        table = call["cache_batch_idx"][:, None] if "cache_batch_idx" in call else table
        cache = [call["k_cache"].clone(), call["v_cache"].clone()]
        rotary = (call.get("rotary_cos"), call.get("rotary_sin"), None, None, self.interleaved, self.by_query(call))
        lengths, q = append_to_cache(*cache, call.get("k"), call.get("v"), call["cache_seqlens"], table, call["q"], *rotary)
        assert lengths.tolist() == [*self.case.lengths]
        return q if self.rotary_dim else call["q"], dict(zip("kv", cache, strict=True))

    def _wrong_rotation(self, call: dict[str, Any], q: Tensor, appended: dict[str, Tensor]) -> list[str]:
        """By float64, to the nearest number of the type, or the next one to it where it lies between two."""
        first, wrong = call["cache_seqlens"].long()[:, None], list[str]()
        tensors = {"k": appended["k"], "cache_seqlens": call["cache_seqlens"] + self.new}
        if "block_table" in call or "cache_batch_idx" in call:
            tensors["block_table"] = call["block_table"] if "block_table" in call else call["cache_batch_idx"][:, None]
        pairs = [("q", call["q"], q, first + torch.arange(q.shape[1], device=q.device) * self.by_query(call))]
        if self.new:
            written = [(page[-self.new :], row[-self.new :]) for page, row in cached_keys(tensors)]
            for name in "kv":
                made = torch.stack([appended[name][page, row] for page, row in written])
                if name == "v" or not self.rotary_dim:
                    wrong += [] if _same(made, call[name]) else [f"new rows of {name} are not those that are given"]
                else:
                    pairs.append(("k", call["k"], made, first + torch.arange(self.new, device=q.device)))
        for name, given, made, positions in pairs if self.rotary_dim else []:
            exact = rotated(given.double(), positions, (call["rotary_cos"], call["rotary_sin"]), self.interleaved)
            error = ((made.double() - exact).abs() / exact.abs().clamp(min=2.0**-6)).max()
            if not error <= 1.01 * FLOATS[given.dtype]:
                wrong.append(f"{name} is rotated with an error of {float(error):.2e}")
        return wrong


def _none(tensors: Tensors) -> Tensor:
    return torch.zeros_like(tensors["cache_seqlens"])


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def _of_modifiers(case: CachedCase, tensors: Tensors) -> dict[str, Any]:
    """Keywords."""
    w, names, found = case.workload, case.problem.modifiers, dict[str, Any]()
    if "window" in names:
        found["window"] = tuple(None if end == OPEN else end for end in (w.window_left, w.window_right))
    if "chunk" in names:
        found["chunk"] = w.chunk
    if "softcap" in names:
        found["softcap"] = tensors.call().scalars["softcap"]
    if TRACED in names:
        found |= _functions(tensors)
    given = ("alibi_slopes", "sinks", "bias", "mask", "tree_mask", "prefix_len")
    return found | {name: tensors[name] for name in given if name in tensors}


def _functions(tensors: Tensors) -> dict[str, Any]:
    """Those of `TRACED`."""
    of_rows, of_keys, lengths = (tensors[f"traced_t{i}"] for i in range(3))
    factor = tensors.call().scalars["traced_number_n0"]

    def score_mod(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + (of_rows[head, query] + of_keys[batch, key]) * factor

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return ((key + query + head) % 3 == 0) | (key < lengths[batch])

    return {"score_mod": score_mod, "mask_mod": mask_mod}


def random_appended_cases(count: int, seed: int, **limits: int) -> list[AppendedCase]:
    """`count` cases; the same for the same arguments. A fifth of them appends and rotates nothing."""
    rng = random.Random(seed)
    return [_random_case(rng, case) for case in random_cached_cases(count, seed, **limits)]


def _random_case(rng: random.Random, case: CachedCase) -> AppendedCase:
    kind = rng.random()
    new = 0 if kind < 0.35 else case.len_q if rng.random() < 0.6 else rng.choice((1, 2, 7, 17))
    half = case.problem.head_dim // 2
    rotary_dim = 2 * rng.choice((half, half, max(1, half // 2), rng.randint(1, half))) if kind > 0.2 and rng.random() < 0.7 else 0
    return AppendedCase(_with_room(rng, case, new) if new else case, new, rotary_dim, rng.random() < 0.5, rng.random() < 0.5)


def _with_room(rng: random.Random, case: CachedCase, new: int) -> CachedCase:
    """With so many more keys in each sequence, in pages of their own: nobody appends to a page that others read."""
    lengths = tuple(length + new for length in case.lengths)
    if case.padding is not None:  # which hides no new key
        case = replace(case, padding=tuple(map(min, case.padding, case.lengths)))
    has_pages = case.table is not None and all(0 <= row[0] < case.pages for row in case.table)  # a sequence without keys may have none
    if case.table is None or (has_pages and len(case.table[0]) == 1 and case.page_size >= max(lengths)):
        return replace(case, lengths=lengths, page_size=max(case.page_size, max(lengths)))
    pages, rows = case.pages, list[list[int]]()
    width = max(-(-length // case.page_size) for length in lengths) + rng.choice((0, 1))
    for before, length, own in zip(case.lengths, lengths, case.table, strict=True):
        whole = before // case.page_size
        fresh = -(-length // case.page_size) - whole
        rows.append([*own[:whole], *range(pages, pages + fresh), *[-1] * (width - whole - fresh)])
        pages += fresh
    return replace(case, lengths=lengths, table=tuple(map(tuple, rows)), pages=pages)


def usual_tables(positions: int, width: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 [positions, width / 2], of the angles position * 10000^(-2 j / width)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angles = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def call_of(call: dict[str, Any]) -> Any:
    """Out and lse."""
    return flashgen.attention_with_kvcache(**call, return_lse=True)


def with_own_cache(call: dict[str, Any]) -> dict[str, Any]:
    """The same call on copies of the cache."""
    return {**call, "k_cache": call["k_cache"].clone(), "v_cache": call["v_cache"].clone()}


def names_of(cases: Sequence[AppendedCase]) -> list[str]:
    """For pytest."""
    return [case.name for case in cases]
