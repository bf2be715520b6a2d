"""JSON files with seeded mutations: each is refused with an ArgumentError, or read and then usable like any other."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashgen.bench import files, report
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.spec import KernelSpec
from flashgen.records.choice import choose, why_useless
from flashgen.records.exchange import parse_records, to_text, winners
from flashgen.records.record import BENCHMARK_VERSION
from flashgen.records.shipped import ShippedRecords
from flashgen.records.store import Failure, FailureKind
from tests.support.bench_results import result
from tests.support.made_records import CONFIGS, DEVICE, PROBLEM, WORKLOAD, make

MUTATIONS = range(100), range(100, 500)  # of each kind of file; the others for --slow
JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 1.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), "", "x", "\ud800", "\0",
    "\u00e4" * 1000, [], {}, [[]], [None], {"kind": "x"}, "bf16", "forward", "full",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def mutated(value: Any, draw: random.Random) -> Any:
    """A copy with one to three values replaced, left out or added."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        *above, last = draw.choice(places(value)[1:] or [(0,)])
        holder, junk, what = value, copy.deepcopy(draw.choice(JUNK)), draw.random()
        for key in above:
            holder = holder[key]
        if not holder:
            continue
        if what < 0.6:
            holder[last] = junk
        elif what < 0.75:
            del holder[last]
        elif isinstance(holder, dict):
            holder[draw.choice(("window", "kind", "\ud83d", "x"))] = junk
        else:
            holder.insert(0, junk)
    return value


def text_of(value: Any, draw: random.Random) -> bytes:
    """Its text, at times with bytes changed or cut off."""
    text = bytearray(json.dumps(value).encode())
    for _ in range(draw.randint(1, 4) if draw.random() < 0.2 else 0):
        text[draw.randrange(len(text))] = draw.randrange(256)
    return bytes(text[: draw.randrange(len(text))] if draw.random() < 0.05 else text)


def read_records(data: bytes, folder: Path) -> None:
    contents = parse_records(data)
    json.dumps(contents.bad, ensure_ascii=False).encode()
    assert parse_records(to_text(contents.records).encode()).records == contents.records
    winners(contents.records, BENCHMARK_VERSION)
    (folder / "gpu.json").write_bytes(data)
    choose(ShippedRecords(folder).known(PROBLEM, DEVICE, BENCHMARK_VERSION).present, WORKLOAD, ("13.0", "13.0"))
    for record in contents.records:
        why_useless(record, BENCHMARK_VERSION)


def read_result(data: bytes, folder: Path) -> None:
    (folder / "bench.json").write_bytes(data)
    found = files.read_result(folder / "bench.json")
    (folder / "again").mkdir(exist_ok=True)
    files.save(found, folder / "again")
    assert files.read_result(folder / "again/bench.json") == found
    report.tables(found)
    report.summary(found)


def read_spec(data: bytes, folder: Path) -> None:
    try:
        values = json.loads(data)
    except ValueError:
        return
    spec = KernelSpec.from_json(values)
    assert KernelSpec.from_json(spec.to_json()).digest == spec.digest


RECORDS = json.loads(to_text([make(), make(Failure(FailureKind.WRONG, "off by one"), config=CONFIGS[1]), make(config=CONFIGS[2])]))
KINDS: dict[str, tuple[Any, Callable[[bytes, Path], None]]] = {
    "records": (RECORDS, read_records),
    "result": (result().to_json(), read_result),
    "spec": (make().spec, read_spec),
}


@pytest.mark.parametrize("seeds", [MUTATIONS[0], pytest.param(MUTATIONS[1], marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_refused_or_can_be_used(kind: str, seeds: range, tmp_path: Path) -> None:
    sound, read = KINDS[kind]
    read(json.dumps(sound).encode(), tmp_path)
    refused = 0
    for seed in seeds:
        draw = random.Random(f"{kind} {seed}")
        data = text_of(mutated(sound, draw), draw)
        try:
            read(data, tmp_path)
        except ArgumentError as error:
            refused += 1
            str(error).encode()
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}; of {data[:3000]!r}")
    assert refused > len(seeds) // 5
