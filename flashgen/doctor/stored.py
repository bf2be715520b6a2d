"""Checks of what is kept on disk: the cache folder, the compiled kernels, the tuning records. They change nothing."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

from flashgen.build.cache_dir import UnsafeCacheError, cache_dir, chosen_by, require_safe
from flashgen.build.files import nearest, require_writable
from flashgen.build.gpu.driver import Gpu
from flashgen.build.nvrtc import nvrtc_version

from ..records import sources
from ..records.choice import tells_time
from ..records.record import BENCHMARK_VERSION, Record
from ..records.sqlite_file import fault_of
from ..selection import compilation
from .finding import Finding, Status

MIB = 2**20
LITTLE = 512 * MIB  # of free space: about a thousand kernels, and room for the rest of the system

_SHOWN = 8  # workloads of a problem
_LOST = "kernels are compiled again in every process, and what a tune measures is lost with it"
_OWN_FOLDER = "set FLASHGEN_CACHE_DIR to a folder that you own and can write to"


def folder(name: str) -> Finding:
    """The cache folder: where it is and why, whether it is safe and can be written, and the space left."""
    path = cache_dir()
    cache = f"{path} (by {chosen_by()})"
    try:
        there = nearest(path)
        if there == path:
            require_safe(path)
            require_writable(path)
        elif not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
            return Finding(name, Status.WRONG, f"{cache} cannot be made: {there} is no folder that can be written", _LOST, _OWN_FOLDER)
        free = shutil.disk_usage(there).free
    except UnsafeCacheError as error:
        return _refused(name, error)
    except OSError as error:
        return Finding(name, Status.WRONG, f"{cache} cannot be used: {error.strerror or error}", _LOST, _OWN_FOLDER)
    found = f"{cache}, {'writable' if there == path else 'not made yet'}, {free / MIB:,.0f} MiB free"
    if free < LITTLE:
        return Finding(name, Status.NOTE, found, "there is little space left", f"free some, or {_OWN_FOLDER}")
    return Finding(name, Status.OK, found)


def _refused(name: str, error: UnsafeCacheError) -> Finding:
    found, _, cure = str(error).rpartition(": ")  # its message ends in the cure
    return Finding(name, Status.WRONG, found, f"it is not used: {_LOST}", cure)


def kernels(name: str) -> Finding:
    """The compiled kernels: how many, how large, and whether all are whole."""
    try:
        usage, faults = compilation.store().usage(), compilation.store().faults()
    except UnsafeCacheError as error:
        return _refused(name, error)
    except OSError as error:
        return Finding(name, Status.WRONG, f"{compilation.store().root} cannot be read: {error.strerror or error}", _LOST, _OWN_FOLDER)
    found = f"{usage.entries} kernels, {usage.bytes / MIB:.1f} MiB"
    if faults:
        path, reason = next(iter(faults.items()))
        found += f"; {len(faults)} are damaged, the first {path}: {reason}"
        return Finding(name, Status.NOTE, found, "those are compiled again when they are needed", "flashgen cache clear")
    return Finding(name, Status.OK, found)


def records(name: str) -> Finding:
    """The file of tuning records: whether it is sound, and of which GPUs it holds how many."""
    path = sources.own_records().path
    if not path.exists():
        return Finding(name, Status.OK, "none yet")
    if fault := _fault(path):
        meaning = "its records are not used: kernels are chosen by the model until they are tuned again"
        cure = "if its folder is sound, the next use renames it aside and begins a new one: flashgen cache import FILE, or tune again"
        return Finding(name, Status.WRONG, f"{path} cannot be used ({fault})", meaning, cure)
    devices = Counter(record.key.device_name for record in sources.own_records().all())
    return Finding(name, Status.OK, "; ".join(f"{count} of {device}" for device, count in devices.items()) or "none")


def _fault(path: Path) -> str | None:
    try:
        return fault_of(path)
    except (OSError, UnsafeCacheError, sqlite3.DatabaseError) as error:
        return str(error)


def records_of(name: str, on: Gpu) -> Finding:
    """The records that speak for one GPU: how many, of this driver and compiler or others, and what they cover."""
    path, device = sources.own_records().path, (on.device.name, on.device.sm_count)
    own = sources.own_records().for_device(*device) if path.exists() and not _fault(path) else []
    shipped = sources.shipped_records().for_device(*device)
    return judge_records(name, own, shipped, (on.driver_version, nvrtc_version()))


def judge_records(name: str, own: list[Record], shipped: list[Record], toolchain: tuple[str, str]) -> Finding:
    """What to say of a GPU's own and shipped records; `toolchain` is the versions of driver and compiler here."""
    usable = [record for record in (*own, *shipped) if tells_time(record, BENCHMARK_VERSION)]
    exact = sum(record.key.toolchain == toolchain for record in usable)
    found = f"{len(own)} own, {len(shipped)} shipped; {len(usable)} times can be used, {exact} of them of this driver and compiler"
    if not usable:
        return Finding(name, Status.NOTE, found, "the model picks the kernels for this GPU", "flashgen tune --head-dim 64")
    found += "".join(f"\n{line}" for line in _coverage(usable))
    if not exact:
        meaning = f"they were measured by others than driver {toolchain[0]} and NVRTC {toolchain[1]}: used, but perhaps no longer the best"
        return Finding(name, Status.NOTE, found, meaning, "flashgen tune --head-dim 64")
    return Finding(name, Status.OK, found)


def _coverage(usable: list[Record]) -> list[str]:
    """A line a problem, with its workloads: 'bf16_d64_causal at B4 H32 S4096, B1 H32 S16384'."""
    workloads: dict[str, list[str]] = {}
    for problem, workload in sorted({(r.problem.name, r.key.workload) for r in usable}):
        workloads.setdefault(problem, []).append(workload.name)
    rest = {problem: f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "" for problem, names in workloads.items()}
    return [f"{problem} at {', '.join(names[:_SHOWN])}{rest[problem]}" for problem, names in workloads.items()]
