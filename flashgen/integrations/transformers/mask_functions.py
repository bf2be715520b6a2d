"""What transformers' mask functions say: a causal mask, a window, chunks, sequences that are packed, and what else there is.

transformers describes a mask as a function of batch, head, query and key, made of a few known ones joined by `and_masks`. What these are is
read from their closures, and nothing is called. Functions of others, and all that is not known here, stay functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.errors import ArgumentError, shown

MaskFunction = Callable[..., Any]
"""Of batch, head, query and key, each an index or a tensor of them: whether the query sees the key."""

_MODULE = "transformers.masking_utils"


@dataclass
class MaskParts:
    """What a mask function is made of; a query sees a key that all of it lets it see."""

    causal: bool = False
    window: tuple[int, int | None] | None = None  # keys to the left and to the right of a query, itself apart; None: no end on that side
    chunk: int | None = None  # keys
    first_tokens: torch.Tensor | None = None  # [batch]: the first token of each sequence that is none of padding, from which chunks count
    sequence_ids: torch.Tensor | None = None  # [batch, len]: the sequence of each token, of those packed in one entry of the batch
    positions: torch.Tensor | None = None  # [batch, len]: the position of each token in its sequence, where chunks count by it
    others: int = 0  # functions that are none of these

    def is_local(self) -> bool:
        """Whether it matters where queries are beside the keys."""
        return self.causal or self.window is not None or self.chunk is not None


def window_length(sliding_window: Any) -> int:
    """Keys of a window. Raises ArgumentError for what is no int: a mask could be made of it, but is never meant."""
    try:
        return operator.index(sliding_window)
    except TypeError:
        wanted = "a whole number of keys, of type int, or None for no window"
        raise ArgumentError(f"sliding_window must be {wanted}; got {shown(sliding_window)}") from None


def mask_parts(mask_function: MaskFunction | None) -> MaskParts:
    """The parts of a mask function of transformers; None is a causal mask. Raises ArgumentError."""
    parts = MaskParts()
    if mask_function is None:
        parts.causal = True
    else:
        _add(parts, mask_function)
    if parts.positions is not None and parts.sequence_ids is None:
        parts.others += 1  # the distance of two tokens is that of their positions within a sequence alone
    return parts


def _add(parts: MaskParts, function: MaskFunction) -> None:
    name = function.__qualname__ if getattr(function, "__module__", None) == _MODULE else ""
    if name == "causal_mask_function":
        parts.causal = True
    elif name == "bidirectional_mask_function":
        pass
    elif is_dynamo_compiling():
        parts.others += 1  # it shows no closures of functions that it has seen being made
    elif name == "and_masks.<locals>.and_mask":
        for each in _captured(function, "mask_functions"):
            _add(parts, each)
    elif name == "sliding_window_overlay.<locals>.inner_mask" and parts.window is None:
        parts.window = (window_length(_captured(function, "sliding_window")) - 1, None)
    elif name == "sliding_window_bidirectional_overlay.<locals>.inner_mask" and parts.window is None:
        parts.window = (window_length(_captured(function, "sliding_window")),) * 2
    elif name == "chunked_overlay.<locals>.inner_mask" and parts.chunk is None:
        parts.chunk, parts.first_tokens = _captured(function, "chunk_size"), _captured(function, "left_padding")
    elif name == "packed_sequence_mask_function.<locals>.inner_mask" and parts.sequence_ids is None:
        parts.sequence_ids = _captured(function, "packed_sequence_mask")
    elif name == "remap_positions_for_packed_sequence.<locals>.inner_mask" and parts.positions is None:
        parts.positions = _captured(function, "position_ids")
        _add(parts, _captured(function, "mask_function"))
    else:
        parts.others += 1


def _captured(function: MaskFunction, name: str) -> Any:
    """What a function has captured under a name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))[name].cell_contents
