"""What compilers make is made once in a run, for all of its processes: it takes seconds, and many tests want the same.

This lies below the artifact store: each test's cache is its own, and as empty as it should be.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from flashgen import templates
from flashgen.build.artifact import Artifact
from flashgen.build.emulator.compiler import LIBRARIES, OPTIONS, CxxCompiler, Emulated, cxx_compiler, key_options
from flashgen.build.lock import locked
from flashgen.build.store.store import artifact_key
from flashgen.build.store.toolchain import toolchain
from flashgen.codegen.render import Source

VARIABLE = "FLASHGEN_TEST_COMPILES"  # names a folder that outlives a run, for several runs of the same commit
_PATIENCE = 600.0  # seconds; longer than any compile takes, on however busy a machine

Compile = Callable[..., Artifact]


def once(folder: Path, compile: Compile) -> Compile:
    """`compile_for_emulator` that looks into `folder` first. What another process has begun is waited for."""

    def compile_once(source: Source, kind: Emulated = Emulated.LIBRARY) -> Artifact:
        return _once(folder, source, kind, compile)

    return compile_once


def source_once(folder: Path, compile: Compile) -> Compile:
    """`compile_source` that looks into `folder` first, as `once` does."""

    def compile_once(source: Source, arch: str) -> Artifact:
        return _once(folder, source, arch, compile)

    return compile_once


def _once(folder: Path, source: Source, arch: str, compile: Compile) -> Artifact:
    tools = toolchain(arch)
    key = artifact_key(f"{source.entry}\n{source.text}", arch, tools.version, tools.options)
    meta, made = folder / f"{key}.json", folder / key
    with locked(folder / f"{key}.lock", source.entry, _PATIENCE, say=lambda message: None):
        if meta.exists():  # it is written last
            return Artifact.from_parts(json.loads(meta.read_text()), source.text, made.read_bytes())
        artifact = compile(source, arch)
        made.write_bytes(artifact.cubin)
        meta.write_text(json.dumps(artifact.meta()))
        return artifact


def runtime_once(folder: Path, compile: Callable[[CxxCompiler], bytes]) -> Callable[[CxxCompiler], bytes]:
    """`runtime_object` that looks into `folder` first, as `once` does."""

    def compile_runtime_once(compiler: CxxCompiler) -> bytes:
        made = folder / f"{artifact_key('', 'runtime', compiler.version, key_options(Emulated.LIBRARY))}.o"
        with locked(made.with_suffix(".lock"), "the emulator's runtime", _PATIENCE, say=lambda message: None):
            if not made.exists():
                partial = made.with_suffix(".partial")
                partial.write_bytes(compile(compiler))
                partial.rename(made)
        return made.read_bytes()

    return compile_runtime_once


def precompiled(folder: Path, compile: Compile) -> Compile:
    """`compile_for_emulator` that takes standard headers precompiled from `folder`, and the faster linker. Of libraries of g++ alone."""
    linker = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()

    def compile_precompiled(source: Source, kind: Emulated = Emulated.LIBRARY) -> Artifact:
        if kind not in LIBRARIES or not cxx_compiler().version.startswith("g++"):
            return compile(source, kind)
        return compile(source, kind, ("-include", str(_standard_headers(folder, kind)), *linker))

    return compile_precompiled


def _standard_headers(folder: Path, kind: Emulated) -> Path:
    """A header of all standard headers that the emulator includes, which g++ finds precompiled, with the options of a kind, beside it."""
    header, made = folder / f"{kind}.hpp", folder / f"{kind}.hpp.gch"
    with locked(folder / f"{kind}.lock", header.name, _PATIENCE, say=lambda message: None):
        if not made.exists():
            texts = [path.read_text() for path in Path(templates.__file__).parent.rglob("emulat*/*.cuh")]
            header.write_text("".join(sorted({line for text in texts for line in re.findall(r"^#include <.*>\n", text, re.MULTILINE)})))
            partial = made.with_suffix(".partial")
            options = [option for option in OPTIONS[kind] if option != "-shared"]
            command = [str(cxx_compiler().path), *options, "-x", "c++-header", str(header), "-o", str(partial)]
            subprocess.run(command, check=True)
            partial.rename(made)
    return header
