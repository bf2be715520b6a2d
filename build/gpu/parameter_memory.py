"""`ParameterMemory`: where a thread writes the parameters of a kernel before each launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..parameter_buffer import parameter_buffer
from .driver import driver
from .tensor_map import TensorMapField, TensorMaps

if TYPE_CHECKING:
    from flashgen.codegen.parameters import ParameterBlock
    from flashgen.codegen.program import BlockResources


class AddressFields(NamedTuple):
    """Where addresses go in the parameters of a kernel.

    pointers: the word, and the index of the name; maps: the index, the name, and the offset in bytes
    all_at_once: how all addresses are packed, and the offset, where the pointers are just those, in their order; else None
    """

    pointers: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, str, int], ...]
    all_at_once: tuple[struct.Struct, int] | None


EnqueueLaunch = Callable[[int | None, int, int], Any]
"""Enqueues a launch: given the stream, the arguments, no more options. None stands for the default stream, of which the driver's binding
then makes no object."""


class LaunchNumbers(NamedTuple):
    """What of a launch differs between sizes of a call: its blocks, the numbers among its parameters, as bytes, and its tensor maps."""

    grid: int
    values: bytes
    maps: tuple[TensorMaps, ...]


class ParameterMemory:
    """Where a thread writes the parameters of one kernel before each launch, which copies them: one for calls of all sizes.

    holds: the numbers of a launch that are there
    launch: enqueues it
    place_all: writes all addresses at once, where a kernel's pointers are just those, in their order; else None
    """

    __slots__ = (
        *("_address", "_buffer", "_grid", "_launch_of", "_values", "arguments", "holds", "launch", "map_fields", "place_all", "pointers"),
        *("suffix", "words"),
    )

    def __init__(
        self, suffix: str, block: ParameterBlock, where: AddressFields, resources: BlockResources, handle: Any, overlaps: bool
    ) -> None:
        """suffix: of the kernel's entry; handle: of the loaded kernel; overlaps: whether launches do, see `KernelLaunch`."""
        self.suffix = suffix
        self.holds: Any = None
        self._buffer = parameter_buffer(bytes(block.size))
        self._address = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self.arguments = ctypes.addressof(self._address)
        written = memoryview(self._buffer).cast("B")
        self._values, self.words, self.pointers = written[block.values_begin :], written.cast("Q"), where.pointers
        self.map_fields = tuple((index, TensorMapField(written, offset)) for index, _, offset in where.maps)
        self.place_all: Callable[..., None] | None = None
        if where.all_at_once is not None:
            packing, begin = where.all_at_once
            self.place_all = partial(packing.pack_into, written, begin)
        self._launch_of = (_overlapping if overlaps else _plain)(handle, resources)
        self._grid = 0
        self.launch: EnqueueLaunch

    def load(self, numbers: LaunchNumbers) -> None:
        """Makes these the parameters of another launch, all but the addresses."""
        self.holds = None  # so that nobody takes them for another launch's, should somebody interrupt this
        grid, self._values[:], maps = numbers
        if maps:  # in a loop over nothing, and a new launch of as many blocks, a call of other sizes would lose half a microsecond
            for (_, field), own in zip(self.map_fields, maps, strict=True):
                field.take_from(own)
        if grid != self._grid:
            self._grid = 0  # none, as above
            self.launch = self._launch_of(grid)
            self._grid = grid
        self.holds = numbers


# What gives what enqueues a launch of so many blocks, until it is asked for another one.


def _plain(handle: Any, resources: BlockResources) -> Callable[[int], EnqueueLaunch]:
    launch, threads, shared_bytes = driver().cuLaunchKernel, resources.threads, resources.shared_bytes
    return lambda grid: partial(launch, handle, grid, 1, 1, threads, 1, 1, shared_bytes)


def _overlapping(handle: Any, resources: BlockResources) -> Callable[[int], EnqueueLaunch]:
    """Of launches that may begin while what is before them is under way. All share a config: to make one takes as long as a launch."""
    cu = driver()
    attribute, config = cu.CUlaunchAttribute(), cu.CUlaunchConfig()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.blockDimX, config.sharedMemBytes = resources.threads, resources.shared_bytes
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.attrs, config.numAttrs = [attribute], 1
    launch = cu.cuLaunchKernelEx

    def enqueue(stream: int | None, arguments: int, options: int) -> Any:
        config.hStream = stream
        return launch(config, handle, arguments, options)

    def of_blocks(grid: int) -> EnqueueLaunch:
        config.gridDimX = grid
        return enqueue

    return of_blocks
