"""Participants in cells with a backward pass: a peer's forward pass, followed by the backward pass that reads what it has saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from flashgen.bench.peer import AttentionPeer, Peer
from flashgen.bench.peers import FamilyPeer
from flashgen.bench.work import Given, Inputs, Run, prepare_with_backward
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.spec import KernelSpec

from ..cells import Cell
from .shapes import BACKWARD_FAMILIES, calls_of


def with_backward(peer: Peer) -> Peer:
    """The same peer with its backward pass: by autograd, or of a family by the family of its gradients."""
    if isinstance(peer, FamilyPeer):
        return FamilyWithBackward(peer)
    assert isinstance(peer, AttentionPeer)
    return AttentionWithBackward(peer)


class AttentionWithBackward(Peer):
    """A function of q, k and v, and autograd's way back. Autograd frees what it has saved as it goes."""

    def __init__(self, peer: AttentionPeer) -> None:
        self.name, self.layout, self._peer = peer.name, peer.layout, peer

    def prepare(self, cell: Cell, device: torch.device) -> Callable[[Inputs], Run]:
        """See Peer."""
        return partial(prepare_with_backward, self._peer.bind(cell, device))

    def select(self) -> None:
        """See Peer."""
        self._peer.select()

    def explain(self, cell: Cell, inputs: Inputs) -> list[str]:
        """See Peer."""
        return self._peer.explain(cell, inputs)


class FamilyWithBackward(Peer):
    """A rung's kernels, forward and backward. The forward pass writes lse, too, which the backward pass reads as it reads out."""

    def __init__(self, rung: FamilyPeer) -> None:
        self.name = rung.name
        self._passes = (rung, FamilyPeer(BACKWARD_FAMILIES.get(rung.name)))

    def specs(self, cell: Cell, on: Gpu) -> Sequence[KernelSpec]:
        """The kernels of a cell, that of the forward pass first."""
        return [family.spec(call, on) for family, call in zip(self._passes, calls_of(cell), strict=True)]

    def prepare(self, cell: Cell, device: torch.device) -> Callable[[Inputs], Run]:
        """See Peer."""
        (forward, backward), (before, after) = self._passes, calls_of(cell)
        return partial(self._run, forward.prepare(before, device, with_optional=True), backward.prepare(after, device))

    @staticmethod
    def _run(forward: Callable[[Inputs], Run], backward: Callable[[Inputs], Run], inputs: Inputs) -> Run:
        attention = forward(inputs)

        def run() -> Given:
            out, lse = attention()
            return backward({**inputs, "out": out, "lse": lse})()

        return run
