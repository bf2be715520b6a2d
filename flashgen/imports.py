"""Kernels imported with `flashgen.load`: which there are, and which of them takes a call. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flashgen.build.driver import Gpu
from flashgen.build.kernel import Kernel
from flashgen.codegen.problem import Problem, Workload


class Imports:
    """Kernels imported with `flashgen.load`, preferred over everything else for their problem and architecture."""

    def __init__(self, changed: Callable[[], object]) -> None:
        """`changed` is called whenever earlier choices may no longer be the right ones."""
        self._changed = changed
        self._kernels: dict[tuple[Problem, str, int], dict[str, Kernel]] = {}
        self._lock = threading.Lock()

    def add(self, kernel: Kernel) -> None:
        """Makes a loaded kernel the preferred one for its problem on its GPU."""
        spec = kernel.spec
        with self._lock:
            self._kernels.setdefault((spec.problem, spec.target.name, kernel.gpu.ordinal), {})[spec.family.name] = kernel
        self._changed()

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
        self._changed()
