"""`Workload`: the sizes known at launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .errors import ArgumentError, require_int
from .plain import ADDED_LATER
from .problem import _MOST, Mask
from .sizes import NUMBERS
from .typed import require_type

OPEN = _MOST  # an end of a window, or of a chunk, that is not there: no key is as far away


@dataclass(frozen=True, order=True)
class Workload:
    """Sizes known at launch: batch, query heads, key/value heads, query length, key/value length.

    `heads_q` is a multiple of `heads_kv` (grouped-query attention). Any of the sizes may be 0.
    `window_left` and `window_right` are of problems that have a window: query i sees the keys from i + len_kv - len_q - window_left to
    i + len_kv - len_q + window_right, both included. They may be negative; OPEN stands for no end on that side.
    `chunk` is of problems that have chunks: a query sees the keys of its own chunk alone, of so many keys; OPEN stands for no chunks.
    `tokens_q` and `tokens_kv` are of packed sequences: rows of the packed tensors. `batch` counts the sequences then, and `len_q` and
    `len_kv` are what the caller expects of the longest ones, by which launches are planned: longer ones are computed, too.
    `pages`, `page_size` and `table_pages` are of caches: pages of the cache, keys of a page, and pages that a sequence may have.
    `len_kv` is then how many keys a sequence may have at most, `table_pages * page_size`: how many it has only the device knows.
    `new_keys` is of what appends to a cache: keys that each sequence gets.
    """

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int
    window_left: int = field(default=OPEN, metadata=ADDED_LATER)
    window_right: int = field(default=OPEN, metadata=ADDED_LATER)
    chunk: int = field(default=OPEN, metadata=ADDED_LATER)
    tokens_q: int = field(default=0, metadata=ADDED_LATER)
    tokens_kv: int = field(default=0, metadata=ADDED_LATER)
    pages: int = field(default=0, metadata=ADDED_LATER)
    page_size: int = field(default=0, metadata=ADDED_LATER)
    table_pages: int = field(default=0, metadata=ADDED_LATER)
    new_keys: int = field(default=0, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        sizes = self.batch, self.heads_q, self.heads_kv, self.len_q, self.len_kv
        if not {*map(type, sizes)} <= NUMBERS or min(sizes) < 0 or max(sizes) > _MOST:  # in short, because each call of a new length asks
            for name, size in zip(("batch", "heads_q", "heads_kv", "len_q", "len_kv"), sizes, strict=True):
                require_int(name, size, 0, _MOST)
        if self.window_left != OPEN or self.window_right != OPEN:  # written out: each call of a new length makes one
            for name in ("window_left", "window_right"):
                require_int(name, getattr(self, name), -OPEN, OPEN)
        if self.chunk != OPEN:
            require_int("chunk", self.chunk, 1, OPEN)
        if self.tokens_q or self.tokens_kv:
            for name in ("tokens_q", "tokens_kv"):
                require_int(name, getattr(self, name), 0, _MOST)
        if self.page_size or self.pages or self.table_pages or self.new_keys:
            self._require_pages()
        if self.heads_q and (not self.heads_kv or self.heads_q % self.heads_kv):
            raise ArgumentError(f"heads_q must be a multiple of heads_kv; got heads_q {self.heads_q}, heads_kv {self.heads_kv}")

    def _require_pages(self) -> None:
        sizes = self.pages, self.page_size, self.table_pages, self.new_keys
        if not {*map(type, sizes)} <= NUMBERS or min(sizes) < 0 or max(sizes) > _MOST:  # in short, as above
            for name, size in zip(("pages", "page_size", "table_pages", "new_keys"), sizes, strict=True):
                require_int(name, size, 0, _MOST)
        if (self.page_size or self.pages or self.table_pages) and self.table_pages * self.page_size != self.len_kv:
            told = f"table_pages {self.table_pages}, page_size {self.page_size}"
            raise ArgumentError(f"len_kv must be table_pages * page_size where keys are in pages; got len_kv {self.len_kv}, {told}")

    @property
    def has_window(self) -> bool:
        """Whether a window has an end."""
        return self.window_left != OPEN or self.window_right != OPEN

    @property
    def is_local(self) -> bool:
        """Whether attention is local: a window or chunks say which keys are near enough to a query."""
        return self.window_left != OPEN or self.window_right != OPEN or self.chunk != OPEN  # each call of a new length asks

    @property
    def longest(self) -> int:
        """len_q + len_kv of a sequence, at most: what packed ones have only the device knows."""
        packed = self.tokens_q + self.tokens_kv
        return packed or self.len_q + self.len_kv

    @property
    def name(self) -> str:
        """For people, for example 'B4 H32/8 S4096' or 'B1 H32 S1x4096'; 'B4 H32 S4096 W1024:0' with a window, C512 with chunks.

        Packed sequences: 'B16 H32/8 S8192 T40960', with the tokens of queries and keys behind the expected lengths. Caches:
        'B16 H32/8 S1x8192 P64', with the keys of a page, and '+1' behind that where each sequence gets one.
        """
        heads = f"H{self.heads_q}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads_q else "")
        lengths = f"S{self.len_q}" + (f"x{self.len_kv}" if self.len_kv != self.len_q else "")
        window = ":".join("" if end == OPEN else str(end) for end in (self.window_left, self.window_right))
        chunks = f" C{self.chunk}" if self.chunk != OPEN else ""
        tokens = f" T{self.tokens_q}" + (f"x{self.tokens_kv}" if self.tokens_kv != self.tokens_q else "")
        packed = tokens if self.tokens_q or self.tokens_kv else ""
        pages = (f" P{self.page_size}" if self.page_size else "") + (f" +{self.new_keys}" if self.new_keys else "")
        return f"B{self.batch} {heads} {lengths}{packed}{pages}" + (f" W{window}" if self.has_window else "") + chunks

    def visible_pairs(self, mask: Mask) -> int:
        """How many (query, key) pairs of one head the mask, the window and the chunks let through."""
        require_type("mask", mask, Mask)
        right = min(self.window_right, 0) if mask is Mask.CAUSAL else self.window_right
        ends = right, -self.window_left - 1
        pairs = 0
        for count, queries, keys, offset in self._chunks():
            seen, too_early = (_pairs_up_to(queries, keys, offset + end + 1) for end in ends)
            pairs += count * max(0, seen - too_early)
        return pairs

    def _chunks(self) -> Iterator[tuple[int, int, int, int]]:
        """Chunks that have queries: how many are alike, queries and keys of each, and keys of it before its first query's own."""
        offset, size = self.len_kv - self.len_q, self.chunk
        if size == OPEN:
            yield 1, self.len_q, self.len_kv, offset
            return
        begin = max(0, offset)
        while begin < self.len_kv:
            first = begin // size * size
            end = min(first + size, self.len_kv)
            alike = max(1, (self.len_kv - begin) // size) if begin == first else 1
            yield alike, end - begin, end - first, begin - first
            begin = first + alike * size


def _pairs_up_to(queries: int, keys: int, first: int) -> int:
    """Pairs where query 0 sees the `first` first keys, and each later query one more, from 0 to all of them."""
    begin = min(max(0, 1 - first), queries)
    whole = min(max(begin, keys - first), queries)
    return (whole - begin) * (2 * first + begin + whole - 1) // 2 + (queries - whole) * keys


def mean_lengths(workload: Workload) -> tuple[int, int]:
    """Of queries and keys: of packed sequences the mean ones, rounded up, of dense ones those that all have.

    Keys that each sequence of a cache gets count as queries: there usually are as many.
    """
    if not workload.tokens_q and not workload.tokens_kv:
        return max(workload.len_q, workload.new_keys), workload.len_kv
    count = max(1, workload.batch)
    return -(-workload.tokens_q // count), -(-workload.tokens_kv // count)


def equal_lengths(workload: Workload) -> Workload:
    """Dense sequences in place of others, as many: of packed ones' mean lengths, rounded up, or with all keys that a cache may have."""
    if not workload.tokens_q and not workload.tokens_kv and not workload.page_size:
        return workload
    len_q, len_kv = mean_lengths(workload)
    return replace(workload, len_q=len_q, len_kv=len_kv, tokens_q=0, tokens_kv=0, pages=0, page_size=0, table_pages=0, new_keys=0)
