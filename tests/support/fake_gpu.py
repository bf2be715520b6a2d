"""A GPU made up for tests of what is timed on one."""

from __future__ import annotations

from collections.abc import Callable


class FakeGpu:
    """A stopwatch on which each call takes as long as it says. `log` has the input sets in the order in which calls ran on them."""

    def __init__(self) -> None:
        self.now, self.captured, self.log = 0.0, 0, list[int]()

    def call(self, seconds: float) -> Callable[[int], None]:
        def call(i: int) -> None:
            self.log.append(i)
            self.now += seconds

        return call

    def seconds(self, work: Callable[[], object]) -> float:
        begun = self.now
        work()
        return self.now - begun

    def graph(self, work: Callable[[], object]) -> Callable[[], object]:
        """As CUDA does: `work` runs once for the libraries' sake, is then captured without running, and a replay repeats the captured."""
        self.captured += 1
        work()
        before, begun = len(self.log), self.now
        work()
        calls, took = self.log[before:], self.now - begun
        del self.log[before:]
        self.now = begun

        def replay() -> None:
            self.log.extend(calls)
            self.now += took

        return replay
