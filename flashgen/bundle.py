"""Generated folders: `.cu`, `.cubin` and a manifest for kernels of any architecture, written without a GPU and read without NVRTC."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from flashgen.build.artifact import Artifact
from flashgen.build.files import make_folders, nearest, put_folder, require_writable, sync_folder, write_new
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target

SCHEMA = 1
MANIFEST = "manifest.json"
_FIELDS = {
    "name", "source", "source_sha256", "cubin", "cubin_sha256", "spec", "parameters", "threads", "shared_bytes", "registers",
    "spill_bytes", "artifact",
}  # fmt: skip

T = TypeVar("T")


def require_place(folder: Path) -> Path:
    """The absolute path at which `write` would put a generated folder. Changes nothing.

    Raises ArgumentError, which starts with `out`, where it could not be put, or where it would take the place of anything but
    an empty folder or a generated one that is as it was written.
    """
    try:
        place = Path(os.path.realpath(folder))
        if folder.is_symlink():
            raise _refused(folder, f"which is a link to {place}")
        if place in (here := Path.cwd(), *here.parents):
            raise _refused(folder, "in which this command runs: it cannot be replaced by another one")
        if os.path.ismount(place):
            raise _refused(folder, "where a file system is mounted: it cannot be replaced by another one")
        require_writable(nearest(place.parent))
        with suppress(FileNotFoundError):
            _steadily(place, lambda: _names_of(place, folder))
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written; got {folder}: {error.strerror or error}") from error
    return place


def write(folder: Path, kernels: Sequence[tuple[KernelSpec, Artifact]]) -> list[Path]:
    """Writes the kernels and their manifest; returns the paths, manifest last.

    The folder is made whole beside its place and then put there: it is there complete or not at all. A generated one that is as it was
    written is replaced. Raises ArgumentError as `require_place`, and FlashgenError if it cannot be written: what was there stays.
    """
    place = require_place(folder)
    try:
        make_folders(place.parent)
        staging = place.with_name(f".flashgen-{secrets.token_hex(8)}")
        staging.mkdir(0o755)
        try:
            entries = [_write_kernel(staging, spec, artifact) for spec, artifact in kernels]
            write_new(staging / MANIFEST, (json.dumps({"schema": SCHEMA, "kernels": entries}, indent=2) + "\n").encode(), 0o644)
            sync_folder(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        put_folder(staging, place, partial(_names_of, folder=folder))
    except OSError as error:
        raise FlashgenError(f"{folder} cannot be written: {error.strerror or error}") from error
    return [folder / entry[part] for entry in entries for part in ("source", "cubin")] + [folder / MANIFEST]


def _steadily(folder: Path, look: Callable[[], T]) -> T:
    """What `look` finds in a folder: if that is an error, then not because another process replaced the folder meanwhile."""
    while True:
        before = _identity(folder)
        try:
            return look()
        except (ArgumentError, OSError):
            if _identity(folder) == before:
                raise


def _identity(folder: Path) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        found = folder.stat()
        return found.st_ino, found.st_ctime_ns
    return None


def _refused(folder: Path, reason: str) -> ArgumentError:
    return ArgumentError(f"out must be a new folder, an empty one, or one as `flashgen generate` left it; got {folder}, {reason}")


def _names_of(place: Path, folder: Path) -> list[str]:
    """The names of all files of the generated or empty folder at `place`. `folder` is its name in messages.

    Raises ArgumentError if it holds anything that is not as `write` left it: what somebody else has put there is not ours to remove.
    """
    try:
        names = sorted(os.listdir(place))
    except NotADirectoryError:
        raise _refused(folder, "which is no folder") from None
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    if not names:
        return names
    sums = _checksums(place / MANIFEST)
    if sums is None:
        raise _refused(folder, f"which has no {MANIFEST} of that command")
    for name in set(names) - {MANIFEST}:
        if name not in sums:
            raise _refused(folder, f"which holds {folder / name}, too: move that away")
        if sums[name] != _checksum(place / name):
            raise _refused(folder, f"in which {folder / name} was altered: move that away")
    return names


def _checksums(manifest: Path) -> dict[str, str] | None:
    """The checksum of each file that a manifest names; None if it is not one that `write` wrote."""
    if not _is_plain(manifest):
        return None
    try:
        values = json.loads(manifest.read_bytes())
        if not isinstance(values, dict) or values.keys() != {"schema", "kernels"} or values["schema"] != SCHEMA:
            return None
        if not all(entry.keys() == _FIELDS for entry in values["kernels"]):
            return None
        return {entry[part]: entry[f"{part}_sha256"] for entry in values["kernels"] for part in ("source", "cubin")}
    except (AttributeError, TypeError, ValueError, RecursionError):
        return None


def _checksum(path: Path) -> str | None:
    """The sha256 of a file, as hex digits; None if it is a link or no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if _is_plain(path) else None


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _write_kernel(folder: Path, spec: KernelSpec, artifact: Artifact) -> dict[str, Any]:
    source, cubin = f"{spec.name}.cu", f"{spec.name}.cubin"
    write_new(folder / source, artifact.source.encode(), 0o644)
    write_new(folder / cubin, artifact.cubin, 0o644)
    report = artifact.report
    return {
        "name": spec.name,
        "source": source,
        "source_sha256": hashlib.sha256(artifact.source.encode()).hexdigest(),
        "cubin": cubin,
        "cubin_sha256": hashlib.sha256(artifact.cubin).hexdigest(),
        "spec": spec.to_json(),
        "parameters": spec.family.parameters.signature,
        "threads": spec.family.threads(spec.config),
        "shared_bytes": spec.family.shared_bytes(spec.problem, spec.config),
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "artifact": artifact.meta(),
    }


def read(folder: Path, target: Target) -> list[tuple[KernelSpec, Artifact]]:
    """The kernels of a generated folder that are for `target`.

    Raises ArgumentError, which starts with `folder`, if the manifest or a file is missing, altered or of another version,
    or if there is no kernel for `target`.
    """
    return _steadily(folder, lambda: _read(folder, target))


def _read(folder: Path, target: Target) -> list[tuple[KernelSpec, Artifact]]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise ArgumentError(f"folder {folder} must have a manifest of schema {SCHEMA}; got {manifest['schema']!r}: generate it again")
        entries = [e for e in manifest["kernels"] if e["spec"]["target"] == target.name]
        archs = sorted({e["spec"]["target"] for e in manifest["kernels"]})
        kernels = [_read_kernel(folder, entry) for entry in entries]
    except OSError as error:
        raise ArgumentError(f"folder must hold what `flashgen generate` wrote; got {folder}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"folder {folder} must hold a whole manifest; {type(error).__name__}: {error}") from error
    if not kernels:
        raise ArgumentError(f"folder {folder} must hold a kernel for {target.name}; got kernels for {', '.join(archs) or 'nothing'}")
    return kernels


def _read_kernel(folder: Path, entry: dict[str, Any]) -> tuple[KernelSpec, Artifact]:
    spec = KernelSpec.from_json(entry["spec"])
    if entry["parameters"] != spec.family.parameters.signature:
        raise ArgumentError(
            f"folder {folder} must hold kernels of this version of flashgen; {entry['name']} takes other parameters: generate it again"
        )
    files = {}
    for part in ("source", "cubin"):
        name = entry[part]
        if Path(name).name != name:
            raise ArgumentError(f"folder {folder} must hold its files itself; the manifest names {name!r}")
        files[part] = (folder / name).read_bytes()
        if hashlib.sha256(files[part]).hexdigest() != entry[f"{part}_sha256"]:
            raise ArgumentError(f"folder {folder} must be as it was generated; {name} was altered: generate it again")
    return spec, Artifact.from_parts(entry["artifact"], files["source"].decode(), files["cubin"])
