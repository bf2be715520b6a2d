"""Generated folders: `.cu`, `.cubin` and a manifest for kernels of any architecture, written without a GPU and read without NVRTC."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flashgen.build.artifact import Artifact
from flashgen.build.files import checksum, make_folders, nearest, put_folder, require_writable, sync_folder, write_new
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.plain import from_plain
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

from ..records.choice import bucket as bucket_of
from . import manifest
from .manifest import ManifestError

T = TypeVar("T")


class NoKernelError(ArgumentError):
    """A generated folder is as it was written, and has no kernel for an architecture."""


class Generated(NamedTuple):
    """A kernel of a generated folder.

    bucket: the only one that it is for; workloads: those of the tuning records that chose it, which speak for others by the rule of records
    (`by_nearness`). With neither it is for workloads of all sizes.
    """

    spec: KernelSpec
    artifact: Artifact
    bucket: Workload | None = None
    workloads: tuple[Workload, ...] = ()


def require_replaceable(folder: Path) -> Path:
    """The absolute path at which `write` would put a generated folder. Changes nothing.

    Raises ArgumentError, which starts with `out`, where it could not be put, or where it would take the place of anything but
    an empty folder or a generated one that is as it was written.
    """
    try:
        resolved = Path(os.path.realpath(folder))
        if folder.is_symlink():
            raise _refused(folder, f"which is a link to {resolved}")
        if resolved in (here := Path.cwd(), *here.parents):
            raise _refused(folder, "in which this command runs: name a folder in it")
        if os.path.ismount(resolved):
            raise _refused(folder, "where a file system is mounted: name a folder in it")
        require_writable(nearest(resolved.parent))
        with suppress(FileNotFoundError):
            _steadily(resolved, lambda: _names_of(resolved, folder))
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written; got {folder}: {error.strerror or error}") from error
    return resolved


def write(folder: Path, kernels: Sequence[Generated]) -> list[Path]:
    """Writes the kernels and their manifest; returns the paths, manifest last.

    The folder is made whole beside its place and then put there: it is there complete or not at all. A generated one that is as it was
    written is replaced. Raises ArgumentError as `require_replaceable`, and FlashgenError if it cannot be written: what was there stays.
    """
    files = {f"{kernel.spec.name}.cu": kernel.artifact.source.encode() for kernel in kernels}
    files |= {f"{kernel.spec.name}.cubin": kernel.artifact.cubin for kernel in kernels}
    files[manifest.FILE] = manifest.to_bytes([manifest.entry_of(*kernel) for kernel in kernels])
    resolved = require_replaceable(folder)
    try:
        make_folders(resolved.parent)
        staging = resolved.with_name(f".flashgen-{secrets.token_hex(8)}")
        staging.mkdir(0o755)
        try:
            for name, data in files.items():
                write_new(staging / name, data, 0o644)
            sync_folder(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        put_folder(staging, resolved, partial(_names_of, folder=folder))
    except OSError as error:
        raise FlashgenError(f"{folder} cannot be written: {error.strerror or error}") from error
    return [folder / name for name in files]


_Identity = tuple[int, int]
"""Inode number and time of change of a folder; 0 and an error's number where there is none."""

_MISSING: _Identity = (0, errno.ENOENT)


def _steadily(folder: Path, look: Callable[[], T]) -> T:
    """What `look` finds in a folder: if that is an error, then not because another process replaced the folder meanwhile."""
    while True:
        with _held(folder) as before:
            try:
                return look()
            except (ArgumentError, OSError) as error:
                # A folder that is missing before and after may have been there in between, if anything but its absence is said of it.
                met = before == _MISSING and not isinstance(error.__cause__ or error, FileNotFoundError)
                if not met and _identity(folder) == before:
                    raise


@contextmanager
def _held(folder: Path) -> Iterator[_Identity]:
    """The folder's identity. While it is held open, no folder that is made in its place can be given its number."""
    try:
        handle = os.open(folder, os.O_PATH)
    except OSError as error:
        yield 0, error.errno or 0
        return
    except ValueError:  # a path with a NUL
        yield 0, errno.EINVAL
        return
    try:
        yield _identity(handle)
    finally:
        os.close(handle)


def _identity(folder: Path | int) -> _Identity:
    try:
        found = os.stat(folder)
    except OSError as error:
        return 0, error.errno or 0
    except ValueError:
        return 0, errno.EINVAL
    return found.st_ino, found.st_ctime_ns


def _refused(folder: Path, reason: str) -> ArgumentError:
    return ArgumentError(f"out must be a new folder, an empty one, or one as `flashgen generate` left it; got {folder}, {reason}")


def _names_of(resolved: Path, folder: Path) -> list[str]:
    """The names of all files of the generated or empty folder at `resolved`. `folder` is its name in messages.

    Raises ArgumentError if it holds anything that is not as `write` left it: what somebody else has put there is not ours to remove.
    """
    try:
        names = sorted(os.listdir(resolved))
    except NotADirectoryError:
        raise _refused(folder, "which is no folder") from None
    if not os.access(resolved, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(resolved))
    if not names:
        return names
    if checksum(resolved / manifest.FILE) is None:
        raise _refused(folder, f"which has no {manifest.FILE} of that command")
    try:
        sums = manifest.checksums((resolved / manifest.FILE).read_bytes())
    except ManifestError as error:
        raise _refused(folder, f"in which {folder / manifest.FILE} {error}") from error
    for name in sorted({*names} - {manifest.FILE}):
        if name not in sums:
            raise _refused(folder, f"which holds {folder / name}, too: move that away")
        if sums[name] != checksum(resolved / name):
            raise _refused(folder, f"in which {folder / name} was altered: move that away")
    return names


def read_bundle(folder: Path, target: Target) -> list[Generated]:
    """The kernels of a generated folder that are for `target`.

    Raises ArgumentError, which starts with `folder`, if the manifest or a file is missing, altered or of another version,
    and NoKernelError if there is no kernel for `target`.
    """
    return _steadily(folder, lambda: _read(folder, target))


def _read(folder: Path, target: Target) -> list[Generated]:
    try:
        entries = manifest.read_manifest(_bytes_of(folder / manifest.FILE))
        archs = [(entry["spec"]["target"], entry["artifact"]["arch"]) for entry in entries]  # the same twice, unless one was altered
        kernels = [_read_kernel(folder, entry, target) for entry, both in zip(entries, archs, strict=True) if target.name in both]
    except OSError as error:
        raise ArgumentError(f"folder must hold what `flashgen generate` wrote; got {folder}: {error}") from error
    except ManifestError as error:
        raise ArgumentError(f"folder {folder} must be as it was generated; {manifest.FILE} {error}: generate it again") from error
    except FlashgenError as error:
        raise ArgumentError(f"folder {folder} must hold kernels of this version of flashgen, unaltered: {error}") from error
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ArgumentError(f"folder {folder} must hold a whole manifest; {type(error).__name__}: {error}") from error
    if not kernels:
        there = ", ".join(sorted({str(arch) for arch, _ in archs})) or "nothing"
        raise NoKernelError(f"folder {folder} must hold a kernel for {target.name}; got kernels for {there}")
    return kernels


def _read_kernel(folder: Path, entry: dict[str, Any], target: Target) -> Generated:
    """One kernel. Its spec decides all else that the manifest says of it: whatever differs was altered, or made by another version."""
    spec = KernelSpec.from_json(entry["spec"], target)
    if entry["name"] != spec.name:
        raise ArgumentError(f"spec of {entry['name']} must be that of the kernel; got that of {spec.name}: generate it again")
    source, cubin = (_bytes_of(folder / f"{spec.name}.{suffix}") for suffix in ("cu", "cubin"))
    artifact = Artifact.from_parts(entry["artifact"], source.decode(), cubin)
    bucket = None if entry["bucket"] is None else from_plain(Workload, entry["bucket"], "bucket")
    if bucket is not None and bucket != bucket_of(bucket):
        raise ArgumentError(f"bucket of {spec.name} must be {bucket_of(bucket).name}; got {bucket.name}: generate it again")
    workloads = tuple([from_plain(Workload, values, "workloads") for values in entry.get("workloads", ())])
    if bucket is not None and workloads:
        raise ArgumentError(f"workloads of {spec.name} must be left out, as it is for a bucket: generate it again")
    if differing := manifest.differences(entry, manifest.entry_of(spec, artifact, bucket, workloads)):
        raise ArgumentError(f"{', '.join(differing)} of {spec.name} must be as it was generated: generate it again")
    if spec.name not in artifact.source:
        raise ArgumentError(f"{spec.name}.cu must hold the kernel {spec.name}: generate it again")
    if (artifact.entry, artifact.arch) != (spec.name, spec.target.name) or f".text.{spec.name}\0".encode() not in cubin:
        raise ArgumentError(f"{spec.name}.cubin must hold the kernel {spec.name} for {spec.target.name}: generate it again")
    return Generated(spec, artifact, bucket, workloads)


def _bytes_of(path: Path) -> bytes:
    """What a file holds. Raises OSError for anything else: a pipe would be waited for, a device may have no end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no file", str(path))
    return path.read_bytes()
