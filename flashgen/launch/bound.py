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
            self._lay_out(program.buffers)
            self.enqueue = self._with_buffers

    def _with_counter(self, stream: int, *addresses: int) -> None:
        """Of the fastest kernels, whose calls must not cost more than they have to."""
        self.launch.enqueue(stream, *addresses, tile_counters.address(self.index, stream))

    def _lay_out(self, buffers: Iterable[Buffer]) -> None:
        """Lays the buffers of each kind one after the other."""
        ends = dict.fromkeys(_KINDS, 0)
        offsets = []
        for buffer in buffers:
            counts = buffer.kind is BufferKind.STREAM_COUNTER  # one buffer at most, in no whole piece of memory
            offsets.append((_KINDS.index(buffer.kind), 0 if counts else ends[buffer.kind]))
            ends[buffer.kind] += buffer.bytes if counts else -(-buffer.bytes // _ALIGNED) * _ALIGNED
        self._offsets, self._device = tuple(offsets), torch.device("cuda", self.index)
        self._zeroed_bytes, self._other_bytes, counted = ends.values()
        self._counters = -(-counted // COUNTER_BYTES)

    def _with_buffers(self, stream: int, *addresses: int) -> None:
        # Memory that PyTorch's allocator takes back once this returns goes to nobody else before the stream is done with it.
        zeroed = self._memory(self._zeroed_bytes, torch.zeros)
        other = self._memory(self._other_bytes, _not_zeroed)
        bases = (
            0 if zeroed is None else zeroed.data_ptr(),
            0 if other is None else other.data_ptr(),
            tile_counters.address(self.index, stream, self._counters) if self._counters else 0,
        )
        self.launch.enqueue(stream, *addresses, *[bases[kind] + offset for kind, offset in self._offsets])

    def _memory(self, size: int, make: Callable[..., torch.Tensor]) -> torch.Tensor | None:
        """One allocation for all buffers of a kind: each costs a call a microsecond or two."""
        return make(size, dtype=torch.uint8, device=self._device) if size else None


def _not_zeroed(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.empty`, on the current device."""
    return empty_strided((size,), _DENSE, dtype)


def addresses_of(names: Iterable[str], tensors: Mapping[str, torch.Tensor], excluded: Iterable[str] = ()) -> tuple[int, ...]:
    """Where these operands lie; 0 for those that are not there, and those that nobody wants."""
    wanted = tensors.keys() - set(excluded)
    return tuple(tensors[name].data_ptr() if name in wanted else 0 for name in names)
