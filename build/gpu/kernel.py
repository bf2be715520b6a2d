"""`Kernel`: an artifact loaded on one GPU, ready to launch; `Launch`: a call's program on it with everything but the addresses bound."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.operation import operation_of

from ..parameter_buffer import parameter_buffer
from .driver import Gpu, check, driver
from .tensor_map import TensorMapField, tensor_maps_of

if TYPE_CHECKING:
    from flashgen.codegen.parameters import ParameterBlock
    from flashgen.codegen.program import KernelLaunch, Program
    from flashgen.codegen.spec import KernelSpec

    from ..artifact import Artifact

MAX_GRID = 2**31 - 1


class _AddressFields(NamedTuple):
    """Where addresses go in the parameters of a kernel.

    pointers: the word, and the index of the name; maps: the index, the name, and the offset in bytes
    all_at_once: how all addresses are packed, and the offset, where the pointers are just those, in their order; else None
    """

    pointers: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, str, int], ...]
    all_at_once: tuple[struct.Struct, int] | None


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
        self._address_fields: dict[tuple[str, tuple[str, ...]], _AddressFields] = {}
        self._of_thread = _OfThread()
        self.resources = spec.resources
        self.handles: dict[str, Any] = {}
        for suffix, block in self.resources.items():
            entry, shared_bytes = artifact.entry + suffix, block.shared_bytes
            kernel = check(cu.cuLibraryGetKernel(library, entry.encode()), f"finding {entry}")
            check(cu.cuKernelSetAttribute(limit, shared_bytes, kernel, device), f"allowing {shared_bytes} B of shared memory")
            self.handles[suffix] = _function(kernel, gpu.ordinal, device)

    def address_fields(self, suffix: str, names: tuple[str, ...]) -> _AddressFields:
        """Where the addresses of `names` go in the parameters of a kernel: found once, because each call of a new length asks."""
        address_fields = self._address_fields.get((suffix, names))
        if address_fields is None:
            block = self.parameters[suffix]
            # A pointer to what the program does not have stays 0.
            pointers = tuple((field.offset // 8, names.index(field.name)) for field in block.pointers if field.name in names)
            maps = tuple((names.index(field.name), field.name, field.offset) for field in block.tensor_maps)
            in_order = bool(pointers) and pointers == tuple((pointers[0][0] + i, i) for i in range(len(names)))
            packing = (struct.Struct(f"={len(names)}Q"), 8 * pointers[0][0]) if in_order else None
            address_fields = self._address_fields[suffix, names] = _AddressFields(pointers, maps, packing)
        return address_fields

    def parameter_memory(self, suffix: str, names: tuple[str, ...]) -> _ParameterMemory:
        """This thread's, for the launches of one kernel that are given the addresses of `names`."""
        memories = self._of_thread.memories
        memory = memories.get((suffix, names))
        if memory is None:
            memory = memories[suffix, names] = _ParameterMemory(self.parameters[suffix], self.address_fields(suffix, names))
        return memory

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
        self.names = (*kernel.operands, *[buffer.name for buffer in program.buffers])
        self._bound = tuple([_Bound(kernel, launch, self.names) for launch in program.launches])
        first = self._bound[0]
        alone = len(self._bound) == 1 and first.memory.place_all is not None and not first.maps
        self.enqueue: Callable[..., None] = self._one(first) if alone else self._each

    def __call__(self, stream: int, *addresses: int) -> None:
        """Enqueues the program on a stream of the GPU whose context is current. Addresses: of `names`, 0 for what nobody wants.

        Raises DriverError if the driver refuses a tensor map or a launch.
        """
        self.enqueue(stream, *addresses)

    def _one(self, bound: _Bound) -> Callable[..., None]:
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
                self._refused(status, bound)

        return enqueue

    def _each(self, stream: int, *addresses: int) -> None:
        for bound in self._bound:
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
                self._refused(status, bound)

    def _refused(self, status: Any, bound: _Bound) -> None:
        check((status,), f"launching {self.kernel.artifact.entry}{bound.suffix}")


class _ParameterMemory:
    """Where a thread writes the parameters of one kernel before each launch, which copies them: one for calls of all sizes.

    holds: the launch whose numbers and maps are there
    place_all: writes all addresses at once, where a kernel's pointers are just those, in their order; else None
    """

    __slots__ = ("_address", "_buffer", "_numbers", "arguments", "holds", "map_fields", "map_names", "place_all", "pointers", "words")

    def __init__(self, block: ParameterBlock, where: _AddressFields) -> None:
        self.holds: _Bound | None = None
        self._buffer = parameter_buffer(bytes(block.size))
        self._address = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self.arguments = ctypes.addressof(self._address)
        written = memoryview(self._buffer).cast("B")
        self._numbers, self.words, self.pointers = written[block.values_begin :], written.cast("Q"), where.pointers
        self.map_names = tuple(name for _, name, _ in where.maps)
        self.map_fields = tuple((index, TensorMapField(written, offset)) for index, _, offset in where.maps)
        self.place_all: Callable[..., None] | None = None
        if where.all_at_once is not None:
            packing, begin = where.all_at_once
            self.place_all = partial(packing.pack_into, written, begin)

    def load(self, bound: _Bound) -> None:
        """Makes these the parameters of another launch, all but the addresses."""
        self._numbers[:] = bound.numbers
        for (_, field), maps in zip(self.map_fields, bound.maps, strict=True):
            field.take_from(maps)
        self.holds = bound


class _OfThread(threading.local):
    """What each thread has of a kernel's own: the memory of parameters, by a launch's suffix and the names of its addresses."""

    def __init__(self) -> None:
        self.memories: dict[tuple[str, tuple[str, ...]], _ParameterMemory] = {}


class _Bound:
    """One launch of a program: its numbers as they lie in the parameters, and its tensor maps but for their addresses."""

    __slots__ = ("enqueue", "maps", "memory", "numbers", "suffix")

    def __init__(self, kernel: Kernel, launch: KernelLaunch, names: tuple[str, ...]) -> None:
        if not 0 < launch.grid <= MAX_GRID:
            raise ArgumentError(f"workload must need from 1 to {MAX_GRID} blocks; got {launch.grid}")
        self.suffix, self.memory = launch.suffix, kernel.parameter_memory(launch.suffix, names)
        self.numbers = kernel.parameters[launch.suffix].pack_values(launch.values)
        self.maps = tuple([tensor_maps_of(launch.maps[name]) for name in self.memory.map_names])
        resources = kernel.resources[launch.suffix]
        resources.require_clusters("grid", launch.grid)
        handle, shape = kernel.handles[launch.suffix], (launch.grid, resources.threads, resources.shared_bytes)
        self.enqueue = _overlapping(handle, *shape) if launch.overlaps else _plain(handle, *shape)


# What enqueues a launch, given the rest: the stream, the arguments, no more options. None stands for the default stream, of which the
# driver's binding then makes no object.


def _plain(handle: Any, grid: int, threads: int, shared_bytes: int) -> Callable[..., Any]:
    return partial(driver().cuLaunchKernel, handle, grid, 1, 1, threads, 1, 1, shared_bytes)


def _overlapping(handle: Any, grid: int, threads: int, shared_bytes: int) -> Callable[..., Any]:
    """Of a launch that may begin while the one before it in the stream is under way. It has a config of its own, which knows the stream."""
    cu = driver()
    attribute, config = cu.CUlaunchAttribute(), cu.CUlaunchConfig()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.blockDimX, config.sharedMemBytes = grid, threads, shared_bytes
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.attrs, config.numAttrs = [attribute], 1
    launch = cu.cuLaunchKernelEx

    def enqueue(stream: int | None, arguments: int, options: int) -> Any:
        config.hStream = stream
        return launch(config, handle, arguments, options)

    return enqueue
