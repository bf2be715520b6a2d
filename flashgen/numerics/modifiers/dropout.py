"""Dropout: see flashgen/codegen/modifiers/dropout.py."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from flashgen.codegen.modifiers.dropout import keep_scale, limit_of

from ..link import Link, Rows

_WORD = 2**32 - 1
_MULTIPLIERS, _INCREMENTS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # of Philox4x32
_ROUNDS = 7
_TILE = 16  # queries and keys
_COUNTERS_AT_ONCE = 2**23  # 64 MiB for each of some ten numbers


class DropoutLink(Link):
    """Zeroes elements of P, and divides the others by the probability that they are left. `seed`: int64, of no dimensions."""

    def __init__(self, seed: Tensor, p: float) -> None:
        self.seed, self.p = seed, p

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        return cls(tensors["dropout_seed"], scalars["dropout_p"])

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link."""
        return torch.randint(-(2**63), 2**63 - 1, sizes, generator=generator, device=generator.device)

    def kept(self, rows: Rows) -> Tensor | None:
        """See Link."""
        assert rows.heads is not None
        heads = rows.batch * rows.heads_q + rows.heads
        return kept_elements(self.seed, self.p, heads, rows.queries[:, None], rows.keys).float() * keep_scale(self.p)


def kept_elements(seed: Tensor, p: float, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Which elements of P a dropout keeps: bool [n, rows, keys]. The arguments are those of `random_bits`."""
    return _are_kept(random_bits(seed, heads, queries, keys), p)


def dropout_mask(seed: Tensor | None, p: float, batch: int, heads: int, len_q: int, len_kv: int, device: torch.device) -> Tensor:
    """Which elements of P a call keeps: bool [batch, heads, len_q, len_kv]. All of them without a seed."""
    kept = torch.ones(batch, heads, len_q, len_kv, dtype=torch.bool, device=device)
    if seed is None or not kept.numel():
        return kept
    tiles_q, tiles_kv = -(-len_q // _TILE), -(-len_kv // _TILE)  # elements of a counter lie within such a tile: see `random_bits`
    queries, keys = torch.arange(tiles_q * _TILE // 2, device=device)[:, None], torch.arange(tiles_kv * _TILE // 4, device=device)[None]
    at_once = max(1, _COUNTERS_AT_ONCE // (len(queries) * keys.shape[1]))
    of_heads = kept.flatten(0, 1)
    for first in range(0, batch * heads, at_once):
        some = of_heads[first : first + at_once]
        words = _words(seed, torch.arange(first, first + len(some), device=device)[:, None], queries, keys)
        words = words.reshape(2, 2, len(some), tiles_q, _TILE // 2, tiles_kv, _TILE // 4)  # eights of keys and of queries come first
        halves = torch.stack((_are_kept(words & 0xFFFF, p), _are_kept(words >> 16, p)), dim=-1)
        tiles = halves.permute(2, 3, 1, 4, 5, 0, 6, 7).reshape(len(some), tiles_q * _TILE, tiles_kv * _TILE)
        some.copy_(tiles[:, :len_q, :len_kv])
    return kept


def random_bits(seed: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The 16 random bits of each element of P: int64 [n, rows, keys].

    They are of Philox4x32 (Salmon et al. 2011) with 7 rounds. Its key is the seed, its counter tells elements apart by eights.

    heads: [n, rows], counted over the whole batch; queries: [rows, 1]; keys: [1, keys]
    """
    words = _words(seed, heads, queries // 16 * 8 + queries % 8, keys // 16 * 4 + keys % 8 // 2)
    which = (queries // 8 % 2 + keys // 8 % 2 * 2).expand(words.shape[1:])
    return words.gather(0, which[None])[0] >> keys % 2 * 16 & 0xFFFF


def _words(seed: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The four words of Philox, int64 [4, n, rows, keys], of counters of (keys, queries, heads, 0) in the shapes of `random_bits`."""
    counter = [keys, queries, heads[..., None], torch.zeros_like(keys)]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(_ROUNDS):
        (high, low), (other_high, other_low) = (
            ((product := counter[2 * i] * _MULTIPLIERS[i]) >> 32 & _WORD, product & _WORD) for i in range(2)
        )
        counter = [other_high ^ counter[1] ^ key[0], other_low, high ^ counter[3] ^ key[1], low]
        key = [(part + more) & _WORD for part, more in zip(key, _INCREMENTS, strict=True)]
    return torch.stack(torch.broadcast_tensors(*counter))


def _are_kept(bits: Tensor, p: float) -> Tensor:
    """Whether elements with these 16 random bits are kept: bool, in the bits' shape."""
    limit, inverted = limit_of(p)
    (number,) = struct.unpack("e", struct.pack("H", limit))  # a tensor would have to be copied to the device, which no graph captures
    less: Tensor = bits.to(torch.int16).view(torch.float16) < number
    return less if inverted else ~less


LINK = DropoutLink
