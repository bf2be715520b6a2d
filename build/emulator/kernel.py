"""`EmulatedKernel`: a text with emulated atoms, compiled and loaded in this process, run thread for thread on the CPU."""

from __future__ import annotations

import ctypes
import enum
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.parameters import TENSOR_MAP_BYTES, ParameterBlock
from flashgen.codegen.program import Buffer, BufferKind, KernelLaunch, Program, Waits

from ..parameter_buffer import parameter_buffer
from .compiler import Emulated
from .fault import EmulatorFaultError
from .folder import program_folder
from .memory import Extent, GuardedTensors, MemoryView
from .tensor_map import emulated_map

if TYPE_CHECKING:
    from flashgen.codegen.spec import KernelSpec

    from ..artifact import Artifact

_TEXT_BYTES = 4096


class Schedule(enum.IntEnum):
    """Which thread goes on when one has to wait: `Schedule` in templates/emulator/schedule.cuh."""

    ROUND_ROBIN = 0
    AHEAD = 1
    REVERSED = 2
    RANDOM = 3


@dataclass(frozen=True)
class EmulationOrder:
    """In what order a launch happens: threads by `schedule` (and `seed`, where that is random), copies early or late."""

    schedule: Schedule = Schedule.ROUND_ROBIN
    late_copies: bool = True
    seed: int = 0


@dataclass(frozen=True)
class EmulationLimits:
    """When a launch is stopped: after so many seconds in which no thread of the kernel waits or ends, or so many in all; 0: never."""

    stall_seconds: float = 60.0
    seconds: float = 0.0


# One of each kind: every schedule, and both completions of copies.
ORDERS = tuple(EmulationOrder(schedule, late) for schedule in Schedule for late in (False, True))


class _Options(ctypes.Structure):
    """`Options` in templates/emulator/block.cuh."""

    _fields_ = (
        ("extents", ctypes.POINTER(Extent)),
        ("seed", ctypes.c_uint64),
        ("stall_seconds", ctypes.c_double),
        ("limit_seconds", ctypes.c_double),
        ("extent_count", ctypes.c_int),
        ("schedule", ctypes.c_int),
        ("late_copies", ctypes.c_int),
        ("workers", ctypes.c_int),
        ("isolated", ctypes.c_int),
    )


class _Launch(ctypes.Structure):
    """`Launch` in templates/emulator/block.cuh."""

    _fields_ = (
        ("parameters", ctypes.c_void_p),
        ("kernel", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("first_block", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("resident", ctypes.c_int),
        ("cluster", ctypes.c_int),
        ("waits_for_begun", ctypes.c_int),
    )


@dataclass(frozen=True)
class EmulatedLaunch:
    """One launch of a kernel of a library: its number in the text, its parameters as bytes; the rest as in EmulatedKernel.launch."""

    parameters: bytes | bytearray
    threads: int
    shared_bytes: int
    blocks: range
    kernel: int = 0
    resident: int = 1
    cluster: int = 1
    waits_for_begun: bool = False

    def at(self, parameters: int) -> _Launch:
        """For the library, with the parameters at that address."""
        which = self.blocks.start, len(self.blocks)
        return _Launch(parameters, self.kernel, self.threads, self.shared_bytes, *which, self.resident, self.cluster, self.waits_for_begun)


class EmulatedLibrary:
    """A text with emulated atoms as a shared library in this process, with its entry. Safe to use from several threads."""

    def __init__(self, library: bytes) -> None:
        # Under a name of its own: the loader takes a library of the same name for the same library.
        with tempfile.NamedTemporaryFile(prefix="flashgen-", suffix=".so", dir=program_folder()) as file:
            file.write(library)
            file.flush()
            self._loaded = ctypes.CDLL(file.name)
        self._run = self._loaded.flashgen_emulator_run

    def run(
        self,
        launches: Sequence[EmulatedLaunch],
        interleaving: EmulationOrder,
        *,
        tensors: Sequence[MemoryView] = (),
        workers: int = 1,
        limits: EmulationLimits | None = None,
    ) -> None:
        """Runs launches, each of which overlaps the one before it, on `workers` cores and waits for them.

        `tensors`: what atoms may touch, all of memory if none is given. `limits`: of a process of its own, in which they run then.

        Raises EmulatorFaultError if a check fails.
        """
        aligned = [parameter_buffer(launch.parameters) for launch in launches]
        chain = (_Launch * len(launches))(*[launch.at(ctypes.addressof(of)) for launch, of in zip(launches, aligned, strict=True)])
        allowed = (Extent * len(tensors))(*(tensor.extent() for tensor in tensors))
        seconds = (limits.stall_seconds, limits.seconds) if limits else (0.0, 0.0)
        how = (interleaving.schedule, interleaving.late_copies, workers, limits is not None)
        options = _Options(allowed, interleaving.seed, *seconds, len(tensors), *how)
        check, message = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.create_string_buffer(_TEXT_BYTES)
        if self._run(ctypes.byref(chain), len(launches), ctypes.byref(options), check, message, ctypes.c_int(_TEXT_BYTES)):
            raise EmulatorFaultError(check.value.decode(), message.value.decode(errors="replace"))


class EmulatedKernel:
    """The kernels of a text. Safe to use from several threads."""

    kind: ClassVar[Emulated] = Emulated.LIBRARY

    def __init__(self, spec: KernelSpec, artifact: Artifact) -> None:
        """Loads the library. Raises ArgumentError for machine code of a GPU, or of another kind."""
        if artifact.arch != self.kind:
            raise ArgumentError(f"artifact must be for {self.kind}; got {artifact.arch}")
        self.spec, self.artifact = spec, artifact
        self._library = self._loaded(artifact.cubin)
        self._numbers = {suffix: number for number, suffix in enumerate(spec.kernels)}

    def _loaded(self, library: bytes) -> EmulatedLibrary:
        return EmulatedLibrary(library)

    def launch(
        self,
        program: Program,
        tensors: Mapping[str, MemoryView],
        interleaving: EmulationOrder | None = None,
        *,
        limits: EmulationLimits | None = None,
        first_block: int = 0,
        blocks: int | None = None,
        workers: int = 0,
        resident: int = 1,
    ) -> None:
        """Runs a program on `workers` cores (0: all), and waits for it. Of each launch, blocks [first_block, first_block + blocks), or all.

        `tensors`: the operands by name, without those that nobody wants; buffers are made here. `resident`: how many blocks run at the
        same time on a core; blocks that wait for each other must, unless `KernelLaunch.waits` says so: then all run on one core. Blocks
        of a cluster do in any case. A launch has a process of its own with those that overlap it, which ends with them, or by
        `limits`.
        Raises ArgumentError for blocks that are not there or are no whole clusters; EmulatorFaultError if a check fails, the kernel crashes
        or does not end. The tensors in this process are then as they were.
        """
        buffers = {buffer.name: _Memory(buffer) for buffer in program.buffers}
        given = [*tensors.values(), *(memory.tensor for memory in buffers.values())]
        whole = True
        with GuardedTensors(given) as guarded:
            addresses = {name: tensor.address for name, tensor in zip((*tensors, *buffers), guarded, strict=True)}
            for chain in program.chains:
                prepared = [self._prepared(launch, addresses, first_block, blocks, resident) for launch in chain]
                whole = whole and all(len(one.blocks) == launch.grid for one, launch in zip(prepared, chain, strict=True))
                groups = max(-(-len(one.blocks) // one.resident) for one in prepared)
                alone = any(launch.waits is not Waits.NOBODY for launch in chain)
                cores = 1 if alone else min(workers or len(os.sched_getaffinity(0)), groups)
                self._library.run(
                    prepared, interleaving or EmulationOrder(), tensors=guarded, workers=cores, limits=limits or EmulationLimits()
                )
        for buffer in program.buffers:
            if whole and buffer.kind is BufferKind.STREAM_COUNTER and (left := buffers[buffer.name].words()):
                raise EmulatorFaultError("tile counter", f"the kernel must leave its {buffer.name.replace('_', ' ')} 0; it left {left}")

    def _prepared(
        self, launch: KernelLaunch, addresses: Mapping[str, int], first_block: int, blocks: int | None, resident: int
    ) -> EmulatedLaunch:
        require_int("first_block", first_block, 0, launch.grid - 1)
        some = range(first_block, launch.grid if blocks is None else first_block + blocks)
        require_int("blocks", len(some), 1, launch.grid - first_block)
        require_int("resident", resident, 1, len(some))
        block = self.spec.resources[launch.suffix]
        for name, count in (("grid", launch.grid), ("first_block", first_block), ("blocks", len(some))):
            block.require_clusters(name, count)
        together = -(-resident // block.cluster) * block.cluster
        parameters = packed_parameters(self.spec.kernels[launch.suffix].parameters, launch, addresses)
        number = self._numbers[launch.suffix]
        begun = launch.waits is Waits.BEGUN
        return EmulatedLaunch(parameters, block.threads, block.shared_bytes, some, number, together, block.cluster, begun)


class _Memory:
    """A program's buffer: what is in it when the first launch begins is as on a GPU, or, where that may be anything, all ones: NaN."""

    def __init__(self, buffer: Buffer) -> None:
        anything = buffer.kind in (BufferKind.CALL, BufferKind.KEPT)
        self._bytes = ctypes.create_string_buffer((b"\xff" if anything else b"\0") * buffer.bytes, buffer.bytes)
        self.tensor = MemoryView(buffer.name, ctypes.addressof(self._bytes), 1, (buffer.bytes,), (1,), writable=True)

    def words(self) -> int:
        """Its contents as an integer."""
        return int.from_bytes(self._bytes, "little")


def packed_parameters(block: ParameterBlock, launch: KernelLaunch, addresses: Mapping[str, int]) -> bytearray:
    """A launch's parameters with addresses of this process. A pointer to what has none is 0."""
    packed = bytearray(block.pack(launch.values))
    for field in block.pointers:
        struct.pack_into("=Q", packed, field.offset, addresses.get(field.name, 0))
    for field in block.tensor_maps:
        packed[field.offset : field.offset + TENSOR_MAP_BYTES] = emulated_map(launch.maps[field.name], addresses[field.name])
    return packed
