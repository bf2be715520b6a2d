"""Tuning records that come with the package: one JSON file for each GPU that flashgen was tuned on.

    flashgen cache export --best --device-name 'NVIDIA H200' flashgen/records/shipped/nvidia_h200.json

writes one. The only Python here: the look-up among them, which is asked where the user's own records know nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from functools import cached_property
from pathlib import Path

from flashgen.codegen.devices import Device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Problem

from ..choice import Entry, Known, known_of
from ..exchange import parse_records
from ..record import Record

logger = logging.getLogger("flashgen")

FOLDER = Path(__file__).resolve().parent


class ShippedRecords:
    """The records in the JSON files of a folder. They are read on first use, once, and never written."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._known: dict[tuple[Problem, Device, int, frozenset[str]], Known] = {}

    def for_device(self, device_name: str, sm_count: int) -> list[Record]:
        """The records of a device."""
        return self._by_device.get((device_name, sm_count), [])

    def known(self, problem: Problem, device: Device, benchmark_version: int, excluded: frozenset[str] = frozenset()) -> Known:
        """What the records say of a problem on a device: as `Records.known`."""
        wanted = (problem, device, benchmark_version, excluded)
        if wanted not in self._known:
            entries = (entry for r in self.for_device(device.name, device.sm_count) if (entry := Entry.of(r)))
            self._known[wanted] = known_of(entries, problem, device.target, benchmark_version, excluded)
        return self._known[wanted]

    @cached_property
    def _by_device(self) -> dict[tuple[str, int], list[Record]]:
        found = defaultdict(list)
        for file in sorted(self.folder.glob("*.json")):
            try:
                contents = parse_records(file.read_bytes())
            except (OSError, ArgumentError) as error:  # a spoiled installation: kernels can be chosen without these
                logger.warning("%s is left out: %s", file, error)
                continue
            for reason in contents.bad[:1]:
                logger.warning("%s: %d bad records are left out; the first: %s", file, len(contents.bad), reason)
            for record in contents.records:
                found[record.key.device_name, record.key.sm_count].append(record)
        return dict(found)
