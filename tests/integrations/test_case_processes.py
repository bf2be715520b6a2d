"""The processes of tools/case_processes.py: cases that end, that take too long, that end their process, and the end of all time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tools.case_processes import run_in_processes


def run(case: str) -> str:
    if case == "ends":
        os._exit(7)
    if case == "hangs":
        time.sleep(600)
    return case.upper()


def ended(cases: Sequence[str], case_seconds: float, seconds: float) -> dict[str, Any]:
    return {case: (returned, why) for case, returned, why, _ in run_in_processes(run, cases, 2, case_seconds, seconds)}


@pytest.mark.slow
def test_a_case_costs_no_other_one() -> None:
    assert ended(["hangs", "a", "ends", "b", "c"], 1.0, 300.0) == {
        "a": ("A", ""),
        "b": ("B", ""),
        "c": ("C", ""),
        "ends": (None, "its process ended, with exit code 7"),
        "hangs": (None, "it took longer than 1 s"),
    }


@pytest.mark.slow
def test_the_end_names_what_was_running() -> None:
    start = time.monotonic()
    assert ended(["hangs", "a", "hangs", "b"], 300.0, 20.0) == {"a": ("A", ""), "hangs": (None, "it was running when the time ended")}
    assert time.monotonic() - start < 60.0


class Broken:
    """What a process cannot be told to run."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)

    def __call__(self, case: str) -> str:
        return case


@pytest.mark.slow
def test_processes_that_cannot_begin_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="a process that was to run cases ended, with exit code"):
        list(run_in_processes(Broken(), ["a"], 1, 9.0, 300.0))
