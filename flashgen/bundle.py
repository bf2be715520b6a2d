"""Generated folders: `.cu`, `.cubin` and a manifest for kernels of any architecture, written without a GPU and read without NVRTC."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashgen.build.artifact import Artifact
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target

SCHEMA = 1
MANIFEST = "manifest.json"


def write(folder: Path, kernels: Sequence[tuple[KernelSpec, Artifact]]) -> list[Path]:
    """Writes the kernels and their manifest; returns the paths, manifest last.

    The folder is made whole beside its place and then renamed: it is there complete or not at all.
    An existing generated folder is replaced; raises ArgumentError if `folder` is anything else that is not empty.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MANIFEST).is_file())):
        raise ArgumentError(f"out must be a new, empty or generated folder; got {folder}, which holds something else")
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        entries = [_write_kernel(staging, spec, artifact) for spec, artifact in kernels]
        (staging / MANIFEST).write_text(json.dumps({"schema": SCHEMA, "kernels": entries}, indent=2) + "\n", encoding="utf-8")
        os.chmod(staging, 0o755)
        _swap(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return [folder / entry[part] for entry in entries for part in ("source", "cubin")] + [folder / MANIFEST]


def _swap(staging: Path, folder: Path) -> None:
    """Puts `staging` in the place of `folder`; what was there is removed only once the new one stands."""
    old = Path(f"{staging}.old")
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(staging, folder)
    except OSError:
        if old.exists():
            os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_kernel(folder: Path, spec: KernelSpec, artifact: Artifact) -> dict[str, Any]:
    source, cubin = f"{spec.name}.cu", f"{spec.name}.cubin"
    (folder / source).write_text(artifact.source, encoding="utf-8")
    (folder / cubin).write_bytes(artifact.cubin)
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
