"""The timing core on a clock of our own: warm-up, rotation, graphs, repeats, interleaving; and the spread of what it gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashgen import timing
from flashgen.spread import Spread
from flashgen.timing import Timer, input_sets, interleaved


class FakeGpu:
    """A stopwatch on which each call takes as long as it says, and a graph what its calls take."""

    def __init__(self) -> None:
        self.now, self.captured, self.timed = 0.0, 0, 0

    def seconds(self, work: Callable[[], object]) -> float:
        self.timed += 1
        begun = self.now
        work()
        return self.now - begun

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        self.captured += 1
        return work


def calls(gpu: FakeGpu, seconds: float, log: list[int]) -> Callable[[int], None]:
    def call(i: int) -> None:
        log.append(i)
        gpu.now += seconds

    return call


def test_a_long_call_is_timed_one_by_one_on_rotating_sets() -> None:
    gpu, log = FakeGpu(), list[int]()
    timer = Timer(calls(gpu, 1e-3, log), 3, 4e-3, stopwatch=gpu)
    assert log == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0], "two warm-ups of each set, and an estimate of four calls"
    assert (timer.graphed, timer.repeats, gpu.captured) == (False, 4, 0)
    log.clear()
    assert timer.seconds() == pytest.approx(1e-3)
    assert log == [0, 0, 1, 2, 0], "one warm-up, then the repeats"


def test_a_short_call_is_timed_as_a_graph() -> None:
    gpu, log = FakeGpu(), list[int]()
    timer = Timer(calls(gpu, 10e-6, log), 8, 4e-3, stopwatch=gpu)
    assert (timer.graphed, timer.repeats, gpu.captured) == (True, 20, 1)
    log.clear()
    assert timer.seconds() == pytest.approx(10e-6)
    assert len(log) == timing.GRAPH_CALLS * 21


@pytest.mark.parametrize(("seconds", "graphed"), [(199e-6, True), (201e-6, False)])
def test_where_graphs_begin(seconds: float, graphed: bool) -> None:
    gpu = FakeGpu()
    assert Timer(calls(gpu, seconds, []), 1, 4e-3, stopwatch=gpu).graphed is graphed


def test_graphs_can_be_refused() -> None:
    gpu = FakeGpu()
    timer = Timer(calls(gpu, 1e-6, []), 1, 4e-3, graphs=False, stopwatch=gpu)
    assert (timer.graphed, gpu.captured) == (False, 0)
    assert timer.seconds() == pytest.approx(1e-6)


def test_a_clock_that_stands_still_ends() -> None:
    gpu = FakeGpu()
    assert Timer(calls(gpu, 0.0, []), 1, 1e-3, graphs=False, stopwatch=gpu).repeats == 10_000


def test_preparing_is_not_timed() -> None:
    gpu = FakeGpu()
    prepared: list[float] = []

    def prepare() -> None:
        prepared.append(gpu.now)
        gpu.now += 5.0

    timer = Timer(calls(gpu, 1e-3, []), 1, 4e-3, prepare=prepare, stopwatch=gpu)
    assert timer.seconds() == pytest.approx(1e-3)
    assert timer.seconds() == pytest.approx(1e-3)
    assert len(prepared) == 3, "before the warm-up, and before each round"


def test_rounds_are_interleaved_in_shuffled_order() -> None:
    log: list[str] = []

    class Entrant:
        def __init__(self, name: str) -> None:
            self.name = name

        def seconds(self) -> float:
            log.append(self.name)
            return float(len(log))

    entrants = {name: Entrant(name) for name in "abc"}
    seconds = interleaved(entrants, 20, seed=1)
    rounds = [tuple(log[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds), "each once a round"
    assert len(set(rounds)) == 6, "in all orders"
    for name, values in seconds.items():
        assert values == [i + 1.0 for i, given in enumerate(log) if given == name], "in the order of rounds"
    again, log[:] = list(log), []
    interleaved(entrants, 20, seed=1)
    assert log == again, "the seed repeats it"


@pytest.mark.parametrize(
    ("io_bytes", "l2_bytes", "sets"), [(0, 60, 8), (1, 60, 8), (40, 60, 3), (60, 60, 2), (119, 60, 2), (120, 60, 1), (10**9, 60, 1)]
)
def test_sets_exceed_twice_the_l2_up_to_eight(io_bytes: int, l2_bytes: int, sets: int) -> None:
    assert input_sets(io_bytes, l2_bytes) == sets


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0)
    assert Spread.of([float(i) for i in range(20, 0, -1)]) == Spread(10.5, 3.0, 18.0), "a tenth off each end"
