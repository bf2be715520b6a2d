"""From (problem, workload, GPU) to a loaded kernel: imported ones, own records, shipped records, else the model's pick. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from flashgen.build.artifact import Artifact
from flashgen.build.compiler import nvrtc_version
from flashgen.build.driver import Gpu
from flashgen.build.kernel import Kernel
from flashgen.build.store import ArtifactStore
from flashgen.codegen.config import Config
from flashgen.codegen.device import Device
from flashgen.codegen.errors import ArgumentError, choice_error
from flashgen.codegen.family import Family, Strides, families, find_family
from flashgen.codegen.problem import Problem, Workload
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target

from .imports import Imports
from .record_choice import Choice, Known
from .record_choice import bucket as bucket
from .records import Records
from .shipped_records import ShippedRecords

logger = logging.getLogger("flashgen")

BENCHMARK_VERSION = 3  # raise when flashgen/timing.py or measure.py changes what a recorded time means
_MODEL_TRIES = 3


@cache
def store() -> ArtifactStore:
    """The process's artifact store."""
    return ArtifactStore()


@cache
def records() -> Records:
    """The process's tuning records."""
    return Records()


@cache
def shipped_records() -> ShippedRecords:
    """The tuning records that come with the package."""
    return ShippedRecords()


def families_for(problem: Problem, target: Target, name: str | None = None) -> list[Family]:
    """The families that can compute `problem` on `target`, those preferred first; or the one of that name.

    Raises ArgumentError with every family's reasons if none can.
    """
    asked = [find_family(name)] if name is not None else families().values()
    able = _without_reasons({family: family.refusals(problem, target) for family in asked})
    return sorted(able, key=lambda family: (-family.preference, family.name))


def left_out(problem: Problem, workload: Workload, strides: Sequence[Strides], target: Target) -> frozenset[str]:
    """Names of the families that can compute `problem`, but not with these sizes and strides of q, k, v and out.

    Raises ArgumentError with every family's reasons if that leaves none.
    """
    refusals = {family: family.launch_refusals(problem, workload, strides) for family in families_for(problem, target)}
    able = _without_reasons(refusals)
    return frozenset(family.name for family in refusals if family not in able)


def dense_strides(problem: Problem, workload: Workload) -> list[Strides]:
    """Of q, k, v and out, each dense in layout bshd."""
    queries, keys = (workload.len_q, workload.heads_q), (workload.len_kv, workload.heads_kv)
    shapes = ((*queries, problem.head_dim), (*keys, problem.head_dim), (*keys, problem.head_dim_v), (*queries, problem.head_dim_v))
    return [(length * heads * width, width, heads * width) for length, heads, width in shapes]


def _without_reasons(refusals: dict[Family, list[str]]) -> list[Family]:
    """The families that refuse for no reason. Raises ArgumentError with all reasons if all refuse."""
    able = [family for family, reasons in refusals.items() if not reasons]
    if not able:
        raise ArgumentError("; ".join(dict.fromkeys(reason for reasons in refusals.values() for reason in reasons)))
    return able


@dataclass(frozen=True)
class Candidate:
    """A config of a family, with the model's expectation for a workload in seconds and what bounds it."""

    family: Family
    config: Config
    seconds: float
    bound_by: str


def ranked(problem: Problem, workload: Workload, device: Device, among: Sequence[Family] | None = None) -> list[Candidate]:
    """All legal configs of `among`, or of all families that can, that are worth trying, the model's best first. Deterministic."""
    found = []
    for family in families_for(problem, device.target) if among is None else among:
        for config in family.legal_configs(problem, device.target):
            if family.workload_refusals(config, workload) or not family.worth_trying(config, workload):
                continue
            prediction = family.predict(problem, config, workload, device)
            found.append(Candidate(family, config, prediction.seconds, prediction.bound_by))
    return sorted(found, key=lambda c: (c.seconds, c.config.name))


def shortlist(problem: Problem, workload: Workload, device: Device, count: int, among: Sequence[Family] | None = None) -> list[Candidate]:
    """The model's best `count` of `ranked`. Of configs that it cannot tell apart, two will do: the others would crowd out what differs."""
    chosen: list[Candidate] = []
    for candidate in ranked(problem, workload, device, among):
        if sum(c.seconds == candidate.seconds for c in chosen) < 2:
            chosen.append(candidate)
        if len(chosen) == count:
            break
    return chosen


def compile_spec(spec: KernelSpec) -> Artifact:
    """The artifact of a spec, from the store or the compiler. Raises CompileError."""
    return store().get_or_compile(render(spec), spec.target.name)


def family_of(config: Config) -> Family:
    """The family that a config belongs to. Raises ArgumentError if there is none."""
    owners = {family.config_type: family for family in families().values()}
    if type(config) not in owners:
        raise choice_error("config", type(config).__name__, [kind.__name__ for kind in owners])
    return owners[type(config)]


def default_spec(problem: Problem, target: Target, without: frozenset[str] = frozenset(), family: str | None = None) -> KernelSpec:
    """The config for where nothing is known: it compiles cleanly everywhere. Of the family preferred, or of the one of that name.

    `without`: names of families that are left out.
    """
    chosen = next(able for able in families_for(problem, target, family) if able.name not in without)
    return KernelSpec(chosen, problem, chosen.default(problem, target), target)


@dataclass(frozen=True)
class Pick:
    """A record that speaks for a workload: whose it is, and its choice."""

    whose: str
    choice: Choice

    @property
    def name(self) -> str:
        """For people."""
        toolchain = "" if self.choice.same_toolchain else " of another driver or compiler"
        return f"{self.whose} record{toolchain} for {self.choice.record.key.workload.name}"


def picks(
    problem: Problem,
    workload: Workload,
    device: Device,
    toolchain: tuple[str, str],
    without: frozenset[str] = frozenset(),
    any_length: bool = False,
) -> Iterator[Pick]:
    """The records that speak for a workload on a device, the best first; `toolchain` is the versions of driver and compiler.

    `any_length`: those that speak for the lengths of its bucket without a record of their own.
    In this order: the user's own of that very workload, his own for its bucket, then so of those that come with the package, then so the
    configs of older ones of either. All but the exact ones are chosen for the bucket, so no choice depends on what was called before.
    """
    met: list[tuple[str, Known]] = []
    for whose, source in (("own", records), ("shipped", shipped_records)):
        known = source().known(problem, device, BENCHMARK_VERSION, without)
        met.append((whose, known))
        yield from (Pick(whose, choice) for choice in known.choices(workload, toolchain, any_length))
    for whose, known in met:
        yield from (Pick(whose, choice) for choice in known.choices(workload, toolchain, any_length, older=True))


def model_picks(problem: Problem, workload: Workload, device: Device, without: frozenset[str] = frozenset()) -> Iterator[KernelSpec]:
    """What the model takes for a workload's bucket, the best first, then the default.

    All are of the family preferred: the models of two families need not err in the same direction.
    """
    default = default_spec(problem, device.target, without)
    for candidate in shortlist(problem, bucket(workload), device, _MODEL_TRIES, [default.family]):
        yield KernelSpec(candidate.family, problem, candidate.config, device.target)
    yield default


class Kernels:
    """The kernels that this process has loaded, and the choice among them. Safe to use from several threads.

    A kernel is compiled once, and threads that want different ones do not wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what is here; never held during a compile
        self._locks: dict[Hashable, threading.Lock] = {}
        self._chosen: dict[Hashable, Kernel] = {}
        self._loaded: dict[tuple[str, int], Kernel] = {}
        self._broken: set[Hashable] = set()
        self._said: set[Hashable] = set()
        self.generation = 0  # raised whenever an earlier choice may no longer be the right one

    def choose(
        self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str] = frozenset(), any_length: bool = False
    ) -> Kernel:
        """The kernel for this call; compiles it if it is not in the store. `without`: the call's `left_out`; `any_length`: see `picks`.

        What is chosen depends on the call, the imports and the records alone, not on earlier calls. Raises ArgumentError if no family can.
        """
        while True:
            generation = self.generation
            imported = imports.find(problem, workload, gpu, without)
            if imported is not None:
                return imported
            pick = self._pick(problem, workload, gpu, without, any_length)
            key = self._key(pick, problem, workload, gpu, without)
            with self._locked(key):
                kernel = self._chosen.get(key)
                if kernel is None:
                    kernel = self._load_pick(pick, gpu) if pick else self._model_pick(problem, workload, gpu, without)
                with self._lock:
                    if kernel is None:
                        self._broken.add(key)
                    elif generation == self.generation:
                        self._chosen[key] = kernel
            self._tell(pick, kernel, problem, workload, gpu)
            if kernel is not None:
                return kernel

    def is_chosen(
        self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str] = frozenset(), any_length: bool = False
    ) -> bool:
        """Whether `choose` would return at once."""
        if imports.find(problem, workload, gpu, without) is not None:
            return True
        pick = self._pick(problem, workload, gpu, without, any_length)
        return self._key(pick, problem, workload, gpu, without) in self._chosen

    def load(self, spec: KernelSpec, gpu: Gpu) -> Kernel:
        """One kernel by its spec, from memory, the store or the compiler."""
        key = (spec.digest, gpu.ordinal)
        kernel = self._loaded.get(key)
        if kernel is None:
            with self._locked(key):
                kernel = self._loaded.get(key)
                if kernel is None:
                    kernel = self._loaded[key] = Kernel(spec, compile_spec(spec), gpu)
        return kernel

    def forget(self) -> None:
        """Drops the choices made, so that new records or imports are heard. Kernels in use stay alive."""
        with self._lock:
            self._chosen.clear()
            self.generation += 1

    def _locked(self, key: Hashable) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

    def _pick(self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str], any_length: bool) -> Pick | None:
        """The best record whose kernel is not known to be broken here."""
        families_for(problem, gpu.device.target)
        found = picks(problem, workload, gpu.device, (gpu.driver_version, nvrtc_version()), without, any_length)
        return next((pick for pick in found if self._key(pick, problem, workload, gpu, without) not in self._broken), None)

    @staticmethod
    def _key(pick: Pick | None, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str]) -> Hashable:
        """What a choice is kept under: what the record's kernel follows from, or where there is none what the model is asked."""
        if pick is not None:
            choice = pick.choice
            return (choice.record.key.spec_digest, choice.same_toolchain, choice.older, gpu.ordinal)
        return (problem, bucket(workload), gpu.ordinal, without)

    def _load_pick(self, pick: Pick, gpu: Gpu) -> Kernel | None:
        """None if this compiler breaks the kernel, which only one that was measured here and now is known to be sound of."""
        kernel = self.load(pick.choice.spec(gpu.device.target), gpu)
        sound = pick.choice.same_toolchain and not pick.choice.older
        return kernel if sound or not kernel.artifact.report.defects else None

    def _model_pick(self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str]) -> Kernel:
        """The first that compiles without defects; the default, which comes last, does everywhere."""
        for spec in model_picks(problem, workload, gpu.device, without):
            kernel = self.load(spec, gpu)
            if not kernel.artifact.report.defects:
                break
        return kernel

    def _tell(self, pick: Pick | None, kernel: Kernel | None, problem: Problem, workload: Workload, gpu: Gpu) -> None:
        """Says once a bucket where something other than an own record of that very workload decides, and what could be done."""
        about, of = f"{problem.name} {workload.name}: ", (problem, bucket(workload))
        if pick is None:
            self._say(of, f"{about}no tuning record for {gpu.device.name}, using the model's pick; try `flashgen tune`")
        elif kernel is None:
            self._say((*of, pick.name), f"{about}not using the {pick.name}, whose kernel this compiler breaks")
        elif pick.choice.older:
            self._say((*of, pick.name), f"{about}using the config of the {pick.name}, measured by an older version; try `flashgen tune`")
        elif pick.whose != "own" or not pick.choice.same_toolchain or pick.choice.record.key.workload != workload:
            self._say((*of, pick.name), f"{about}using the {pick.name}")

    def _say(self, once: Hashable, message: str) -> None:
        if once not in self._said:
            self._said.add(once)
            logger.info(message)


kernels = Kernels()
imports = Imports(changed=kernels.forget)
