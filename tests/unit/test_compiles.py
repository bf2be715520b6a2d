"""Texts for the emulator are compiled once for all processes of a run, and each test's store stays as empty as it should be."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.emulator import compiler
from flashgen.build.emulator.compiler import LIBRARIES, CxxCompilerMissingError, Emulated, compile_for_emulator, cxx_compiler
from flashgen.build.store.store import ArtifactStore
from flashgen.codegen.render import Source
from tests.support.compiles import once, precompiled, source_once

try:
    cxx_compiler()
except CxxCompilerMissingError as error:
    pytest.skip(str(error), allow_module_level=True)


class Compiler:
    """One that takes its time, and counts."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str, Emulated]] = []

    def __call__(self, source: Source, kind: Emulated = Emulated.LIBRARY) -> Artifact:
        self.compiled.append((source.entry, source.text, kind))
        time.sleep(0.1)
        if "nonsense" in source.text:
            raise CompileError("it is nonsense")
        return Artifact(source.entry, kind, source.text, b"made of " + source.text.encode(), "log", "g++")


def test_threads_and_processes_that_want_the_same_text_compile_it_once(tmp_path: Path) -> None:
    counted, found = Compiler(), list[Artifact]()
    first, second = (once(tmp_path, counted) for _ in range(2))  # as two processes: they share nothing but the folder
    threads = [threading.Thread(target=lambda one=one: found.append(one(Source("k", "text")))) for one in (first, second) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counted.compiled) == 1
    assert found == [Artifact("k", Emulated.LIBRARY, "text", b"made of text", "log", "g++")] * 6


def test_texts_entries_and_kinds_are_told_apart(tmp_path: Path) -> None:
    counted = Compiler()
    compile_once = once(tmp_path, counted)
    wanted = [("k", "text", kind) for kind in Emulated] + [("k", "other", Emulated.LIBRARY), ("other", "text", Emulated.LIBRARY)]
    for entry, text, kind in wanted * 2:
        artifact = compile_once(Source(entry, text), kind)
        assert (artifact.entry, artifact.source, artifact.arch) == (entry, text, kind)
    assert counted.compiled == wanted


def test_kernels_for_gpus_are_shared_too(tmp_path: Path) -> None:
    asked: list[str] = []

    def compile(source: Source, arch: str) -> Artifact:
        asked.append(arch)
        return Artifact(source.entry, arch, source.text, arch.encode(), "log", "13.0")

    found = [source_once(tmp_path, compile)(Source("k", "text"), arch=arch).cubin for arch in ("sm_80", "sm_90a") * 2]
    assert (asked, found) == (["sm_80", "sm_90a"], [b"sm_80", b"sm_90a"] * 2)


def test_a_text_that_does_not_compile_never_does(tmp_path: Path) -> None:
    compile_once = once(tmp_path, Compiler())
    for _ in range(2):
        with pytest.raises(CompileError, match="it is nonsense"):
            compile_once(Source("k", "nonsense"))


def test_a_store_of_a_test_s_own_is_filled_by_the_compiler_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Compiler()
    monkeypatch.setattr(compiler, "compile_for_emulator", once(tmp_path, counted))
    for name in ("first", "second"):
        store = ArtifactStore(tmp_path / name)
        assert store.find(Source("k", "text"), Emulated.LIBRARY) is None
        store.get_or_compile(Source("k", "text"), Emulated.LIBRARY)
        assert store.usage().entries == 1
    assert len(counted.compiled) == 1


@pytest.mark.slow
def test_standard_headers_are_precompiled_once_and_libraries_take_them(tmp_path: Path) -> None:
    if not cxx_compiler().version.startswith("g++"):
        pytest.skip("precompiled headers are used with g++ alone")
    taken = list[tuple[str, ...]]()

    def compile(source: Source, kind: Emulated = Emulated.LIBRARY, more: tuple[str, ...] = ()) -> Artifact:
        taken.append(more)
        return compile_for_emulator(source, kind, (*more, "-H"))

    compile_precompiled, text = precompiled(tmp_path, compile), "#include <vector>\nint main() { return std::vector<int>().size(); }\n"
    made: list[int] = []
    for _ in range(2):
        for kind in LIBRARIES:
            headers = tmp_path / f"{kind}.hpp.gch"
            log = compile_precompiled(Source("main", text), kind).log
            assert f"! {headers}" in log, "g++ must find it valid"
            made.append(headers.stat().st_mtime_ns)
    compile_precompiled(Source("main", text), Emulated.PROGRAM)
    assert [more[:2] for more in taken] == [("-include", str(tmp_path / f"{kind}.hpp")) for kind in LIBRARIES] * 2 + [()]
    assert made[:2] == made[2:]
