"""From (problem, workload, GPU) to a loaded kernel: imported ones, own records, shipped records, else the model's pick. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from flashgen.build.artifact import Artifact
from flashgen.build.compiler import nvrtc_version
from flashgen.build.driver import Gpu
from flashgen.build.kernel import Kernel
from flashgen.build.store import ArtifactStore
from flashgen.codegen.config import Config
from flashgen.codegen.device import Device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import Family, Strides, families, find_family
from flashgen.codegen.problem import Problem, Workload
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target

from .records import Choice, Records
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
    """The family that a config belongs to."""
    return next(family for family in families().values() if type(config) is family.config_type)


def default_spec(problem: Problem, target: Target, without: frozenset[str] = frozenset(), family: str | None = None) -> KernelSpec:
    """The config for where nothing is known: it compiles cleanly everywhere. Of the family preferred, or of the one of that name.

    `without`: names of families that are left out.
    """
    chosen = next(able for able in families_for(problem, target, family) if able.name not in without)
    return KernelSpec(chosen, problem, chosen.default(problem, target), target)


def bucket(workload: Workload) -> Workload:
    """The workload that stands for all of its size: lengths and batch * heads rounded up to powers of two.

    One kernel is chosen per bucket, so a length not seen before costs at most one compile per bucket.
    """
    group = workload.heads_q // max(1, workload.heads_kv)
    heads = _power_of_two(workload.batch * workload.heads_kv)
    return Workload(1, heads * group, heads, _power_of_two(workload.len_q), _power_of_two(workload.len_kv))


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _recorded(problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str]) -> Iterator[tuple[str, Choice]]:
    """The best of the user's own records, then the best of those that come with the package; says whose each is."""
    for whose, known in (("own", records()), ("shipped", shipped_records())):
        choice = known.best(problem, workload, gpu.device, gpu.driver_version, nvrtc_version(), BENCHMARK_VERSION, without)
        if choice is not None:
            yield whose, choice


class Kernels:
    """The kernels that this process has loaded, and the choice among them. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._chosen: dict[tuple[Problem, Workload, int, frozenset[str]], Kernel] = {}
        self._loaded: dict[tuple[str, int], Kernel] = {}
        self._said: set[str] = set()
        self.generation = 0  # raised whenever an earlier choice may no longer be the right one

    def choose(self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str] = frozenset()) -> Kernel:
        """The kernel for this call; compiles it if it is not in the store. `without`: the call's `left_out`.

        Raises ArgumentError if no family can.
        """
        key = (problem, bucket(workload), gpu.ordinal, without)
        kernel = self._chosen.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._chosen.get(key) or self._choose(problem, workload, gpu, without)
                self._chosen[key] = kernel
        return kernel

    def is_chosen(self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str] = frozenset()) -> bool:
        """Whether `choose` would return at once."""
        return (problem, bucket(workload), gpu.ordinal, without) in self._chosen

    def load(self, spec: KernelSpec, gpu: Gpu) -> Kernel:
        """One kernel by its spec, from memory, the store or the compiler."""
        with self._lock:
            key = (spec.digest, gpu.ordinal)
            if key not in self._loaded:
                self._loaded[key] = Kernel(spec, compile_spec(spec), gpu)
            return self._loaded[key]

    def forget(self) -> None:
        """Drops the choices made, so that new records or imports are heard. Kernels in use stay alive."""
        with self._lock:
            self._chosen.clear()
            self.generation += 1

    def _choose(self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str]) -> Kernel:
        imported = imports.find(problem, workload, gpu, without)
        if imported is not None:
            return imported
        families_for(problem, gpu.device.target)
        for whose, choice in _recorded(problem, workload, gpu, without):
            kernel = self.load(KernelSpec.from_json(choice.record.spec, gpu.device.target), gpu)
            toolchain = "" if choice.same_toolchain else " of another driver or compiler"
            record = f"{whose} record{toolchain} for {choice.record.key.workload.name}"
            if not choice.same_toolchain and kernel.artifact.report.defects:
                self._say(f"{problem.name} {workload.name}: not using the {record}, whose kernel this compiler breaks")
                continue
            if whose != "own" or not choice.exact_workload or not choice.same_toolchain:
                self._say(f"{problem.name} {workload.name}: using the {record}")
            return kernel
        self._say(f"{problem.name} {workload.name}: no tuning record for {gpu.device.name}, using the model's pick; try `flashgen tune`")
        return self._model_pick(problem, workload, gpu, without)

    def _model_pick(self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str]) -> Kernel:
        """Of the family preferred: the models of two families need not err in the same direction."""
        default = default_spec(problem, gpu.device.target, without)
        for candidate in shortlist(problem, workload, gpu.device, _MODEL_TRIES, [default.family]):
            kernel = self.load(KernelSpec(candidate.family, problem, candidate.config, gpu.device.target), gpu)
            if not kernel.artifact.report.defects:
                return kernel
        return self.load(default, gpu)

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.info(message)


class Imports:
    """Kernels imported with `flashgen.load`, preferred over everything else for their problem and architecture."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Problem, str, int], dict[str, Kernel]] = {}
        self._lock = threading.Lock()

    def add(self, kernel: Kernel) -> None:
        """Makes a loaded kernel the preferred one for its problem on its GPU."""
        spec = kernel.spec
        with self._lock:
            self._kernels.setdefault((spec.problem, spec.target.name, kernel.gpu.ordinal), {})[spec.family.name] = kernel
        kernels.forget()

    def find(self, problem: Problem, workload: Workload, gpu: Gpu, without: frozenset[str] = frozenset()) -> Kernel | None:
        """The imported kernel that takes the workload, if there is one; of several families that preferred. `without`: names of others."""
        with self._lock:
            of_families = dict(self._kernels.get((problem, gpu.device.target.name, gpu.ordinal), {}))
        able = [
            kernel
            for name, kernel in of_families.items()
            if name not in without and not kernel.spec.family.workload_refusals(kernel.spec.config, workload)
        ]
        return max(able, key=lambda kernel: kernel.spec.family.preference, default=None)

    def clear(self) -> None:
        """Forgets all imported kernels."""
        with self._lock:
            self._kernels.clear()
        kernels.forget()


imports = Imports()
kernels = Kernels()
