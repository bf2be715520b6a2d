"""Timing calls side by side on one GPU: the one protocol, for the tuner's candidates and the benchmark's peers alike.

Inputs from N(0, 1), as many sets in rotation as exceed twice the L2, at most `MAX_SETS`; every round times every call once, in
shuffled order; the median over rounds counts. Calls under `GRAPH_BELOW` seconds are timed as replays of a CUDA graph of
`GRAPH_CALLS` calls or a few more: whole rotations, so that a replay continues where the one before ended.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

MAX_SETS = 8
GRAPH_BELOW = 200e-6
GRAPH_CALLS = 20
FINAL_ROUNDS = 15
FINALISTS, FINAL_MARGIN = 8, 1.06  # at most so many, and at most so much slower than the fastest
_SHORTEST = 1e-7  # seconds: no call is shorter, whatever the clock says


class Stopwatch(Protocol):
    """What a timer needs of a GPU. Tests bring their own."""

    def seconds(self, work: Callable[[], object]) -> float:
        """How long the GPU takes for what `work` enqueues."""

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        """Captures what `work` enqueues; returns what enqueues all of it at once."""


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: PyTorch keeps a workspace of cuBLAS for each stream."""
    return torch.cuda.Stream(device)


class CudaStopwatch:
    """The current GPU, by its events, in its current stream."""

    def seconds(self, work: Callable[[], object]) -> float:
        """See Stopwatch."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        """See Stopwatch. `work` runs once beside the current stream first: libraries set themselves up on a stream's first use."""
        here = torch.cuda.current_stream()
        side = _side_stream(here.device_index)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(here), torch.cuda.graph(graph):  # a capture that fails leaves its own stream the current one
            work()
        return graph.replay


class Timer:
    """One call on rotating inputs, warmed up, with as many repeats as fill a round.

    Each call takes the set that was used longest ago, across warm-up, estimate, graph and rounds: one met early may still lie in the L2.
    """

    def __init__(
        self,
        call: Callable[[int], object],
        sets: int,
        round_seconds: float,
        *,
        prepare: Callable[[], object] | None = None,
        graphs: bool = True,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """`call(i)` enqueues one call on input set i < `sets`; `prepare` runs before each round, outside of what is timed.

        graphs: False to enqueue short calls one by one, where they cannot be captured.
        """
        self._call, self._sets, self._prepare = call, sets, prepare or (lambda: None)
        self._stopwatch = stopwatch or CudaStopwatch()
        self._next_set = itertools.cycle(range(sets)).__next__
        self._graph_calls = math.ceil(GRAPH_CALLS / sets) * sets
        self._replay: Callable[[], object] | None = None
        self._prepare()
        self._enqueue(2 * sets)
        estimate = self._measure(4)
        if graphs and estimate < GRAPH_BELOW:
            self._replay = self._stopwatch.graph(partial(self._enqueue, self._graph_calls))
            estimate = self._measure(1)
        self.repeats = max(1, math.ceil(round_seconds / max(estimate, _SHORTEST) / self._step))

    @property
    def graphed(self) -> bool:
        """Whether replays of a graph are what is timed."""
        return self._replay is not None

    def seconds(self) -> float:
        """Seconds of one call, measured now.

        The warm-up is a whole rotation: another timer of the same sets may have ended on the one that is next here.
        """
        self._prepare()
        self._measure(math.ceil(self._sets / self._step))
        return self._measure(self.repeats)

    @property
    def _step(self) -> int:
        """Calls in one step of `_run`."""
        return self._graph_calls if self._replay else 1

    def _measure(self, steps: int) -> float:
        return self._stopwatch.seconds(partial(self._run, steps)) / (steps * self._step)

    def _run(self, steps: int) -> None:
        if self._replay is None:
            self._enqueue(steps)
        else:
            for _ in range(steps):
                self._replay()

    def _enqueue(self, count: int) -> None:
        for _ in range(count):
            self._call(self._next_set())


class Timed(Protocol):
    """What takes part in a comparison."""

    def seconds(self) -> float:
        """Seconds of one call, measured now."""


def interleaved(timers: Mapping[str, Timed], rounds: int, seed: int) -> dict[str, list[float]]:
    """Times each once a round, in an order that is shuffled anew; returns the seconds of each in the order of rounds."""
    seconds: dict[str, list[float]] = {key: [] for key in timers}
    shuffled, generator = list(timers), random.Random(seed)
    for _ in range(rounds):
        generator.shuffle(shuffled)
        for key in shuffled:
            seconds[key].append(timers[key].seconds())
    return seconds


def with_finals(timers: Mapping[str, Timed], rounds: int, seed: int) -> dict[str, list[float]]:
    """The same as `interleaved`, but those that are nearly as fast as the fastest are timed again, among themselves, in more rounds.

    A GPU's clock follows the power that the calls before have taken, so that times of long kernels among very different ones vary by some
    percent. Calls that differ little meet the same clock. The seconds of the finals, times one factor that gives the finalists the clock
    of the first rounds, take the place of theirs: so all that are returned compare.
    """
    seconds = interleaved(timers, rounds, seed)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    fastest = min(medians.values(), default=0.0)
    close = sorted((key for key in medians if medians[key] <= fastest * FINAL_MARGIN), key=medians.__getitem__)[:FINALISTS]
    if len(close) < 2:
        return seconds
    finals = interleaved({key: timers[key] for key in close}, FINAL_ROUNDS, seed)
    factor = statistics.median(medians[key] / statistics.median(finals[key]) for key in close)
    return seconds | {key: [value * factor for value in values] for key, values in finals.items()}


def input_sets(io_bytes: int, l2_bytes: int) -> int:
    """How many sets of inputs and outputs of `io_bytes` are rotated, so that no call finds its data in the L2.

    Sets so small that more than `MAX_SETS` were needed stay in the L2, for all that are timed alike.
    """
    return max(1, min(MAX_SETS, math.ceil(2 * l2_bytes / max(1, io_bytes))))
