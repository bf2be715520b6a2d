"""Moves tuning records of an older revision to the present one, where both revisions give the same machine code.

    git worktree add ../before <commit that the records were measured at>
    python tools/move_records.py --old ../before flashgen/records/shipped/nvidia_h200.json
    python tools/move_records.py --old ../before          # the user's own records

For each record the old checkout renders its spec, this one renders the same problem, config and target in the present revision, and NVRTC
compiles both. Only where all that the driver loads is the same to the byte (code, constants, relocations, symbols but for their names) and
threads, shared memory and parameters agree, the record is given the present spec and its digest: its time is the present kernel's. What
was measured with another NVRTC than the one here is not moved: nothing here can prove anything of it. The grid is Python's and is not
compared. In a file moved records take the place of the old ones; among the user's own they are added. All others stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build.artifact import CompileError
from flashgen.build.files import write_file
from flashgen.build.nvrtc import nvrtc_version
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.family import find_family
from flashgen.codegen.plain import from_plain
from flashgen.codegen.render import Source, render
from flashgen.codegen.spec import KernelSpec, PlainSpec
from flashgen.records import sources
from flashgen.records.exchange import parse_records, to_text
from flashgen.records.record import Record
from flashgen.selection import compilation

# Run in the old checkout, so it may use nothing newer than `KernelSpec.from_json`.
RENDER = """
import json, sys, flashgen
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec

def made(values):
    try:
        spec = KernelSpec.from_json(values)
        source, family = render(spec), spec.family
        if hasattr(spec, "resources"):
            launch = {suffix: [block.threads, block.shared_bytes, spec.kernels[suffix].parameters.signature]
                      for suffix, block in spec.resources.items()}
        else:  # of before a text could have several kernels
            sizes = family.threads(spec.config), family.shared_bytes(spec.problem, spec.config)
            launch = {"": [*sizes, family.parameters.signature]}
        return {"entry": source.entry, "text": source.text, "launch": launch}
    except ValueError as error:
        return {"fault": str(error)}

json.dump({"home": flashgen.__file__, "made": [made(values) for values in json.load(sys.stdin)]}, sys.stdout)
"""

NAMES_ONLY = (".shstrtab", ".strtab", ".note", ".debug", ".rel.debug", ".rela.debug", ".nv.merc.debug", ".nv.merc.rela.debug")
SYMTAB, NOBITS, SYMBOL_BYTES, NAME_BYTES = (".symtab", ".nv.merc.symtab"), 8, 24, 4


@dataclass(frozen=True)
class Rendered:
    """A text, and what launches depend on beside it: threads, shared memory in bytes and parameters of each kernel, by its suffix."""

    entry: str
    text: str
    launch: dict[str, tuple[int, int, str]]


@dataclass(frozen=True)
class Fault:
    """Why a checkout cannot render a spec."""

    fault: str


def rendered_by(checkout: Path, specs: list[dict[str, Any]]) -> list[Rendered | Fault]:
    """What another checkout makes of specs. Raises FlashgenError if it cannot be run."""
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    done = subprocess.run(
        [sys.executable, "-c", RENDER], cwd=checkout, env=environment, input=json.dumps(specs), capture_output=True, text=True
    )
    if done.returncode:
        raise FlashgenError(f"{checkout} cannot render: {done.stderr.strip().splitlines()[-1:]}")
    answer = json.loads(done.stdout)
    if not Path(answer["home"]).resolve().is_relative_to(checkout.resolve()):
        raise ArgumentError(f"old must be a checkout of flashgen; got {checkout}, where {answer['home']} was imported")
    return from_plain(list[Rendered | Fault], answer["made"], "rendered")


def rendered_here(spec: KernelSpec) -> Rendered:
    """What this checkout makes of a spec."""
    source, kernels = render(spec), spec.kernels
    blocks = spec.resources.items()
    launch = {suffix: (block.threads, block.shared_bytes, kernels[suffix].parameters.signature) for suffix, block in blocks}
    return Rendered(source.entry, source.text, launch)


def loaded_parts(cubin: bytes, entry: str) -> list[tuple[Any, ...]]:
    """The sections of an ELF file that decide what a kernel does, in order: name, type, flags, info, size and contents."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    step, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * step) for i in range(count)]
    names = cubin[headers[names_at][4] :]
    parts = []
    for name_at, kind, flags, _, offset, size, _, info, *_ in headers:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        if name.startswith(NAMES_ONLY):
            continue
        contents = b"" if kind == NOBITS else cubin[offset : offset + size]
        if name in SYMTAB:
            contents = b"".join(contents[i + NAME_BYTES : i + SYMBOL_BYTES] for i in range(0, size, SYMBOL_BYTES))
        parts.append((name.replace(entry, "kernel"), kind, flags, info, size, contents))
    return parts


def why_different(old: Rendered, new: Rendered, arch: str) -> str | None:
    """Why a time of the old kernel is none of the new one's; None if they are the same machine code."""
    if old.launch != new.launch:
        return "launched with other threads, shared memory or parameters"
    if old == new:
        return None
    try:
        parts = [loaded_parts(compilation.store().get_or_compile(Source(r.entry, r.text), arch).cubin, r.entry) for r in (old, new)]
    except CompileError:
        return "one of the two texts does not compile"
    return None if parts[0] == parts[1] else "another machine code"


@dataclass(frozen=True)
class Moved:
    """`moved`: the new record of each old one; `stay`: why each of the others stays as it is."""

    moved: dict[int, Record]
    stay: dict[int, str]


def move(records: list[Record], checkout: Path) -> Moved:
    """Tries all of `records`; the keys of what comes back are their places in the list."""
    moved, stay = {}, {}
    wanted: dict[int, KernelSpec] = {}
    for i, record in enumerate(records):
        try:
            wanted[i] = _present(record)
        except ArgumentError as error:
            stay[i] = str(error)
    old = dict(zip(wanted, rendered_by(checkout, [records[i].spec for i in wanted]), strict=True))
    here = {record.key for record in records}
    verdicts: dict[str, str | None] = {}
    for i, spec in wanted.items():
        record, made = records[i], old[i]
        if record.key.spec_digest not in verdicts:
            different = made.fault if isinstance(made, Fault) else why_different(made, rendered_here(spec), spec.target.name)
            verdicts[record.key.spec_digest] = different
        key = dataclasses.replace(record.key, spec_digest=spec.digest)
        if reason := verdicts[record.key.spec_digest]:
            stay[i] = reason
        elif key in here:
            stay[i] = "measured in the present revision already"
        else:
            moved[i] = dataclasses.replace(record, key=key, spec=spec.to_json())
    return Moved(moved, stay)


def _present(record: Record) -> KernelSpec:
    """The spec of the present revision that an older record could move to. Raises ArgumentError with the reason if there is none."""
    plain = PlainSpec.from_json(record.spec)
    if plain.revision >= find_family(plain.family).revision:
        raise ArgumentError("of the present revision")
    if record.key.nvrtc_version != nvrtc_version():
        raise ArgumentError(f"measured with NVRTC {record.key.nvrtc_version}; the one here is {nvrtc_version()}")
    return plain.as_of_now()


def main(arguments: Iterable[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="checkout of the revision that the records were measured at")
    parser.add_argument("--dry-run", action="store_true", help="say what would be moved; write nothing")
    parser.add_argument("file", type=Path, nargs="?", help="JSON file of records; the user's own if left out")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.file is None:
        records = sources.own_records().all()
    else:
        contents = parse_records(options.file.read_bytes())
        if contents.bad:
            raise ArgumentError(f"file must hold sound records only; got {contents.bad[0]}")
        records = contents.records
    done = move(records, options.old)
    if done.moved and not options.dry_run:
        if options.file is None:
            sources.own_records().add(done.moved.values())
        else:
            write_file(options.file, to_text(done.moved.get(i, record) for i, record in enumerate(records)).encode())
    print(f"{len(done.moved)} of {len(records)} records {'would be ' if options.dry_run else ''}moved")
    for reason, count in Counter(done.stay.values()).most_common():
        print(f"{count} stay: {reason}")


if __name__ == "__main__":
    try:
        main()
    except FlashgenError as error:
        sys.exit(f"move_records: {error}")
