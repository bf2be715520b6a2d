"""The results of tunes, made up: times near the model's, failures of every kind, texts that a page must not take for its own."""

from __future__ import annotations

from dataclasses import replace

from flashgen.cells import Cell, cells_of
from flashgen.codegen.devices import find_device
from flashgen.tuning.request import Request
from flashgen.tuning.result import Row, TriedConfig, TuneResult

DEVICE = find_device("h200")
REASONS = (
    "compile: error: expected a `;` after </script><b>&amp;</b> <!-- <script>",
    "defect: spills 48 B",
    "wrong: out is off by 0.25, 0.01 is allowed, in 'B1 H2 S7'",
    "launch: CUDA_ERROR_ILLEGAL_ADDRESS",
)


def made_request(lengths: tuple[int, ...] = (1024, 4096)) -> Request:
    """Both masks of head dim 64."""
    return Request(cells_of(64, seqlens=lengths), device="h200")


def made_result(request: Request, timed: bool = True) -> TuneResult:
    """Of each cell the model's candidates: some have failed, the last was not tried. timed: whether the others were measured."""
    rows = [_row(request, cell, timed, seed) for seed, cell in enumerate(request.cells)]
    failures = {each.spec.name: each.failure for row in rows for each in row.candidates if each.failure}
    measured = sum(each.seconds is not None for row in rows for each in row.candidates)
    return TuneResult(DEVICE.name, timed, False, rows, failures, measured, 12.5, not_verified="no <compiler> & nothing else")


def _row(request: Request, cell: Cell, timed: bool, seed: int) -> Row:
    default = request.default(cell, DEVICE)
    tried = []
    for i, spec in enumerate(request.candidates(cell, DEVICE)):
        predicted = spec.family.predict(spec.problem, spec.config, cell.workload, DEVICE, 168).seconds
        median = predicted * (0.97 + ((7 * i + 5 * seed) % 11) / 50)
        tried.append(TriedConfig(spec, median, median * 0.99, median * 1.02, predicted, "tensor cores", 168, 0, 90000 + i))
    for i, reason in zip(range(2, len(tried), 3), REASONS, strict=False):
        tried[i] = _without_time(tried[i], reason)
    tried[-2] = replace(_without_time(tried[-2]), tried=False, registers=None, spill_bytes=None)
    if not timed:
        tried = [_without_time(each, each.failure) for each in tried]
    sound = [each for each in tried if not each.failure and each.tried]
    best = min(sound, key=lambda each: each.seconds or each.predicted)
    return Row.of(cell, default, tuple(tried), sum(bool(each.failure) for each in tried), best, 1.25 + seed)


def _without_time(each: TriedConfig, failure: str = "") -> TriedConfig:
    return replace(each, seconds=None, low=None, high=None, failure=failure)
