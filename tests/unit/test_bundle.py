"""Generated folders: written whole or not at all, read back only if unaltered."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashgen import bundle, selection
from flashgen.build import files
from flashgen.build.artifact import Artifact
from flashgen.codegen.errors import ArgumentError, FlashgenError
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


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """All that is below a folder: what files hold, where links lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def web_app(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "src").mkdir()
    (folder / "src/app.js").write_text("months of work")
    (folder / "manifest.json").write_text('{"name": "app", "icons": []}')


def refolder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def relink(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


# What is done to a generated folder, and the path that the refusal must name.
FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a web app": (web_app, "out, which has no manifest.json of that command"),
    "a file": (lambda folder: (folder / "thesis.txt").write_text("years of work"), "out/thesis.txt"),
    "a hidden file": (lambda folder: (folder / ".env").write_text("secret"), "out/.env"),
    "a folder": (lambda folder: (folder / "notes").mkdir(), "out/notes"),
    "a link": (lambda folder: (folder / "link").symlink_to("manifest.json"), "out/link"),
    "a dangling link": (lambda folder: (folder / "link").symlink_to("nowhere"), "out/link"),
    "altered text": (lambda folder: next(folder.glob("*.cu")).write_text("by hand"), ".cu was altered"),
    "altered machine code": (lambda folder: flip_last_byte(folder), ".cubin was altered"),
    "a text that is a link": (lambda folder: relink(next(folder.glob("*.cu"))), ".cu was altered"),
    "a text that is a folder": (lambda folder: refolder(next(folder.glob("*.cu"))), ".cu was altered"),
    "a manifest that is a link": (lambda folder: relink(folder / "manifest.json"), "out, which has no manifest.json"),
    "a torn manifest": (lambda folder: (folder / "manifest.json").write_text('{"schema": 1'), "out, which has no manifest.json"),
    "a deep manifest": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "out, which has no manifest.json"),
    "a manifest with more in it": (lambda folder: edit(lambda m: m.update(notes="mine"))(folder), "out, which has no manifest.json"),
    "a kernel with more to it": (lambda folder: edit(lambda m: m["kernels"][0].update(notes="mine"))(folder), "out, which has no manifest"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "out, which has no manifest.json"),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_was_not_generated_is_never_removed(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, foreign: str) -> None:
    folder = tmp_path / "out"
    bundle.write(folder, kernels)
    change, named = FOREIGN[foreign]
    change(folder)
    before = tree(tmp_path)
    for refuse in (lambda: bundle.require_place(folder), lambda: bundle.write(folder, kernels)):
        with pytest.raises(ArgumentError, match=r"^out must be a new folder, an empty one, or one as .* left it; got ") as caught:
            refuse()
        assert named in str(caught.value)
        assert tree(tmp_path) == before


def test_what_arrives_just_before_the_exchange_stays(
    kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    bundle.write(folder, kernels)
    monkeypatch.setattr(bundle, "sync_folder", lambda _: (folder / "thesis.txt").write_text("years of work"))
    for exchange in (files._exchange, lambda *_: False):
        monkeypatch.setattr(files, "_exchange", exchange)
        with pytest.raises(ArgumentError, match=r"^out must be .*out/thesis.txt"):
            bundle.write(folder, kernels[:1])
        assert os.listdir(tmp_path) == ["out"]
        assert (folder / "thesis.txt").read_text() == "years of work"
        (folder / "thesis.txt").unlink()
        assert bundle.read(folder, TARGET) == kernels


def test_a_missing_file_is_generated_again(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path) -> None:
    bundle.write(tmp_path / "out", kernels)
    next((tmp_path / "out").glob("*.cubin")).unlink()
    bundle.write(tmp_path / "out", kernels)
    assert bundle.read(tmp_path / "out", TARGET) == kernels


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename"])
def test_a_failed_write_leaves_the_old_folder(
    kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, exchange: bool
) -> None:
    bundle.write(tmp_path / "out", kernels)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    with pytest.raises(FlashgenError, match=r"/out cannot be written: No space left on device"):
        bundle.write(tmp_path / "out", kernels[:1])
    monkeypatch.undo()
    assert bundle.read(tmp_path / "out", TARGET) == kernels
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_where_folders_cannot_be_exchanged_a_failed_rename_puts_the_old_one_back(
    kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle.write(tmp_path / "out", kernels)
    placed = iter([False])
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(files, "_placed", lambda *_: next(placed))  # StopIteration where the new one should be put
    with pytest.raises(StopIteration):
        bundle.write(tmp_path / "out", kernels[:1])
    assert bundle.read(tmp_path / "out", TARGET) == kernels
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("exchange", [True, False])
def test_processes_that_write_one_folder_leave_one(
    kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_often, args=(tmp_path / "out", kernels[i % 2 :], exchange)) for i in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 6
    assert os.listdir(tmp_path) == ["out"]
    assert bundle.read(tmp_path / "out", TARGET) in (kernels, kernels[1:])


def write_often(folder: Path, kernels: list[tuple[KernelSpec, Artifact]], never_missing: bool) -> None:
    for _ in range(10):
        bundle.write(folder, kernels)
        if never_missing:
            assert len(bundle.read(folder, TARGET)) in (1, 2)


def test_places_that_cannot_be(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    places = {
        ".": "in which this command runs",
        "": "in which this command runs",
        "..": "in which this command runs",
        "/": "in which this command runs",
        "/proc": "a file system is mounted",
        "/proc/flashgen/out": "",
        "../file": "which is no folder",
        "../file/out": "Not a directory",
        "../link": "which is a link to",
        "../dangling": "which is a link to",
        "a" * 300: "File name too long",
    }
    before = tree(tmp_path)
    for place, reason in places.items():
        for refuse in (bundle.require_place, lambda folder: bundle.write(folder, kernels)):
            with pytest.raises(ArgumentError, match=r"^out must be a .*; got ") as caught:
                refuse(Path(place))
            assert str(Path(place)) in str(caught.value)
            assert reason in str(caught.value)
    bundle.write(Path("../link/out"), kernels)
    assert bundle.read(tmp_path / "folder/out", TARGET) == kernels
    bundle.write(Path("a/../b"), kernels)
    assert os.listdir() == ["b"]
    assert bundle.read(Path("b"), TARGET) == kernels
    for made in (tmp_path / "folder/out", tmp_path / "cwd/b"):
        shutil.rmtree(made)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_write_what_is_made(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        paths = bundle.write(tmp_path / "a/b/out", kernels)
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/out", *paths):
        assert path.stat().st_mode & 0o777 == (0o644 if path.is_file() else 0o755) & ~umask


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
