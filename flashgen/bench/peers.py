"""Who is measured: one small class for each implementation of attention, and the registry of them.

A peer is made once, and raises what its import raises where it is absent. `bind` gives its call for one cell, with all that a user
would keep from call to call already made. What a cell's problem asks of a peer that it cannot do, its first call raises.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from flashgen.build.driver import gpu
from flashgen.codegen.errors import FlashgenError, choice_error
from flashgen.codegen.problem import Mask

from ..tuning.request import Cell
from .check import Check

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
_REASON_LENGTH = 300


class Peer(ABC):
    """One implementation of attention.

    name: for the command line and the tables; layout: of its tensors, "bshd" or "bhsd"; packages: distributions whose versions
    decide its speed, the first that is installed counts; usual: whether it is measured unless asked otherwise.
    """

    name: ClassVar[str]
    layout: ClassVar[str] = "bshd"
    packages: ClassVar[tuple[str, ...]] = ()
    usual: ClassVar[bool] = True

    @abstractmethod
    def bind(self, cell: Cell, device: torch.device) -> Call:
        """The call (q, k, v) -> out for a cell, tensors and out in `layout`."""

    def select(self) -> None:  # noqa: B027 (most peers need nothing)
        """What must be set for this peer before its calls, and is no part of them."""

    def explain(self, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
        """Why a call may have failed, where the error itself does not tell."""
        return []

    def note(self, cell: Cell, device: torch.device) -> str:
        """What else is to be told of this peer in a cell."""
        return ""

    def fault(self, check: Check, call: Call, q: Tensor, k: Tensor, v: Tensor) -> str:
        """What is wrong with the call's result, empty if nothing. Its tensors are in `layout`."""
        out = call(q, k, v)
        return check.fault(out if self.layout == "bshd" else out.transpose(1, 2))


class Flashgen(Peer):
    """flashgen, as its user calls it."""

    name = "flashgen"

    def __init__(self) -> None:
        from ..api import attention

        self._attention = attention

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        attention, causal = self._attention, cell.problem.mask is Mask.CAUSAL
        return lambda q, k, v: attention(q, k, v, causal=causal, layout="bshd")

    def note(self, cell: Cell, device: torch.device) -> str:
        """The kernel that the calls of this cell run."""
        from .. import selection

        return f"kernel {selection.kernels.choose(cell.problem, cell.workload, gpu(device.index)).spec.name}"

    def fault(self, check: Check, call: Call, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Also held to the numerics rule, with the log-sum-exp: a kernel of our own is right by our own standard."""
        out, lse = self._attention(q, k, v, causal=check.causal, layout="bshd", return_lse=True)
        return super().fault(check, call, q, k, v) or check.rule(out, lse)


class Sdpa(Peer):
    """One backend of `torch.nn.functional.scaled_dot_product_attention`."""

    layout = "bhsd"
    backend: ClassVar[SDPBackend]
    can_use: ClassVar[str] = ""  # PyTorch's function that tells why it cannot

    def explain(self, cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> list[str]:
        """See Peer. By version, PyTorch warns of its reasons when it raises, or only when it is asked, and then not through Python."""
        if not self.can_use:
            return []
        causal, gqa = cell.problem.mask is Mask.CAUSAL and q.shape[2] == k.shape[2], q.shape[1] != k.shape[1]
        parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, gqa)
        written = written_to_stderr(partial(getattr(torch.backends.cuda, self.can_use), parameters, True))
        return re.findall(r"Warning: (.*?)(?: \(function \w+\))?$", written, re.MULTILINE)

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer. `is_causal` is aligned top-left: where lengths differ, a causal mask must be given as one."""
        w, causal = cell.workload, cell.problem.mask is Mask.CAUSAL
        gqa, mask = w.heads_q != w.heads_kv, None
        if causal and w.len_q != w.len_kv:
            causal, mask = False, self._bottom_right(w.len_q, w.len_kv, device)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)

    def select(self) -> None:
        """Selects the backend; PyTorch's context manager would cost every call several microseconds."""
        for backend, setting in _SDPA_SETTINGS.items():
            getattr(torch.backends.cuda, f"enable_{setting}_sdp")(backend is self.backend)

    @staticmethod
    def _bottom_right(len_q: int, len_kv: int, device: torch.device) -> Tensor:
        return torch.ones(len_q, len_kv, dtype=torch.bool, device=device).tril(len_kv - len_q)


class SdpaFlash(Sdpa):
    """FlashAttention-2, as PyTorch ships it."""

    name = "flash"
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


class Flex(Peer):
    """FlexAttention, compiled for each shape."""

    name = "flex"
    layout = "bhsd"
    packages = ("triton",)

    def __init__(self) -> None:
        import_module("triton")  # else the first call would say so, long after
        from torch.nn.attention import flex_attention as flex

        # One compiled function is specialised for every cell; beyond the usual limit PyTorch would silently not compile.
        torch._dynamo.config.recompile_limit = 512
        torch._dynamo.config.accumulated_recompile_limit = 4096
        self._attention, self._block_mask = torch.compile(flex.flex_attention, dynamic=False), flex.create_block_mask

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        w, attention = cell.workload, self._attention
        gqa, mask, offset = w.heads_q != w.heads_kv, None, w.len_kv - w.len_q
        if cell.problem.mask is Mask.CAUSAL:
            mask = self._block_mask(lambda b, h, i, j: i + offset >= j, None, None, w.len_q, w.len_kv, device=device)
        return lambda q, k, v: attention(q, k, v, block_mask=mask, enable_gqa=gqa)


class Fa4(Peer):
    """FlashAttention-4, from its own package."""

    name = "fa4"
    packages = ("flash-attn-4", "flash-attn")

    def __init__(self) -> None:
        self._attention = import_module("flash_attn.cute.interface").flash_attn_func

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        attention, causal = self._attention, cell.problem.mask is Mask.CAUSAL

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = attention(q, k, v, causal=causal)
            out: Tensor = result[0] if isinstance(result, tuple | list) else result  # with the log-sum-exp or without, by version
            return out

        return call


class Xformers(Peer):
    """xformers' memory-efficient attention, which picks its kernel itself."""

    name = "xformers"
    packages = ("xformers",)

    def __init__(self) -> None:
        self._ops = import_module("xformers.ops")

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        w, attention, biases = cell.workload, self._ops.memory_efficient_attention, self._ops.fmha.attn_bias
        bias = None
        if cell.problem.mask is Mask.CAUSAL:
            bias = biases.LowerTriangularMask() if w.len_q == w.len_kv else biases.LowerTriangularFromBottomRightMask()
        if w.heads_q == w.heads_kv:
            return lambda q, k, v: attention(q, k, v, attn_bias=bias)
        group = w.heads_q // w.heads_kv

        def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Grouped queries are a fifth dimension, along which k and v are expanded."""
            k, v = (t.unsqueeze(3).expand(-1, -1, -1, group, -1) for t in (k, v))
            out: Tensor = attention(q.unflatten(2, (w.heads_kv, group)), k, v, attn_bias=bias)
            return out.flatten(2, 3)

        return grouped


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Flashgen, SdpaFlash, SdpaCudnn, Flex, Fa4, Xformers, SdpaEfficient, SdpaMath)}

# Backend -> its part in the names of PyTorch's settings.
_SDPA_SETTINGS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "mem_efficient",
    SDPBackend.MATH: "math",
}


def parse_peers(text: str | None) -> list[str]:
    """The peers named, which commas separate; the usual ones for None. Raises ArgumentError for an unknown one."""
    if text is None:
        return [name for name, peer in PEERS.items() if peer.usual]
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PEERS:
            raise choice_error("peers", name, PEERS)
    return names


def make_peers(names: Iterable[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can be imported, and for each of the others why not."""
    made, absent = {}, {}
    for name in names:
        try:
            made[name] = PEERS[name]()
        except Exception as error:  # a package that is broken fails in its own ways
            absent[name] = reason(error)
    return made, absent


def reason(error: Exception, said: Iterable[str] = ()) -> str:
    """Why a peer is left out, in one line: its error, and what it `said` in warnings before."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = lines[0].strip() if lines else "no message"
    if not isinstance(error, FlashgenError):  # ours begin with what is wrong
        text = f"{type(error).__name__}: {text}"
    # PyTorch tells why a backend cannot run in warnings, between others that only name the backends which are not selected.
    why = [line for line in said if not re.search(r"not used because|runtime disabled|disabled at runtime", line)]
    return "; ".join(dict.fromkeys([text, *why]))[:_REASON_LENGTH]


def written_to_stderr(call: Callable[[], object]) -> str:
    """What the call writes to the process's standard error, past Python: it does not appear there."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        os.dup2(file.fileno(), 2)
        try:
            call()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read()


@contextmanager
def sdpa_settings_kept() -> Iterator[None]:
    """Puts back what `Sdpa.select` changes for the whole process."""
    kept = {setting: getattr(torch.backends.cuda, f"{setting}_sdp_enabled")() for setting in _SDPA_SETTINGS.values()}
    try:
        yield
    finally:
        for setting, enabled in kept.items():
            getattr(torch.backends.cuda, f"enable_{setting}_sdp")(enabled)
