"""The folder of `flashgen debug`: which of its files are replaced, and that those of the user's are not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.build.artifact import Artifact
from flashgen.build.emulator.compiler import Emulated
from flashgen.build.emulator.program import FILES
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import Source, render_program
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation
from flashgen.selection.families import default_spec
from flashgen.verification import debug

SPEC = default_spec(Problem(Dtype.BF16, 8), find_target("sm_80"))
TEXT = render_program(SPEC)
EDITED = Source(TEXT.entry, TEXT.text + "// mine\n")
PROGRAM = b"#!/bin/sh\n[ -e $2 ] && exit 9\necho results > $2; exit 1\n"  # stands for a kernel: it leaves results, and fails

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`debug.run` in a folder. `compiled` has the texts that were compiled."""

    def compiled(source: Source, arch: str) -> Artifact:
        texts.append(source.text)
        return Artifact(source.entry, Emulated.PROGRAM, source.text, PROGRAM, "", "test")

    def started(folder: Path, source: Source | None = None) -> list[str]:
        del texts[:]
        tensors = Tensors.random(SPEC.problem, Workload(1, 1, 1, 4, 4), torch.Generator().manual_seed(0))
        with open(os.devnull, "w") as output:
            found = debug.run_blocks(SPEC, tensors, folder, source=source, output=output)
        assert found.fault is not None
        assert found.fault.message == "exit code 1"
        return texts

    texts: list[str] = []
    monkeypatch.setattr(compilation, "store", lambda: SimpleNamespace(get_or_compile=compiled))
    started.texts = texts  # type: ignore[attr-defined]
    return started


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in os.listdir(folder)}


def refused(run: Run, folder: Path, name: str, source: Source | None = None) -> None:
    before = contents(folder)
    with pytest.raises(ArgumentError, match=rf"^out must .*; got {folder}, in which {folder / name} is of somebody else, or was altered"):
        run(folder, source)
    assert contents(folder) == before
    assert not run.texts, "refused before any work is done"  # type: ignore[attr-defined]


def test_a_folder_may_be_used_again(run: Run, tmp_path: Path) -> None:
    for source in (None, EDITED, None):
        run(tmp_path, source)
        assert (tmp_path / "kernel.cpp").read_text() == (source or TEXT).text
    (tmp_path / "notes.txt").write_text("mine")  # in nobody's way
    run(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_users_is_kept_and_named(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    refused(run, tmp_path, name)


@pytest.mark.parametrize("name", FILES)
def test_an_altered_file_is_kept_and_named(run: Run, tmp_path: Path, name: str) -> None:
    run(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"// mine\n")
    refused(run, tmp_path, name)


def test_an_edit_in_the_folder_runs_there_and_stays(run: Run, tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "kernel.cpp").write_text(EDITED.text)
    assert run(tmp_path, debug.read_text(tmp_path / "kernel.cpp", SPEC)) == [EDITED.text]
    assert (tmp_path / "kernel.cpp").read_text() == EDITED.text
    refused(run, tmp_path, "kernel.cpp")
