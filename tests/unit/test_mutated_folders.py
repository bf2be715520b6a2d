"""Mutations of what is stored as JSON beside machine code: each is refused by name or a miss, and none a crash or another kernel."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flashgen.build.artifact import Artifact
from flashgen.build.store.store import FILES, ArtifactStore
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.selection import bundle, compilation, manifest
from flashgen.selection.bundle import Generated
from flashgen.selection.families import default_spec

T = TypeVar("T")

NUMBERS = range(100), range(100, 300)  # of each kind of file; the others for --slow
TARGET = find_target("sm_80")
DEEP = "\0deep\0"
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**64, 10**400, 1.0, 0.5, float("nan"), float("inf"), -float("inf"), "", "0", "sm_80", "causal",
    "\ud800", "\0", "../../etc/passwd", "x" * 10_000, [], {}, [[]], {"": {}}, DEEP,
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [(value, key) for key, _ in items] + [place for _, item in items for place in places(item)]


def change(value: Any, draw: random.Random) -> Any:
    """The value with something deleted, added, retyped, renamed or exchanged in one to three places."""
    for _ in range(draw.randint(1, 3)):
        if not (found := places(value)):
            return copy.deepcopy(draw.choice(VALUES))
        holder, key = draw.choice(found)
        kind = draw.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice(("", "name", "more", "\ud800", *holder))] = holder.pop(key)
        elif kind == 2:
            other, its_key = draw.choice(found)
            if its_key in other if isinstance(other, dict) else its_key < len(other):
                holder[key] = json.loads(json.dumps(other[its_key]))
        elif kind == 3 and isinstance(holder[key], str | int):
            holder[key] = holder[key] + 1 if isinstance(holder[key], int) else holder[key][: draw.randrange(len(holder[key]) + 1)]
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def as_text(value: Any, draw: random.Random) -> bytes:
    text = json.dumps(value, indent=draw.choice((None, 1, 2))).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)
    return (text + "\n").encode()


def damage(data: bytes, draw: random.Random) -> bytes:
    """The file torn, with other bytes in it, in another encoding, or with a field twice."""
    at = draw.randrange(len(data))
    return draw.choice(
        (
            lambda: data[:at],
            lambda: data[at:],
            lambda: data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
            lambda: data[:at] + data[at : at + 40] + data[at:],
            lambda: data.decode().encode(draw.choice(("utf-8-sig", "utf-16", "utf-32-le"))),
            lambda: data.replace(b'"schema": ', draw.choice((b'"schema": 1, "schema": ', b'"schema": 1' + b"0" * 5000 + b', "schema": '))),
            lambda: data + draw.choice((b"\0", b"{}", b"\n", b"\xff")),
            lambda: b"",
            lambda: draw.randbytes(draw.randrange(200)),
            lambda: b"[" * 100_000,
            lambda: data.replace(b"\n", b"\r\n"),
        )
    )()


@pytest.fixture(scope="module")
def kernels() -> list[tuple[KernelSpec, Artifact]]:
    specs = [default_spec(Problem(Dtype.BF16, 8, mask=mask), TARGET) for mask in Mask]
    return [(spec, compilation.compile_spec(spec)) for spec in specs]


def mutated_manifest(data: bytes, draw: random.Random) -> bytes:
    kind = draw.randrange(3)
    if kind == 0:
        return damage(data, draw)
    if kind == 1:
        return as_text(change(json.loads(data), draw), draw)
    entries = change(json.loads(data)["kernels"], draw)  # and all checksums set right
    return manifest.to_bytes(entries) if isinstance(entries, list) else as_text(entries, draw)


@pytest.mark.parametrize("numbers", [NUMBERS[0], pytest.param(NUMBERS[1], marks=pytest.mark.slow)], ids=str)
def test_mutated_manifests(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, numbers: range) -> None:
    folder = tmp_path / "out"
    bundle.write(folder, [Generated(*kernel) for kernel in kernels])
    whole, by_spec = (folder / "manifest.json").read_bytes(), dict(kernels)
    for number in numbers:
        data = mutated_manifest(whole, random.Random(f"1 {number}"))
        (folder / "manifest.json").write_bytes(data)
        found, refusal = result_of(lambda: bundle.read_bundle(folder, TARGET))
        assert found is not None or (refusal.startswith("folder ") and str(folder) in refusal), (number, refusal)
        for spec, artifact, *_ in found or []:  # only what decides nothing may have been changed, or a kernel been left out
            made = by_spec[spec]
            assert (artifact.entry, artifact.arch, artifact.cubin) == (made.entry, made.arch, made.cubin), number
            said = next(entry for entry in manifest.read_manifest(data) if entry["name"] == spec.name)
            assert set(manifest.differences(said, manifest.entry_of(spec, made))) <= {"artifact"}, number
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        place, refusal = result_of(lambda: bundle.require_replaceable(folder))
        assert manifest.checksums(data) if place else str(folder) in refusal, (number, refusal)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def result_of(action: Callable[[], T]) -> tuple[T, str] | tuple[None, str]:
    """What it gives, or None and the refusal."""
    try:
        return action(), ""
    except ArgumentError as error:
        return None, str(error)


def forged(meta: Any) -> Any:
    """With the checksum of the part that has none of its own files set right."""
    if isinstance(meta, dict) and isinstance(meta.get("sha256"), dict) and "artifact" in meta:
        text = json.dumps(meta["artifact"], sort_keys=True, separators=(",", ":"))
        meta["sha256"]["artifact"] = hashlib.sha256(text.encode()).hexdigest()
    return meta


def mutated_meta(data: bytes, other: bytes, draw: random.Random) -> bytes:
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: damage(data, draw),
        lambda: as_text(change(json.loads(data), draw), draw),
        lambda: as_text(forged(change(json.loads(data), draw)), draw),
        lambda: other,
    )
    return draw.choices(kinds, (3, 3, 3, 1))[0]()


@pytest.mark.parametrize("numbers", [NUMBERS[0], pytest.param(NUMBERS[1], marks=pytest.mark.slow)], ids=str)
def test_mutated_meta(kernels: list[tuple[KernelSpec, Artifact]], tmp_path: Path, numbers: range) -> None:
    spec, artifact = kernels[0]
    source, store = render(spec), ArtifactStore(tmp_path / "cache")
    for each, made in kernels:
        assert store.get_or_compile(render(each), TARGET.name).cubin == made.cubin
    entries = {(entry / FILES[0]).read_text(): entry / FILES[2] for entry, _ in store._entries()}
    meta, other = entries[source.text], entries[render(kernels[1][0]).text]
    whole = meta.read_bytes()
    for number in numbers:
        meta.write_bytes(mutated_meta(whole, other.read_bytes(), random.Random(f"1 {number}")))
        store = ArtifactStore(tmp_path / "cache")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = store.find(source, TARGET.name)
        faults = store.faults()
        if found is None:
            assert [str(meta.parent) in str(warning.message) for warning in caught] == [True], number
        else:
            assert (found.entry, found.arch, found.source, found.cubin) == (spec.name, TARGET.name, source.text, artifact.cubin)
            assert not faults, number
            assert not caught, number
