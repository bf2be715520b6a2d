"""Where kernels on the CPU are loaded from, and where programs are left: also if the folder for temporary files allows no programs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from flashgen.build.emulator import folder as program_place
from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.target import find_target
from flashgen.launch import cpu
from flashgen.selection.families import default_spec
from tests.support.command_line import as_json, flashgen

OPTIONS = ["debug", "--head-dim", "8", "--arch", "sm_80", "--seqlen", "8"]


def mounted_noexec(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """These folders allow no programs: nothing may be put there to be run."""
    monkeypatch.setattr(program_place, "allows_programs", lambda folder: folder not in folders)


def test_a_library_is_loaded_from_the_cache_if_need_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = default_spec(Problem(Dtype.BF16, 8), find_target("sm_80"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cpu.load_emulated(spec)  # compiled and stored
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    mounted_noexec(monkeypatch, tmp_path)
    tmp_path.chmod(0o700)
    named, folders = tempfile.NamedTemporaryFile, []

    def told(**options: Any) -> Any:
        folders.append(options["dir"])
        return named(**options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", told)
    cpu.load_emulated(spec)
    assert folders == [tmp_path / "cache"]
    assert os.listdir(tmp_path / "cache") == []
    mounted_noexec(monkeypatch, tmp_path, tmp_path / "cache")
    with pytest.raises(FlashgenError, match=rf"none may be run in {tmp_path} or {tmp_path}/cache, .* set TMPDIR to another folder"):
        cpu.load_emulated(spec)


@pytest.mark.slow
def test_debug_takes_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = as_json(*OPTIONS, "--out", "a/out")
    assert facts["ok"]
    assert facts["text"] == str(tmp_path / "a/out/kernel.cpp")
    assert (tmp_path / "a/out/kernel").exists()


def test_debug_refuses_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/out", Path("/proc/flashgen")):
        _, err = flashgen(*OPTIONS, "--out", str(out), code=2)
        assert err.startswith(f"flashgen: out must be a folder that can be written; got {out}: ")
