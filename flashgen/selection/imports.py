"""Kernels imported from generated folders: which there are, and which of them takes a call. No torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flashgen.build.gpu.driver import Gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from ..records.choice import bucket as bucket_of
from ..records.choice import by_nearness
from . import bundle


@dataclass
class _OfProblem:
    """The kernels of one problem on one GPU.

    by_bucket: of each family the one for a bucket, or for workloads of all sizes; tuned: by the workload of the record that chose it
    """

    by_bucket: dict[tuple[str, Workload | None], Kernel] = field(default_factory=dict)
    tuned: dict[Workload, Kernel] = field(default_factory=dict)

    def preferred(self, bucket: Workload | None, takes: Callable[[Kernel], bool]) -> Kernel | None:
        """Of the families that have a kernel for a bucket, or for all sizes, the one preferred."""
        able = [kernel for (_, of), kernel in self.by_bucket.items() if of == bucket and takes(kernel)]
        return max(able, key=lambda kernel: kernel.spec.family.preference, default=None)


class Imports:
    """Kernels imported with `flashgen.load`, preferred over everything else for their problem and architecture.

    Safe to use from several threads.
    """

    def __init__(self, changed: Callable[[], object]) -> None:
        """`changed` is called whenever earlier choices may no longer be the right ones."""
        self._changed = changed
        self._kernels: dict[tuple[Problem, str, int], _OfProblem] = {}
        self._folders: tuple[Path, ...] = ()  # registered, to be loaded on each GPU
        self._asked: dict[int, tuple[Path, ...]] = {}  # by ordinal: those of them that were loaded there
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def load(self, folder: Path, gpu: Gpu) -> list[Kernel]:
        """Loads the kernels of a generated folder for a GPU's architecture, and adds them. Raises as `read_bundle`, and adds none then."""
        generated = bundle.read_bundle(folder, gpu.device.target)
        kernels = [Kernel(one.spec, one.artifact, gpu) for one in generated]
        for one, kernel in zip(generated, kernels, strict=True):
            self.add(kernel, one.bucket, one.workloads)
        return kernels

    def register(self, folder: Path) -> None:
        """Has each GPU load the kernels of a generated folder before the first choice for it. Nothing is read before.

        A relative path is of the working directory that there is now.
        """
        folder = folder.absolute()
        with self._lock:
            self._folders = tuple(dict.fromkeys((*self._folders, folder)))
        self._changed()

    def is_pending(self, gpu: Gpu) -> bool:
        """Whether kernels of registered folders have yet to be loaded on a GPU."""
        return self._asked.get(gpu.ordinal, ()) != self._folders

    def _load_registered(self, gpu: Gpu) -> None:
        """Loads what is pending. Raises ArgumentError if none of the registered folders has a kernel for the GPU's architecture."""
        with self._loading:
            folders, asked = self._folders, self._asked.get(gpu.ordinal, ())
            if folders == asked:
                return
            refusals = []
            for folder in folders:
                if folder not in asked:
                    try:
                        self.load(folder, gpu)
                    except bundle.NoKernelError as error:
                        refusals.append(str(error))
                    else:  # at once: where another folder is broken, the next call need not load this one again
                        self._asked[gpu.ordinal] = asked = (*asked, folder)
            if refusals and len(refusals) == len(folders):
                raise ArgumentError("; ".join(refusals))
            self._asked[gpu.ordinal] = folders

    def add(self, kernel: Kernel, bucket: Workload | None = None, workloads: Iterable[Workload] = ()) -> None:
        """Makes a loaded kernel the preferred one for its problem on its GPU: for what `bucket` and `workloads` say, see `Generated`."""
        spec, workloads = kernel.spec, tuple(workloads)
        with self._lock:
            known = self._kernels.setdefault((spec.problem, spec.target.name, kernel.gpu.ordinal), _OfProblem())
            known.tuned |= dict.fromkeys(workloads, kernel)
            if not workloads:
                known.by_bucket[spec.family.name, bucket] = kernel
        self._changed()

    def find(
        self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str] = frozenset(), any_length: bool = False
    ) -> Kernel | None:
        """The imported kernel that takes the workload, if there is one.

        In this order: the one tuned for that very workload, those for its bucket, the one tuned for what is nearest to the bucket, as
        records have it, those for all sizes. Of several families the one preferred. `excluded`: names of families that do not count;
        `any_length`: what the lengths of its bucket get that nothing was tuned for.
        """
        if self.is_pending(gpu):
            self._load_registered(gpu)
        known, takes = self._of(problem, gpu), _taker(workload, excluded)
        exact, bucket = known.tuned.get(workload), bucket_of(workload)
        if exact is not None and not any_length and takes(exact):
            return exact
        near = (known.tuned[other] for other in by_nearness(known.tuned, bucket))
        return known.preferred(bucket, takes) or next(filter(takes, near), None) or known.preferred(None, takes)

    def farthest(self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str] = frozenset()) -> Kernel | None:
        """For where no other kernel can be had: the imported one for what is nearest to the workload, however far away that is."""
        known, bucket = self._of(problem, gpu), bucket_of(workload)
        kernels = known.tuned | {of: kernel for (_, of), kernel in known.by_bucket.items() if of is not None}
        near = (kernels[other] for other in by_nearness(kernels, bucket, math.inf))
        return next(filter(_taker(workload, excluded), near), None)

    def workloads(self, problem: Problem, gpu: Gpu) -> frozenset[Workload]:
        """Those that kernels are tuned for: all others of a bucket get the same kernel."""
        return frozenset(self._of(problem, gpu).tuned)

    def has_any(self, gpu: Gpu) -> bool:
        """Whether kernels were imported for a GPU."""
        with self._lock:
            return any(ordinal == gpu.ordinal for _, _, ordinal in self._kernels)

    def _of(self, problem: Problem, gpu: Gpu) -> _OfProblem:
        with self._lock:
            known = self._kernels.get((problem, gpu.device.target.name, gpu.ordinal), _OfProblem())
            return _OfProblem(dict(known.by_bucket), dict(known.tuned))

    def clear(self) -> None:
        """Forgets all imported kernels, and registered folders."""
        with self._lock:
            self._kernels.clear()
            self._folders, self._asked = (), {}
        self._changed()


def _taker(workload: Workload, excluded: frozenset[str]) -> Callable[[Kernel], bool]:
    """Says of a kernel whether it may be taken for a workload."""

    def takes(kernel: Kernel) -> bool:
        spec = kernel.spec
        return spec.family.name not in excluded and not spec.family.config_refusals(spec.config, workload)

    return takes
