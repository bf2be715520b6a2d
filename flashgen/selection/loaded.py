"""The kernels that this process has loaded, and the choice among them: imported ones, records, else the model's pick. No torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable
from dataclasses import dataclass

from flashgen.build.gpu.driver import Gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.nvrtc import CompilerMissingError, nvrtc_version
from flashgen.codegen.problem import Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload

from ..records import sources
from ..records.choice import bucket, bucket_sizes
from . import compilation
from .families import families_for, families_not_asked
from .imports import Imports
from .picks import Pick, model_picks, picks, recorded_workloads

logger = logging.getLogger("flashgen")


@dataclass(frozen=True)
class _Bucket:
    """What all workloads of a bucket get but those `recorded`, which have a record of their own; `sources`: what that followed from."""

    kernel: Kernel
    recorded: frozenset[Workload]
    sources: tuple[object, ...]


class Kernels:
    """The kernels that this process has loaded, and the choice among them. Safe to use from several threads.

    A kernel is compiled once, and threads that want different ones do not wait for each other.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what is here; never held during a compile
        self._locks: dict[Hashable, threading.Lock] = {}
        self._chosen: dict[Hashable, Kernel] = {}
        self._buckets: dict[Hashable, _Bucket] = {}
        self._loaded: dict[tuple[str, int], Kernel] = {}
        self._broken: set[Hashable] = set()
        self._said: set[Hashable] = set()
        self.generation = 0  # raised whenever an earlier choice may no longer be the right one

    def choose(
        self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str] = frozenset(), any_length: bool = False
    ) -> Kernel:
        """The kernel for this call; compiles it if it is not in the store.

        `excluded`: names of the families that cannot take the call; `any_length`: see `picks`.

        What is chosen depends on the call, the imports and the records alone, not on earlier calls. Raises ArgumentError if no family can.
        """
        kernel = self.cached(problem, workload, gpu, excluded, any_length)
        if kernel is None:
            sources_then = self.sources()
            kernel = self._choose(problem, workload, gpu, excluded, any_length)
            recorded = recorded_workloads(problem, gpu.device, excluded | families_not_asked()) | imports.workloads(problem, gpu)
            if workload not in recorded:
                with self._lock:
                    if sources_then == self.sources():
                        sizes = bucket_sizes(workload)
                        recorded = frozenset(other for other in recorded if bucket_sizes(other) == sizes)
                        self._buckets[problem, sizes, gpu.ordinal, excluded] = _Bucket(kernel, recorded, sources_then)
        return kernel

    def cached(self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str], any_length: bool) -> Kernel | None:
        """What `choose` would return, if it has chosen for another workload of this one's bucket: found without walking records.

        The answer is the same as long as imports and records are what they were then, unless this very workload has a record.
        """
        found = self._buckets.get((problem, bucket_sizes(workload), gpu.ordinal, excluded))
        if found is None or (found.recorded and workload in found.recorded and not any_length) or found.sources != self.sources():
            return None
        return found.kernel

    def chooses_alike(self, kernel: Kernel, problem: Problem, known: Workload, workload: Workload) -> bool:
        """Whether a workload gets the kernel that one which is known got by its bucket, without excluded families, while `sources` stay.

        Of `Size`s: from there on they are of that bucket, and the workload has no record of its own.
        """
        sizes = bucket_sizes(known)
        found = self._buckets.get((problem, sizes, kernel.gpu.ordinal, frozenset()))
        if found is None or found.kernel is not kernel or found.sources != self.sources() or known in found.recorded:
            return False
        return bucket_sizes(workload) == sizes and not any(workload == other for other in found.recorded)

    def sources(self) -> tuple[object, ...]:
        """What a choice follows from beside the call: differs from what it was earlier once imports or records may have changed."""
        own = sources.own_records()
        return self.generation, own, own.generation, sources.shipped_records()

    def _choose(self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str], any_length: bool) -> Kernel:
        while True:
            generation = self.generation
            imported = self._imported(problem, workload, gpu, excluded, any_length)
            if imported is not None:
                return imported
            pick = self._pick(problem, workload, gpu, excluded, any_length)
            key = self._key(pick, problem, workload, gpu, excluded)
            with self._locked(key):
                kernel = self._chosen.get(key)
                if kernel is None:
                    kernel = self._load_pick(pick, gpu) if pick else self._model_pick(problem, workload, gpu, excluded)
                with self._lock:
                    if kernel is None:
                        self._broken.add(key)
                    elif generation == self.generation:
                        self._chosen[key] = kernel
            self._tell(pick, kernel, problem, workload, gpu)
            if kernel is not None:
                return kernel

    def is_chosen(
        self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str] = frozenset(), any_length: bool = False
    ) -> bool:
        """Whether `choose` would return at once."""
        if self.cached(problem, workload, gpu, excluded, any_length) is not None:
            return True
        if imports.is_pending(gpu):
            return False
        if self._imported(problem, workload, gpu, excluded, any_length) is not None:
            return True
        pick = self._pick(problem, workload, gpu, excluded, any_length)
        return self._key(pick, problem, workload, gpu, excluded) in self._chosen

    @staticmethod
    def _imported(problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str], any_length: bool) -> Kernel | None:
        """The imported kernel to take; where none can be compiled one that is for other sizes, too, rather than none.

        Raises CompilerMissingError if kernels were imported, none of them takes the workload, and none can be compiled.
        """
        found = imports.find(problem, workload, gpu, excluded, any_length)
        if found is not None or not imports.has_any(gpu) or not (reason := compilation.why_no_compile()):
            return found
        if (found := imports.farthest(problem, workload, gpu, excluded)) is None:
            about = f"{problem.name} {workload.name}"
            raise CompilerMissingError(f"{about}: none of the loaded kernels takes it, and none can be compiled here, as {reason}")
        return found

    def load(self, spec: KernelSpec, gpu: Gpu) -> Kernel:
        """One kernel by its spec, from memory, the store or the compiler."""
        key = (spec.digest, gpu.ordinal)
        kernel = self._loaded.get(key)
        if kernel is None:
            with self._locked(key):
                kernel = self._loaded.get(key)
                if kernel is None:
                    kernel = self._loaded[key] = Kernel(spec, compilation.compile_spec(spec), gpu)
        return kernel

    def forget(self) -> None:
        """Drops the choices made, so that new records or imports are heard. Kernels in use stay alive."""
        with self._lock:
            self._chosen.clear()
            self._buckets.clear()
            self.generation += 1

    def _locked(self, key: Hashable) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())

    def _pick(self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str], any_length: bool) -> Pick | None:
        """The best record whose kernel is not known to be broken here."""
        families_for(problem, gpu.device.target)
        found = picks(problem, workload, gpu.device, (gpu.driver_version, nvrtc_version()), excluded | families_not_asked(), any_length)
        return next((pick for pick in found if self._key(pick, problem, workload, gpu, excluded) not in self._broken), None)

    @staticmethod
    def _key(pick: Pick | None, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str]) -> Hashable:
        """What a choice is kept under: what the record's kernel follows from, or where there is none what the model is asked."""
        if pick is not None:
            choice = pick.choice
            return (choice.record.key.spec_digest, choice.problem, choice.same_toolchain, choice.older, gpu.ordinal)
        return (problem, bucket(workload), gpu.ordinal, excluded)

    def _load_pick(self, pick: Pick, gpu: Gpu) -> Kernel | None:
        """None if this compiler breaks the kernel, which only one that was measured here and now is known to be sound of."""
        kernel = self.load(pick.choice.spec(gpu.device.target), gpu)
        sound = pick.choice.same_toolchain and not pick.choice.older
        return kernel if sound or not kernel.artifact.report.defects else None

    def _model_pick(self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str]) -> Kernel:
        """The first that compiles without defects. Where many modifiers leave none, the one that spills least."""
        broken = []
        for spec in model_picks(problem, workload, gpu.device, excluded):
            kernel = self.load(spec, gpu)
            if not kernel.artifact.report.defects:
                return kernel
            broken.append(kernel)
        return min(broken, key=lambda kernel: kernel.artifact.report.spill_bytes)

    def _tell(self, pick: Pick | None, kernel: Kernel | None, problem: Problem, workload: Workload, gpu: Gpu) -> None:
        """Says once a bucket where something other than an own record of that very workload decides, and what could be done."""
        about, of = f"{problem.name} {workload.name}: ", (problem, bucket(workload))
        if pick is None:
            self._say(of, f"{about}no tuning record for {gpu.device.name}, using the model's pick; try `flashgen tune`")
        elif kernel is None:
            self._say((*of, pick.name), f"{about}not using the {pick.name}, whose kernel this compiler breaks")
        elif pick.choice.older:
            why = ", measured by an older version" * pick.choice.is_of_older_version
            self._say((*of, pick.name), f"{about}using the config of the {pick.name}{why}; try `flashgen tune`")
        elif pick.whose != "own" or not pick.choice.same_toolchain or pick.choice.record.key.workload != workload:
            self._say((*of, pick.name), f"{about}using the {pick.name}")

    def _say(self, once: Hashable, message: str) -> None:
        if once not in self._said:
            self._said.add(once)
            logger.info(message)


kernels = Kernels()
imports = Imports(changed=kernels.forget)
