"""Lengths that all sequences of a batch have, as kernels read them: from the device."""

from __future__ import annotations

import threading

import torch

from . import gpu
from .untraced import untraced


class _OfThread(threading.local):
    """What each thread made last, and for which length, batch, device, stream and mode."""

    key: tuple[object, ...] = ()
    lengths: torch.Tensor | None = None


_LOCAL = _OfThread()


@untraced
def filled_lengths(q: torch.Tensor, length: int) -> torch.Tensor:
    """int32, [batch of q], on q's device, each the length. Layers of a model ask for the same: the last ones of a thread are kept.

    Only for the stream that has filled them, and not for a graph that is being captured, which would read them when they are gone.
    q: a plain tensor; nobody must want to see how they are made.
    """
    if not q.is_cuda or torch.cuda.is_current_stream_capturing():
        return q.new_full((q.shape[0],), length, dtype=torch.int32)
    key = (length, q.shape[0], q.device.index, gpu.current_stream(q.device.index), torch.is_inference_mode_enabled())
    found = _LOCAL.lengths
    if found is None or key != _LOCAL.key:
        found = q.new_full((q.shape[0],), length, dtype=torch.int32)
        _LOCAL.key, _LOCAL.lengths = key, found
    return found
