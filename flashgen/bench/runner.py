"""Measuring: each peer checked, then all of them timed interleaved by the protocol of `flashgen/timing/protocol.py`, cell after cell."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.operands import Role
from flashgen.codegen.operation import operation_of

from ..cells import Cell
from ..numerics.oracle import oracle_of
from ..timing import protocol as timing
from .bias import NAME as BIAS
from .bias import bias_of_grid, has_bias
from .caches import cache_tensors, io_bytes
from .check import CellCheck, poison
from .documents import document_ids
from .dropout import DropoutCheck, dropout_seed, has_dropout
from .packed import packed_boundaries
from .peer import Peer, reason
from .relative import problem_name, relative_table, scalars_of
from .result import CellResult, PeerTimes
from .work import Inputs, Run

ROUND_SECONDS = 12e-3  # of GPU time for one peer in one round


class ContextLostError(FlashgenError):
    """A peer broke the GPU's context: nothing more can run in this process."""


class _PeerError(Exception):
    """A peer failed while it was timed."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self.peer = peer


@dataclass(frozen=True)
class _Entrant:
    """A peer that has passed the check of a cell."""

    peer: str
    timer: timing.Timer
    first_call_s: float

    def seconds(self) -> float:
        """Seconds of one call, measured now. Raises _PeerError, so that the one to blame is known."""
        try:
            return self.timer.seconds()
        except Exception as error:
            raise _PeerError(self.peer) from error


class Runner:
    """Measures cells on one device, which is the current one."""

    def __init__(
        self, peers: Mapping[str, Peer], device: torch.device, l2_bytes: int, rounds: int, stopwatch: timing.Stopwatch | None = None
    ) -> None:
        self.peers, self.device, self.l2_bytes, self.rounds, self.stopwatch = peers, device, l2_bytes, rounds, stopwatch
        # One of our own: a backward pass runs on the stream of its forward pass, and nothing can be captured on the default one. The same
        # one for all cells, since PyTorch keeps a workspace of cuBLAS for each stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def measure(self, grid: str, cell: Cell) -> CellResult:
        """One cell. A peer that fails, or computes something else, is left out of it with the reason.

        Raises ContextLostError if the GPU can no longer be used.
        """
        result = CellResult(grid, cell)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            try:
                inputs = self._input_sets(cell, grid)
                check = (DropoutCheck if has_dropout(cell) else CellCheck)(cell, inputs["bshd"][0])
                self.settle()
            except Exception as error:
                self.recover("the reference", problem_name(cell.problem), error)
                result.errors = dict.fromkeys(self.peers, f"not measured: {reason(error)}")
                return result
            entrants = {}
            for name, peer in self.peers.items():
                try:
                    entrants[name] = self._enter(name, peer, inputs[peer.layout], check, result)
                except Exception as error:
                    result.errors[name] = reason(error)
                    self.recover(name, result.name, error)
            self._time(entrants, result)
        entrants.clear()
        self._free()
        return result

    def inputs(self, cell: Cell, layout: str, grid: str = "") -> Inputs:
        """One set of inputs, as those on which `measure` times."""
        drawn = self._drawn(cell, torch.Generator(self.device).manual_seed(0), grid)
        return drawn if layout == "bshd" else _bhsd(drawn)

    def _input_sets(self, cell: Cell, grid: str = "") -> dict[str, list[Inputs]]:
        """The same sets of inputs, as the operation's oracle draws them from N(0, 1), in every layout, each dense."""
        generator = torch.Generator(self.device).manual_seed(0)
        sets = [self._drawn(cell, generator, grid) for _ in range(timing.input_sets(io_bytes(cell), self.l2_bytes))]
        layouts = {"bshd": sets}
        if any(peer.layout == "bhsd" for peer in self.peers.values()):
            layouts["bhsd"] = [_bhsd(inputs) for inputs in sets]
        return layouts

    @staticmethod
    def _drawn(cell: Cell, generator: torch.Generator, grid: str = "") -> Inputs:
        """What the operation reads, without what a call may leave out."""
        problem, oracle, operation = cell.problem, oracle_of(cell.problem), operation_of(cell.problem)
        drawn = oracle.inputs(problem, cell.workload, generator)
        drawn |= packed_boundaries(cell, generator.device)
        drawn |= {**document_ids(cell, generator.device), **relative_table(cell, generator), **dropout_seed(cell, generator.device)}
        if has_bias(cell):
            drawn[BIAS] = bias_of_grid(grid, drawn[BIAS])
        inputs = {o.name: drawn[o.name] for o in operation.operands(problem) if o.role is not Role.OUT and not o.optional}
        inputs |= cache_tensors(cell, generator.device)
        oracle.derive(problem, inputs, scalars_of(cell))
        return inputs

    def _enter(self, name: str, peer: Peer, sets: list[Inputs], check: CellCheck, result: CellResult) -> _Entrant:
        """Calls a peer for the first time, checks what it computes and warms it up. Raises whatever it raises."""
        cell = result.cell
        peer.select()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                prepare = peer.prepare(cell, self.device)
                begun = time.perf_counter()
                run = prepare(sets[0])
                run()
                self.settle()
                first_call_s = time.perf_counter() - begun
                poison(cell, self.device)
                fault = peer.fault(check, run, sets[0])
            except Exception as error:
                why = [str(warning.message) for warning in said]
                if not isinstance(error, FlashgenError):  # ours tell it themselves
                    with suppress(Exception):  # what matters is the first error
                        why += peer.explain(cell, sets[0])
                raise FlashgenError(reason(error, why)) from error
            if fault:
                raise FlashgenError(fault)
            notes = [peer.note(cell, self.device)]
            timer, note = self._timer(peer, [run, *map(prepare, sets[1:])])
        if note := "; ".join(filter(None, [*notes, note])):
            result.notes[name] = note
        return _Entrant(name, timer, first_call_s)

    def _timer(self, peer: Peer, runs: list[Run]) -> tuple[timing.Timer, str]:
        """A peer that cannot be captured in a CUDA graph is timed call by call, which is said."""

        def make(graphs: bool) -> timing.Timer:
            return timing.Timer(lambda i: runs[i](), len(runs), ROUND_SECONDS, prepare=peer.select, graphs=graphs, stopwatch=self.stopwatch)

        try:
            return make(graphs=True), ""
        except Exception as error:
            note = f"no CUDA graph: {reason(error)}"
        self.settle()
        return make(graphs=False), note

    def _time(self, entrants: dict[str, _Entrant], result: CellResult) -> None:
        """All that are left, from the first round on: rounds in which one failed would not be alike."""
        while entrants:
            try:
                seconds = timing.interleaved(entrants, self.rounds, seed=0)
                break
            except _PeerError as error:
                del entrants[error.peer]
                cause = error.__cause__
                assert isinstance(cause, Exception)
                result.errors[error.peer] = reason(cause)
                self.recover(error.peer, result.name, cause)
        for name, entrant in entrants.items():
            rounds_ms = tuple(s * 1e3 for s in seconds[name])
            result.times[name] = PeerTimes(rounds_ms, entrant.timer.graphed, entrant.first_call_s)

    def recover(self, who: str, where: str, error: Exception) -> None:
        """After an error: frees memory, and finds out whether the GPU can still be used. Raises ContextLostError if not."""
        try:
            self.settle()
            self._free()
        except Exception as lost:
            raise ContextLostError(f"the GPU's context was lost to {who} in {where}: {reason(error)}") from lost

    def settle(self) -> None:
        """Waits for the GPU, which reports its errors then."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _bhsd(inputs: Inputs) -> Inputs:
    """Tensors of rows with their heads before their length; what has no rows, such as lse or a bias, is alike in both layouts."""
    return {name: tensor.transpose(1, 2).contiguous() if tensor.ndim == 4 and name != BIAS else tensor for name, tensor in inputs.items()}
