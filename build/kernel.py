"""`Kernel`: an artifact loaded on one GPU, ready to launch; `Launch`: one such kernel with everything but its pointers bound."""

from __future__ import annotations

import ctypes
import struct
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.codegen.errors import ArgumentError

from .driver import Gpu, check, driver

if TYPE_CHECKING:
    from flashgen.codegen.spec import KernelSpec

    from .artifact import Artifact

MAX_GRID = 2**31 - 1


class Kernel:
    """An artifact loaded on one GPU. Independent of CUDA contexts; safe to share between threads."""

    def __init__(self, spec: KernelSpec, artifact: Artifact, gpu: Gpu) -> None:
        """Loads the machine code. Raises DriverError if the driver refuses it, ArgumentError if it is for another architecture."""
        cu = driver()
        if artifact.arch != gpu.device.target.name:
            raise ArgumentError(
                f"artifact must be for {gpu.device.target.name}, the architecture of device {gpu.ordinal}; got {artifact.arch}"
            )
        self.spec, self.artifact, self.gpu = spec, artifact, gpu
        self.threads = spec.family.threads(spec.config)
        self.shared_bytes = spec.family.shared_bytes(spec.problem, spec.config)
        library = check(cu.cuLibraryLoadData(artifact.cubin, [], [], 0, [], [], 0), f"loading {artifact.entry}")
        self._unload = weakref.finalize(self, cu.cuLibraryUnload, library)
        self._unload.atexit = False  # the driver is gone by then
        kernel = check(cu.cuLibraryGetKernel(library, artifact.entry.encode()), f"finding {artifact.entry}")
        device = check(cu.cuDeviceGet(gpu.ordinal), "finding the GPU")
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuKernelSetAttribute(limit, self.shared_bytes, kernel, device), f"allowing {self.shared_bytes} B of shared memory")
        self.handle = cu.CUfunction(int(kernel))

    def bind(self, grid: int, values: tuple[int | float, ...]) -> Launch:
        """Fixes the number of blocks and the parameters after the pointers."""
        if not 0 < grid <= MAX_GRID:
            raise ArgumentError(f"workload must need from 1 to {MAX_GRID} blocks; got {grid}")
        return Launch(self, grid, self.spec.family.parameters.pack(values))


@dataclass
class Launch:
    """One kernel with its parameters packed. Not for use by two threads at once: it has one buffer for the pointers."""

    kernel: Kernel
    grid: int
    parameters: bytes

    def __post_init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(self.parameters, len(self.parameters))
        self._address = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._arguments = ctypes.addressof(self._address)
        self._pointers = struct.Struct(f"={self.kernel.spec.family.parameters.pointers}Q")
        self._launch = driver().cuLaunchKernel
        self._shape: tuple[Any, ...] = (self.kernel.handle, self.grid, 1, 1, self.kernel.threads, 1, 1, self.kernel.shared_bytes)

    def __call__(self, stream: int, *pointers: int) -> None:
        """Enqueues the kernel on a stream of the GPU whose context is current. Pointers are device addresses, in the parameters' order."""
        self._pointers.pack_into(self._buffer, 0, *pointers)
        (status,) = self._launch(*self._shape, stream, self._arguments, 0)
        if status:
            check((status,), f"launching {self.kernel.artifact.entry}")
