"""What an entry of the store must hold to be taken for the kernel that is asked for, and that it is on the disk before it has its name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashgen.build import nvrtc as compiler_module
from flashgen.build.artifact import Artifact
from flashgen.build.nvrtc import nvrtc_version
from flashgen.build.store.store import FILES, META_FILE, ArtifactStore
from flashgen.codegen.render import Source

SOURCE = Source("k", "one text")
LOG = (
    "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
    "ptxas info    : Used 8 registers\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries of the texts that were compiled, by a compiler that is made up."""
    made: list[str] = []

    def compile_source(source: Source, arch: str) -> Artifact:
        made.append(source.entry)
        return Artifact(source.entry, arch, source.text, b"code", LOG, nvrtc_version())

    monkeypatch.setattr(compiler_module, "compile_source", compile_source)
    return made


def test_an_entry_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash of the machine an entry must not be there with files that are not."""
    events: list[tuple[str, Path]] = []
    sync = os.fsync

    def fsync(handle: int) -> None:
        events.append(("synced", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)

    def recorded(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any, **more: Any) -> None:
            events.extend((("moved from", Path(source)), ("moved to", Path(target))))
            move(source, target, **more)

        return moved

    monkeypatch.setattr(os, "rename", recorded(os.rename))
    monkeypatch.setattr(os, "replace", recorded(os.replace))
    ArtifactStore(tmp_path / "cache").get_or_compile(SOURCE, "sm_80")
    (entry,) = (tmp_path / "cache").glob("artifacts/??/*")
    at = events.index(("moved to", entry))
    what, stage = events[at - 1]
    assert what == "moved from"
    synced = [path for kind, path in events[:at] if kind == "synced"]
    assert synced[-1] == stage, "the folder, with the names of its files, after them"
    assert {path.name for path in synced[:-1] if path.parent == stage} == set(FILES)
    assert ("synced", entry.parent) in events[at:], "the name itself"


def test_an_entry_of_another_compiler_is_not_taken(tmp_path: Path, compiled: list[str]) -> None:
    """Whole, with checksums that are right, under the key of this compiler: somebody has copied it there."""
    ArtifactStore(tmp_path).get_or_compile(SOURCE, "sm_80")
    (entry,) = tmp_path.glob("artifacts/??/*")
    meta = json.loads((entry / META_FILE).read_text())
    for field, other in (("compiler_version", "12.9"), ("arch", "sm_90a"), ("entry", "other")):
        forged = {**meta, "artifact": {**meta["artifact"], field: other}}
        canonical = json.dumps(forged["artifact"], sort_keys=True, separators=(",", ":"))
        forged["sha256"] = {**meta["sha256"], "artifact": hashlib.sha256(canonical.encode()).hexdigest()}
        (entry / META_FILE).write_text(json.dumps(forged))
        del compiled[:]
        with pytest.warns(RuntimeWarning, match="it holds another kernel"):
            found = ArtifactStore(tmp_path).get_or_compile(SOURCE, "sm_80")
        assert compiled == ["k"], field
        assert (found.entry, found.arch, found.compiler_version) == ("k", "sm_80", nvrtc_version())


def test_what_is_kept_in_memory_is_for_one_entry(tmp_path: Path, compiled: list[str]) -> None:
    """Where nothing can be written. The same text under two names is two artifacts: a launch looks for the name."""
    (tmp_path / "cache").write_text("not a folder")
    store = ArtifactStore(tmp_path / "cache")
    other = Source("other", SOURCE.text)
    with pytest.warns(RuntimeWarning, match="cannot hold compiled kernels"):
        assert store.get_or_compile(SOURCE, "sm_80").entry == "k"
    assert store.get_or_compile(SOURCE, "sm_80").entry == "k"
    assert compiled == ["k"]
    assert store.get_or_compile(other, "sm_80").entry == "other"
    assert compiled == ["k", "other"]
