"""`Kernel`: an artifact loaded on one GPU, ready to launch; `Launch`: a call's program on it with everything but the addresses bound."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.operation import operation_of

from .driver import Gpu, check, driver
from .parameter_memory import AddressFields, ParameterMemory
from .tensor_map import TensorMaps, tensor_maps_of

if TYPE_CHECKING:
    from flashgen.codegen.program import Program
    from flashgen.codegen.spec import KernelSpec

    from ..artifact import Artifact

MAX_GRID = 2**31 - 1
ProgramNumbers = tuple[tuple[Any, ...], ...]
"""Of each launch the blocks, the numbers among its parameters and its tensor maps, both in the order of the parameters."""


_contexts: dict[int, Any] = {}  # by ordinal
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


def _function(kernel: Any, ordinal: int, device: Any) -> Any:
    """A loaded kernel in the primary context of a GPU, which PyTorch works in; the context is made if it is not there, and stays.

    By the kernel's own handle, which holds in all contexts, each launch takes a little longer (docs/performance-log.md).
    """
    cu = driver()
    with _loading:
        if ordinal not in _contexts:
            _contexts[ordinal] = check(cu.cuDevicePrimaryCtxRetain(device), "finding the GPU's primary context")
    check(cu.cuCtxPushCurrent(_contexts[ordinal]), "entering the GPU's primary context")
    try:
        return check(cu.cuKernelGetFunction(kernel), "finding a kernel in the GPU's primary context")
    finally:
        check(cu.cuCtxPopCurrent(), "leaving the GPU's primary context")


class Kernel:
    """An artifact loaded on one GPU, for as long as the process lives, to be launched in its primary context. Threads may share it."""

    def __init__(self, spec: KernelSpec, artifact: Artifact, gpu: Gpu) -> None:
        """Loads the machine code. Raises DriverError if the driver refuses it, ArgumentError if it is for another architecture."""
        cu = driver()
        if artifact.arch != gpu.device.target.name:
            raise ArgumentError(
                f"artifact must be for {gpu.device.target.name}, the architecture of device {gpu.ordinal}; got {artifact.arch}"
            )
        self.spec, self.artifact, self.gpu = spec, artifact, gpu
        library = _library(artifact)
        device = check(cu.cuDeviceGet(gpu.ordinal), "finding the GPU")
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.operands = tuple(operand.name for operand in operation_of(spec.problem).operands(spec.problem))
        self.parameters = {suffix: text.parameters for suffix, text in spec.kernels.items()}
        self._address_fields: dict[tuple[str, tuple[str, ...]], AddressFields] = {}
        self._of_thread = _OfThread()
        self.resources = spec.resources
        self.handles: dict[str, Any] = {}
        for suffix, block in self.resources.items():
            entry, shared_bytes = artifact.entry + suffix, block.shared_bytes
            kernel = check(cu.cuLibraryGetKernel(library, entry.encode()), f"finding {entry}")
            check(cu.cuKernelSetAttribute(limit, shared_bytes, kernel, device), f"allowing {shared_bytes} B of shared memory")
            self.handles[suffix] = _function(kernel, gpu.ordinal, device)

    def address_fields(self, suffix: str, names: tuple[str, ...]) -> AddressFields:
        """Where the addresses of `names` go in the parameters of a kernel: found once, because each call of a new length asks."""
        address_fields = self._address_fields.get((suffix, names))
        if address_fields is None:
            block = self.parameters[suffix]
            # A pointer to what the program does not have stays 0.
            pointers = tuple((field.offset // 8, names.index(field.name)) for field in block.pointers if field.name in names)
            maps = tuple((names.index(field.name), field.name, field.offset) for field in block.tensor_maps)
            in_order = bool(pointers) and pointers == tuple((pointers[0][0] + i, i) for i in range(len(names)))
            packing = (struct.Struct(f"={len(names)}Q"), 8 * pointers[0][0]) if in_order else None
            address_fields = self._address_fields[suffix, names] = AddressFields(pointers, maps, packing)
        return address_fields

    def parameter_memory(self, suffix: str, names: tuple[str, ...]) -> ParameterMemory:
        """This thread's, for the launches of one kernel that are given the addresses of `names`."""
        memories = self._of_thread.memories
        memory = memories.get((suffix, names))
        if memory is None:
            memory = memories[suffix, names] = ParameterMemory(
                suffix, self.parameters[suffix], self.address_fields(suffix, names), self.resources[suffix], self.handles[suffix]
            )
        return memory

    def numbers(self, program: Program) -> ProgramNumbers:
        """What of a program differs between sizes of a call. Raises ValueError for numbers that are not of a kernel's parameters."""
        found = []
        for launch in program.launches:
            block = self.parameters[launch.suffix]
            maps = tuple([tensor_maps_of(launch.maps[field.name]) for field in block.tensor_maps])
            found.append((launch.grid, block.in_order(launch.values), maps))
        return tuple(found)

    def bind(self, program: Program) -> Launch:
        """Fixes all of a call but the addresses."""
        return Launch(self, program)


class Launch:
    """A program with everything but the addresses bound. For the thread that made it, whose launches share the memory of their parameters.

    names: whose addresses a launch is given, in this order: the operation's operands and the program's buffers
    enqueue: given a stream and those addresses, what a call of this object does, without one step more than the program needs
    """

    def __init__(self, kernel: Kernel, program: Program) -> None:
        """Raises ArgumentError for a number of blocks that no launch can have, or that are no whole clusters."""
        self.kernel = kernel  # and not the program: what lives as long as a plan costs each collection of garbage
        self.names = names = (*kernel.operands, *[buffer.name for buffer in program.buffers])
        kinds = [(kernel.parameter_memory(launch.suffix, names), launch.overlaps) for launch in program.launches]
        self._set(tuple([_Bound(*kind, *numbers) for kind, numbers in zip(kinds, kernel.numbers(program), strict=True)]))

    def with_numbers(self, numbers: ProgramNumbers) -> Launch:
        """The launch of a program that differs from this one's in `Kernel.numbers` alone. Raises as `Launch` does."""
        other = object.__new__(Launch)
        other.kernel, other.names = self.kernel, self.names
        other._set(tuple([_Bound(one.memory, one.overlaps, *own) for one, own in zip(self._bound, numbers, strict=True)]))
        return other

    def _set(self, bound: tuple[_Bound, ...]) -> None:
        self._bound, first = bound, bound[0]
        alone = len(bound) == 1 and first.memory.place_all is not None and not first.maps
        self.enqueue: Callable[..., None] = _one(self.kernel, first) if alone else _each(self.kernel, bound)

    def __call__(self, stream: int, *addresses: int) -> None:
        """Enqueues the program on a stream of the GPU whose context is current. Addresses: of `names`, 0 for what nobody wants.

        Raises DriverError if the driver refuses a tensor map or a launch.
        """
        self.enqueue(stream, *addresses)


# What enqueues a program. It knows no launch that knows it: plans of sizes that come once would be garbage that only the collector finds.


def _one(kernel: Kernel, bound: _Bound) -> Callable[..., None]:
    """Of a program of one kernel whose parameters are all the addresses and numbers."""
    memory, launch = bound.memory, bound.enqueue
    place_all, arguments = memory.place_all, memory.arguments
    assert place_all is not None

    def enqueue(stream: int, *addresses: int) -> None:
        if memory.holds is not bound:
            memory.load(bound)
        place_all(*addresses)
        (status,) = launch(stream or None, arguments, 0)
        if status:
            _refused(status, kernel, bound)

    return enqueue


def _each(kernel: Kernel, every: tuple[_Bound, ...]) -> Callable[..., None]:
    """Of any program."""

    def enqueue(stream: int, *addresses: int) -> None:
        for bound in every:
            memory = bound.memory
            if memory.holds is not bound:
                memory.load(bound)
            if memory.place_all is not None:
                memory.place_all(*addresses)
            else:
                words = memory.words
                for word, index in memory.pointers:
                    words[word] = addresses[index]
            for index, field in memory.map_fields:
                if field.address != addresses[index]:
                    field.fill(addresses[index])
            (status,) = bound.enqueue(stream or None, memory.arguments, 0)
            if status:
                _refused(status, kernel, bound)

    return enqueue


def _refused(status: Any, kernel: Kernel, bound: _Bound) -> None:
    check((status,), f"launching {kernel.artifact.entry}{bound.suffix}")


class _OfThread(threading.local):
    """What each thread has of a kernel's own: the memory of parameters, by a launch's suffix and the names of its addresses."""

    def __init__(self) -> None:
        self.memories: dict[tuple[str, tuple[str, ...]], ParameterMemory] = {}


class _Bound:
    """One launch of a program: its blocks, its numbers as they lie in the parameters, and its tensor maps but for their addresses."""

    __slots__ = ("enqueue", "grid", "maps", "memory", "numbers", "overlaps")

    def __init__(
        self, memory: ParameterMemory, overlaps: bool, grid: int, numbers: tuple[int | float, ...], maps: tuple[TensorMaps, ...]
    ) -> None:
        if not 0 < grid <= MAX_GRID:
            raise ArgumentError(f"workload must need from 1 to {MAX_GRID} blocks; got {grid}")
        memory.resources.require_clusters("grid", grid)
        self.memory, self.overlaps, self.grid, self.maps = memory, overlaps, grid, maps
        self.numbers = memory.pack(*numbers)
        self.enqueue = memory.overlapping() if overlaps else memory.plain(grid)

    @property
    def suffix(self) -> str:
        """Of the kernel's entry."""
        return self.memory.suffix
