"""Kernels imported with `flashgen.load`: which there are, and which of them takes a call. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flashgen.build.gpu.driver import Gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

from ..records.choice import bucket as bucket_of


class Imports:
    """Kernels imported with `flashgen.load`, preferred over everything else for their problem and architecture."""

    def __init__(self, changed: Callable[[], object]) -> None:
        """`changed` is called whenever earlier choices may no longer be the right ones."""
        self._changed = changed
        self._kernels: dict[tuple[Problem, str, int], dict[tuple[str, Workload | None], Kernel]] = {}
        self._lock = threading.Lock()

    def add(self, kernel: Kernel, bucket: Workload | None = None) -> None:
        """Makes a loaded kernel the preferred one for its problem on its GPU, for workloads of `bucket` alone unless it is None."""
        spec = kernel.spec
        with self._lock:
            self._kernels.setdefault((spec.problem, spec.target.name, kernel.gpu.ordinal), {})[spec.family.name, bucket] = kernel
        self._changed()

    def find(self, problem: Problem, workload: Workload, gpu: Gpu, excluded: frozenset[str] = frozenset()) -> Kernel | None:
        """The imported kernel that takes the workload, if there is one. `excluded`: names of families that do not count.

        One for the workload's bucket comes before those for all; of several families the one preferred.
        """
        with self._lock:
            imported = dict(self._kernels.get((problem, gpu.device.target.name, gpu.ordinal), {}))
        able = [
            (bucket is not None, kernel.spec.family.preference, kernel)
            for (name, bucket), kernel in imported.items()
            if name not in excluded and bucket in (None, bucket_of(workload))
            if not kernel.spec.family.config_refusals(kernel.spec.config, workload)
        ]
        return max(able, key=lambda found: found[:2], default=(False, 0, None))[2]

    def clear(self) -> None:
        """Forgets all imported kernels."""
        with self._lock:
            self._kernels.clear()
        self._changed()
