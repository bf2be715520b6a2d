"""`BoundCall`: a call bound to a kernel on a GPU, with the memory of its program's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.operands import Call
from flashgen.codegen.program import Buffer, BufferKind

from .allocation import empty_strided
from .tile_counters import COUNTER_BYTES, tile_counters

_KINDS = (BufferKind.CALL_ZEROED, BufferKind.CALL, BufferKind.STREAM_COUNTER)  # each call goes through them by number
_DENSE = (1,)  # strides
_ALIGNED = 512  # bytes, as PyTorch's allocator aligns what it gives


class BoundCall:
    """All of a call but addresses. For the thread that made it: see `Launch`.

    enqueue: given a stream of the kernel's device, which is the current one, and the addresses of the operands in order, 0 for none,
    enqueues the program
    """

    def __init__(self, kernel: Kernel, call: Call) -> None:
        """Raises ArgumentError if the kernel's config cannot take the call's sizes."""
        family, config, gpu = kernel.spec.family, kernel.spec.config, kernel.gpu
        family.require_call(call, config)
        program = family.program(config, call, gpu.device)
        self.index, self.launch = gpu.ordinal, kernel.bind(program)
        self.enqueue: Callable[..., None] = self.launch.enqueue
        if not program.buffers:
            return
        if [(buffer.kind, buffer.bytes) for buffer in program.buffers] == [(BufferKind.STREAM_COUNTER, COUNTER_BYTES)]:
            self.enqueue = self._with_counter
        else:
            self.enqueue = self._with_buffers(program.buffers)

    def _with_counter(self, stream: int, *addresses: int) -> None:
        """Of the fastest kernels, whose calls must not cost more than they have to."""
        self.launch.enqueue(stream, *addresses, tile_counters.address(self.index, stream))

    def _with_buffers(self, buffers: Iterable[Buffer]) -> Callable[..., None]:
        """The buffers of each kind lie one after the other, as each allocation costs a call a microsecond or two."""
        ends, offsets = dict.fromkeys(_KINDS, 0), []
        for buffer in buffers:
            counts = buffer.kind is BufferKind.STREAM_COUNTER  # one buffer at most, in no whole piece of memory
            offsets.append((_KINDS.index(buffer.kind), 0 if counts else ends[buffer.kind]))
            ends[buffer.kind] += buffer.bytes if counts else -(-buffer.bytes // _ALIGNED) * _ALIGNED
        zeroed_bytes, other_bytes, counted = ends.values()
        counters, index, other_shape, device = -(-counted // COUNTER_BYTES), self.index, (other_bytes,), torch.device("cuda", self.index)
        launch, zeros = self.launch, _zeros

        def enqueue(stream: int, *addresses: int) -> None:
            # Memory that PyTorch's allocator takes back once this returns goes to nobody else before the stream is done with it.
            zeroed = zeros(zeroed_bytes, device) if zeroed_bytes else None
            other = empty_strided(other_shape, _DENSE, torch.uint8) if other_bytes else None
            bases = (
                0 if zeroed is None else zeroed.data_ptr(),
                0 if other is None else other.data_ptr(),
                tile_counters.address(index, stream, counters) if counters else 0,
            )
            launch.enqueue(stream, *addresses, *[bases[kind] + offset for kind, offset in offsets])

        return enqueue


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def addresses_of(names: Iterable[str], tensors: Mapping[str, torch.Tensor], excluded: Iterable[str] = ()) -> tuple[int, ...]:
    """Where these operands lie; 0 for those that are not there, and those that nobody wants."""
    wanted = tensors.keys() - set(excluded)
    return tuple(tensors[name].data_ptr() if name in wanted else 0 for name in names)
