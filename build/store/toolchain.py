"""Which compiler makes the machine code of an architecture: NVRTC for GPUs, the system's C++ compiler for the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .. import nvrtc
from ..emulator import compiler

if TYPE_CHECKING:
    from flashgen.codegen.render import Source

    from ..artifact import Artifact


@dataclass(frozen=True)
class Toolchain:
    """A compiler as an artifact's key sees it.

    options: and what else decides the machine code, beside the text
    """

    version: str
    options: tuple[str, ...]
    compile: Callable[[Source], Artifact]


def toolchain(arch: str) -> Toolchain:
    """The compiler for `arch`. Raises CompilerMissingError or CxxCompilerMissingError."""
    if arch in compiler.OPTIONS:
        kind = compiler.Emulated(arch)
        return Toolchain(compiler.cxx_compiler().version, compiler.key_options(kind), partial(compiler.compile_for_emulator, kind=kind))
    return Toolchain(nvrtc.nvrtc_version(), nvrtc.OPTIONS, partial(nvrtc.compile_source, arch=arch))
