"""The JSON files by which tuning records move between machines, and which the package ships: written, checked, imported. No torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from flashgen.codegen.errors import ArgumentError, choice_error
from flashgen.codegen.family import find_family
from flashgen.codegen.plain import from_plain
from flashgen.codegen.plain import parse as parse_json

from .choice import tells_time, why_useless
from .record import Record, RecordKey, Timing
from .store import Records

FORMAT = "flashgen tuning records"
SCHEMA = 1  # raise when the fields of a record, or what they mean, change

_SHOWN = 5  # bad records whose reasons an error gives
T = TypeVar("T")


def to_text(records: Iterable[Record]) -> str:
    """The text of a file: one object of JSON, with one record a line."""
    lines = ",\n".join(json.dumps(record.to_json()) for record in records)
    return f'{{"format": {json.dumps(FORMAT)}, "schema": {SCHEMA}, "records": [\n{lines}\n]}}\n'


@dataclass(frozen=True)
class Contents:
    """What a file holds: its sound records, and why each of the others is none ('record 3: ...', counted from 1)."""

    records: list[Record]
    bad: list[str]


def parse_records(data: bytes) -> Contents:
    """Reads a file and checks every record: fields, types, times, the digest of its spec, a known family, a key of its own.

    Raises ArgumentError, which starts with `file`, if it is no whole file of this schema.
    """
    found: dict[RecordKey, Record] = {}
    bad = []
    for number, values in enumerate(_entries(data), start=1):
        try:
            record = Record.from_json(values)
            find_family(record.spec["family"])
            if record.key in found:
                raise ArgumentError("key must be of one record; got it twice")
            found[record.key] = record
        except ArgumentError as error:
            bad.append(f"record {number}: {error}")
    return Contents(list(found.values()), bad)


@dataclass(frozen=True)
class _File:
    format: str
    schema: int
    records: list[Any]


def _entries(data: bytes) -> list[Any]:
    try:
        whole = parse_json(data, "file")
    except ArgumentError as error:
        raise ArgumentError(f"{error}: `flashgen cache export` writes such files") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ArgumentError(f"file must be of the format {FORMAT!r}, as `flashgen cache export` writes it; got something else")
    if whole.get("schema") != SCHEMA:
        raise ArgumentError(f"file must be of schema {SCHEMA}; got {whole.get('schema')!r}: another version of flashgen wrote it")
    return from_plain(_File, whole, "file").records


@dataclass(frozen=True)
class Imported:
    """What became of a file's records.

    added: new here; here_already: left as they are here; useless: left out, by the reason why no look-up could take them;
    bad: left out, with the reason of each. `dry_run`: what would have become of them.
    """

    added: int
    here_already: int
    useless: dict[str, int]
    bad: list[str]
    dry_run: bool


def import_into(records: Records, contents: Contents, benchmark_version: int, *, skip_bad: bool = False, dry_run: bool = False) -> Imported:
    """Adds a file's records to those that are here, all at once. A record whose key is here already stays as it was measured here.

    Left out is what no look-up of this version could take. Raises ArgumentError if a record is bad, unless `skip_bad`; FlashgenError if
    they cannot be written. Either way none were added.
    """
    if contents.bad and not skip_bad:
        shown = "\n".join(f"  {reason}" for reason in contents.bad[:_SHOWN])
        more = f"\n  and {len(contents.bad) - _SHOWN} more" if len(contents.bad) > _SHOWN else ""
        count = f"{len(contents.bad)} bad of {len(contents.bad) + len(contents.records)}"
        raise ArgumentError(
            f"file must hold sound records only; got {count}, and none were imported (--skip-bad leaves them out):\n{shown}{more}"
        )
    reasons = {record.key: why_useless(record, benchmark_version) for record in contents.records}
    useful = [record for record in contents.records if reasons[record.key] is None]
    if dry_run:
        here = {record.key for record in records.all()}
        added = sum(record.key not in here for record in useful)
    else:
        added = records.add(useful)
    useless = Counter(reason for reason in reasons.values() if reason)
    return Imported(added, len(useful) - added, dict(useless), contents.bad, dry_run)


def of_device(records: Iterable[Record], name: str) -> list[Record]:
    """The records of one device. Raises ArgumentError that lists the devices there are."""
    return _only("device_name", records, name, lambda record: record.key.device_name)


def of_head_dim(records: Iterable[Record], head_dim: int) -> list[Record]:
    """The records of one head dim of q and k. Raises ArgumentError that lists those there are."""
    return _only("head_dim", records, head_dim, lambda record: record.problem.head_dim)


def _only(argument: str, records: Iterable[Record], wanted: T, value: Callable[[Record], T]) -> list[Record]:
    pairs = [(value(record), record) for record in records]
    if wanted not in (there := sorted({have for have, _ in pairs})):  # type: ignore[type-var]
        if not there:
            raise ArgumentError(f"{argument} must be left out where there are no records; got {wanted!r}")
        raise choice_error(argument, wanted, there)
    return [record for have, record in pairs if have == wanted]


def winners(records: Iterable[Record], benchmark_version: int) -> list[Record]:
    """The fastest record of each device, driver, compiler, problem and workload, of those whose times count today.

    A family that is taken only by name has a fastest one of its own: it is not in the others' way, nor they in its.
    """
    fastest: dict[tuple[Any, ...], tuple[float, Record]] = {}
    for record in records:
        if isinstance(record.outcome, Timing) and tells_time(record, benchmark_version):
            key = record.key
            family = find_family(str(record.spec["family"]))
            named = "" if family.automatic else family.name
            cell = (key.device_name, key.sm_count, *key.toolchain, record.problem, key.workload, named)
            if cell not in fastest or record.outcome.seconds < fastest[cell][0]:
                fastest[cell] = (record.outcome.seconds, record)
    return [record for _, record in fastest.values()]
