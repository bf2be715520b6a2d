"""`Workload`: the sizes known at launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import ArgumentError, require_int
from .plain import ADDED_LATER
from .problem import _MOST, Mask
from .typed import require_type

_INT = {int}
OPEN = _MOST  # an end of a window that is not there: no key is as far away


@dataclass(frozen=True, order=True)
class Workload:
    """Sizes known at launch: batch, query heads, key/value heads, query length, key/value length.

    `heads_q` is a multiple of `heads_kv` (grouped-query attention). Any of the sizes may be 0.
    `window_left` and `window_right` are of problems that have a window: query i sees the keys from i + len_kv - len_q - window_left to
    i + len_kv - len_q + window_right, both included. They may be negative; OPEN stands for no end on that side.
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    window_left: int = field(default=OPEN, metadata=ADDED_LATER)
    window_right: int = field(default=OPEN, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        sizes = self.batch, self.heads_q, self.heads_kv, self.len_q, self.len_kv
        if {*map(type, sizes)} != _INT or min(sizes) < 0 or max(sizes) > _MOST:  # in short, because each call of a new length asks
            for name, size in zip(("batch", "heads_q", "heads_kv", "len_q", "len_kv"), sizes, strict=True):
                require_int(name, size, 0, _MOST)
        if self.has_window:
            for name in ("window_left", "window_right"):
                require_int(name, getattr(self, name), -OPEN, OPEN)
        if self.heads_q and (not self.heads_kv or self.heads_q % self.heads_kv):
            raise ArgumentError(f"heads_q must be a multiple of heads_kv; got heads_q {self.heads_q}, heads_kv {self.heads_kv}")

    @property
    def has_window(self) -> bool:
        """Whether a window has an end."""
        return self.window_left != OPEN or self.window_right != OPEN

    @property
    def name(self) -> str:
        """For people, for example 'B4 H32/8 S4096', 'B1 H32 S1x4096' or 'B4 H32 S4096 W1024:0' with a window."""
        heads = f"H{self.heads_q}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        lengths = f"S{self.len_q}" + (f"x{self.len_kv}" if self.len_kv != self.len_q else "")
        window = ":".join("" if end == OPEN else str(end) for end in (self.window_left, self.window_right))
        return f"B{self.batch} {heads} {lengths}" + (f" W{window}" if self.has_window else "")

    def visible_pairs(self, mask: Mask) -> int:
        """How many (query, key) pairs of one head the mask and the window let through."""
        require_type("mask", mask, Mask)
        right = min(self.window_right, 0) if mask is Mask.CAUSAL else self.window_right
        return max(0, self._pairs_up_to(right) - self._pairs_up_to(-self.window_left - 1))

    def _pairs_up_to(self, end: int) -> int:
        """Pairs whose key is at most `end` behind where the last query's last key would be: j <= i + len_kv - len_q + end."""
        first = self.len_kv - self.len_q + end + 1  # keys that query 0 sees; each later query sees one more, from 0 to len_kv
        begin = min(max(0, 1 - first), self.len_q)
        whole = min(max(begin, self.len_kv - first), self.len_q)
        return (whole - begin) * (2 * first + begin + whole - 1) // 2 + (self.len_q - whole) * self.len_kv
