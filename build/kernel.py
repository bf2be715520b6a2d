"""`Kernel`: an artifact loaded on one GPU, ready to launch; `Launch`: one such kernel with everything but the addresses bound."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.parameters import TENSOR_MAP_BYTES
from flashgen.codegen.tensor_map import TensorMapShape

from .driver import Gpu, check, driver
from .parameter_buffer import parameter_buffer
from .tensor_map import Encoder, TensorMapField

if TYPE_CHECKING:
    from flashgen.codegen.spec import KernelSpec

    from .artifact import Artifact

MAX_GRID = 2**31 - 1


_libraries: dict[bytes, Any] = {}
_loading = threading.Lock()


def _library(artifact: Artifact) -> Any:
    """The driver's library of an artifact's machine code, loaded once and never unloaded.

    A CUDA graph does not keep alive the kernels that it captured, and nothing tells when it is gone: unloading one of them would let a
    replay launch freed code. What that costs is the size of each machine code once a process, 50 to 100 KB.
    """
    key = hashlib.sha256(artifact.cubin).digest()
    with _loading:
        if key not in _libraries:
            _libraries[key] = check(driver().cuLibraryLoadData(artifact.cubin, [], [], 0, [], [], 0), f"loading {artifact.entry}")
        return _libraries[key]


class Kernel:
    """An artifact loaded on one GPU, for as long as the process lives. Independent of CUDA contexts; safe to share between threads."""

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
        library = _library(artifact)
        kernel = check(cu.cuLibraryGetKernel(library, artifact.entry.encode()), f"finding {artifact.entry}")
        device = check(cu.cuDeviceGet(gpu.ordinal), "finding the GPU")
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuKernelSetAttribute(limit, self.shared_bytes, kernel, device), f"allowing {self.shared_bytes} B of shared memory")
        self.handle = cu.CUfunction(int(kernel))

    def bind(self, grid: int, values: tuple[int | float, ...], tensor_maps: Sequence[TensorMapShape] = ()) -> Launch:
        """Fixes the number of blocks and all parameters but the addresses; `values` and `tensor_maps` as the family gives them."""
        if not 0 < grid <= MAX_GRID:
            raise ArgumentError(f"workload must need from 1 to {MAX_GRID} blocks; got {grid}")
        return Launch(self, grid, self.spec.family.parameters.pack(values), tensor_maps)


@dataclass
class Launch:
    """One kernel with its parameters packed. Not for use by two threads at once: it has one buffer for the parameters."""

    kernel: Kernel
    grid: int
    parameters: bytes
    tensor_maps: Sequence[TensorMapShape] = ()

    def __post_init__(self) -> None:
        self._buffer = parameter_buffer(self.parameters)
        self._address = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._arguments = ctypes.addressof(self._address)
        block, written = self.kernel.spec.family.parameters, memoryview(self._buffer).cast("B")
        self._words = written.cast("Q")
        self._pointers = tuple((place.offset // 8, place.index) for place in block.pointers)
        self._maps = tuple(
            TensorMapField(Encoder(shape), place.index, written[place.offset : place.offset + TENSOR_MAP_BYTES])
            for place, shape in zip(block.tensor_maps, self.tensor_maps, strict=True)
        )
        self._launch = driver().cuLaunchKernel
        self._shape: tuple[Any, ...] = (self.kernel.handle, self.grid, 1, 1, self.kernel.threads, 1, 1, self.kernel.shared_bytes)

    def __call__(self, stream: int, *addresses: int) -> None:
        """Enqueues the kernel on a stream of the GPU whose context is current. Addresses: see `codegen.parameters.ADDRESSES`.

        Raises DriverError if the driver refuses a tensor map or the launch.
        """
        words = self._words
        for word, index in self._pointers:
            words[word] = addresses[index]
        for field in self._maps:
            if field.address != addresses[field.index]:
                field.fill(addresses[field.index])
        (status,) = self._launch(*self._shape, stream, self._arguments, 0)
        if status:
            check((status,), f"launching {self.kernel.artifact.entry}")
