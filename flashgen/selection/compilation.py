"""From a spec to its artifact: the process's artifact store, and whether what a compile needs is here."""

from __future__ import annotations

from functools import cache

from flashgen.build.artifact import Artifact
from flashgen.build.nvrtc import nvrtc_version
from flashgen.build.store.store import ArtifactStore
from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.render import jinja_environment, render
from flashgen.codegen.spec import KernelSpec


@cache
def store() -> ArtifactStore:
    """The process's artifact store."""
    return ArtifactStore()


def compile_spec(spec: KernelSpec) -> Artifact:
    """The artifact of a spec, from the store or the compiler. Raises CompileError."""
    return store().get_or_compile(render(spec), spec.target.name)


@cache
def why_no_compile() -> str | None:
    """What keeps this process from compiling a kernel, with the cure; None if nothing does."""
    try:
        nvrtc_version()
        jinja_environment()
    except FlashgenError as error:
        return str(error)
    return None
