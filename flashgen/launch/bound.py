"""`BoundCall`: a call bound to a kernel on a GPU, with the memory of its program's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from flashgen.build.gpu.kernel import Kernel, Launch, ProgramNumbers
from flashgen.codegen.operands import Call
from flashgen.codegen.program import Buffer, BufferKind, Program

from .allocation import empty_strided
from .tile_counters import COUNTER_BYTES, tile_counters

_KINDS = (BufferKind.CALL_ZEROED, BufferKind.CALL, BufferKind.STREAM_COUNTER)  # each call goes through them by number
_DENSE = (1,)  # strides
_ALIGNED = 512  # bytes, as PyTorch's allocator aligns what it gives


class _Memory(NamedTuple):
    """Of the buffers of a call, those of each kind one after the other, as each allocation costs a call a microsecond or two.

    zeroed_bytes, other_bytes, counters: how much memory of each kind; bases, offsets: of each buffer the kind, and where in that it lies
    """

    zeroed_bytes: int
    other_bytes: int
    counters: int
    bases: tuple[int, ...]
    offsets: tuple[int, ...]


class BoundCall:
    """All of a call but addresses. For the thread that made it: see `Launch`.

    enqueue: given a stream of the kernel's device, which is the current one, and the addresses of the operands in order, 0 for none,
    enqueues the program
    """

    def __init__(self, kernel: Kernel, call: Call) -> None:
        """Raises ArgumentError if the kernel's config cannot take the call's sizes."""
        program = _program(kernel, call)
        self.index, self.launch, self.workload = kernel.gpu.ordinal, kernel.bind(program), call.workload
        self.enqueue = self._enqueue(_memory(program.buffers))

    def numbers(self, call: Call) -> tuple[Any, ...]:
        """What `with_numbers` takes for another call of the same kernel. Raises as `BoundCall`."""
        kernel = self.launch.kernel
        program = _program(kernel, call)
        return kernel.numbers(program), tuple(_memory(program.buffers))

    def with_numbers(self, of_launches: ProgramNumbers, memory: tuple[Any, ...]) -> BoundCall:
        """What another call is bound to, whose program differs from this one's in `numbers` alone."""
        other = object.__new__(BoundCall)
        other.index, other.launch, other.workload = self.index, self.launch.with_numbers(of_launches), self.workload
        other.enqueue = other._enqueue(_Memory(*memory))
        return other

    def _enqueue(self, memory: _Memory) -> Callable[..., None]:
        if not memory.bases:
            return self.launch.enqueue
        if memory[:3] == (0, 0, 1) and memory.offsets == (0,):
            return _with_counter(self.launch, self.index)
        return _with_buffers(self.launch, self.index, memory)


# What enqueues a call. As of a program, it knows no call that knows it: see build/gpu/kernel.py.


def _with_counter(launch: Launch, index: int) -> Callable[..., None]:
    """Of the fastest kernels, whose calls must not cost more than they have to."""

    def enqueue(stream: int, *addresses: int) -> None:
        launch.enqueue(stream, *addresses, tile_counters.address(index, stream))

    return enqueue


def _with_buffers(launch: Launch, index: int, memory: _Memory) -> Callable[..., None]:
    """Of all others."""
    zeroed_bytes, other_bytes, counters, bases, offsets = memory
    other_shape, device, where = (other_bytes,), torch.device("cuda", index), tuple(zip(bases, offsets, strict=True))
    zeros = _zeros

    def enqueue(stream: int, *addresses: int) -> None:
        # Memory that PyTorch's allocator takes back once this returns goes to nobody else before the stream is done with it.
        zeroed = zeros(zeroed_bytes, device) if zeroed_bytes else None
        other = empty_strided(other_shape, _DENSE, torch.uint8) if other_bytes else None
        at = (
            0 if zeroed is None else zeroed.data_ptr(),
            0 if other is None else other.data_ptr(),
            tile_counters.address(index, stream, counters) if counters else 0,
        )
        launch.enqueue(stream, *addresses, *[at[kind] + offset for kind, offset in where])

    return enqueue


def _program(kernel: Kernel, call: Call) -> Program:
    family, config = kernel.spec.family, kernel.spec.config
    family.require_call(call, config)
    return family.program(config, call, kernel.gpu.device)


def _memory(buffers: Iterable[Buffer]) -> _Memory:
    ends, bases, offsets = [0, 0, 0], list[int](), list[int]()
    for buffer in buffers:
        counts, kind = buffer.kind is BufferKind.STREAM_COUNTER, _KINDS.index(buffer.kind)
        bases.append(kind)
        offsets.append(0 if counts else ends[kind])  # one such buffer at most, in no whole piece of memory
        ends[kind] += buffer.bytes if counts else -(-buffer.bytes // _ALIGNED) * _ALIGNED
    return _Memory(ends[0], ends[1], -(-ends[2] // COUNTER_BYTES), tuple(bases), tuple(offsets))


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def addresses_of(names: Iterable[str], tensors: Mapping[str, torch.Tensor], excluded: Iterable[str] = ()) -> tuple[int, ...]:
    """Where these operands lie; 0 for those that are not there, and those that nobody wants."""
    wanted = tensors.keys() - set(excluded)
    return tuple(tensors[name].data_ptr() if name in wanted else 0 for name in names)
