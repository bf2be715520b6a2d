"""The peers: flashgen and the others, by name.

A peer is made where its package can be imported, so that its import raises where it is absent. `prepare` gives what is timed in one cell,
with all that a user would keep from call to call already made. What a problem asks of a peer that it cannot do, its first call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashgen.build.gpu.driver import Gpu, gpu
from flashgen.build.nvrtc import nvrtc_version
from flashgen.codegen.errors import ArgumentError, choice_error
from flashgen.codegen.family import families
from flashgen.codegen.modifiers.document_ids import IDS_KV, IDS_Q
from flashgen.codegen.modifiers.dropout import DROPOUT_P, SEED
from flashgen.codegen.operands import Role
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Mask
from flashgen.codegen.spec import KernelSpec

from ..cells import Cell
from ..launch.bound import BoundCall, addresses_of
from ..numerics.oracle import torch_dtype
from ..selection import loaded
from ..selection.picks import picked_spec
from .bias import NAME as BIAS
from .check import CellCheck
from .documents import has_documents
from .dropout import dropout_p, has_dropout, repeat_seed
from .eager import Eager, EagerFp16
from .flex import Flex, FlexFlash
from .packed_peers import FlashgenEqual
from .peer import AttentionPeer, Call, Peer, chunk_of, reason, softcap_of, window_of
from .relative import TABLE, has_relative_bias, offset_of, relative_bias, scalars_of
from .sdpa import SdpaCudnn, SdpaEfficient, SdpaFlash, SdpaMath
from .work import Inputs, Run, prepare


class Flashgen(AttentionPeer):
    """flashgen, as its user calls it."""

    name = "flashgen"
    modifiers = ("alibi", "bias", "chunk", "document_ids", "dropout", "relative", "sinks", "softcap", "window")
    packed = cached = True
    deterministic: ClassVar[bool | None] = None

    def __init__(self) -> None:
        from ..api import attention
        from ..kvcache import attention_with_kvcache
        from ..varlen import attention_varlen

        self._attention, self._varlen, self._with_cache = attention, attention_varlen, attention_with_kvcache

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        return self._call(cell)

    def _call(self, cell: Cell, **more: Any) -> Callable[..., Any]:
        more |= {
            "window": window_of(cell),
            "chunk": chunk_of(cell),
            "softcap": softcap_of(cell),
            "causal": cell.problem.mask is Mask.CAUSAL,
        }
        if cell.problem.is_packed:
            return partial(self._varlen, max_seqlen_q=cell.workload.len_q, max_seqlen_kv=cell.workload.len_kv, **more)
        if cell.problem.is_cached:
            return partial(self._with_cache, **more)
        call = partial(self._attention, layout="bshd", deterministic=self.deterministic, **more)
        if not cell.problem.modifiers:
            return call
        return lambda q, k, v, **tensors: call(q, k, v, **_keywords(cell, tensors))

    def note(self, cell: Cell, device: torch.device) -> str:
        """The kernel that the calls of this cell run."""
        problem = replace(cell.problem, deterministic=bool(self.deterministic))
        return f"kernel {loaded.kernels.choose(problem, cell.workload, gpu(device.index)).spec.name}"

    def fault(self, check: CellCheck, run: Run, inputs: Inputs) -> str:
        """Also held to the numerics rule, of the forward pass with the log-sum-exp: a kernel of our own is right by our own standard."""
        with_lse = self._call(check.cell, return_lse=True)
        if fault := super().fault(check, run, inputs):
            return fault
        repeat_seed()
        return check.rule(prepare(check.cell.problem, with_lse, inputs)())


def _keywords(cell: Cell, tensors: Inputs) -> dict[str, Any]:
    """What `flashgen.attention` calls the tensors of a cell's modifiers."""
    found: dict[str, Any] = {**tensors}
    if has_documents(cell):
        found["document_ids"] = found.pop(IDS_Q), found.pop(IDS_KV)
    if has_relative_bias(cell):
        found["score_mod"] = relative_bias(found.pop(TABLE), offset_of(cell))
    if has_dropout(cell):
        del found[SEED]  # it draws its own
        found[DROPOUT_P] = dropout_p(cell)
    return found


class FlashgenDeterministic(Flashgen):
    """flashgen with gradients that are the same to the bit in every run."""

    name = "flashgen_deterministic"
    usual = False
    deterministic = True


class Fa4(AttentionPeer):
    """FlashAttention-4, from its own package."""

    name = "fa4"
    modifiers = ("sinks", "softcap", "window")
    packed = True
    packages = ("flash-attn-4", "flash-attn")
    renamed: ClassVar[dict[str, str]] = {"sinks": "learnable_sink", "cu_seqlens_kv": "cu_seqlens_k"}

    def __init__(self) -> None:
        interface = import_module("flash_attn.cute.interface")
        self._attention, self._varlen = interface.flash_attn_func, interface.flash_attn_varlen_func

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        attention, causal = self._varlen if cell.problem.is_packed else self._attention, cell.problem.mask is Mask.CAUSAL
        given: dict[str, Any] = {"window_size": window_of(cell), "softcap": softcap_of(cell)}
        if cell.problem.is_packed:
            given |= {"max_seqlen_q": cell.workload.len_q, "max_seqlen_k": cell.workload.len_kv}
        more = {name: value for name, value in given.items() if value is not None}

        def call(q: Tensor, k: Tensor, v: Tensor, **tensors: Tensor) -> Tensor:
            result = attention(q, k, v, causal=causal, **more, **{self.renamed.get(name, name): each for name, each in tensors.items()})
            out: Tensor = result[0] if isinstance(result, tuple | list) else result  # with the log-sum-exp or without, by version
            return out

        return call


class Xformers(AttentionPeer):
    """xformers' memory-efficient attention, which picks its kernel itself."""

    name = "xformers"
    modifiers = ("window",)
    packages = ("xformers",)

    def __init__(self) -> None:
        self._ops = import_module("xformers.ops")

    def bind(self, cell: Cell, device: torch.device) -> Call:
        """See Peer."""
        w, attention, biases = cell.workload, self._ops.memory_efficient_attention, self._ops.fmha.attn_bias
        bias, window = None, window_of(cell)
        if window is not None:
            left, right = ends = tuple(w.len_q + w.len_kv if end is None else end for end in window)
            if min(ends) < 0:
                raise ArgumentError(f"xformers has windows with ends from 0 on; got {window}")
            bias = biases.LocalAttentionFromBottomRightMask(window_left=left, window_right=right)
        elif cell.problem.mask is Mask.CAUSAL:
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


class FamilyPeer(Peer):
    """A kernel family of flashgen, asked for by name: its tuned kernel for a cell, else its model's pick. None: an automatic family."""

    usual = False

    def __init__(self, family: str | None) -> None:
        self.name, self._family = family or "automatic", family

    def spec(self, cell: Cell, on: Gpu) -> KernelSpec:
        """The kernel of a cell. Raises ArgumentError, with the reasons, if the family cannot compute the cell."""
        return picked_spec(cell.problem, cell.workload, on.device, (on.driver_version, nvrtc_version()), self._family)

    def _bound(self, cell: Cell, device: torch.device) -> BoundCall:
        call = operation_of(cell.problem).call(cell.problem, cell.workload, scalars=scalars_of(cell))
        on = gpu(device.index)
        return BoundCall(loaded.kernels.load(self.spec(cell, on), on), call)

    def prepare(self, cell: Cell, device: torch.device, with_optional: bool = False) -> Callable[[Inputs], Run]:
        """See Peer. Only the operation of the cell is launched, on operands that are given. with_optional: write optional outputs, too."""
        return partial(self._run, cell, self._bound(cell, device), with_optional)

    @staticmethod
    def _run(cell: Cell, bound: BoundCall, with_optional: bool, inputs: Inputs) -> Run:
        operands, like = operation_of(cell.problem).operands(cell.problem), inputs["q"]
        for operand in operands:
            sizes = operand.sizes(cell.problem, cell.workload)
            if operand.name == BIAS and inputs[BIAS].shape != sizes:
                raise ArgumentError(f"a family takes a bias of the shape {sizes} here; got {tuple(inputs[BIAS].shape)}")
        written = {
            operand.name: (operand.sizes(cell.problem, cell.workload), torch_dtype(operand, cell.problem))
            for operand in operands
            if operand.role is not Role.IN and (with_optional or not operand.optional)
        }

        def run() -> tuple[Tensor, ...]:
            made = {name: like.new_empty(sizes, dtype=dtype) for name, (sizes, dtype) in written.items()}
            addresses = addresses_of((operand.name for operand in operands), {**inputs, **made})
            bound(torch.cuda.current_stream().cuda_stream, *addresses)
            return tuple(made.values())

        return run

    def note(self, cell: Cell, device: torch.device) -> str:
        """The kernel that the calls of this cell run."""
        return f"kernel {self.spec(cell, gpu(device.index)).name}"

    def fault(self, check: CellCheck, run: Run, inputs: Inputs) -> str:
        """Also held to the numerics rule, with all outputs, as flashgen is."""
        complete = self._run(check.cell, self._bound(check.cell, inputs["q"].device), True, inputs)
        return super().fault(check, run, inputs) or check.rule(complete())


_EVERY = (
    *(Flashgen, SdpaFlash, SdpaCudnn, Flex, Fa4, Xformers),
    *(FlexFlash, SdpaEfficient, SdpaMath, Eager, EagerFp16, FlashgenDeterministic, FlashgenEqual),
)
PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in _EVERY}


def parse_peers(text: str | None) -> list[str]:
    """The peers named, which commas separate; the usual ones for None. Families of flashgen are peers, too, by their names.

    Raises ArgumentError for an unknown one.
    """
    if text is None:
        return [name for name, peer in PEERS.items() if peer.usual]
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PEERS and name not in families():
            raise choice_error("peers", name, (*PEERS, *families()))
    return names


def make_peers(names: Iterable[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can be imported, and for each of the others why not."""
    made, absent = {}, {}
    for name in names:
        try:
            made[name] = PEERS[name]() if name in PEERS else FamilyPeer(name)
        except Exception as error:  # a package that is broken fails in its own ways
            absent[name] = reason(error)
    return made, absent
