"""Tuning records made up for tests."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from flashgen.codegen.config import Config
from flashgen.codegen.devices import Device, find_device
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.records.record import BENCHMARK_VERSION
from flashgen.records.store import Failure, Record, RecordKey, Timing
from flashgen.selection.families import family_of

DEVICE = find_device("h200")
FAMILY = find_family("attention_forward")
PROBLEM = Problem(Dtype.BF16, 64)
WORKLOAD = Workload(2, 16, 16, 1024, 1024)
CONFIGS = FAMILY.legal_configs(PROBLEM, DEVICE.target)


def timing(seconds: float) -> Timing:
    return Timing(seconds, 0.9 * seconds, 1.1 * seconds, 7)


def make(
    seconds: float | Failure = 1e-3,
    workload: Workload = WORKLOAD,
    config: Config = CONFIGS[0],
    problem: Problem = PROBLEM,
    device: Device = DEVICE,
    spec: dict[str, Any] | None = None,
    **key: Any,
) -> Record:
    """A record; `seconds` may be a failure, `spec` may be the JSON of a spec that cannot be built today."""
    spec = spec or KernelSpec(family_of(config), problem, config, device.target).to_json()
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    fixed = {"driver_version": "13.0", "nvrtc_version": "13.0", "benchmark_version": BENCHMARK_VERSION, **key}
    full = RecordKey(device_name=device.name, sm_count=device.sm_count, spec_digest=digest, workload=workload, **fixed)
    return Record(full, spec, timing(seconds) if isinstance(seconds, float) else seconds, 128, 0, 65536)


def in_order(*records: Record) -> list[Record]:
    """As `Records.all` gives them."""
    return sorted(records, key=lambda record: dataclasses.astuple(record.key))
