"""One tuning record: what was measured of one candidate on one GPU, or why it cannot be used; and its JSON form. No torch."""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from flashgen.codegen.errors import ArgumentError, choice_error, require_int
from flashgen.codegen.problem import Problem, Workload
from flashgen.codegen.spec import problem_from_json

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

    kind: FailureKind
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

    key: RecordKey
    spec: dict[str, Any]
    outcome: Timing | Failure
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None

    def __post_init__(self) -> None:
        if not isinstance(self.key, RecordKey):
            raise ArgumentError(f"key must be a RecordKey; got {self.key!r}")
        problem_of(self.spec)
        if self.key.spec_digest != hashlib.sha256(canonical(self.spec).encode()).hexdigest():
            raise ArgumentError(f"spec_digest must be the digest of the spec; got {self.key.spec_digest!r}")
        if not isinstance(self.outcome, (Timing, Failure)):
            raise ArgumentError(f"outcome must be a Timing or a Failure; got {self.outcome!r}")
        for name in _SIZES:
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 0, _INT_MAX)

    @property
    def problem(self) -> Problem:
        """The problem of its spec."""
        return problem_of(self.spec)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values; times in seconds, sizes in bytes."""
        if isinstance(self.outcome, Timing):
            outcome = asdict(self.outcome)
        else:
            outcome = {"failure": self.outcome.kind.value, "message": self.outcome.message}
        sizes = {name: getattr(self, name) for name in _SIZES}
        return {**asdict(self.key), "spec": self.spec, "outcome": outcome, **sizes}

    @classmethod
    def from_json(cls, values: Any) -> Record:
        """The reverse of `to_json`. Raises ArgumentError for a field that is unknown, missing, of a wrong type or not allowed."""
        given = _fields("record", values, (*_KEY, "spec", "outcome", *_SIZES))
        sizes = _fields("workload", given["workload"], [f.name for f in fields(Workload)])
        key = RecordKey(**{**{name: given[name] for name in _KEY}, "workload": Workload(**sizes)})
        return cls(key, given["spec"], _outcome_from_json(given["outcome"]), *(given[name] for name in _SIZES))


_KEY = tuple(f.name for f in fields(RecordKey))
_SIZES = ("registers", "spill_bytes", "shared_bytes")


def _outcome_from_json(values: Any) -> Timing | Failure:
    if not isinstance(values, dict) or "failure" not in values:
        return Timing(**_fields("outcome", values, [f.name for f in fields(Timing)]))
    failure = _fields("outcome", values, ("failure", "message"))
    if failure["failure"] not in (kinds := [kind.value for kind in FailureKind]):
        raise choice_error("failure", failure["failure"], kinds)
    return Failure(FailureKind(failure["failure"]), failure["message"])


def _fields(what: str, values: Any, names: Iterable[str]) -> dict[str, Any]:
    """`values` if it is an object of exactly these fields."""
    if not isinstance(values, dict) or values.keys() != set(names):
        got = ", ".join(sorted(values)) or "none" if isinstance(values, dict) else type(values).__name__
        raise ArgumentError(f"{what} must have the fields {', '.join(names)}; got {got}")
    return values


def _require_text(name: str, value: object, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        raise ArgumentError(f"{name} must be {'' if empty else 'non-empty '}text; got {value!r}")


def canonical(spec: Any) -> str:
    """The text that `KernelSpec.digest` is of. Raises ArgumentError if `spec` holds anything but JSON values."""
    try:
        return json.dumps(spec, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"spec must hold JSON values; got {spec!r}") from error


def problem_of(spec: Any) -> Problem:
    """The problem of a spec of any revision. Raises ArgumentError if it is no spec."""
    kinds = {"family": str, "revision": int, "problem": dict, "config": dict, "target": str}
    if not isinstance(spec, dict) or spec.keys() != kinds.keys() or not all(isinstance(spec[name], kind) for name, kind in kinds.items()):
        raise ArgumentError(f"spec must have family, revision, problem, config and target, as KernelSpec.to_json gives them; got {spec!r}")
    return problem_from_json(spec["problem"])
