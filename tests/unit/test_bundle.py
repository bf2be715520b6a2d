"""Generated folders: written whole or not at all, read back only if unaltered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashgen import bundle, selection
from flashgen.build.artifact import Artifact
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target

TARGET = find_target("sm_90a")


@pytest.fixture(scope="module")
def kernels() -> list[tuple[KernelSpec, Artifact]]:
    problems = [Problem(Dtype.BF16, 8, mask=mask) for mask in Mask]
    specs = [selection.default_spec(problem, TARGET) for problem in problems]
    return [(spec, selection.compile_spec(spec)) for spec in specs]


def test_what_is_written_is_read_back(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path) -> None:
    paths = bundle.write(tmp_path / "out", kernels)
    assert all(path.is_file() for path in paths)
    assert bundle.read(tmp_path / "out", TARGET) == kernels
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "staging is left over"


def test_a_generated_folder_is_replaced(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path) -> None:
    bundle.write(tmp_path / "out", kernels)
    bundle.write(tmp_path / "out", kernels[:1])
    assert bundle.read(tmp_path / "out", TARGET) == kernels[:1]
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_another_folder_is_not_replaced(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ArgumentError, match=r"^out must be a new, empty or generated folder; got "):
        bundle.write(tmp_path, kernels)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failed_write_leaves_the_old_folder(
    kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle.write(tmp_path / "out", kernels)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        bundle.write(tmp_path / "out", kernels[:1])
    monkeypatch.undo()
    assert bundle.read(tmp_path / "out", TARGET) == kernels
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return apply


def flip_last_byte(folder: Path) -> None:
    cubin = next(folder.glob("*.cubin"))
    data = cubin.read_bytes()
    cubin.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_last_byte, "was altered"),
        (lambda folder: next(folder.glob("*.cu")).write_text("int x;"), "was altered"),
        (lambda folder: next(folder.glob("*.cubin")).unlink(), "must hold what `flashgen generate` wrote"),
        (lambda folder: (folder / "manifest.json").unlink(), "must hold what `flashgen generate` wrote"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "must hold a whole manifest"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "must hold a whole manifest"),
        (edit(lambda m: m.update(schema=99)), "schema 1; got 99"),
        (edit(lambda m: m["kernels"][0].pop("cubin_sha256")), "must hold a whole manifest"),
        (edit(lambda m: m["kernels"][0].update(parameters="int q")), "takes other parameters"),
        (edit(lambda m: m["kernels"][0].update(cubin="../secret")), "must hold its files itself"),
        (edit(lambda m: m["kernels"][0]["spec"].update(revision=0)), "revision of attention_forward_sm90 must be"),
        (edit(lambda m: m["kernels"][0]["spec"]["config"].update(block_q=7)), "block_q"),
        (edit(lambda m: m["kernels"].clear()), "got kernels for nothing"),
    ],
)
def test_damage_is_refused(
    kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    bundle.write(tmp_path / "out", kernels)
    damage(tmp_path / "out")
    with pytest.raises(ArgumentError, match=message):
        bundle.read(tmp_path / "out", TARGET)


def test_the_architectures_that_are_there_are_named(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path) -> None:
    bundle.write(tmp_path / "out", kernels)
    with pytest.raises(ArgumentError, match="a kernel for sm_80; got kernels for sm_90a"):
        bundle.read(tmp_path / "out", find_target("sm_80"))
