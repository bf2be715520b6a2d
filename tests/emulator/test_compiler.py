"""The C++ compiler as distributions ship it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashgen.build.artifact import CompileError
from flashgen.build.emulator import compiler as module
from flashgen.build.emulator.compiler import CxxCompilerMissingError, compile_for_emulator, cxx_compiler
from flashgen.codegen.render import Source

ROOT = Path(__file__).parents[2]
# Threads that wait for each other: each jumps from its own stack to others.
WITH_A_BARRIER = """
import numpy as np
from flashgen.build.emulator.kernel import EmulationOrder
from tests.support.probes import Probe
print(Probe("barrier", "barrier_sync(); out[0] = 7;", lambda: np.zeros(1, np.uint32)).on_cpu(EmulationOrder()).sum())
"""


@pytest.mark.slow
def test_a_compiler_that_fortifies_by_default(tmp_path: Path) -> None:
    """In a process of its own: glibc's checked longjmp would abort it."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {cxx_compiler().path} -D_FORTIFY_SOURCE=2 "$@"\n')
    compiler.chmod(0o700)
    environment = {**os.environ, "CXX": str(compiler), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", WITH_A_BARRIER], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.stdout == f"{64 * 7}\n", done.stderr


def made(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o700)
    return path


@pytest.fixture
def cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], None]]:
    """Makes CXX name a program of one's own."""

    def put(content: bytes) -> None:
        monkeypatch.chdir(tmp_path)
        made(tmp_path / "compiler", content)
        monkeypatch.setenv("CXX", "./compiler")
        cxx_compiler.cache_clear()

    yield put
    cxx_compiler.cache_clear()


@pytest.mark.parametrize(
    "content", [b"\x7fELF, of another machine", b"#!/nowhere\n", b"#!/bin/sh\nprintf '\\377\\376'\n", b"#!/bin/sh\nexec sleep 600\n"]
)
def test_a_compiler_that_cannot_say_its_version(content: bytes, cxx: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    cxx(content)
    with pytest.raises(CxxCompilerMissingError, match=r"must be there; got \./compiler: "):
        cxx_compiler()


@pytest.mark.parametrize("log", [b"", b"printf '\\377' >&2"])
def test_a_compiler_that_writes_nothing(log: bytes, cxx: Callable[[bytes], None]) -> None:
    cxx(b"#!/bin/sh\necho 'g++ (of mine) 99.1.0'\n" + log)
    with pytest.raises(CompileError, match=r"^emulator_runtime does not compile with g\+\+ 99\.1\.0 for \S+:\n(it wrote nothing|\ufffd)$"):
        compile_for_emulator(Source("name", "text"))


def test_a_compiler_named_by_a_relative_path(cxx: Callable[[bytes], None]) -> None:
    cxx(f'#!/bin/sh\nexec {cxx_compiler().path} "$@"\n'.encode())
    assert compile_for_emulator(Source("name", "int kernel;")).cubin


def test_a_compiler_that_links_no_library_of_cpp_by_itself(cxx: Callable[[bytes], None], tmp_path: Path) -> None:
    """As gcc does."""
    cxx(f'#!/bin/sh\nexec {cxx_compiler().path} -nodefaultlibs "$@" -lgcc_s -lc\n'.encode())
    library = tmp_path / "library.so"
    library.write_bytes(compile_for_emulator(Source("name", "void kernel() { throw new int; }")).cubin)
    ctypes.CDLL(str(library), os.RTLD_NOW)
