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
from .parameter_memory import AddressFields, LaunchNumbers, ParameterMemory
from .tensor_map import tensor_maps_of

if TYPE_CHECKING:
    from flashgen.codegen.program import Program
    from flashgen.codegen.spec import KernelSpec

    from ..artifact import Artifact

MAX_GRID = 2**31 - 1
ProgramNumbers = tuple[LaunchNumbers, ...]  # of each launch


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

    def parameter_memory(self, suffix: str, names: tuple[str, ...], overlaps: bool) -> ParameterMemory:
        """This thread's, for the launches of one kernel that are given the addresses of `names`. overlaps: see `KernelLaunch`."""
        memories = self._of_thread.memories
        memory = memories.get((suffix, names, overlaps))
        if memory is None:
            fields, resources = self.address_fields(suffix, names), self.resources[suffix]
            memory = ParameterMemory(suffix, self.parameters[suffix], fields, resources, self.handles[suffix], overlaps)
            memories[suffix, names, overlaps] = memory
        return memory

    def numbers(self, program: Program) -> ProgramNumbers:
        """What of a program differs between sizes of a call. Its numbers may be `Size`s.

        Raises ArgumentError for a number of blocks that no launch can have, or that are no whole clusters, and ValueError for numbers that
        are not of a kernel's parameters.
        """
        found = []
        for launch in program.launches:
            block, grid = self.parameters[launch.suffix], launch.grid
            if grid < 1 or grid > MAX_GRID:
                raise ArgumentError(f"workload must need from 1 to {MAX_GRID} blocks; got {grid}")
            self.resources[launch.suffix].require_clusters("grid", grid)
            maps = tuple([tensor_maps_of(launch.maps[field.name]) for field in block.tensor_maps])
            found.append(LaunchNumbers(grid, block.pack_in_order(block.in_order(launch.values)), maps))
        return tuple(found)

    def bind(self, program: Program) -> Launch:
        """Fixes all of a call but the addresses."""
        return Launch(self, program)


class Launch:
    """A program with everything but the addresses bound. For the thread that made it, whose launches share the memory of their parameters.

    names: whose addresses a launch is given, in this order: the operation's operands and the program's buffers
    numbers: `Kernel.numbers` of the program
    enqueue: given such numbers, of this program or of one that differs from it in these alone, a stream and those addresses, enqueues it
    enqueue_others: the same without the launches that find what is kept
    finding: indices of these launches
    """

    def __init__(self, kernel: Kernel, program: Program) -> None:
        """Raises as `Kernel.numbers` does."""
        self.kernel = kernel  # and not the program: what lives as long as a plan costs each collection of garbage
        self.names = names = (*kernel.operands, *[buffer.name for buffer in program.buffers])
        self.numbers = kernel.numbers(program)
        self.memories = tuple([kernel.parameter_memory(launch.suffix, names, launch.overlaps) for launch in program.launches])
        first = self.memories[0]
        alone = len(self.memories) == 1 and first.place_all is not None and not first.map_fields
        every = tuple(enumerate(self.memories))
        self.enqueue: Callable[..., None] = _one(kernel, first) if alone else _each(kernel, every)
        self.finding = tuple([i for i, launch in enumerate(program.launches) if launch.finds])
        others = tuple([(i, memory) for i, memory in every if i not in self.finding])
        self.enqueue_others = _each(kernel, others) if self.finding else self.enqueue

    def __call__(self, stream: int, *addresses: int) -> None:
        """Enqueues the program on a stream of the GPU whose context is current. Addresses: of `names`, 0 for what nobody wants.

        Raises DriverError if the driver refuses a tensor map or a launch.
        """
        self.enqueue(self.numbers, stream, *addresses)


# What enqueues a program of any sizes, without one step more than it needs.


def _one(kernel: Kernel, memory: ParameterMemory) -> Callable[..., None]:
    """Of a program of one kernel whose parameters are all the addresses and numbers."""
    place_all, arguments = memory.place_all, memory.arguments
    assert place_all is not None

    def enqueue(numbers: ProgramNumbers, stream: int, *addresses: int) -> None:
        (own,) = numbers
        if memory.holds is not own:
            memory.load(own)
        place_all(*addresses)
        (status,) = memory.launch(stream or None, arguments, 0)
        if status:
            _refused(status, kernel, memory)

    return enqueue


def _each(kernel: Kernel, every: tuple[tuple[int, ParameterMemory], ...]) -> Callable[..., None]:
    """Of any program: of these of its launches, by their indices."""

    def enqueue(numbers: ProgramNumbers, stream: int, *addresses: int) -> None:
        for i, memory in every:  # no zip, which takes longer
            own = numbers[i]
            if memory.holds is not own:
                memory.load(own)
            if memory.place_all is not None:
                memory.place_all(*addresses)
            else:
                words = memory.words
                for word, index in memory.pointers:
                    words[word] = addresses[index]
            for index, field in memory.map_fields:
                if field.address != addresses[index]:
                    field.fill(addresses[index])
            (status,) = memory.launch(stream or None, memory.arguments, 0)
            if status:
                _refused(status, kernel, memory)

    return enqueue


def _refused(status: Any, kernel: Kernel, memory: ParameterMemory) -> None:
    check((status,), f"launching {kernel.artifact.entry}{memory.suffix}")


class _OfThread(threading.local):
    """What each thread has of a kernel's own: the memory of parameters, by the arguments of `Kernel.parameter_memory`."""

    def __init__(self) -> None:
        self.memories: dict[tuple[str, tuple[str, ...], bool], ParameterMemory] = {}
