"""What the page's scripts read: a tune's result as JSON values. Texts that come often stand in one table, and are numbers elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashgen.codegen.devices import Device
from flashgen.codegen.spec import KernelSpec

from ..compare.formula import Roofline, traffic_of
from ..pages.html import ValueTable
from ..tuning.passed_over import PassedOver
from ..tuning.result import Row, TriedConfig, TuneResult


def tune_page_data(result: TuneResult, others: Sequence[PassedOver], device: Device, names: bool = True) -> dict[str, Any]:
    """The values of a result. others: what each of its rows passed over; names: whether refused configs are named, or counted only."""
    texts, roof = ValueTable(), Roofline.of(device)
    cells = [_cell(row, other, device, roof, texts, names) for row, other in zip(result.rows, others, strict=True)]
    return {
        "device": result.device,
        "timed": result.timed,
        "deviceMeasured": result.device_measured,
        "complete": result.complete,
        "measured": result.measured,
        "seconds": result.seconds,
        "verifiedOnCpu": result.verified_on_cpu,
        "notVerified": result.not_verified,
        "roof": {"flops": roof.flops, "bandwidth": roof.bandwidth},
        "cells": cells,
        "texts": texts.values,
    }


def _cell(row: Row, other: PassedOver, device: Device, roof: Roofline, texts: ValueTable, names: bool) -> dict[str, Any]:
    candidates = list(row.candidates)
    if row.spec is not None and row.spec not in [each.spec for each in candidates]:  # an earlier tune's, which had other candidates
        candidates.append(_winner(row, row.spec, device))
    specs = [each.spec for each in candidates]
    traffic = traffic_of([(row.spec, row.cell)], device) if row.spec else None
    intensity = row.cell.flops / row.cell.io_bytes
    return {
        "problem": row.cell.problem.name,
        "workload": row.cell.workload.name,
        "flops": row.cell.flops,
        "bytes": row.cell.io_bytes,
        "intensity": intensity,
        "loopBytes": traffic and traffic.read + traffic.written + traffic.reduced,
        "attainable": roof.attainable(intensity),
        "limit": roof.bound(intensity),
        "seconds": row.seconds,
        "tflops": row.tflops,
        "gain": row.gain,
        "registers": row.registers,
        "spills": row.spill_bytes,
        "shared": row.shared_bytes,
        "boundBy": row.bound_by,
        "tried": row.tried,
        "failed": row.failed,
        "measured": row.measured,
        "winner": specs.index(row.spec) if row.spec else None,
        "default": specs.index(row.default) if row.default in specs else None,
        "candidates": [_candidate(each, row.default, texts) for each in candidates],
        "slower": [
            [texts.number(each.family.name), texts.number(each.config.describe()), each.seconds, texts.number(each.bound_by)]
            for each in other.slower
        ],
        "dominated": [[texts.number(family.name), texts.number(config.describe())] for family, config in other.dominated],
        "refused": _refused(other, texts, names),
    }


def _winner(row: Row, spec: KernelSpec, device: Device) -> TriedConfig:
    """A winner that is none of the candidates."""
    times = (row.seconds if row.measured else None, None, None)
    return TriedConfig.of(row.cell, spec, device, times, row.registers, row.spill_bytes)


def _candidate(each: TriedConfig, default: KernelSpec, texts: ValueTable) -> list[Any]:
    spec = each.spec
    usual = default.config if default.family is spec.family else spec.family.default(spec.problem, spec.target)
    times = [each.seconds, each.low, each.high, each.predicted]
    resources = [each.registers, each.spill_bytes, each.shared_bytes]
    described = [spec.family.name, spec.config.settings(usual) or "default", spec.config.describe(), each.failure]
    return [_state(each), *times, *resources, *map(texts.number, described)]


def _state(each: TriedConfig) -> str:
    """What the page shows a candidate as."""
    if each.failure:
        return "failed"
    if not each.tried:
        return "untried"
    return "predicted" if each.seconds is None else "measured"


def _refused(other: PassedOver, texts: ValueTable, names: bool) -> list[list[Any]]:
    """By reasons, the most frequent first: how many, and which if they are named, as family and config."""
    by_reasons: dict[str, list[str]] = {}
    for family, config, reasons in other.refused:
        by_reasons.setdefault("; ".join(reasons), []).append(f"{family.name} {config.name}")
    found = sorted(by_reasons.items(), key=lambda item: -len(item[1]))
    return [[texts.number(why), len(which), texts.number(", ".join(which)) if names else None] for why, which in found]
