"""What the emulator's compiler makes is made once in a run, for all of its processes: it takes seconds, and many tests want the same.

This lies below the artifact store: each test's cache is its own, and as empty as it should be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from flashgen.build.artifact import Artifact
from flashgen.build.emulator.compiler import OPTIONS, Emulated, cxx_compiler
from flashgen.build.lock import locked
from flashgen.build.store.store import artifact_key
from flashgen.codegen.render import Source

VARIABLE = "FLASHGEN_TEST_COMPILES"  # names a folder that outlives a run, for several runs of the same commit
_PATIENCE = 600.0  # seconds; longer than any compile takes, on however busy a machine

Compile = Callable[..., Artifact]


def once(folder: Path, compile: Compile) -> Compile:
    """`compile_for_emulator` that looks into `folder` first. One that another process has begun is waited for."""

    def compile_once(source: Source, kind: Emulated = Emulated.LIBRARY) -> Artifact:
        key = artifact_key(f"{source.entry}\n{source.text}", kind, cxx_compiler().version, OPTIONS[kind])
        meta, made = folder / f"{key}.json", folder / key
        with locked(folder / f"{key}.lock", source.entry, _PATIENCE, say=lambda message: None):
            if meta.exists():  # it is written last
                return Artifact.from_parts(json.loads(meta.read_text()), source.text, made.read_bytes())
            artifact = compile(source, kind)
            made.write_bytes(artifact.cubin)
            meta.write_text(json.dumps(artifact.meta()))
            return artifact

    return compile_once
