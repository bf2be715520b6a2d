"""The manifest of a generated folder. There is one text for what it says, its own checksum included: an altered one is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from flashgen.build.artifact import Artifact
from flashgen.codegen.errors import ArgumentError, FlashgenError, shown
from flashgen.codegen.plain import parse, to_plain
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload

SCHEMA = 2
FILE = "manifest.json"

# Schema 1 had no checksum of its own. Such a folder is no longer loaded, but generated again in its place.
_UNSIGNED = 1
_FIELDS = {
    "name", "source", "source_sha256", "cubin", "cubin_sha256", "spec", "parameters", "threads", "shared_bytes", "registers",
    "spill_bytes", "artifact", "bucket",
}  # fmt: skip
_UNSIGNED_FIELDS = _FIELDS - {"bucket"}
_ADDED_LATER = {"workloads"}  # left out where there are none


class ManifestError(FlashgenError):
    """A text is not a manifest as it was written. The message goes on from 'manifest.json ...'."""


def entry_of(spec: KernelSpec, artifact: Artifact, bucket: Workload | None = None, workloads: Sequence[Workload] = ()) -> dict[str, Any]:
    """All that a manifest says of one kernel, as JSON values. It follows from these: whoever reads an entry can compare.

    bucket, workloads: for which the kernel is: see `Generated`
    """
    entry = {
        "name": spec.name,
        "source": f"{spec.name}.cu",
        "source_sha256": hashlib.sha256(artifact.source.encode()).hexdigest(),
        "cubin": f"{spec.name}.cubin",
        "cubin_sha256": hashlib.sha256(artifact.cubin).hexdigest(),
        "spec": spec.to_json(),
        "parameters": "; ".join(kernel.parameters.signature for kernel in spec.kernels.values()),
        "threads": spec.largest_block.threads,
        "shared_bytes": spec.largest_block.shared_bytes,
        "registers": artifact.report.registers,
        "spill_bytes": artifact.report.spill_bytes,
        "artifact": artifact.meta(),
        "bucket": to_plain(bucket),
    }
    return {**entry, "workloads": [to_plain(workload) for workload in workloads]} if workloads else entry


def differences(entry: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The fields in which two entries are not the same, to the type: True is not 1."""
    return sorted(key for key in entry.keys() | other.keys() if json.dumps(entry.get(key)) != json.dumps(other.get(key)))


def to_bytes(entries: Sequence[dict[str, Any]]) -> bytes:
    """The text of a manifest."""
    checksum = hashlib.sha256(json.dumps([SCHEMA, entries]).encode()).hexdigest()
    return _text({"schema": SCHEMA, "sha256": checksum, "kernels": entries})


def read_manifest(data: bytes) -> list[dict[str, Any]]:
    """The entries of a manifest that is as it was written. Raises ManifestError."""
    values = _object(data)
    if values["schema"] != SCHEMA:
        raise ManifestError(f"is of schema {shown(values['schema'])}, not {SCHEMA}")
    entries = values.get("kernels")
    if not isinstance(entries, list) or to_bytes(entries) != data:
        raise ManifestError("was altered")
    if not all(isinstance(entry, dict) and entry.keys() - _ADDED_LATER == _FIELDS for entry in entries):
        raise ManifestError("does not hold kernels")
    return entries


def checksums(data: bytes) -> dict[str, str]:
    """The sha256 of each file that a manifest, also one of schema 1, names. Raises ManifestError unless it is as it was written."""
    values = _object(data)
    entries, fields = values.get("kernels"), _FIELDS
    if values["schema"] != _UNSIGNED:
        entries = read_manifest(data)
    elif values.keys() != {"schema", "kernels"} or not isinstance(entries, list) or _text(values) != data:
        raise ManifestError("was altered")
    else:
        fields = _UNSIGNED_FIELDS
    if not all(isinstance(entry, dict) and entry.keys() - _ADDED_LATER == fields for entry in entries):
        raise ManifestError("does not hold kernels")
    return {str(entry[part]): str(entry[f"{part}_sha256"]) for entry in entries for part in ("source", "cubin")}


def _object(data: bytes) -> dict[str, Any]:
    try:
        values = parse(data, "text")
    except ArgumentError as error:
        raise ManifestError(f"is no JSON text: {error}") from error
    if not isinstance(values, dict) or "schema" not in values:
        raise ManifestError("is not one of flashgen")
    return values


def _text(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
