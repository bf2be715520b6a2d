"""`KeptTiles`: lists of the tiles that a block mask leaves, by kernel, kept with it: the first call finds them, those behind it need not.

A list is of one stream, which runs the launch that finds it before all others that read it, and of tensors that nobody has written since,
as PyTorch counts. While a CUDA graph is captured each call finds its own, as nobody knows how long the graph lives.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import ReferenceType, finalize, ref

import torch

_MOST_LISTS = 16  # of a mask: of kernels with tiles of other sizes, forward and backward, lengths, streams


class _List(NamedTuple):
    """memory: of the list; tensors, states: of which it was found, and where they lay and how often they had been written then."""

    memory: torch.Tensor
    tensors: tuple[ReferenceType[torch.Tensor], ...]
    states: tuple[tuple[int, int], ...]


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Changed by whatever PyTorch counts as a write, and by another memory for the same tensor (`tensor.data = other`)."""
    return tensor.data_ptr(), tensor._version


class KeptTiles:
    """Those of one block mask. Threads may share it: what two of them find at once is the same."""

    __slots__ = ("_lists",)

    def __init__(self) -> None:
        self._lists: dict[Hashable, _List] = {}

    def get(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The list that was found by `key`, if these tensors are those of then, as they were."""
        found = self._lists.get(key)
        if found is None:
            return None
        for tensor, own, state in zip(tensors, found.tensors, found.states, strict=True):
            if own() is not tensor or (tensor.data_ptr(), tensor._version) != state:  # as _state
                return None
        return found.memory

    def put(self, key: Hashable, tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Keeps a list whose launch is in its stream."""
        if len(self._lists) >= _MOST_LISTS:
            self._lists.clear()
        self._lists[key] = _List(memory, tuple([ref(tensor) for tensor in tensors]), tuple([_state(tensor) for tensor in tensors]))


_of_states: dict[int, KeptTiles] = {}  # by the id of what `keeping_tiles` gave, as long as that lives


def keeping_tiles(states: torch.Tensor) -> torch.Tensor:
    """The states of a block mask, for a mask_mod that says what it does and no more: calls with that keep lists."""
    alias = states.detach()
    _of_states[id(alias)] = KeptTiles()
    finalize(alias, _of_states.pop, id(alias), None).atexit = False
    return alias


def kept_tiles(tensors: Sequence[torch.Tensor]) -> KeptTiles | None:
    """What a call with these among its modifiers' tensors may keep; None: nothing."""
    found = None
    for tensor in tensors:
        if tensor.is_inference():  # nobody counts its writes
            return None
        found = found or _of_states.get(id(tensor))
    return None if found is None or torch.cuda.is_current_stream_capturing() else found
