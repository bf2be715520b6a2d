"""The peers that are attention in plain PyTorch, with its scores in memory whole."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cells import Cell
from ..numerics.oracle import TORCH_DTYPES
from .bias import NAME as BIAS
from .dropout import dropout_p
from .peer import AttentionPeer, Call, hidden_from, softcap_of
from .relative import TABLE, has_relative_bias, offset_of


class Eager(AttentionPeer):
    """Attention in plain PyTorch as it is written down: S in fp32, P in the inputs' type, both in memory whole."""

    name = "eager"
    modifiers: ClassVar[tuple[str, ...]] = ("alibi", "bias", "chunk", "document_ids", "dropout", "relative", "sinks", "softcap", "window")
    layout = "bhsd"
    usual = False

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        w, scale, hidden, cap = cell.workload, cell.problem.head_dim**-0.5, hidden_from(cell, device), softcap_of(cell)
        p = dropout_p(cell)
        group, scaled, softmax = w.heads_q // w.heads_kv, self._scaled, self._softmax
        if hidden is not None:
            hidden = self._hidden(hidden, cell)
        if "alibi" in cell.problem.modifiers:
            queries, keys = (torch.arange(length, device=device, dtype=torch.float32) for length in (w.len_q, w.len_kv))
            distance = (queries[:, None] + (w.len_kv - w.len_q) - keys).abs()
        if has_relative_bias(cell):
            positions = torch.arange(w.len_q, device=device)[:, None] - torch.arange(w.len_kv, device=device) + offset_of(cell)

        def call(
            q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, **others: Tensor
        ) -> Tensor:
            if group > 1:
                k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            s = scaled(q @ k.mT, scale)
            if cap is not None:
                s = cap * torch.tanh(s / cap)
            if alibi_slopes is not None:
                s = s - alibi_slopes[:, :, None, None] * distance
            if BIAS in others:
                s = s + others[BIAS]
            if TABLE in others:
                s = s + others[TABLE][:, positions]
            return F.dropout(softmax(s, hidden, sinks).to(q.dtype), p) @ v

        return call

    def _hidden(self, hidden: Tensor, cell: Cell) -> Tensor:
        """What `_softmax` takes of a causal mask, given True where a key is hidden."""
        return hidden

    def _scaled(self, s: Tensor, scale: float) -> Tensor:
        return s.float() * scale

    def _softmax(self, s: Tensor, hidden: Tensor | None, sinks: Tensor | None) -> Tensor:
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        if sinks is None:
            return torch.softmax(s, -1)
        return torch.softmax(torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1), -1)[..., :-1]


class EagerFp16(Eager):
    """Attention in plain PyTorch as articles have it: S in the inputs' type with an additive mask, softmax in fp32."""

    name = "eager_fp16"
    modifiers = ("chunk", "document_ids", "dropout", "softcap", "window")  # slopes and sinks are fp32

    def _hidden(self, hidden: Tensor, cell: Cell) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=TORCH_DTYPES[cell.problem.dtype], device=hidden.device)
        return mask.masked_fill(hidden, -torch.inf)

    def _scaled(self, s: Tensor, scale: float) -> Tensor:
        return s * scale

    def _softmax(self, s: Tensor, hidden: Tensor | None, sinks: Tensor | None) -> Tensor:
        if hidden is not None:
            s = s + hidden
        return torch.softmax(s, -1, dtype=torch.float32)
