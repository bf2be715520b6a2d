"""Generated folders: written whole or not at all, read back only if unaltered."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flashgen.build import files
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.target import find_target
from flashgen.selection import bundle, compilation, manifest
from flashgen.selection.bundle import Generated
from flashgen.selection.families import default_spec

TARGET = find_target("sm_90a")


@pytest.fixture(scope="module")
def kernels() -> list[Generated]:
    problems = [Problem(Dtype.BF16, 8, mask=mask) for mask in Mask]
    specs = [default_spec(problem, TARGET) for problem in problems]
    return [Generated(spec, compilation.compile_spec(spec)) for spec in specs]


def test_what_is_written_is_read_back(kernels: list[Generated], tmp_path: Path) -> None:
    paths = bundle.write(tmp_path / "out", kernels)
    assert all(path.is_file() for path in paths)
    assert bundle.read_bundle(tmp_path / "out", TARGET) == kernels
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "staging is left over"


def test_a_generated_folder_is_replaced(kernels: list[Generated], tmp_path: Path) -> None:
    bundle.write(tmp_path / "out", kernels)
    bundle.write(tmp_path / "out", kernels[:1])
    assert bundle.read_bundle(tmp_path / "out", TARGET) == kernels[:1]
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


def repipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def relink(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Alters the manifest, and nothing else."""

    def apply(folder: Path) -> None:
        values = json.loads((folder / "manifest.json").read_text())
        change(values)
        (folder / "manifest.json").write_text(json.dumps(values, indent=2) + "\n")

    return apply


def forge(change: Callable[[list[Any]], object]) -> Callable[[Path], None]:
    """Alters the kernels in the manifest, and its own checksum with them."""

    def apply(folder: Path) -> None:
        entries = json.loads((folder / "manifest.json").read_text())["kernels"]
        change(entries)
        (folder / "manifest.json").write_bytes(manifest.to_bytes(entries))

    return apply


def as_schema_1(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    del values["sha256"]
    for entry in values["kernels"]:
        del entry["bucket"]
    (folder / "manifest.json").write_text(json.dumps(values | {"schema": 1}, indent=2) + "\n")


def swap(folder: Path, suffix: str) -> None:
    """Each kernel gets the other one's machine code, or text, and all checksums are right."""
    first, second = sorted(folder.glob(f"*.{suffix}"))
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])

    def change(entries: list[Any]) -> None:
        for entry in entries:
            for part in ("source", "cubin"):
                entry[f"{part}_sha256"] = hashlib.sha256((folder / entry[part]).read_bytes()).hexdigest()

    forge(change)(folder)


def flip_last_byte(folder: Path) -> None:
    cubin = next(folder.glob("*.cubin"))
    data = cubin.read_bytes()
    cubin.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


# What is done to a generated folder, and the path that the refusal must name.
FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a web app": (web_app, "out/manifest.json is not one of flashgen"),
    "a file": (lambda folder: (folder / "thesis.txt").write_text("years of work"), "out/thesis.txt"),
    "a hidden file": (lambda folder: (folder / ".env").write_text("secret"), "out/.env"),
    "a folder": (lambda folder: (folder / "notes").mkdir(), "out/notes"),
    "a link": (lambda folder: (folder / "link").symlink_to("manifest.json"), "out/link"),
    "a dangling link": (lambda folder: (folder / "link").symlink_to("nowhere"), "out/link"),
    "altered text": (lambda folder: next(folder.glob("*.cu")).write_text("by hand"), ".cu was altered"),
    "altered machine code": (flip_last_byte, ".cubin was altered"),
    "a text that is a link": (lambda folder: relink(next(folder.glob("*.cu"))), ".cu was altered"),
    "a text that is a pipe": (lambda folder: repipe(next(folder.glob("*.cu"))), ".cu was altered"),
    "a text that is a folder": (lambda folder: refolder(next(folder.glob("*.cu"))), ".cu was altered"),
    "a manifest that is a link": (lambda folder: relink(folder / "manifest.json"), "out, which has no manifest.json"),
    "a torn manifest": (lambda folder: (folder / "manifest.json").write_text('{"schema": 1'), "out/manifest.json is no JSON text"),
    "a deep manifest": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "out/manifest.json is no JSON text"),
    "a manifest with more in it": (edit(lambda m: m.update(notes="mine")), "out/manifest.json was altered"),
    "a kernel with more to it": (
        edit(lambda m: m["kernels"][0].update(notes="mine")),
        "out/manifest.json was altered",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "out, which has no manifest.json"),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_was_not_generated_is_never_removed(kernels: list[Generated], tmp_path: Path, foreign: str) -> None:
    folder = tmp_path / "out"
    bundle.write(folder, kernels)
    change, named = FOREIGN[foreign]
    change(folder)
    before = tree(tmp_path)
    for refuse in (lambda: bundle.require_replaceable(folder), lambda: bundle.write(folder, kernels)):
        with pytest.raises(ArgumentError, match=r"^out must be a new folder, an empty one, or one as .* left it; got ") as caught:
            refuse()
        assert named in str(caught.value)
        assert tree(tmp_path) == before


def test_what_arrives_just_before_the_exchange_stays(kernels: list[Generated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert bundle.read_bundle(folder, TARGET) == kernels


def test_a_missing_file_is_generated_again(kernels: list[Generated], tmp_path: Path) -> None:
    bundle.write(tmp_path / "out", kernels)
    next((tmp_path / "out").glob("*.cubin")).unlink()
    bundle.write(tmp_path / "out", kernels)
    assert bundle.read_bundle(tmp_path / "out", TARGET) == kernels


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename"])
def test_a_failed_write_leaves_the_old_folder(
    kernels: list[Generated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, exchange: bool
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
    assert bundle.read_bundle(tmp_path / "out", TARGET) == kernels
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_where_folders_cannot_be_exchanged_a_failed_rename_puts_the_old_one_back(
    kernels: list[Generated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle.write(tmp_path / "out", kernels)
    placed = iter([False])
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    monkeypatch.setattr(files, "_placed", lambda *_: next(placed))  # StopIteration where the new one should be put
    with pytest.raises(StopIteration):
        bundle.write(tmp_path / "out", kernels[:1])
    assert bundle.read_bundle(tmp_path / "out", TARGET) == kernels
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("exchange", [True, False])
def test_processes_that_write_one_folder_leave_one(
    kernels: list[Generated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
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
    assert bundle.read_bundle(tmp_path / "out", TARGET) in (kernels, kernels[1:])


def test_a_folder_made_in_the_place_of_another_is_not_taken_for_it(kernels: list[Generated], tmp_path: Path) -> None:
    """Many file systems give the number of a folder just removed to the next one, and their clocks tick slowly: both can look like one."""
    folder = tmp_path / "out"
    numbers: list[int] = []
    bundle.write(folder, kernels)

    def look() -> str:
        if len(numbers) == 8:
            return "found"
        numbers.append(folder.stat().st_ino)
        shutil.rmtree(folder)
        folder.mkdir()
        raise ArgumentError("another folder's files were looked for in this one")

    assert bundle._steadily(folder, look) == "found"
    assert all(one != other for one, other in itertools.pairwise(numbers))


def test_a_folder_that_comes_and_goes_is_looked_at_again(tmp_path: Path) -> None:
    """Before and after the look it is missing; in between another process had it there, and took it away while it was looked at."""
    folder, looks = tmp_path / "out", itertools.count()

    def look() -> str:
        if next(looks) == 3:
            return "found"
        folder.mkdir()
        folder.rmdir()
        raise ArgumentError("a file of it was altered")

    assert bundle._steadily(folder, look) == "found"


@pytest.mark.parametrize("name", ["missing", "x" * 5000, "with\0nul", "loop", "file/in"])
def test_a_folder_that_cannot_be_is_looked_at_once(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"^folder (.* )?must hold"):
        bundle.read_bundle(tmp_path / name, TARGET)


def write_often(folder: Path, kernels: list[Generated], never_missing: bool) -> None:
    for _ in range(10):
        bundle.write(folder, kernels)
        if never_missing:
            assert len(bundle.read_bundle(folder, TARGET)) in (1, 2)


def test_places_that_cannot_be(kernels: list[Generated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        for refuse in (bundle.require_replaceable, lambda folder: bundle.write(folder, kernels)):
            with pytest.raises(ArgumentError, match=r"^out must be a .*; got ") as caught:
                refuse(Path(place))
            assert str(Path(place)) in str(caught.value)
            assert reason in str(caught.value)
    bundle.write(Path("../link/out"), kernels)
    assert bundle.read_bundle(tmp_path / "folder/out", TARGET) == kernels
    bundle.write(Path("a/../b"), kernels)
    assert os.listdir() == ["b"]
    assert bundle.read_bundle(Path("b"), TARGET) == kernels
    for made in (tmp_path / "folder/out", tmp_path / "cwd/b"):
        shutil.rmtree(made)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize("right", [os.W_OK, os.X_OK], ids=["to write", "to enter"])
def test_a_folder_that_may_not_be_changed_is_refused(
    kernels: list[Generated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: int, empty: bool
) -> None:
    """Its parent would let it be replaced."""
    folder = tmp_path / "out"
    folder.mkdir()
    if not empty:
        bundle.write(folder, kernels)
    before = tree(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder or not mode & right)  # root has every right
    for refuse in (lambda: bundle.require_replaceable(folder), lambda: bundle.write(folder, kernels)):
        with pytest.raises(ArgumentError, match=rf"^out must be a folder that can be written; got {folder}: Permission denied$"):
            refuse()
        assert tree(tmp_path) == before


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_write_what_is_made(kernels: list[Generated], tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        paths = bundle.write(tmp_path / "a/b/out", kernels)
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/out", *paths):
        assert path.stat().st_mode & 0o777 == (0o644 if path.is_file() else 0o755) & ~umask


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_last_byte, "cubin_sha256 of attention_forward_sm90_bf16_d8_"),
        (lambda folder: next(folder.glob("*.cu")).write_text("int x;"), "source_sha256 of attention_forward_sm90_bf16_d8_"),
        (lambda folder: next(folder.glob("*.cubin")).unlink(), "must hold what `flashgen generate` wrote"),
        (lambda folder: (folder / "manifest.json").unlink(), "must hold what `flashgen generate` wrote"),
        (lambda folder: repipe(folder / "manifest.json"), "must hold what `flashgen generate` wrote; .* is no file"),
        (lambda folder: repipe(next(folder.glob("*.cubin"))), "must hold what `flashgen generate` wrote; .* is no file"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is no JSON text"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "manifest.json is no JSON text"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "manifest.json is no JSON text"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is not one of flashgen"),
        (edit(lambda m: m.update(schema=99)), "manifest.json is of schema 99, not 2"),
        (as_schema_1, "manifest.json is of schema 1, not 2: generate it again"),
        (edit(lambda m: m.update(more=1)), "manifest.json was altered"),
        (edit(lambda m: m["kernels"][0]["spec"]["problem"].update(mask="causal")), "manifest.json was altered"),
        (forge(lambda kernels: kernels[0]["spec"]["problem"].update(mask="causal")), "must be that of the kernel"),
        (forge(lambda kernels: kernels[0]["artifact"].update(entry=kernels[1]["name"])), "must hold the kernel"),
        (forge(lambda kernels: kernels[0]["artifact"].update(arch="sm_100a")), "for sm_90a: generate it again"),
        (partial(swap, suffix="cubin"), r"\.cubin must hold the kernel"),
        (partial(swap, suffix="cu"), r"\.cu must hold the kernel"),
        (forge(lambda kernels: kernels[0].pop("cubin_sha256")), "manifest.json does not hold kernels"),
        (forge(lambda kernels: kernels[0].update(more=1)), "manifest.json does not hold kernels"),
        (forge(lambda kernels: kernels[0].update(parameters="int q")), "parameters of attention_forward_sm90_bf16_d8_"),
        (forge(lambda kernels: kernels[0].update(cubin="../secret")), "cubin of attention_forward_sm90_bf16_d8_"),
        (forge(lambda kernels: kernels[0]["artifact"].update(log="")), "log of the compiler has no report"),
        (forge(lambda kernels: kernels[0]["artifact"].update(log=["Used 1 registers"])), "artifact must have the texts"),
        (forge(lambda kernels: kernels[0]["spec"].update(revision=0)), "revision of attention_forward_sm90 must be"),
        (forge(lambda kernels: kernels[0]["spec"]["config"].update(block_q=7)), "block_q"),
        (forge(lambda kernels: kernels.clear()), "got kernels for nothing"),
    ],
)
def test_damage_is_refused(kernels: list[Generated], tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    bundle.write(tmp_path / "out", kernels)
    damage(tmp_path / "out")
    with pytest.raises(ArgumentError, match=message) as caught:
        bundle.read_bundle(tmp_path / "out", TARGET)
    assert str(caught.value).startswith("folder ")
    assert str(tmp_path / "out") in str(caught.value)


def test_no_value_of_a_manifest_can_be_altered(kernels: list[Generated], tmp_path: Path) -> None:
    """Not even by somebody who sets the manifest's own checksum right, but for the compiler's log and version, which decide nothing."""
    bundle.write(tmp_path / "out", kernels)
    entries = json.loads((tmp_path / "out/manifest.json").read_text())["kernels"]
    paths = [path for path in leaves(entries) if path[-1] not in ("log", "compiler_version")]
    assert len(paths) > 40
    for path in paths:
        forged = json.loads(json.dumps(entries))
        *above, last = path
        holder = forged
        for key in above:
            holder = holder[key]
        other = {str: "other", int: holder[last] + 1 if isinstance(holder[last], int) else 0, bool: 2, type(None): "other"}
        holder[last] = other[type(holder[last])]
        (tmp_path / "out/manifest.json").write_bytes(manifest.to_bytes(forged))
        with pytest.raises(ArgumentError, match=r"^folder "):
            pytest.fail(f"{path} was altered, and this was loaded: {bundle.read_bundle(tmp_path / 'out', TARGET)}")


def test_no_value_of_a_manifest_can_be_of_another_type(kernels: list[Generated], tmp_path: Path) -> None:
    """Not even by one that Python takes for equal: True is not 1, and 128.0 is not 128."""
    bundle.write(tmp_path / "out", kernels)
    entries = json.loads((tmp_path / "out/manifest.json").read_text())["kernels"]
    tried = set()
    for *above, last in leaves(entries):
        forged = json.loads(json.dumps(entries))
        holder = forged
        for key in above:
            holder = holder[key]
        value = holder[last]
        for kind in {int, float, bool} - {type(value)}:
            if isinstance(value, int) and kind(value) == value:
                holder[last] = kind(value)
                tried.add((type(value), kind))
                (tmp_path / "out/manifest.json").write_bytes(manifest.to_bytes(forged))
                with pytest.raises(ArgumentError, match=r"^folder "):
                    pytest.fail(f"{above} {last} was {holder[last]}, and this was loaded: {bundle.read_bundle(tmp_path / 'out', TARGET)}")
    assert {(int, float), (int, bool), (bool, int)} <= tried


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, dict | list):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, item in items for leaf in leaves(item, (*path, key))]


def test_folders_of_the_schema_before_are_replaced(kernels: list[Generated], tmp_path: Path) -> None:
    bundle.write(tmp_path / "out", kernels)
    as_schema_1(tmp_path / "out")
    bundle.write(tmp_path / "out", kernels)
    assert bundle.read_bundle(tmp_path / "out", TARGET) == kernels
    as_schema_1(tmp_path / "out")
    edit(lambda values: values["kernels"][0].update(notes="mine"))(tmp_path / "out")
    with pytest.raises(ArgumentError, match=r"manifest\.json does not hold kernels"):
        bundle.write(tmp_path / "out", kernels)


def test_the_architectures_that_are_there_are_named(kernels: list[Generated], tmp_path: Path) -> None:
    bundle.write(tmp_path / "out", kernels)
    with pytest.raises(ArgumentError, match="a kernel for sm_80; got kernels for sm_90a"):
        bundle.read_bundle(tmp_path / "out", find_target("sm_80"))
