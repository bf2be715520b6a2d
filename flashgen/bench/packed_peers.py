"""The peers in cells of packed sequences and caches, as far as they differ from what they are in others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Mask

from ..cells import Cell
from .caches import equal_cell
from .check import CellCheck
from .packed import dense_cell
from .peer import Peer
from .work import Inputs, Run, prepare


class FlashgenEqual(Peer):
    """flashgen on dense sequences that are equally long, with the FLOPs of a packed cell, or the keys of a cache: what these cost."""

    name = "flashgen_equal"
    usual: ClassVar[bool] = False

    def __init__(self) -> None:
        from ..api import attention

        self._attention = attention

    def prepare(self, cell: Cell, device: torch.device) -> Callable[[Inputs], Run]:
        """See Peer."""
        return partial(self._run, self._equal(cell))

    def _equal(self, cell: Cell) -> Cell:
        if cell.problem.modifiers or not (cell.problem.is_packed or cell.problem.is_cached):
            raise ArgumentError(f"{self.name} is for packed sequences and caches without modifiers; got {cell.problem.name}")
        return equal_cell(cell) if cell.problem.is_cached else dense_cell(cell)

    def _run(self, cell: Cell, inputs: Inputs) -> Run:
        w = cell.workload
        lengths = {"q": w.len_q, "k": w.len_kv, "v": w.len_kv, "d_out": w.len_q}
        dense = {name: self._dense(inputs[name], w.batch, length) for name, length in lengths.items() if name in inputs}
        return prepare(cell.problem, partial(self._attention, causal=cell.problem.mask is Mask.CAUSAL), dense)

    @staticmethod
    def _dense(packed: Tensor, batch: int, length: int) -> Tensor:
        """So many sequences of the tokens of packed sequences, or of all pages, from the begin again where these end."""
        packed = packed.flatten(0, -3)
        repeated = packed.repeat(-(-batch * length // len(packed)), 1, 1)
        return repeated[: batch * length].view(batch, length, *packed.shape[1:])

    def note(self, cell: Cell, device: torch.device) -> str:
        """See Peer."""
        return f"dense {self._equal(cell).workload.name}"

    def fault(self, check: CellCheck, run: Run, inputs: Inputs) -> str:
        """See Peer. What it computes is not the cell's: other cells check that."""
        return ""


def nested_sdpa(cell: Cell) -> Callable[..., Tensor]:
    """PyTorch's attention of nested tensors, of packed ones and their boundaries, for peers that are its backends."""
    w, causal = cell.workload, cell.problem.mask is Mask.CAUSAL
    if causal and w.tokens_q != w.tokens_kv:
        raise ArgumentError("PyTorch's causal masks are aligned top-left: not the same work")
    gqa = w.heads_q != w.heads_kv

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor) -> Tensor:
        of_q, of_k, of_v = (
            torch.nested.nested_tensor_from_jagged(tensor, offsets, min_seqlen=1, max_seqlen=longest).transpose(1, 2)
            for tensor, offsets, longest in ((q, cu_seqlens_q, w.len_q), (k, cu_seqlens_kv, w.len_kv), (v, cu_seqlens_kv, w.len_kv))
        )
        out: Any = F.scaled_dot_product_attention(of_q, of_k, of_v, is_causal=causal, enable_gqa=gqa).transpose(1, 2)
        values: Tensor = out.values()
        return values

    return call
