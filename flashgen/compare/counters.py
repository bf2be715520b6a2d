"""Bytes that hardware counters see in one call of a participant: Nsight Compute (`ncu`) runs `profiled.py` in a process of its own."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.plain import to_plain
from flashgen.codegen.spec import problem_to_json

from ..cells import Cell
from .profiled import MARK
from .result import CountedBytes

SECTOR = 32  # bytes
# What comes to the SMs from the L2, whoever asked for it: loads, copies by cp.async, tensor copies. The L2's own counters of what it was
# asked for (lts__t_sectors_srcunit_tex_op_read) show less: some SMs ask for the same lines at a time, and the answer goes to all of them.
_READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
_WRITTEN, _REDUCED = "lts__t_sectors_srcunit_tex_op_write.sum", "lts__t_sectors_srcunit_tex_op_red.sum"
_MEMORY_READ, _MEMORY_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
METRICS = (_READ, _WRITTEN, _REDUCED, _MEMORY_READ, _MEMORY_WRITTEN)
SECONDS = 30.0  # that one call may take under the profiler, which runs each kernel several times


class CountersError(FlashgenError):
    """Nsight Compute is missing, or gives no counters."""


def find_profiler() -> str | None:
    """The path of `ncu`; None if it is not there."""
    return shutil.which("ncu")


def count_bytes(calls: Sequence[tuple[str, Cell]], ordinal: int, profiler: str) -> list[CountedBytes | None]:
    """For each call, a participant and a cell; None where it has no kernel: what is wrong with it shows when it is timed.

    Raises CountersError with the profiler's words, among others where the machine denies counters to its users.
    """
    requests = [(name, problem_to_json(cell.problem), to_plain(cell.workload)) for name, cell in calls]
    options = ("--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off", "--metrics", ",".join(METRICS))
    command = [profiler, *options, sys.executable, "-m", "flashgen.compare.profiled", str(ordinal)]
    try:
        ran = subprocess.run(
            command, input=json.dumps(requests), capture_output=True, text=True, timeout=60 + SECONDS * len(calls), check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CountersError(f"counters could not be read: {error}") from error
    if ran.returncode:
        told = [line for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("==ERROR==")] or ran.stderr.splitlines()[-1:]
        raise CountersError(f"counters could not be read: {' '.join(told) or f'ncu ended with {ran.returncode}'}")
    found = counted(ran.stdout.splitlines())
    if len(found) != len(calls):
        raise CountersError(f"counters could not be read: ncu told of {len(found)} of {len(calls)} calls")
    return found


def counted(lines: Iterable[str]) -> list[CountedBytes | None]:
    """What the profiler's lines of comma-separated values say of each call: all kernels up to a `MARK` are one."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    found, sums = list[CountedBytes | None](), dict[str, float]()
    for row in rows:
        if not row["ID"]:
            continue  # the units
        if MARK in row["Kernel Name"]:
            found.append(_bytes(sums) if sums else None)
            sums = {}
            continue
        for metric in METRICS:
            sums[metric] = sums.get(metric, 0.0) + float(row[metric].replace(",", ""))
    return found


def _bytes(sums: Mapping[str, float]) -> CountedBytes:
    read, written, reduced, memory_read, memory_written = (round(sums[metric]) for metric in METRICS)
    return CountedBytes(read, SECTOR * written, SECTOR * reduced, memory_read, memory_written)
