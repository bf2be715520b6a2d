"""Tile counters: which launches share one, and which never do."""

from __future__ import annotations

import itertools
import threading

import pytest

from flashgen.build.gpu.driver import DriverError
from flashgen.launch.tile_counters import COUNTERS_AT_ONCE, TileCounters


class Memory:
    """Stands for the driver: far apart pieces, each zero, and how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, size: int) -> int:
        self.asked.append(size)
        return len(self.asked) * 2**32


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Its one entry is whether the current stream is being captured."""
    state = [False]
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: state[0])
    return state


def test_launches_of_a_stream_share_one_and_others_do_not(capturing: list[bool]) -> None:
    counters = TileCounters(Memory())
    first = {place: counters.address(*place) for place in ((0, 0), (0, 7), (1, 0), (1, 7))}
    assert len(set(first.values())) == 4
    assert {place: counters.address(*place) for place in first} == first


def test_a_captured_launch_has_its_own(capturing: list[bool]) -> None:
    counters = TileCounters(Memory())
    eager = counters.address(0, 7)
    capturing[0] = True
    captured = [counters.address(0, 7) for _ in range(100)]
    capturing[0] = False
    assert len({eager, *captured}) == 101
    assert counters.address(0, 7) == eager
    assert counters.address(0, 8) not in {eager, *captured}


def test_counters_do_not_overlap_and_memory_is_asked_for_rarely(capturing: list[bool]) -> None:
    capturing[0] = True
    memory = Memory()
    counters = TileCounters(memory)
    found = sorted(counters.address(0, 7) for _ in range(COUNTERS_AT_ONCE + 1))
    assert memory.asked == [4 * COUNTERS_AT_ONCE] * 2
    assert all(b - a >= 4 for a, b in itertools.pairwise(found))
    assert found[0] == 2**32
    assert found[-2] + 4 <= 2**32 + memory.asked[0] < 2**33 == found[-1]


def test_several_lie_in_one_piece_and_a_stream_keeps_the_most(capturing: list[bool]) -> None:
    memory = Memory()
    counters = TileCounters(memory)
    one = counters.address(0, 7)
    many = counters.address(0, 7, 260)
    assert many == one + 4
    assert counters.address(0, 7) == counters.address(0, 7, 260) == counters.address(0, 7, 512) == many, "512: rounded up at first"
    assert counters.address(0, 8) == many + 512 * 4
    capturing[0] = True
    assert [counters.address(0, 7, 3), counters.address(0, 7, 5)] == [many + 513 * 4, many + 516 * 4], "as many as asked for"
    assert memory.asked == [4 * COUNTERS_AT_ONCE]
    assert counters.address(0, 7, COUNTERS_AT_ONCE + 3) == 2 * 2**32
    assert memory.asked[1:] == [4 * (COUNTERS_AT_ONCE + 3)]


def test_threads_never_share_one(capturing: list[bool]) -> None:
    """Not even for the same handle: it may be that of each thread's own default stream."""
    counters = TileCounters(Memory())
    barrier, found = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        mine = [counters.address(0, stream) for stream in range(200)]
        assert mine == [counters.address(0, stream) for stream in range(200)]
        found.extend(mine)
        barrier.wait()  # alive until all are done, or the name of a thread could come back

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(set(found)) == 1600


def test_memory_that_is_not_there_is_asked_for_again(capturing: list[bool]) -> None:
    left = [0]

    def allocate(size: int) -> int:
        if size > left[0]:
            raise DriverError("no memory")
        return 4096

    counters = TileCounters(allocate)
    with pytest.raises(DriverError):
        counters.address(0, 0)
    left[0] = 2**20
    assert counters.address(0, 0) == 4096
