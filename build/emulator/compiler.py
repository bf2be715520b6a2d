"""The system's C++ compiler: from a text with emulated atoms to a shared library, or to a program. Needs g++ 12 or clang++ 14, or later."""

from __future__ import annotations

import enum
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.render import emulator_runtime

from ..artifact import Artifact, CompileError

if TYPE_CHECKING:
    from flashgen.codegen.render import Source


class Emulated(enum.StrEnum):
    """What a text with emulated atoms is compiled to; stands where an architecture would.

    LIBRARY: to be loaded; PROGRAM: of its own, for debuggers; SANITIZED: the same, watched by the compiler's sanitizers;
    TRACED: a library that records what its kernels do
    """

    LIBRARY = "emulator"
    PROGRAM = "emulator-program"
    SANITIZED = "emulator-sanitized"
    TRACED = "emulator-traced"


# -ffp-contract=off: `mul_rn` must not be fused. The kernels' pragmas are for device compilers, and atoms look into each other's types.
# -U_FORTIFY_SOURCE: some distributions' compilers set it by default, and a checked longjmp takes a jump to another stack for a fault.
_COMMON = ("-std=c++17", "-Og", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w")
_PROGRAM = (*_COMMON, "-g", "-fno-omit-frame-pointer")
_LIBRARY = (*_COMMON, "-fPIC", "-shared")
LIBRARIES = (Emulated.LIBRARY, Emulated.TRACED)  # they are linked with the runtime
# More for the runtime, which is compiled once for many kernels. Stacks of TRACED go through its functions: hence the frame pointers.
_RUNTIME = ("-O3", "-fno-omit-frame-pointer")
OPTIONS = {
    Emulated.LIBRARY: _LIBRARY,
    # The sanitizer's calls without its runtime (templates/emulator/trace.cuh), and a frame for each function.
    Emulated.TRACED: (
        *(*_LIBRARY, "-g1", "-fno-inline", "-fno-omit-frame-pointer"),
        *("-fsanitize=thread", "-nodefaultlibs", "-DFLASHGEN_TRACED"),
    ),
    Emulated.PROGRAM: _PROGRAM,
    Emulated.SANITIZED: (*_PROGRAM, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-DFLASHGEN_SANITIZED"),
}
TEXT_FILE = "kernel.cpp"  # what a program's line numbers refer to
_PATIENCE = 30.0  # seconds for a compiler to say its version
_LEAST = {"g++": 12, "clang++": 14}


class CxxCompilerMissingError(FlashgenError):
    """There is no C++ compiler, or only older ones. The message gives the cure."""


class SanitizerMissingError(FlashgenError):
    """The C++ compiler cannot link its sanitizers. The message gives the cure."""


@dataclass(frozen=True)
class CxxCompiler:
    """A C++ compiler: its path, and its kind, version and machine ('g++ 12.2.0 for x86_64')."""

    path: Path
    version: str


@cache
def cxx_compiler() -> CxxCompiler:
    """The compiler that $CXX names, else the first of g++ and clang++ on the PATH that is new enough. Raises CxxCompilerMissingError."""
    wanted = os.environ.get("CXX")
    tried = []
    for name in [wanted] if wanted else list(_LEAST):
        path = shutil.which(name)
        if path is None:
            tried.append(f"{name}: not found")
            continue
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
        except (OSError, subprocess.TimeoutExpired) as error:
            tried.append(f"{name}: {error}")
            continue
        match = re.search(r"(clang) version (\d+)[\d.]*|\b(\d+)\.\d+\.\d+", done.stdout)
        if done.returncode or match is None:
            tried.append(f"{name}: says no version")
            continue
        kind = "clang++" if match[1] else "g++"
        if int(match[2] or match[3]) >= _LEAST[kind]:
            return CxxCompiler(Path(path).absolute(), f"{kind} {match[0].removeprefix('clang version ')} for {platform.machine()}")
        tried.append(f"{name}: {done.stdout.splitlines()[0]}")
    least = " or ".join(f"{kind} {version}" for kind, version in _LEAST.items())
    raise CxxCompilerMissingError(
        f"kernels run on the CPU through a C++ compiler: {least}, or later, must be there; got {'; '.join(tried)}. "
        "Install one (apt install g++), or name it in CXX"
    )


def key_options(kind: Emulated) -> tuple[str, ...]:
    """What decides what is made of a text, beside the compiler: its options and, of a library, the runtime that it is linked with."""
    return (*OPTIONS[kind], *((*_RUNTIME, emulator_runtime().digest) if kind in LIBRARIES else ()))


def compile_for_emulator(source: Source, kind: Emulated = Emulated.LIBRARY, more: tuple[str, ...] = ()) -> Artifact:
    """Compiles a text with emulated atoms to a shared library, or to a program: with one of OPTIONS, and with `more` options.

    A library gets the runtime that launches its kernels; the text of a program has it.
    Raises CompileError with the compiler's log, CxxCompilerMissingError without a compiler, SanitizerMissingError if it lacks libraries.
    """
    compiler = cxx_compiler()
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        objects = []
        if kind in LIBRARIES:
            objects = ["runtime.o"]
            Path(folder, *objects).write_bytes(runtime_object(compiler))
        return _compiled(compiler, source, kind, Path(folder), (*more, TEXT_FILE, *objects))


@cache
def runtime_object(compiler: CxxCompiler) -> bytes:
    """`emulator_runtime` as an object file, compiled once a process: libraries are linked with it. Raises as `compile_for_emulator`."""
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        return _compiled(compiler, emulator_runtime(), Emulated.LIBRARY, Path(folder), (*_RUNTIME, "-c", TEXT_FILE)).cubin


def _compiled(compiler: CxxCompiler, source: Source, kind: Emulated, folder: Path, given: tuple[str, ...]) -> Artifact:
    """What the compiler makes in `folder` of the text and of what else is `given`."""
    made = folder / "made"
    (folder / TEXT_FILE).write_text(source.text, encoding="utf-8")
    # Line numbers must not speak of a folder that is gone.
    command = [str(compiler.path), *OPTIONS[kind], f"-ffile-prefix-map={folder}=.", *given, "-lstdc++", "-o", made.name]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder)
    if done.returncode or not made.is_file():
        if kind == Emulated.SANITIZED and (missing := re.search(r"^.*cannot find.*(?:asan|ubsan).*$", done.stderr, re.MULTILINE)):
            raise SanitizerMissingError(
                f"sanitize needs AddressSanitizer and UndefinedBehaviorSanitizer of {compiler.version}; got {missing[0]!r}. "
                "Install them (apt install libasan8 libubsan1, dnf install libasan libubsan), or name another compiler in CXX"
            )
        raise CompileError(f"{source.entry} does not compile with {compiler.version}:\n{done.stderr or 'it wrote nothing'}")
    return Artifact(source.entry, kind, source.text, made.read_bytes(), done.stderr, compiler.version)
