"""Processes that run cases one by one: a case that takes too long, or that ends its process, costs no other case."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")
_CONTEXT = multiprocessing.get_context("spawn")
_READY = None  # what a process says before its first case: imports are no part of a case's time


class Ended(NamedTuple, Generic[T, R]):
    """A case that a process was given, and what `run` returned, or None: then why there is nothing; seconds: how long it ran."""

    case: T
    returned: R | None
    why: str
    seconds: float


class _Worker:
    """A process, the case that it runs now, if any, and since when."""

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(run, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.case: Any = None
        self.is_busy, self.start = False, 0.0

    def give(self, case: Any) -> None:
        self.case, self.is_busy, self.start = case, True, time.monotonic()
        self.connection.send(case)

    def ended(self, returned: Any, why: str) -> Ended[Any, Any]:
        self.is_busy = False
        return Ended(self.case, returned, why, time.monotonic() - self.start)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_in_processes(
    run: Callable[[T], R], cases: Sequence[T], processes: int, case_seconds: float, seconds: float
) -> Iterator[Ended[T, R]]:
    """Runs the cases in so many processes, and gives them as they end.

    case_seconds: a case that takes longer is ended with its process. seconds: after so many all are, and those that run then come last;
    others do not come. Raises RuntimeError if a process ends before it has had a case.
    """
    waiting, end = deque(cases), time.monotonic() + seconds
    workers = [_Worker(run) for _ in range(min(processes, len(cases)))]
    try:
        while workers and (now := time.monotonic()) < end:
            limit = min([end, *(worker.start + case_seconds for worker in workers if worker.is_busy)])
            said = wait([worker.connection for worker in workers], max(0.0, limit - now))
            for i, worker in enumerate(workers):
                if worker.connection in said:
                    try:
                        returned = worker.connection.recv()
                    except (EOFError, ConnectionError):
                        worker.process.join()
                        why = f"its process ended, with exit code {worker.process.exitcode}"
                        if not worker.is_busy:
                            raise RuntimeError(f"a process that was to run cases ended, with exit code {worker.process.exitcode}") from None
                    else:
                        if worker.is_busy:
                            yield worker.ended(returned, "")
                        if waiting:
                            worker.give(waiting.popleft())
                        continue
                elif worker.is_busy and time.monotonic() - worker.start >= case_seconds:
                    why = f"it took longer than {case_seconds:.0f} s"
                else:
                    continue
                yield worker.ended(None, why)
                worker.kill()
                if waiting:
                    workers[i] = _Worker(run)
            for worker in [each for each in workers if not waiting and not each.is_busy]:
                workers.remove(worker)
                worker.kill()
        for worker in workers:
            if worker.is_busy:
                yield worker.ended(None, "it was running when the time ended")
    finally:
        for worker in workers:
            worker.kill()


def _serve(run: Callable[[Any], Any], connection: Connection[Any, Any]) -> None:
    """Of a process: runs what it is given. What cases print goes nowhere."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for the life of the process
    connection.send(_READY)
    while True:
        connection.send(run(connection.recv()))
