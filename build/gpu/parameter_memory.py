"""`ParameterMemory`: where a thread writes the parameters of a kernel before each launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..parameter_buffer import parameter_buffer
from .driver import driver
from .tensor_map import TensorMapField

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


class ParameterMemory:
    """Where a thread writes the parameters of one kernel before each launch, which copies them: one for calls of all sizes.

    holds: the launch whose numbers and maps are there
    place_all: writes all addresses at once, where a kernel's pointers are just those, in their order; else None
    pack: makes bytes of the numbers of a launch
    """

    __slots__ = (
        *("_address", "_buffer", "_config", "_handle", "_numbers", "arguments", "holds", "map_fields", "pack", "place_all", "pointers"),
        *("resources", "suffix", "words"),
    )

    def __init__(self, suffix: str, block: ParameterBlock, where: AddressFields, resources: BlockResources, handle: Any) -> None:
        """suffix: of the kernel's entry; handle: of the loaded kernel."""
        self.suffix, self.resources, self._handle, self.pack = suffix, resources, handle, block.pack_in_order
        self.holds: Any = None
        self._buffer = parameter_buffer(bytes(block.size))
        self._address = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self.arguments = ctypes.addressof(self._address)
        written = memoryview(self._buffer).cast("B")
        self._numbers, self.words, self.pointers = written[block.values_begin :], written.cast("Q"), where.pointers
        self.map_fields = tuple((index, TensorMapField(written, offset)) for index, _, offset in where.maps)
        self.place_all: Callable[..., None] | None = None
        if where.all_at_once is not None:
            packing, begin = where.all_at_once
            self.place_all = partial(packing.pack_into, written, begin)
        self._config: Any = None

    def load(self, bound: Any) -> None:
        """Makes these the parameters of another launch, all but the addresses: see `Launch`."""
        self.holds = None  # so that nobody takes them for another launch's, should somebody interrupt this
        self._numbers[:] = bound.numbers
        for (_, field), maps in zip(self.map_fields, bound.maps, strict=True):
            field.take_from(maps)
        if bound.overlaps:
            self._config.gridDimX = bound.grid
        self.holds = bound

    # What enqueues a launch, given the rest: the stream, the arguments, no more options. None stands for the default stream, of which the
    # driver's binding then makes no object.

    def plain(self, grid: int) -> Callable[..., Any]:
        """Of a launch of so many blocks."""
        return partial(driver().cuLaunchKernel, self._handle, grid, 1, 1, self.resources.threads, 1, 1, self.resources.shared_bytes)

    def overlapping(self) -> Callable[..., Any]:
        """Of the launch that is held, if it may begin while the one before it in the stream is under way.

        All share a config, which knows blocks and stream: to make one takes as long as a launch.
        """
        cu = driver()
        if self._config is None:
            attribute, config = cu.CUlaunchAttribute(), cu.CUlaunchConfig()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.blockDimX, config.sharedMemBytes = self.resources.threads, self.resources.shared_bytes
            config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
            config.attrs, config.numAttrs = [attribute], 1
            self._config = config
        launch, config, handle = cu.cuLaunchKernelEx, self._config, self._handle

        def enqueue(stream: int | None, arguments: int, options: int) -> Any:
            config.hStream = stream
            return launch(config, handle, arguments, options)

        return enqueue
