"""From a spec to its artifact: the process's artifact store."""

from __future__ import annotations

from functools import cache

from flashgen.build.artifact import Artifact
from flashgen.build.store.store import ArtifactStore
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec


@cache
def store() -> ArtifactStore:
    """The process's artifact store."""
    return ArtifactStore()


def compile_spec(spec: KernelSpec) -> Artifact:
    """The artifact of a spec, from the store or the compiler. Raises CompileError."""
    return store().get_or_compile(render(spec), spec.target.name)
