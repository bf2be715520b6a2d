"""`Workload`: the sizes known at launch."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ArgumentError, require_int
from .problem import _MOST, Mask
from .typed import require_type

_INT = {int}


@dataclass(frozen=True, order=True)
class Workload:
    """Sizes known at launch: batch, query heads, key/value heads, query length, key/value length.

    `heads_q` is a multiple of `heads_kv` (grouped-query attention). Any of the sizes may be 0.
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int

    def __post_init__(self) -> None:
        sizes = self.batch, self.heads_q, self.heads_kv, self.len_q, self.len_kv
        if {*map(type, sizes)} != _INT or min(sizes) < 0 or max(sizes) > _MOST:  # in short, because each call of a new length asks
            for name, size in zip(("batch", "heads_q", "heads_kv", "len_q", "len_kv"), sizes, strict=True):
                require_int(name, size, 0, _MOST)
        if self.heads_q and (not self.heads_kv or self.heads_q % self.heads_kv):
            raise ArgumentError(f"heads_q must be a multiple of heads_kv; got heads_q {self.heads_q}, heads_kv {self.heads_kv}")

    @property
    def name(self) -> str:
        """For people, for example 'B4 H32/8 S4096' or 'B1 H32 S1x4096'."""
        heads = f"H{self.heads_q}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        lengths = f"S{self.len_q}" + (f"x{self.len_kv}" if self.len_kv != self.len_q else "")
        return f"B{self.batch} {heads} {lengths}"

    def visible_pairs(self, mask: Mask) -> int:
        """How many (query, key) pairs of one head the mask lets through."""
        require_type("mask", mask, Mask)
        if mask is Mask.FULL or not self.len_q or not self.len_kv:
            return self.len_q * self.len_kv
        # Query i sees clamp(i + 1 + len_kv - len_q, 0, len_kv) keys: an arithmetic series over the last min(len_q, len_kv) rows.
        rows = min(self.len_q, self.len_kv)
        return rows * (2 * self.len_kv - rows + 1) // 2
