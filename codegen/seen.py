"""Which keys queries see, from what callers say of it: `Seen`, what a causal mask, a window and chunks come to."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .errors import ArgumentError, shown
from .problem import Mask
from .workload import OPEN

TOP_LEFT = "top_left"
Causal = bool | Literal["top_left"]
"""Whether query i sees keys j <= i + len_kv - len_q alone; TOP_LEFT: j <= i."""

Ends = tuple[int | None, int | None]
"""(left, right) of a window, as callers say it: None opens a side."""

CHUNK, WINDOW = "chunk", "window"  # the modifiers


class Seen(NamedTuple):
    """Which keys queries see, as a problem and a workload say it: mask and modifiers; window_left, window_right and chunk.

    A causal mask is a window's right end. What a mask alone can say needs no window.
    """

    mask: Mask
    modifiers: tuple[str, ...] = ()
    sizes: tuple[int, int, int] = (OPEN, OPEN, OPEN)

    @classmethod
    def of(cls, causal: Causal, window: Ends | None = None, chunk: int | None = None, top_left: int = 0) -> Seen:
        """`top_left`: len_q - len_kv, the right end that stands for a causal mask aligned top-left.

        Raises ArgumentError for another text than TOP_LEFT, for a window of anything but two whole numbers or None, and for a chunk of
        anything but a whole number from 1 on.
        """
        if not isinstance(causal, bool) and causal != TOP_LEFT:
            raise ArgumentError(f"causal must be True, False or {TOP_LEFT!r}; got {shown(causal)}")
        left, right = (OPEN, OPEN) if window is None else _checked(window)
        keys, chunks = (OPEN, ()) if chunk is None else (_checked_chunk(chunk), (CHUNK,))
        if causal:
            right = min(right, top_left if causal == TOP_LEFT else 0)
        if left == OPEN and right in (0, OPEN):
            return cls(Mask.CAUSAL if right == 0 else Mask.FULL, chunks, (OPEN, OPEN, keys))
        return cls(Mask.FULL, (*chunks, WINDOW), (left, right, keys))

    @property
    def sizes_of_modifiers(self) -> tuple[int, ...]:
        """Those of `sizes` that its modifiers have, as `given_modifiers` takes them."""
        left, right, keys = self.sizes
        return (*(keys,) * (CHUNK in self.modifiers), *(left, right) * (WINDOW in self.modifiers))


def _checked(window: Ends) -> tuple[int, int]:
    if not isinstance(window, tuple) or len(window) != 2:
        raise ArgumentError(f"window must be a tuple (left, right), each a number of keys or None; got {shown(window)}")
    for end in window:
        if end is not None and not (_is_whole(end) and -OPEN < end < OPEN):
            raise ArgumentError(f"window must have ends that are None or whole numbers from {1 - OPEN} to {OPEN - 1}; got {shown(window)}")
    left, right = (OPEN if end is None else end for end in window)
    return left, right


def _is_whole(number: object) -> bool:
    """A SymInt stands for one where PyTorch traces a call; this layer knows it by name."""
    return (isinstance(number, int) and not isinstance(number, bool)) or type(number).__name__ == "SymInt"


def _checked_chunk(chunk: int) -> int:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk < OPEN:
        raise ArgumentError(f"chunk must be a whole number of keys from 1 to {OPEN - 1}, or None for no chunks; got {shown(chunk)}")
    return chunk
