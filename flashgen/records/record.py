"""One tuning record: what was measured of one candidate on one GPU, or why it cannot be used; and its JSON form. No torch."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from flashgen.codegen.errors import ArgumentError, choice_error, require_int
from flashgen.codegen.plain import INLINE, digest, from_plain, named, to_plain
from flashgen.codegen.problem import Problem
from flashgen.codegen.spec import PlainSpec
from flashgen.codegen.workload import Workload

BENCHMARK_VERSION = 3  # raise when flashgen/timing changes what a recorded time means

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Timing:
    """Time of one launch, in seconds: median, 10 % and 90 % over the rounds."""

    seconds: float
    low: float
    high: float
    rounds: int

    def __post_init__(self) -> None:
        for name in ("low", "seconds", "high"):
            value = getattr(self, name)
            if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
                raise ArgumentError(f"{name} must be a finite number of seconds > 0, as a float; got {value!r}")
        if not self.low <= self.seconds <= self.high:
            raise ArgumentError(f"seconds must be from low {self.low} to high {self.high}; got {self.seconds}")
        require_int("rounds", self.rounds, 1, _INT_MAX)


class FailureKind(enum.Enum):
    """Why a candidate has no time: it does not compile, spills or has an ignored directive, is wrong, or does not launch."""

    COMPILE = "compile"
    DEFECT = "defect"
    WRONG = "wrong"
    LAUNCH = "launch"


@dataclass(frozen=True)
class Failure:
    """A candidate that cannot be used, and why."""

    kind: FailureKind = field(metadata=named("failure"))
    message: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, FailureKind):
            raise choice_error("kind", self.kind, FailureKind)
        _require_text("message", self.message, empty=True)


@dataclass(frozen=True)
class RecordKey:
    """What a measurement is of, and what it was made with and on."""

    device_name: str
    sm_count: int
    driver_version: str
    nvrtc_version: str
    spec_digest: str
    workload: Workload
    benchmark_version: int

    def __post_init__(self) -> None:
        for name in ("device_name", "driver_version", "nvrtc_version", "spec_digest"):
            _require_text(name, getattr(self, name))
        require_int("sm_count", self.sm_count, 1, _INT_MAX)
        require_int("benchmark_version", self.benchmark_version, 0, _INT_MAX)
        if not isinstance(self.workload, Workload):
            raise ArgumentError(f"workload must be a Workload; got {self.workload!r}")

    @property
    def toolchain(self) -> tuple[str, str]:
        """The versions of driver and compiler."""
        return self.driver_version, self.nvrtc_version


@dataclass(frozen=True)
class Record:
    """One candidate's outcome. Registers and spills are a thread's, shared memory is a block's.

    `spec` is `KernelSpec.to_json()`, of any revision. Raises ArgumentError unless the key's spec_digest is its digest.
    """

    key: RecordKey = field(metadata=INLINE)
    spec: dict[str, Any]
    outcome: Timing | Failure
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None

    def __post_init__(self) -> None:
        if not isinstance(self.key, RecordKey):
            raise ArgumentError(f"key must be a RecordKey; got {self.key!r}")
        PlainSpec.from_json(self.spec)
        if self.key.spec_digest != digest(self.spec):
            raise ArgumentError(f"spec_digest must be the digest of the spec; got {self.key.spec_digest!r}")
        if not isinstance(self.outcome, (Timing, Failure)):
            raise ArgumentError(f"outcome must be a Timing or a Failure; got {self.outcome!r}")
        for name in ("registers", "spill_bytes", "shared_bytes"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 0, _INT_MAX)

    @property
    def problem(self) -> Problem:
        """The problem of its spec."""
        return PlainSpec.from_json(self.spec).problem

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values; times in seconds, sizes in bytes."""
        values: dict[str, Any] = to_plain(self)
        return values

    @classmethod
    def from_json(cls, values: object) -> Record:
        """The reverse of `to_json`. Raises ArgumentError for a field that is unknown, missing, of a wrong type or not allowed."""
        return from_plain(cls, values, "record")


def _require_text(name: str, value: object, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        raise ArgumentError(f"{name} must be {'' if empty else 'non-empty '}text; got {value!r}")
