"""The system's C++ compiler: from a text with host atoms to a shared library. Needs g++ 12 or clang++ 14, or later."""

from __future__ import annotations

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

from .artifact import Artifact, CompileError

if TYPE_CHECKING:
    from flashgen.codegen.render import Source

HOST = "host"  # stands where an architecture would
# -ffp-contract=off: `mul_rn` must not be fused. The kernels' pragmas are for device compilers, and atoms look into each other's types.
# -U_FORTIFY_SOURCE: some distributions' compilers set it by default, and a checked longjmp takes a jump to another stack for a fault.
OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-w")
_LEAST = {"g++": 12, "clang++": 14}


class HostCompilerMissingError(FlashgenError):
    """There is no C++ compiler, or only older ones. The message gives the cure."""


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler: its path, and its kind, version and machine ('g++ 12.2.0 for x86_64')."""

    path: Path
    version: str


@cache
def host_compiler() -> HostCompiler:
    """The compiler that $CXX names, else the first of g++ and clang++ on the PATH that is new enough. Raises HostCompilerMissingError."""
    wanted = os.environ.get("CXX")
    tried = []
    for name in [wanted] if wanted else list(_LEAST):
        path = shutil.which(name)
        if path is None:
            tried.append(f"{name}: not found")
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        match = re.search(r"(clang) version (\d+)[\d.]*|\b(\d+)\.\d+\.\d+", done.stdout)
        if done.returncode or match is None:
            tried.append(f"{name}: says no version")
            continue
        kind = "clang++" if match[1] else "g++"
        if int(match[2] or match[3]) >= _LEAST[kind]:
            return HostCompiler(Path(path), f"{kind} {match[0].removeprefix('clang version ')} for {platform.machine()}")
        tried.append(f"{name}: {done.stdout.splitlines()[0]}")
    least = " or ".join(f"{kind} {version}" for kind, version in _LEAST.items())
    raise HostCompilerMissingError(
        f"kernels run on the CPU through a C++ compiler: {least}, or later, must be there; got {'; '.join(tried)}. "
        "Install one (apt install g++), or name it in CXX"
    )


def compile_host_source(source: Source) -> Artifact:
    """Compiles a text with host atoms to a shared library.

    Raises CompileError with the compiler's log, HostCompilerMissingError without a compiler.
    """
    compiler = host_compiler()
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        text, library = Path(folder, f"{source.entry[:200]}.cpp"), Path(folder, "kernel.so")
        text.write_text(source.text, encoding="utf-8")
        done = subprocess.run([compiler.path, *OPTIONS, text, "-o", library], capture_output=True, text=True)
        if done.returncode:
            raise CompileError(f"{source.entry} does not compile with {compiler.version}:\n{done.stderr}")
        return Artifact(source.entry, HOST, source.text, library.read_bytes(), done.stderr, compiler.version)
