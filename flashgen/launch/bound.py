"""`BoundCall`: a call bound to a kernel on a GPU, with the memory of its program's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.operands import Call
from flashgen.codegen.program import BufferKind

from .tile_counters import tile_counters


class BoundCall:
    """All of a call but addresses. Not for use by two threads at once.

    enqueue: given a stream of the kernel's device, which is the current one, and the addresses of the operands in order, 0 for none,
    enqueues the program
    """

    def __init__(self, kernel: Kernel, call: Call) -> None:
        """Raises ArgumentError if the kernel's config cannot take the call's sizes."""
        family, config, gpu = kernel.spec.family, kernel.spec.config, kernel.gpu
        family.require_call(call, config)
        program = family.program(config, call, gpu.device)
        self.index, self.launch = gpu.ordinal, kernel.bind(program)
        self.buffers = tuple((buffer.bytes, buffer.kind) for buffer in program.buffers)
        self.enqueue: Callable[..., None] = self._with_buffers if self.buffers else self.launch.enqueue

    def _with_buffers(self, stream: int, *addresses: int) -> None:
        # Memory that PyTorch's allocator takes back once this returns goes to nobody else before the stream is done with it.
        held = [self._buffer(size, kind, stream) for size, kind in self.buffers]
        self.launch.enqueue(stream, *addresses, *(memory if isinstance(memory, int) else memory.data_ptr() for memory in held))

    def _buffer(self, size: int, kind: BufferKind, stream: int) -> int | torch.Tensor:
        """The memory of one of the program's buffers, or its address where it is nobody's to give back."""
        if kind is BufferKind.STREAM_COUNTER:
            return tile_counters.address(self.index, stream)
        make = torch.zeros if kind is BufferKind.CALL_ZEROED else torch.empty
        return make(size, dtype=torch.uint8, device=torch.device("cuda", self.index))


def addresses_of(names: Iterable[str], tensors: Mapping[str, torch.Tensor], without: Iterable[str] = ()) -> tuple[int, ...]:
    """Where these operands lie; 0 for those that are not there, and those that nobody wants."""
    wanted = tensors.keys() - set(without)
    return tuple(tensors[name].data_ptr() if name in wanted else 0 for name in names)
