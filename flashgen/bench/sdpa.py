"""The peers that are backends of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Mask

from ..cells import Cell
from .bias import NAME as BIAS
from .bias import has_bias
from .dropout import NAME as DROPOUT
from .dropout import dropout_p
from .packed_peers import nested_sdpa
from .peer import AttentionPeer, Call, hidden_from, written_to_stderr
from .work import Inputs


class Sdpa(AttentionPeer):
    """One backend of `torch.nn.functional.scaled_dot_product_attention`."""

    layout = "bhsd"
    modifiers = ("bias", "chunk", "document_ids", "dropout", "window")  # all but dropout as a mask, which not all backends take
    backend: ClassVar[SDPBackend]
    can_use: ClassVar[str] = ""  # PyTorch's function that tells why it cannot

    def explain(self, cell: Cell, inputs: Inputs) -> list[str]:
        """See Peer. By version, PyTorch warns of its reasons when it raises, or only when it is asked, and then not through Python."""
        if not self.can_use or cell.problem.is_packed:
            return []
        q, k, v = (inputs[name] for name in ("q", "k", "v"))
        causal, gqa = cell.problem.mask is Mask.CAUSAL and q.shape[2] == k.shape[2], q.shape[1] != k.shape[1]
        hidden = hidden_from(cell, q.device) if _needs_mask(cell) else None
        mask = self._of_scores(cell, inputs[BIAS]) if has_bias(cell) else None if hidden is None else ~hidden
        parameters = torch.backends.cuda.SDPAParams(q, k, v, mask, dropout_p(cell), causal, gqa)
        written = written_to_stderr(partial(getattr(torch.backends.cuda, self.can_use), parameters, True))
        return re.findall(r"Warning: (.*?)(?: \(function \w+\))?$", written, re.MULTILINE)

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer. `is_causal` is aligned top-left: where lengths differ, a causal mask must be given as one."""
        if cell.problem.is_packed:
            return nested_sdpa(cell)
        w, causal = cell.workload, cell.problem.mask is Mask.CAUSAL
        gqa, mask, p = w.heads_q != w.heads_kv, None, dropout_p(cell)
        if has_bias(cell):
            if causal or _needs_mask(cell):
                others = ", ".join((cell.problem.mask.value, *cell.problem.modifiers))
                raise ArgumentError(f"{self.name} has a bias only where no mask is; got {others}")
            of_scores = partial(self._of_scores, cell)
            return lambda q, k, v, bias, **others: F.scaled_dot_product_attention(
                q, k, v, attn_mask=of_scores(bias), dropout_p=p, enable_gqa=gqa
            )
        if _needs_mask(cell):
            hidden = hidden_from(cell, device)
            assert hidden is not None
            causal, mask = False, ~hidden
        if causal and w.len_q != w.len_kv:
            causal, mask = False, self._bottom_right(w.len_q, w.len_kv, device)
        return lambda q, k, v, **others: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal, enable_gqa=gqa
        )

    @staticmethod
    def _of_scores(cell: Cell, bias: Tensor) -> Tensor:
        """A view of it with an element for each score."""
        w = cell.workload
        return bias.expand(w.batch, w.heads_q, w.len_q, w.len_kv)

    def select(self) -> None:
        """Selects the backend; PyTorch's context manager would cost every call several microseconds."""
        for backend, setting in _SDPA_SETTINGS.items():
            getattr(torch.backends.cuda, f"enable_{setting}_sdp")(backend is self.backend)

    @staticmethod
    def _bottom_right(len_q: int, len_kv: int, device: torch.device) -> Tensor:
        return torch.ones(len_q, len_kv, dtype=torch.bool, device=device).tril(len_kv - len_q)


def _needs_mask(cell: Cell) -> bool:
    """Whether more than a causal mask hides keys."""
    return bool({*cell.problem.modifiers} - {BIAS, DROPOUT})


class SdpaFlash(Sdpa):
    """FlashAttention-2, as PyTorch ships it."""

    name = "flash"
    packed = True
    backend = SDPBackend.FLASH_ATTENTION
    can_use = "can_use_flash_attention"

    @staticmethod
    def _bottom_right(len_q: int, len_kv: int, device: torch.device) -> Tensor:
        """FlashAttention takes no mask, but knows this alignment."""
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(len_q, len_kv)


class SdpaCudnn(Sdpa):
    """cuDNN's fused attention."""

    name = "cudnn"
    backend = SDPBackend.CUDNN_ATTENTION
    can_use = "can_use_cudnn_attention"


class SdpaEfficient(Sdpa):
    """The memory-efficient kernel that PyTorch took over from xformers."""

    name = "efficient"
    backend = SDPBackend.EFFICIENT_ATTENTION
    can_use = "can_use_efficient_attention"
    usual = False


class SdpaMath(Sdpa):
    """Plain matrix products and softmax; the scores are in memory whole."""

    name = "math"
    backend = SDPBackend.MATH
    usual = False


# Backend -> its part in the names of PyTorch's settings.
_SDPA_SETTINGS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "mem_efficient",
    SDPBackend.MATH: "math",
}


@contextmanager
def sdpa_settings_kept() -> Iterator[None]:
    """Puts back what `Sdpa.select` changes for the whole process."""
    kept = {setting: getattr(torch.backends.cuda, f"{setting}_sdp_enabled")() for setting in _SDPA_SETTINGS.values()}
    try:
        yield
    finally:
        for setting, enabled in kept.items():
            getattr(torch.backends.cuda, f"enable_{setting}_sdp")(enabled)
