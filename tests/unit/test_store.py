"""The artifact store: what a key holds, hits and misses, damage, many processes and threads, and folders that cannot be used."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flashgen.build import nvrtc as compiler_module
from flashgen.build.artifact import Artifact, CompileError
from flashgen.build.cache_dir import UnsafeCacheError
from flashgen.build.nvrtc import OPTIONS, nvrtc_version
from flashgen.build.store import store as module
from flashgen.build.store.store import FILES, ArtifactStore, artifact_key
from flashgen.codegen import plain
from flashgen.codegen.render import Source

ARCH = "sm_80"
SOURCE = Source("k", 'extern "C" __global__ void k(float* p) { p[0] = 1; }')
OTHER = Source("k", 'extern "C" __global__ void k(float* p) { p[0] = 2; }')
LOG = (
    "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
    "ptxas info    : Used 8 registers\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
)


def made_up(source: Source, arch: str) -> Artifact:
    """Stands for the compiler where only the store is under test: large enough that a write takes a while."""
    return Artifact(source.entry, arch, source.text, source.text.encode() * 20000, LOG, nvrtc_version())


class Compiler:
    """Counts the compiles."""

    def __init__(self) -> None:
        self.calls: list[tuple[Source, str]] = []

    def __call__(self, source: Source, arch: str) -> Artifact:
        self.calls.append((source, arch))
        return made_up(source, arch)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(compiler_module, "compile_source", compiler)
    return compiler


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def entries(root: Path) -> list[Path]:
    return sorted(root.glob("artifacts/??/*"))


def staged(root: Path) -> list[Path]:
    return sorted(root.glob("artifacts/staging/*"))


def entry_of(root: Path, source: Source = SOURCE) -> Path:
    key = artifact_key(source.text, ARCH, nvrtc_version(), OPTIONS)
    return root / "artifacts" / key[:2] / key


def test_key_holds_all_that_decides_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ("text", "sm_90", "13.0", ("--std=c++17",))
    varied: list[tuple[str, str, str, tuple[str, ...]]] = [
        base,
        ("text ", *base[1:]),
        ("text", "sm_90a", "13.0", base[3]),
        ("text", "sm_90", "13.1", base[3]),
        ("text", "sm_90", "13.0", ("--std=c++17", "-G")),
        ("text", "sm_90", "13.0", ("--std=c++17 -G",)),
        ("textsm_9", "0", "13.0", base[3]),
    ]
    keys = {artifact_key(*values) for values in varied}
    assert len(keys) == len(varied)
    assert all(len(key) == 64 for key in keys)
    # Fixed here, so that a change of the key's recipe, or a key that differs between processes, is seen.
    assert artifact_key(*base) == "49a387d1256bf52704118bd9d349f430826467dc04fb25856ebd13761df99e05"
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + 1)
    assert artifact_key(*base) not in keys


def test_real_compile_is_stored_and_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ArtifactStore(root).get_or_compile(SOURCE, ARCH)
    assert made.cubin.startswith(b"\x7fELF")
    assert made.report.registers > 0

    def fail(source: Source, arch: str) -> Artifact:
        raise AssertionError("a hit must not compile")

    monkeypatch.setattr(compiler_module, "compile_source", fail)
    with no_warning():
        assert ArtifactStore(root).get_or_compile(SOURCE, ARCH) == made
        assert ArtifactStore(root).find(SOURCE, ARCH) == made
        assert ArtifactStore(root).find(OTHER, ARCH) is None
        assert ArtifactStore(root).find(SOURCE, "sm_90") is None


def test_compile_error_stores_nothing(root: Path) -> None:
    store, broken = ArtifactStore(root), Source("k", "nonsense")
    for _ in range(2):
        with pytest.raises(CompileError):
            store.get_or_compile(broken, ARCH)
    assert store.usage().entries == 0


def test_entry_on_disk(root: Path, compiler: Compiler) -> None:
    before = os.umask(0)
    try:
        ArtifactStore(root).get_or_compile(SOURCE, ARCH)
    finally:
        os.umask(before)
    entry = entry_of(root)
    assert entries(root) == [entry]
    assert sorted(path.name for path in entry.iterdir()) == sorted(FILES)
    assert (entry / "kernel.cu").read_text() == SOURCE.text
    assert (entry / "kernel.cubin").read_bytes() == made_up(SOURCE, ARCH).cubin
    meta = json.loads((entry / "meta.json").read_text())
    assert meta["schema"] == module.SCHEMA
    assert meta["artifact"] == made_up(SOURCE, ARCH).meta()
    for folder in (root, root / "artifacts", root / "artifacts/staging", entry.parent, entry):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in entry.iterdir())
    assert staged(root) == []
    with no_warning():
        assert ArtifactStore(root).find(SOURCE, ARCH) == made_up(SOURCE, ARCH)


def test_nothing_is_made_before_the_first_save(root: Path) -> None:
    store = ArtifactStore(root)
    assert store.find(SOURCE, ARCH) is None
    assert (store.usage().entries, store.usage().bytes, store.usage().root) == (0, 0, root)
    assert store.clear() == 0
    assert not root.exists()


def test_default_root_is_the_cache_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(root))
    assert ArtifactStore().root == root


def edit_meta(entry: Path, change: Callable[[dict[str, Any]], object]) -> None:
    meta = json.loads((entry / "meta.json").read_text())
    change(meta)
    (entry / "meta.json").write_text(json.dumps(meta))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def replace_with_file(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.touch(mode=0o600)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def replace_with_link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def replace_with_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tampered cubin": lambda e: (e / "kernel.cubin").write_bytes(b"x" + (e / "kernel.cubin").read_bytes()[1:]),
    "torn cubin": lambda e: truncate(e / "kernel.cubin"),
    "tampered text": lambda e: (e / "kernel.cu").write_text(OTHER.text),
    "text that is no UTF-8": lambda e: (e / "kernel.cu").write_bytes(b"\xff"),
    "torn meta": lambda e: truncate(e / "meta.json"),
    "a field of meta twice": lambda e: (e / "meta.json").write_text((e / "meta.json").read_text().replace("{", '{"schema": 0, ', 1)),
    "empty meta": lambda e: (e / "meta.json").write_bytes(b""),
    "meta is a pipe": lambda e: replace_with_pipe(e / "meta.json"),
    "deep meta": lambda e: (e / "meta.json").write_text("[" * 100_000),
    "deep artifact": lambda e: (e / "meta.json").write_text('{"schema": 2, "artifact": ' + "[" * 100_000),
    "artifact is a list": lambda e: edit_meta(e, lambda m: m.update(artifact=[], sha256=m["sha256"] | {"artifact": digest("[]")})),
    "meta is a list": lambda e: (e / "meta.json").write_text("[]"),
    "foreign schema": lambda e: edit_meta(e, lambda m: m.update(schema=99)),
    "no checksums": lambda e: edit_meta(e, lambda m: m.pop("sha256")),
    "checksums are a list": lambda e: edit_meta(e, lambda m: m.update(sha256=[])),
    "tampered log": lambda e: edit_meta(e, lambda m: m["artifact"].update(log="")),
    "no log": lambda e: edit_meta(e, lambda m: m["artifact"].pop("log")),
    "cubin missing": lambda e: (e / "kernel.cubin").unlink(),
    "cubin is a link": lambda e: replace_with_link(e / "kernel.cubin"),
    "cubin writable by others": lambda e: (e / "kernel.cubin").chmod(0o666),
    "entry writable by others": lambda e: e.chmod(0o777),
    "entry is a link": replace_with_link,
    "entry is a file": replace_with_file,
    "entry is empty": empty,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_one_warning_and_a_miss_and_is_replaced(root: Path, compiler: Compiler, damage: str) -> None:
    store = ArtifactStore(root)
    store.get_or_compile(SOURCE, ARCH)
    DAMAGE[damage](entry_of(root))
    with pytest.warns(RuntimeWarning, match="cannot be used") as caught:
        assert store.find(SOURCE, ARCH) is None
        assert store.find(SOURCE, ARCH) is None
        assert store.get_or_compile(SOURCE, ARCH) == made_up(SOURCE, ARCH)
    assert len(caught) == 1
    assert str(entry_of(root)) in str(caught[0].message)
    assert len(compiler.calls) == 2
    with no_warning():
        assert ArtifactStore(root).get_or_compile(SOURCE, ARCH) == made_up(SOURCE, ARCH)
    assert len(compiler.calls) == 2
    assert staged(root) == []


# What no longer looks like an entry is not counted as one: it could be anybody's.
@pytest.mark.parametrize("damage", sorted(DAMAGE.keys() - {"cubin is a link", "entry is a link", "entry is a file"}))
def test_damaged_entries_are_told_and_stay(root: Path, compiler: Compiler, damage: str) -> None:
    store = ArtifactStore(root)
    assert store.faults() == {}
    store.get_or_compile(SOURCE, ARCH)
    store.get_or_compile(OTHER, ARCH)
    assert store.faults() == {}
    (spoiled,) = [entry for entry, _ in store._entries() if (entry / "kernel.cu").read_text() == SOURCE.text]
    DAMAGE[damage](spoiled)
    faults = store.faults()
    assert list(faults) == [spoiled]
    assert faults[spoiled]
    assert os.path.lexists(spoiled)


def test_whole_entry_of_another_kernel_is_a_miss(root: Path, compiler: Compiler) -> None:
    store = ArtifactStore(root)
    store.get_or_compile(OTHER, ARCH)
    entry_of(root).parent.mkdir(mode=0o700, exist_ok=True)
    entry_of(root, OTHER).rename(entry_of(root))
    with pytest.warns(RuntimeWarning, match="another kernel"):
        assert store.find(SOURCE, ARCH) is None
    store.get_or_compile(SOURCE, ARCH)
    with pytest.warns(RuntimeWarning, match="another kernel"):
        assert ArtifactStore(root).find(Source("other_entry", SOURCE.text), ARCH) is None


def test_lost_race_is_a_hit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = made_up(SOURCE, ARCH)

    def compile_while_another_is_faster(source: Source, arch: str) -> Artifact:
        monkeypatch.setattr(compiler_module, "compile_source", made_up)
        assert ArtifactStore(root).get_or_compile(SOURCE, ARCH) == first
        return Artifact("k", ARCH, SOURCE.text, b"made later", LOG, nvrtc_version())

    monkeypatch.setattr(compiler_module, "compile_source", compile_while_another_is_faster)
    with no_warning():
        assert ArtifactStore(root).get_or_compile(SOURCE, ARCH) == first
        assert ArtifactStore(root).find(SOURCE, ARCH) == first
    assert staged(root) == []


def test_entry_replaced_between_two_reads_is_a_hit(root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(root)
    made = store.get_or_compile(SOURCE, ARCH)
    (entry_of(root) / "meta.json").write_text("{")

    def replace_then_parse(text: bytes, what: str) -> Any:
        monkeypatch.undo()
        monkeypatch.setattr(compiler_module, "compile_source", made_up)
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            ArtifactStore(root).get_or_compile(SOURCE, ARCH)
        return plain.parse(text, what)

    monkeypatch.setattr("flashgen.build.store.store.parse", replace_then_parse)
    with no_warning():
        assert store.find(SOURCE, ARCH) == made


def test_stale_staging_is_removed_on_save(root: Path, compiler: Compiler) -> None:
    store = ArtifactStore(root)
    store.get_or_compile(SOURCE, ARCH)
    old, young = root / "artifacts/staging/old", root / "artifacts/staging/young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "kernel.cu").write_text("half")
    os.utime(old, (time.time() - 3700,) * 2)
    os.utime(young, (time.time() - 3500,) * 2)
    store.get_or_compile(SOURCE, ARCH)
    assert staged(root) == [old, young]
    store.get_or_compile(OTHER, ARCH)
    assert staged(root) == [young]


def removed_just_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, victim: Path) -> None:
    """Lets another process remove a folder between the look that found it and the first call of `name` for it."""
    call, gone = getattr(owner, name), list[Path]()

    def too_late(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path == victim and not gone:
            gone.append(path)
            shutil.rmtree(victim)
        return call(path, *args, **kwargs)

    monkeypatch.setattr(owner, name, too_late)


def test_entries_that_another_process_removes_meanwhile_are_passed_over(
    root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(root)
    store.get_or_compile(OTHER, ARCH)
    looks: tuple[tuple[Any, str, Callable[[], object], object], ...] = (
        (os, "scandir", lambda: store.usage().entries, 1),
        (module, "_read", store.faults, {}),
        (Path, "rename", store.clear, 2),
    )
    for owner, name, look, expected in looks:
        store.get_or_compile(SOURCE, ARCH)
        with monkeypatch.context() as patch:
            removed_just_before(patch, owner, name, entry_of(root))
            assert look() == expected
        assert not entry_of(root).exists(), "else nothing was tried"
    assert entries(root) == staged(root) == []


def test_stale_staging_that_another_process_removes_first_is_no_fault(
    root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = root / "artifacts/staging/old"
    ArtifactStore(root).get_or_compile(SOURCE, ARCH)
    old.mkdir()
    removed_just_before(monkeypatch, Path, "lstat", old)
    with no_warning():
        ArtifactStore(root).get_or_compile(OTHER, ARCH)
    assert staged(root) == []
    assert entries(root) == sorted([entry_of(root), entry_of(root, OTHER)])


def test_usage_and_clear_touch_only_entries(root: Path, compiler: Compiler, tmp_path: Path) -> None:
    store = ArtifactStore(root)
    for source in (SOURCE, OTHER):
        store.get_or_compile(source, ARCH)
    assert store.usage().bytes == sum(path.stat().st_size for entry in entries(root) for path in entry.iterdir())
    assert store.usage().entries == 2

    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kernel.cu").write_text("precious")
    linked = root / "artifacts/ab" / ("ab" + "0" * 62)
    linked.parent.mkdir(exist_ok=True)
    linked.symlink_to(outside)
    fan_link = root / "artifacts/zz"
    fan_link.symlink_to(outside)
    inside = entry_of(root, OTHER) / "notes.txt"
    inside.write_text("not ours")
    for name in ("records.sqlite3", "artifacts/readme", "artifacts/ab/short"):
        (root / name).write_text("not ours")
    assert store.usage().entries == 1
    assert store.clear() == 1
    assert not entry_of(root).exists()
    assert (outside / "kernel.cu").read_text() == "precious"
    assert inside.exists()
    assert linked.is_symlink()
    assert fan_link.is_symlink()
    assert all((root / name).exists() for name in ("records.sqlite3", "artifacts/readme", "artifacts/ab/short"))
    assert staged(root) == []
    assert store.clear() == 0


def unusable(store: ArtifactStore, compiler: Compiler, reason: str) -> None:
    """Asserts that a store falls back to memory, with one warning that gives the folder, the reason and the cure."""
    before = len(compiler.calls)
    with pytest.warns(RuntimeWarning) as caught:
        for source in (SOURCE, OTHER, SOURCE):
            assert store.get_or_compile(source, ARCH) == made_up(source, ARCH)
        assert store.find(OTHER, ARCH) == made_up(OTHER, ARCH)
    assert len(compiler.calls) == before + 2
    assert len(caught) == 1
    message = str(caught[0].message)
    assert all(part in message for part in (str(store.root), reason, "FLASHGEN_CACHE_DIR")), message


def test_linked_root_is_neither_written_nor_trusted(root: Path, compiler: Compiler, tmp_path: Path) -> None:
    ArtifactStore(root).get_or_compile(SOURCE, ARCH)
    link = tmp_path / "link"
    link.symlink_to(root)
    unusable(ArtifactStore(link), compiler, "symbolic link")
    assert entries(root) == [entry_of(root)]
    for refuse in (ArtifactStore(link).usage, ArtifactStore(link).clear):
        with pytest.raises(UnsafeCacheError):
            refuse()
    assert entries(root) == [entry_of(root)]


@pytest.mark.parametrize("folder", ["", "artifacts", "artifacts/??"])
def test_group_writable_folder_is_neither_written_nor_trusted(root: Path, compiler: Compiler, folder: str) -> None:
    ArtifactStore(root).get_or_compile(SOURCE, ARCH)
    (next(root.glob(folder)) if folder else root).chmod(0o770)
    unusable(ArtifactStore(root), compiler, "writable by its group")


def test_foreign_root_is_neither_written_nor_trusted(root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    ArtifactStore(root).get_or_compile(SOURCE, ARCH)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    unusable(ArtifactStore(root), compiler, "belongs to user")


def test_root_that_cannot_be_made(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable(ArtifactStore(tmp_path / "file/cache"), compiler, "Not a directory")


@pytest.mark.parametrize(
    ("call", "code"), [("mkdir", errno.EROFS), ("mkdir", errno.EACCES), ("fsync", errno.ENOSPC), ("rename", errno.EIO)]
)
def test_read_only_or_full_disk(root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    unusable(ArtifactStore(root), compiler, os.strerror(code))
    monkeypatch.undo()
    assert entries(root) == []
    assert staged(root) == []


def test_read_only_root_is_still_read(root: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    ArtifactStore(root).get_or_compile(SOURCE, ARCH)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", fail)
    store = ArtifactStore(root)
    with pytest.warns(RuntimeWarning) as caught:
        for source in (OTHER, SOURCE, OTHER, SOURCE):
            assert store.get_or_compile(source, ARCH) == made_up(source, ARCH)
    assert len(caught) == 1
    assert compiler.calls == [(SOURCE, ARCH), (OTHER, ARCH)]
    monkeypatch.undo()
    assert entries(root) == [entry_of(root)]


def test_threads_compile_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Source] = []

    def slow(source: Source, arch: str) -> Artifact:
        started.append(source)
        time.sleep(0.2)
        return made_up(source, arch)

    monkeypatch.setattr(compiler_module, "compile_source", slow)
    store, found = ArtifactStore(root), []
    threads = [threading.Thread(target=lambda s=s: found.append(store.get_or_compile(s, ARCH))) for s in (SOURCE, OTHER) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(s.text for s in started) == sorted([SOURCE.text, OTHER.text])
    assert {a.source for a in found} == {SOURCE.text, OTHER.text}
    assert len(found) == 8


def test_threads_compile_different_sources_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(source: Source, arch: str) -> Artifact:
        both.wait()
        return made_up(source, arch)

    monkeypatch.setattr(compiler_module, "compile_source", meet)
    store, found = ArtifactStore(root), []
    threads = [threading.Thread(target=lambda s=s: found.append(store.get_or_compile(s, ARCH))) for s in (SOURCE, OTHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2


def test_fork_during_a_compile(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that a thread holds while it compiles must not stop a child forked meanwhile."""
    compiling, release = threading.Event(), threading.Event()

    def wait(source: Source, arch: str) -> Artifact:
        compiling.set()
        release.wait(30)
        return made_up(source, arch)

    monkeypatch.setattr(compiler_module, "compile_source", wait)
    store = ArtifactStore(root)
    thread = threading.Thread(target=store.get_or_compile, args=(SOURCE, ARCH))
    thread.start()
    compiling.wait(10)
    monkeypatch.setattr(compiler_module, "compile_source", made_up)
    child = multiprocessing.get_context("fork").Process(target=store.get_or_compile, args=(SOURCE, ARCH))
    child.start()
    child.join(20)
    stuck = child.is_alive()
    child.kill()
    release.set()
    thread.join()
    assert not stuck
    assert child.exitcode == 0


PROCESS = """
import hashlib, sys
from pathlib import Path
from flashgen.build.store.store import ArtifactStore
from flashgen.codegen.render import Source
store = ArtifactStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in (1, 2):
    source = Source("k", 'extern "C" __global__ void k(float* p) { p[0] = %d; }' % number)
    artifact = store.get_or_compile(source, "sm_80")
    print(hashlib.sha256(repr(artifact).encode()).hexdigest())
"""


@pytest.mark.parametrize("processes", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_on_one_cold_cache(root: Path, processes: int) -> None:
    command = [sys.executable, "-W", "error", "-c", PROCESS, str(root)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=environment, **pipes) for _ in range(processes)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes
    assert len(set(outputs)) == 1
    assert len(set(outputs[0].split())) == 2
    assert entries(root) == sorted([entry_of(root), entry_of(root, OTHER)])
    assert staged(root) == []


def save_for_ever(root: Path, start: int, reports: Any) -> None:
    setattr(compiler_module, "compile_source", made_up)  # noqa: B010
    store = ArtifactStore(root)
    for number in range(start, start + 10**6):
        store.get_or_compile(Source("k", f"// {number}"), ARCH)
        os.write(reports, f"{number}\n".encode())


def test_killed_writers_leave_whole_entries(root: Path) -> None:
    generator, reported = random.Random(0), []
    for turn in range(10):
        reading, writing = os.pipe()
        writer = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(root, turn * 10**6, writing))
        writer.start()
        os.close(writing)
        with os.fdopen(reading) as reports:
            assert reports.readline()
            reported.append(turn * 10**6)
            time.sleep(generator.uniform(0, 0.1))
            writer.kill()
            writer.join()
            reported += [int(line) for line in reports if line.endswith("\n")]
    store = ArtifactStore(root)
    with no_warning():
        for number in reported:
            source = Source("k", f"// {number}")
            assert store.find(source, ARCH) == made_up(source, ARCH)
    # One that was published but not reported may be there for each turn; no more, and all whole.
    assert len(reported) <= store.usage().entries <= len(reported) + 10
    for entry in entries(root):
        source = Source("k", (entry / "kernel.cu").read_text())
        with no_warning():
            assert store.find(source, ARCH) is not None


def damage_for_ever(root: Path) -> None:
    while True:
        for entry in entries(root):
            try:
                (entry / "meta.json").write_text("{")
            except FileNotFoundError:
                continue
        time.sleep(0.002)


def test_readers_never_meet_a_mix(root: Path, compiler: Compiler) -> None:
    """While one process keeps damaging the entries, threads and a second store read and replace them."""
    context = multiprocessing.get_context("fork")
    vandal = context.Process(target=damage_for_ever, args=(root,))
    failures: list[BaseException] = []

    def use(store: ArtifactStore) -> None:
        try:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                for source in (SOURCE, OTHER):
                    assert store.get_or_compile(source, ARCH) == made_up(source, ARCH)
        except BaseException as error:
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vandal.start()
        threads = [threading.Thread(target=use, args=(ArtifactStore(root),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        vandal.kill()
        vandal.join()
    assert failures == []
    assert len(compiler.calls) > 2  # entries were damaged, and replaced
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in (SOURCE, OTHER):
            ArtifactStore(root).get_or_compile(source, ARCH)
    with no_warning():
        assert ArtifactStore(root).find(SOURCE, ARCH) == made_up(SOURCE, ARCH)
