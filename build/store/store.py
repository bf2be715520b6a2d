"""`ArtifactStore`: compiled kernels on disk, found by everything that decides their machine code.

An entry is a folder `artifacts/ab/<key>` with `kernel.cu`, `kernel.cubin` and `meta.json`. It is written under
`artifacts/staging` and renamed into place, so that no reader meets half of one, however many processes write at once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.codegen.errors import shown
from flashgen.codegen.plain import digest, parse

from ..artifact import Artifact
from ..cache_dir import UnsafeCacheError, cache_dir, make_safe_dir, require_safe
from ..files import sync_folder, write_new
from .toolchain import toolchain

if TYPE_CHECKING:
    from flashgen.codegen.render import Source

SCHEMA = 2  # raise when the files of an entry, or what they mean, change
SOURCE_FILE, CUBIN_FILE, META_FILE = FILES = ("kernel.cu", "kernel.cubin", "meta.json")

_STALE_SECONDS = 3600  # no save takes this long: its process is gone
_PUBLISH_TRIES = 8


class _TornError(Exception):
    """An entry does not hold what was asked for, whole and unchanged."""


@dataclass(frozen=True)
class StoreUsage:
    """What a store holds on disk: its folder, number of entries, and their size in bytes."""

    root: Path
    entries: int
    bytes: int


def artifact_key(text: str, arch: str, compiler_version: str, options: Sequence[str]) -> str:
    """sha256, as hex digits, of all that decides the machine code: schema, text, compiler, full architecture, options."""
    return digest([SCHEMA, text, compiler_version, arch, list(options)])


class ArtifactStore:
    """Compiled kernels in a folder. Safe to use from several threads and processes at once.

    Where the folder cannot be written or is not safe, artifacts are kept in memory and one RuntimeWarning says so.
    """

    def __init__(self, root: Path | None = None) -> None:
        """`root`: the cache folder, `cache_dir()` if None. It is created on the first save."""
        self.root = root if root is not None else cache_dir()
        self._artifacts = self.root / "artifacts"
        self._staging = self._artifacts / "staging"
        self._memory: dict[str, Artifact] = {}
        self._writable = True
        self._warned: set[str] = set()
        self._locks: dict[tuple[int, str], threading.Lock] = {}

    def get_or_compile(self, source: Source, arch: str) -> Artifact:
        """The artifact of `source` for `arch` ('sm_90a', or one of `Emulated`), compiled and stored if it is not here yet.

        Threads that ask for the same one at once wait for one compile. Raises CompileError, and CompilerMissingError or
        CxxCompilerMissingError.
        """
        tools = toolchain(arch)
        key = artifact_key(source.text, arch, tools.version, tools.options)
        # By process, because a lock that another thread holds during a fork stays locked in the child.
        with self._locks.setdefault((os.getpid(), key), threading.Lock()):
            return self._find(key, source, arch) or self._save(key, tools.compile(source))

    def find(self, source: Source, arch: str) -> Artifact | None:
        """The stored artifact, or None. Raises CompilerMissingError: the key holds the compiler's version."""
        tools = toolchain(arch)
        return self._find(artifact_key(source.text, arch, tools.version, tools.options), source, arch)

    def usage(self) -> StoreUsage:
        """Counts what is on disk. Raises UnsafeCacheError, or OSError if the folder cannot be read."""
        sizes = [size for _, size in self._entries()]
        return StoreUsage(self.root, len(sizes), sum(sizes))

    def faults(self) -> dict[Path, str]:
        """The entries on disk that are not whole and unchanged, each with the reason. Reads all of them; raises as `usage`."""
        found = {}
        for entry, _ in self._entries():
            try:
                _read(entry)
            except _TornError as error:
                if entry.exists():  # else another process has just removed it
                    found[entry] = str(error)
        return found

    def clear(self) -> int:
        """Removes all entries, and nothing that is not one; says how many. Raises UnsafeCacheError, or OSError if it cannot."""
        count = len(self._memory)
        self._memory.clear()
        for entry, _ in self._entries():
            self._discard(entry)
            count += 1
        self._remove_stale()
        return count

    def _entry(self, key: str) -> Path:
        return self._artifacts / key[:2] / key

    def _entries(self) -> Iterator[tuple[Path, int]]:
        """The folders that have an entry's name and nothing but an entry's files, with their size. Links are not followed."""
        for folder in (self.root, self._artifacts):
            if not os.path.lexists(folder):
                return
            require_safe(folder)
        for fan in sorted(self._artifacts.iterdir()):
            if not re.fullmatch("[0-9a-f]{2}", fan.name) or not _is_folder(fan):
                continue
            for entry in sorted(fan.iterdir()):
                if re.fullmatch(f"{fan.name}[0-9a-f]{{62}}", entry.name) and _is_folder(entry):
                    with suppress(FileNotFoundError):  # another process has just removed it
                        sizes = {file.name: file.stat(follow_symlinks=False).st_size for file in os.scandir(entry)}
                        if sizes.keys() <= set(FILES):
                            yield entry, sum(sizes.values())

    def _find(self, key: str, source: Source, arch: str) -> Artifact | None:
        kept = self._memory.get(key)
        if kept is not None and kept.entry == source.entry:
            return kept
        entry = self._entry(key)
        if not self._is_there(entry):
            return None
        try:
            try:
                return _read_asked(entry, source.entry, source.text, arch)
            except _TornError:  # another process may have replaced the entry between two reads: it is whole now
                return _read_asked(entry, source.entry, source.text, arch)
        except _TornError as error:
            if os.path.lexists(entry) and key not in self._warned:
                self._warned.add(key)
                warnings.warn(f"{entry} cannot be used ({error}): compiling the kernel again", RuntimeWarning, stacklevel=4)
            return None

    def _is_there(self, entry: Path) -> bool:
        try:
            for folder in (self.root, self._artifacts, entry.parent):
                require_safe(folder)
        except UnsafeCacheError as error:
            self._fall_back(error)
            return False
        except OSError:  # not made yet, or out of reach: if that is a fault, the save will say so
            return False
        return os.path.lexists(entry)

    def _save(self, key: str, artifact: Artifact) -> Artifact:
        if self._writable:
            try:
                return self._write(self._entry(key), artifact)
            except (OSError, UnsafeCacheError) as error:
                self._fall_back(error)
        self._memory[key] = artifact
        return artifact

    def _fall_back(self, error: Exception) -> None:
        if self._writable:
            self._writable = False
            reason = f"{self.root} cannot hold compiled kernels ({error}): they stay in memory and the next process compiles them again"
            warnings.warn(f"{reason}. Set FLASHGEN_CACHE_DIR to a folder that you own and can write to", RuntimeWarning, stacklevel=5)

    def _write(self, entry: Path, artifact: Artifact) -> Artifact:
        for folder in (self.root, self._artifacts, self._staging, entry.parent):
            make_safe_dir(folder)
        self._remove_stale()
        stage = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            _write_files(stage, artifact)
            return self._publish(stage, entry, artifact)
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def _publish(self, stage: Path, entry: Path, artifact: Artifact) -> Artifact:
        """Renames the staged folder into place and returns what is there then: ours, or a whole one that came first."""
        for _ in range(_PUBLISH_TRIES):
            try:
                stage.rename(entry)
                sync_folder(entry.parent)
                return artifact
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            try:
                return _read_asked(entry, artifact.entry, artifact.source, artifact.arch)
            except _TornError:
                self._discard(entry)
        raise OSError(errno.EBUSY, "other processes keep replacing the entry", str(entry))

    def _discard(self, entry: Path) -> None:
        """Removes an entry. It is renamed first, so that readers find all of it or nothing."""
        aside = Path(tempfile.mkdtemp(dir=make_safe_dir(self._staging)))
        try:
            with suppress(FileNotFoundError):
                entry.rename(aside / entry.name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _remove_stale(self) -> None:
        """Removes what processes that died while saving have left."""
        if not os.path.lexists(self._staging):
            return
        require_safe(self._staging)
        for stage in self._staging.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - stage.lstat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(stage, ignore_errors=True)


def _write_files(folder: Path, artifact: Artifact) -> None:
    source, report = artifact.source.encode(), artifact.meta()
    values = {"schema": SCHEMA, "artifact": report, "sha256": _checksums(source, artifact.cubin, report)}
    meta = json.dumps(values, indent=1).encode()
    for name, data in zip(FILES, (source, artifact.cubin, meta), strict=True):
        write_new(folder / name, data, 0o600)
    sync_folder(folder)


def _read_asked(entry: Path, name: str, text: str, arch: str) -> Artifact:
    """Reads an entry and checks that it is whole and what was asked for. Raises _TornError with the reason."""
    artifact = _read(entry)
    if (artifact.entry, artifact.source, artifact.arch, artifact.compiler_version) != (name, text, arch, toolchain(arch).version):
        raise _TornError("it holds another kernel")
    return artifact


def _read(entry: Path) -> Artifact:
    """Reads an entry and checks that it is whole. Raises _TornError with the reason.

    The checksums in meta.json also catch a mix of two entries, read while one replaced the other.
    """
    try:
        for path in (entry, *(entry / file for file in FILES)):
            require_safe(path)
        source, cubin, meta = ((entry / file).read_bytes() for file in FILES)
        values: dict[str, Any] = parse(meta, META_FILE)
        if values["schema"] != SCHEMA:
            raise _TornError(f"its schema is {shown(values['schema'])}, not {SCHEMA}")
        for part, checksum in _checksums(source, cubin, values["artifact"]).items():
            if values["sha256"][part] != checksum:
                raise _TornError(f"{part} does not match its checksum")
        return Artifact.from_parts(values["artifact"], source.decode(), cubin)
    except (OSError, UnsafeCacheError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _TornError(f"{type(error).__name__}: {error}") from error


def _checksums(source: bytes, cubin: bytes, report: object) -> dict[str, str]:
    """By part of an entry."""
    return {SOURCE_FILE: _sha256(source), CUBIN_FILE: _sha256(cubin), "artifact": digest(report)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
