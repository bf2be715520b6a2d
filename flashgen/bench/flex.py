"""The peers that are backends of `torch.nn.attention.flex_attention`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from flashgen.codegen.problem import Mask

from ..cells import Cell
from .bias import NAME as BIAS
from .documents import document_ids, has_documents
from .peer import AttentionPeer, Call, softcap_of
from .relative import TABLE, relative_bias

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key: whether it is seen


class Flex(AttentionPeer):
    """FlexAttention, compiled for each shape."""

    name = "flex"
    layout = "bhsd"
    modifiers = ("alibi", "bias", "chunk", "document_ids", "relative", "sinks", "softcap", "window")
    packages: ClassVar[tuple[str, ...]] = ("triton",)
    options: ClassVar[flex.FlexKernelOptions | None] = None

    def __init__(self) -> None:
        import_module("triton")  # else the first call would say so, long after

        # One compiled function is specialised for every cell; beyond the usual limit PyTorch would silently not compile.
        torch._dynamo.config.recompile_limit = 512
        torch._dynamo.config.accumulated_recompile_limit = 4096
        self._attention = torch.compile(changed_attention, dynamic=False)

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        w, attention, options, cap = cell.workload, self._attention, self.options, softcap_of(cell)
        gqa, mask = w.heads_q != w.heads_kv, flex_block_mask(cell, device)

        def call(
            q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, **others: Tensor
        ) -> Tensor:
            return attention(q, k, v, alibi_slopes, sinks, others.get(BIAS), others.get(TABLE), cap, mask, gqa, options)

        return call


class FlexFlash(Flex):
    """FlexAttention on FlashAttention-4, which PyTorch calls with what it makes of masks and modifiers."""

    name = "flex_flash"
    packages = ("flash-attn-4", "flash-attn")
    usual = False
    options: ClassVar[flex.FlexKernelOptions | None] = {"BACKEND": "FLASH"}

    def __init__(self) -> None:
        import_module("flash_attn.cute.interface")
        super().__init__()


def flex_block_mask(cell: Cell, device: torch.device) -> flex.BlockMask | None:
    """Of what a cell's mask, window, chunks and documents let through; None for everything."""
    w, offset, seen = cell.workload, cell.workload.len_kv - cell.workload.len_q, list[MaskMod]()
    causal = cell.problem.mask is Mask.CAUSAL
    if w.is_local:
        far = w.len_q + w.len_kv  # farther than any key: sums of 32 bits hold it
        left, right, chunk = (max(-far, min(end, far)) for end in (w.window_left, w.window_right, w.chunk))
        if causal:
            right = min(right, 0)

        def local(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = (i + offset - left <= j) & (j <= i + offset + right)
            return near if chunk == far else near & (torch.div(i + offset, chunk, rounding_mode="floor") == j // chunk)

        seen.append(local)
    elif causal:
        seen.append(lambda b, h, i, j: i + offset >= j)
    if has_documents(cell):
        of_queries, of_keys = document_ids(cell, device).values()
        seen.append(lambda b, h, i, j: of_queries[b, i] == of_keys[b, j])
    if not seen:
        return None
    batch, mask_mod = w.batch if has_documents(cell) else None, seen[0] if len(seen) == 1 else flex.and_masks(*seen)
    return flex.create_block_mask(mask_mod, batch, None, w.len_q, w.len_kv, device=device)


def changed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    table: Tensor | None,
    cap: float | None,
    mask: flex.BlockMask | None,
    gqa: bool,
    options: flex.FlexKernelOptions | None,
) -> Tensor:
    """FlexAttention with scores that a softcap, ALiBi, a bias and a relative bias change.

    Tensors are its arguments: code compiled for some is right for others. Sinks come behind it, as PyTorch's own examples have
    them: by the log-sum-exp, out has to lose what a row's sink takes of it.
    """
    offset = k.shape[2] - q.shape[2]

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[b, h] * (i + offset - j).abs()
        if bias is not None:
            score = score + bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, i if bias.shape[2] > 1 else 0, j]
        if table is not None:
            score = relative_bias(table, k.shape[2] - 1)(score, b, h, i, j)
        return score

    score_mod = None if cap is None and slopes is None and bias is None and table is None else changed
    if sinks is None:
        out: Tensor = flex.flex_attention(q, k, v, score_mod, mask, enable_gqa=gqa, kernel_options=options)
        return out
    aux = flex.AuxRequest(lse=True)
    plain, more = flex.flex_attention(q, k, v, score_mod, mask, enable_gqa=gqa, kernel_options=options, return_aux=aux)
    assert more.lse is not None
    return plain * torch.sigmoid(more.lse - sinks[:, None])[..., None].to(plain.dtype)
