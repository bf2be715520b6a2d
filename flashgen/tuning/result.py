"""What a tune found: a `Row` for each cell with its candidates, and the `TuneResult` that holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashgen.codegen.devices import Device
from flashgen.codegen.plain import to_plain
from flashgen.codegen.spec import KernelSpec

from ..cells import Cell

Times = tuple[float | None, float | None, float | None]
"""What was measured of a kernel: median, 10 % and 90 % over the rounds, in seconds."""
NO_TIMES: Times = (None, None, None)


@dataclass(frozen=True)
class TriedConfig:
    """What is known of one candidate of a cell; times in seconds, None where there is none.

    seconds, low, high: what was measured, now or by a tuning record: median, 10 % and 90 % over the rounds, where those are known
    predicted, bound_by: the model's time, and what takes it, with the compiler's registers where it was compiled
    failure: why it cannot be used, empty if nothing is known against it
    tried: False where the budget ended before it was compiled, or measured
    """

    spec: KernelSpec
    seconds: float | None
    low: float | None
    high: float | None
    predicted: float
    bound_by: str
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int
    failure: str = ""
    tried: bool = True

    @classmethod
    def of(
        cls,
        cell: Cell,
        spec: KernelSpec,
        device: Device,
        times: Times,
        registers: int | None,
        spill_bytes: int | None,
        failure: str = "",
        tried: bool = True,
    ) -> TriedConfig:
        """A candidate with what the model says of it."""
        model = spec.family.predict(spec.problem, spec.config, cell.workload, device, registers)
        shared = spec.largest_block.shared_bytes
        return cls(spec, *times, model.seconds, model.bound_by, registers, spill_bytes, shared, failure, tried)


@dataclass(frozen=True)
class Row:
    """The winner of one cell, if any was sound. `gain` is the untuned default's time over the winner's.

    default: what `gain` compares with; candidates: all that were to be tried, with their outcomes; failed: how many of those tried
    measured: whether `seconds` was measured, now or by a tuning record; else it is the model's
    """

    cell: Cell
    default: KernelSpec
    candidates: tuple[TriedConfig, ...]
    failed: int
    spec: KernelSpec | None = None
    seconds: float | None = None
    gain: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    bound_by: str = ""
    measured: bool = False

    @classmethod
    def of(
        cls,
        cell: Cell,
        default: KernelSpec,
        candidates: tuple[TriedConfig, ...],
        failed: int,
        winner: TriedConfig | None,
        gain: float | None,
    ) -> Row:
        """The row of a winner, which need be none of the candidates: an earlier tune may have had others."""
        if winner is None:
            return cls(cell, default, candidates, failed)
        measured = winner.seconds is not None
        seconds = winner.seconds if measured else winner.predicted
        resources = (winner.registers, winner.spill_bytes, winner.shared_bytes)
        return cls(cell, default, candidates, failed, winner.spec, seconds, gain, *resources, winner.bound_by, measured)

    @property
    def tried(self) -> int:
        """How many candidates were."""
        return sum(each.tried for each in self.candidates)

    @property
    def tflops(self) -> float | None:
        """TFLOP/s by the field's count."""
        return self.cell.flops / self.seconds / 1e12 if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values; times in seconds."""
        return {
            "problem": self.cell.problem.name,
            "workload": to_plain(self.cell.workload),
            "config": self.spec.config.to_json() if self.spec else None,
            "kernel": self.spec.name if self.spec else None,
            **{
                n: getattr(self, n)
                for n in (
                    "seconds",
                    "tflops",
                    "gain",
                    "registers",
                    "spill_bytes",
                    "shared_bytes",
                    "bound_by",
                    "tried",
                    "failed",
                    "measured",
                )
            },
        }


@dataclass(frozen=True)
class TuneResult:
    """What a tune found. `timed` is False where times are the model's; `complete` is False where the budget ended it.

    device_measured: whether measurements on this device stand behind the times: these, or those that the model was fitted to.
    verified_on_cpu: kernels found right there, where there is no GPU; not_verified: why others were not tried, empty if none was left out.
    """

    device: str
    timed: bool
    complete: bool
    rows: list[Row]
    failures: dict[str, str]
    measured: int
    seconds: float
    device_measured: bool = True
    verified_on_cpu: int = 0
    not_verified: str = ""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        names = ("device", "timed", "device_measured", "complete", "failures", "measured", "seconds", "verified_on_cpu", "not_verified")
        return {**{name: getattr(self, name) for name in names}, "rows": [row.to_json() for row in self.rows]}
