"""Which compiler makes the machine code of an architecture: NVRTC for GPUs, the system's C++ compiler for the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from . import compiler, host_compiler

if TYPE_CHECKING:
    from flashgen.codegen.render import Source

    from .artifact import Artifact


@dataclass(frozen=True)
class Toolchain:
    """A compiler as an artifact's key sees it."""

    version: str
    options: tuple[str, ...]
    compile: Callable[[Source], Artifact]


def toolchain(arch: str) -> Toolchain:
    """The compiler for `arch`. Raises CompilerMissingError or HostCompilerMissingError."""
    if options := host_compiler.OPTIONS.get(arch):
        return Toolchain(host_compiler.host_compiler().version, options, partial(host_compiler.compile_host_source, kind=arch))
    return Toolchain(compiler.nvrtc_version(), compiler.OPTIONS, partial(compiler.compile_source, arch=arch))
