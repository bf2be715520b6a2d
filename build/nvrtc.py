"""NVRTC: from source text to an artifact. Needs no GPU, no toolkit and no C++ compiler."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.codegen.errors import FlashgenError

from .artifact import Artifact, CompileError, Report

if TYPE_CHECKING:
    from flashgen.codegen.render import Source

# --no-cache: NVRTC keeps a cache of its own, and a hit there comes without the log that we read registers and spills from.
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
T = TypeVar("T")


class CompilerMissingError(FlashgenError):
    """NVRTC cannot be loaded. The message gives the cure."""


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # the binding raises RuntimeError, ImportError or its own types, by version
        raise CompilerMissingError(f"NVRTC cannot be loaded ({error}): pip install 'nvidia-cuda-nvrtc>=13,<14' cuda-python") from error
    return nvrtc


@cache
def nvrtc_version() -> str:
    """'13.0', as NVRTC reports it. Raises CompilerMissingError."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def nvrtc_architectures() -> tuple[int, ...]:
    """The compute capabilities that NVRTC compiles for, 90 for 9.0, in rising order. Raises CompilerMissingError."""
    nvrtc = _nvrtc()
    status, archs = nvrtc.nvrtcGetSupportedArchs()
    _require(nvrtc, status, "list its architectures")
    return tuple(sorted(archs))


def nvrtc_path() -> Path:
    """The library that NVRTC was loaded from. Raises CompilerMissingError."""
    _nvrtc()
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return Path(load_nvidia_dynamic_lib("nvrtc").abs_path)  # it is loaded: this finds it again


def compile_source(source: Source, arch: str) -> Artifact:
    """Compiles one text to machine code for `arch` ('sm_90a').

    Raises CompileError with the compiler's log; CompilerMissingError without NVRTC. A text that compiles with spills or
    ignored directives is an artifact like any other: see `Report.defects`. Safe to call from several threads: NVRTC runs without the GIL.
    """
    nvrtc = _nvrtc()
    status, program = nvrtc.nvrtcCreateProgram(source.text.encode(), f"{source.entry}.cu".encode(), 0, [], [])
    _require(nvrtc, status, "create a program")
    try:
        options = [f"--gpu-architecture={arch}".encode(), *(o.encode() for o in OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode().rstrip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{source.entry} does not compile for {arch}:\n{log}")
        cubin = _text(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    Report.from_log(log)
    return Artifact(source.entry, arch, source.text, cubin, log, nvrtc_version())


def compile_many(jobs: Iterable[tuple[T, Callable[[], Artifact]]], workers: int = 0) -> Iterator[tuple[T, Artifact | CompileError]]:
    """Runs compile jobs on `workers` threads (0: all cores, 16 at most) and yields (key, artifact or error) as they finish.

    Closing the iterator drops the jobs that have not begun.
    """
    pool = ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1), thread_name_prefix="flashgen-compile")
    try:
        futures: dict[Future[Artifact], T] = {pool.submit(job): key for key, job in jobs}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except CompileError as error:
                yield futures[future], error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _text(nvrtc: Any, size_of: Callable[[Any], Any], read: Callable[[Any, bytes], Any], program: Any) -> bytes:
    status, size = size_of(program)
    _require(nvrtc, status, "size an output")
    buffer = bytes(size)
    (status,) = read(program, buffer)  # the binding fills the bytes object in place
    _require(nvrtc, status, "read an output")
    return buffer


def _require(nvrtc: Any, status: Any, what: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC could not {what}: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
