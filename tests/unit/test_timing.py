"""The timing core on a clock of our own: warm-up, rotation, graphs, repeats, interleaving; and the spread of what it gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashgen.timing.protocol import FINAL_ROUNDS, FINALISTS, Timer, input_sets, interleaved, with_finals
from flashgen.timing.spread import Spread
from tests.support.fake_gpu import FakeGpu


def test_a_long_call_is_timed_one_by_one_on_rotating_sets() -> None:
    gpu = FakeGpu()
    timer = Timer(gpu.call(1e-3), 3, 4e-3, stopwatch=gpu)
    assert gpu.log == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0], "two warm-ups of each set, and an estimate of four calls"
    assert (timer.graphed, timer.repeats, gpu.captured) == (False, 4, 0)
    gpu.log.clear()
    assert timer.seconds() == pytest.approx(1e-3)
    assert gpu.log == [1, 2, 0, 1, 2, 0, 1], "one warm-up of each set, then the repeats, from where the estimate ended"


@pytest.mark.parametrize(("sets", "calls"), [(1, 20), (2, 20), (3, 21), (7, 21), (8, 24), (24, 24)])
def test_a_short_call_is_timed_as_a_graph_of_whole_rotations(sets: int, calls: int) -> None:
    gpu = FakeGpu()
    timer = Timer(gpu.call(10e-6), sets, 4e-3, stopwatch=gpu)
    assert (timer.graphed, gpu.captured) == (True, 1)
    gpu.log.clear()
    assert timer.seconds() == pytest.approx(10e-6)
    assert len(gpu.log) == calls * (1 + timer.repeats), "one warm-up, then the repeats"
    assert 4e-3 <= calls * timer.repeats * 10e-6 < 4e-3 + calls * 10e-6


@pytest.mark.parametrize("seconds", [10e-6, 150e-6, 1e-3, 5e-3])
@pytest.mark.parametrize("sets", [1, 2, 3, 5, 7, 8])
def test_a_set_comes_again_after_all_others_whatever_lies_between(sets: int, seconds: float) -> None:
    gpu = FakeGpu()
    timer = Timer(gpu.call(seconds), sets, 4e-3, stopwatch=gpu)
    for _ in range(3):
        timer.seconds()
    assert gpu.log == [i % sets for i in range(len(gpu.log))]


@pytest.mark.parametrize("seconds", [10e-6, 1e-3])
def test_no_timed_call_finds_what_another_timer_left(seconds: float) -> None:
    class Watched(FakeGpu):
        """Notes where in the log each measurement began."""

        def seconds(self, work: Callable[[], object]) -> float:
            marks.append(len(self.log))
            return super().seconds(work)

    marks: list[int] = []
    gpu, sets = Watched(), 8
    timers = [Timer(gpu.call(seconds * (1 + i / 4)), sets, 4e-3, stopwatch=gpu) for i in range(3)]
    for timer in (timers[i] for i in (0, 1, 2, 2, 0, 1, 0, 2, 1)):
        timer.seconds()
        begun = marks[-1]  # the measurement that counts is a round's last
        for at in range(begun, len(gpu.log)):
            assert len(set(gpu.log[at - sets + 1 : at + 1])) == sets, "a set was used again before all others were"


@pytest.mark.parametrize(("seconds", "graphed"), [(199e-6, True), (201e-6, False)])
def test_where_graphs_begin(seconds: float, graphed: bool) -> None:
    gpu = FakeGpu()
    assert Timer(gpu.call(seconds), 1, 4e-3, stopwatch=gpu).graphed is graphed


def test_graphs_can_be_refused() -> None:
    gpu = FakeGpu()
    timer = Timer(gpu.call(1e-6), 1, 4e-3, graphs=False, stopwatch=gpu)
    assert (timer.graphed, gpu.captured) == (False, 0)
    assert timer.seconds() == pytest.approx(1e-6)


def test_a_clock_that_stands_still_ends() -> None:
    gpu = FakeGpu()
    assert Timer(gpu.call(0.0), 1, 1e-3, graphs=False, stopwatch=gpu).repeats == 10_000


def test_preparing_is_not_timed() -> None:
    gpu = FakeGpu()
    prepared: list[float] = []

    def prepare() -> None:
        prepared.append(gpu.now)
        gpu.now += 5.0

    timer = Timer(gpu.call(1e-3), 1, 4e-3, prepare=prepare, stopwatch=gpu)
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


class Scripted:
    """Takes these seconds in the first rounds, and others from then on."""

    def __init__(self, first: list[float], then: float) -> None:
        self.first, self.then, self.calls = first, then, 0

    def seconds(self) -> float:
        self.calls += 1
        return self.first[self.calls - 1] if self.calls <= len(self.first) else self.then


def test_those_that_are_nearly_as_fast_are_timed_again_among_themselves() -> None:
    """b seemed the fastest. At the clock of the finals, which is 1.1 times as slow, it takes 1 % longer than a."""
    entrants = {"a": Scripted([1.02, 1.0, 1.04], 1.1), "b": Scripted([1.0, 1.0, 1.0], 1.111), "c": Scripted([1.2, 1.2, 1.2], 0.5)}
    seconds = with_finals(entrants, 3, seed=1)
    assert [entrant.calls for entrant in entrants.values()] == [3 + FINAL_ROUNDS, 3 + FINAL_ROUNDS, 3]
    assert seconds["c"] == [1.2] * 3
    a, b = (Spread.of(seconds[name]).median for name in "ab")
    assert b / a == pytest.approx(1.01)
    assert (a + b) / 2 == pytest.approx(1.01, rel=2e-3), "as fast on average as in the first rounds, whose clock the others had"


def test_finals_need_two_and_take_the_fastest() -> None:
    alone = {"a": Scripted([1.0], 9.0), "b": Scripted([2.0], 9.0)}
    assert with_finals(alone, 1, seed=1) == {"a": [1.0], "b": [2.0]}
    assert with_finals({}, 1, seed=1) == {}
    many = {str(i): Scripted([1.0 + i * 1e-3], 1.0) for i in range(FINALISTS + 2)}
    with_finals(many, 1, seed=1)
    assert [entrant.calls > 1 for entrant in many.values()] == [True] * FINALISTS + [False] * 2


@pytest.mark.parametrize(
    ("io_bytes", "l2_bytes", "sets"), [(0, 60, 8), (1, 60, 8), (40, 60, 3), (60, 60, 2), (119, 60, 2), (120, 60, 1), (10**9, 60, 1)]
)
def test_sets_exceed_twice_the_l2_up_to_eight(io_bytes: int, l2_bytes: int, sets: int) -> None:
    assert input_sets(io_bytes, l2_bytes) == sets


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0)
    assert Spread.of([float(i) for i in range(20, 0, -1)]) == Spread(10.5, 3.0, 18.0), "a tenth off each end"
