"""What a peer is: one implementation of attention that the benchmark can call."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.modifiers.document_ids import IDS_KV, IDS_Q
from flashgen.codegen.problem import Mask
from flashgen.codegen.workload import OPEN

from ..cells import Cell
from ..numerics.link import Rows, hidden_keys, hiding_links
from .bias import NAME as BIAS
from .check import CellCheck
from .documents import document_ids, has_documents
from .dropout import NAME as DROPOUT
from .relative import names_of_modifiers, scalars_of
from .work import Given, Inputs, Run, prepare

Call = Callable[..., Tensor]  # of q, k and v, and by name the tensors of a cell's modifiers
_REASON_LENGTH = 300


class Peer(ABC):
    """One implementation of attention.

    name: for the command line and the tables; layout: of its tensors, "bshd" or "bhsd"; packages: distributions whose versions
    decide its speed, the first that is installed counts; usual: whether it is measured unless asked otherwise.
    """

    name: str
    layout: str = "bshd"
    packages: ClassVar[tuple[str, ...]] = ()
    usual: ClassVar[bool] = True

    @abstractmethod
    def prepare(self, cell: Cell, device: torch.device) -> Callable[[Inputs], Run]:
        """For a cell, what makes of one set of inputs in `layout` that which is timed on it."""

    def select(self) -> None:  # noqa: B027 (most peers need nothing)
        """What must be set for this peer before its calls, and is no part of them."""

    def explain(self, cell: Cell, inputs: Inputs) -> list[str]:
        """Why a call may have failed, where the error itself does not tell."""
        return []

    def note(self, cell: Cell, device: torch.device) -> str:
        """What else is to be told of this peer in a cell."""
        return ""

    def fault(self, check: CellCheck, run: Run, inputs: Inputs) -> str:
        """What is wrong with what the run gives, empty if nothing. `inputs`: those that it was prepared for."""
        return check.fault(self._bshd(run()))

    def _bshd(self, given: Given) -> Given:
        first = given if isinstance(given, Tensor) else given[0]
        if self.layout == "bshd" or first.ndim != 4:  # packed sequences lie in one way alone
            return given
        if isinstance(given, Tensor):
            return given.transpose(1, 2)
        return (*(tensor.transpose(1, 2) for tensor in given[:3]), *given[3:])  # gradients of q, k and v, and of modifiers' tensors


class AttentionPeer(Peer):
    """A function of q, k, v and the tensors of modifiers, whose derivatives PyTorch's autograd knows.

    modifiers: those of problems that it can do; packed, cached: whether it can do packed sequences, and caches.
    """

    modifiers: ClassVar[tuple[str, ...]] = ()
    packed: ClassVar[bool] = False
    cached: ClassVar[bool] = False

    @abstractmethod
    def bind(self, cell: Cell, device: torch.device) -> Call:
        """The call (q, k, v, and by name the tensors of the cell's modifiers) -> out for a cell, tensors and out in `layout`."""

    def prepare(self, cell: Cell, device: torch.device) -> Callable[[Inputs], Run]:
        """See Peer."""
        if others := [name for name in names_of_modifiers(cell.problem) if name not in self.modifiers]:
            raise ArgumentError(f"{self.name} has no {', '.join(others)}")
        if cell.problem.is_packed and not self.packed:
            raise ArgumentError(f"{self.name} has no packed sequences")
        if cell.problem.is_cached and not self.cached:
            raise ArgumentError(f"{self.name} has no caches")
        return partial(prepare, cell.problem, self.bind(cell, device))


def window_of(cell: Cell) -> tuple[int | None, int | None] | None:
    """The window of a cell as (left, right), as flashgen takes it; None where there is none."""
    if "window" not in cell.problem.modifiers:
        return None
    left, right = (None if end == OPEN else end for end in (cell.workload.window_left, cell.workload.window_right))
    return left, right


def chunk_of(cell: Cell) -> int | None:
    """The keys of a cell's chunks; None where there are none."""
    return cell.workload.chunk if "chunk" in cell.problem.modifiers else None


def softcap_of(cell: Cell) -> float | None:
    """The cap of a cell's scores; None where there is none."""
    return scalars_of(cell).get("softcap")


def hidden_from(cell: Cell, device: torch.device) -> Tensor | None:
    """Which keys a cell's mask and modifiers hide: [len_q, len_kv], with documents [batch, 1, len_q, len_kv]; None where all are seen."""
    problem, w = cell.problem, cell.workload
    if problem.mask is Mask.FULL and not {*problem.modifiers} - {BIAS, DROPOUT}:
        return None
    rows = Rows(torch.arange(w.len_q, device=device), w.len_q, w.len_kv)
    hidden = hidden_keys(rows, problem.mask is Mask.CAUSAL, hiding_links(problem, scalars_of(cell)))
    if not has_documents(cell):
        return hidden
    ids = document_ids(cell, device)
    return hidden | (ids[IDS_Q][:, None, :, None] != ids[IDS_KV][:, None, None, :])


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
