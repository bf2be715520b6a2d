"""How many calls flashgen has run, and how many it has passed on, and why."""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple


class _Counts(threading.local):
    """A thread's own, so that no call waits for another one. Those of threads that have ended count, too."""

    def __init__(self) -> None:
        self.run: Counter[str] = Counter()
        self.passed_on: Counter[str] = Counter()
        self.calls = 0
        with _lock:
            _all.append((self.run, self.passed_on))


_lock = threading.Lock()
_all: list[tuple[Counter[str], Counter[str]]] = []
_counts = _Counts()


class CallCounts(NamedTuple):
    """Calls since the process began, or since a report with reset=True. Each forward call counts once, operators in a compiled graph, too.

    run: by the name that took them, `scaled_dot_product_attention` or one of PyTorch's fused operators
    passed_on: those that went where they would have gone without flashgen, by reason
    """

    run: dict[str, int]
    passed_on: dict[str, int]

    def __str__(self) -> str:
        lines = [f"run by flashgen: {sum(self.run.values())}", *_lines(self.run)]
        return "\n".join([*lines, f"passed on: {sum(self.passed_on.values())}", *_lines(self.passed_on)])


def _lines(counts: dict[str, int]) -> list[str]:
    return [f"{count:8} {what}" for what, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def report(*, reset: bool = False) -> CallCounts:
    """What has been counted in all threads. reset: whether counting begins anew."""
    run, passed = Counter[str](), Counter[str]()
    with _lock:
        for of_run, of_passed in _all:
            run.update(of_run.copy())
            passed.update(of_passed.copy())
            if reset:
                of_run.clear()
                of_passed.clear()
    return CallCounts(dict(run), dict(passed))


def ran(name: str) -> None:
    """Counts a call that flashgen has run."""
    counts = _counts
    counts.calls += 1
    counts.run[name] += 1


def passed_on(reason: str) -> None:
    """Counts a call that goes on to where it went before."""
    counts = _counts
    counts.calls += 1
    counts.passed_on[reason] += 1


def calls_of_thread() -> int:
    """How many calls this thread has counted: whether an operator within a call has counted it already."""
    return _counts.calls
