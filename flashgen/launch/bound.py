"""`BoundCall`: a call bound to a kernel on a GPU, with the memory of its program's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add, itemgetter
from typing import Any

import torch

from flashgen.build.gpu.kernel import Kernel, Launch, ProgramNumbers
from flashgen.codegen.operands import Call
from flashgen.codegen.program import Buffer, BufferKind, Program

from .allocation import empty_strided
from .kept_tiles import KeptTiles
from .tile_counters import COUNTER_BYTES, tile_counters

_KINDS = (BufferKind.CALL_ZEROED, BufferKind.CALL, BufferKind.STREAM_COUNTER, BufferKind.KEPT)  # each call goes through them by number
_DENSE = (1,)  # strides
_ALIGNED = 512  # bytes, as PyTorch's allocator aligns what it gives
Enqueue = Callable[..., None]


class BoundCall:
    """All of a call but addresses. For the thread that made it: see `Launch`.

    numbers: what differs between sizes of a call
    enqueue: given these, or those of another call, a stream of the kernel's device, which is the current one, and the addresses of the
        operands in order, 0 for none, enqueues the program
    enqueue_kept: the same with tiles that a block mask keeps: given its `KeptTiles` and the modifiers' tensors before all that; None where
        the program finds no tiles
    """

    def __init__(self, kernel: Kernel, call: Call) -> None:
        """Raises ArgumentError if the kernel's config cannot take the call's sizes."""
        program = _program(kernel, call)
        self.index, self.launch, self.workload = kernel.gpu.ordinal, kernel.bind(program), call.workload
        self.numbers, self.enqueue = _with_memory(self.launch, self.launch.numbers, self.index, program.buffers)
        finds = any(launch.finds for launch in program.launches)
        self.enqueue_kept = _with_kept(self.launch, self.enqueue) if finds else None

    def __call__(self, stream: int, *addresses: int) -> None:
        """Enqueues the call itself. Raises as `Launch` does."""
        self.enqueue(self.numbers, stream, *addresses)

    def numbers_of(self, call: Call) -> Any:
        """`numbers` of another call of the same kernel, whose sizes may be `Size`s. Raises as `BoundCall`."""
        kernel = self.launch.kernel
        program = _program(kernel, call)
        return _with_memory(self.launch, kernel.numbers(program), self.index, program.buffers)[0]


def _with_memory(launch: Launch, of_launches: ProgramNumbers, index: int, buffers: Sequence[Buffer]) -> tuple[Any, Enqueue]:
    """What a call has in `BoundCall.numbers`, and what enqueues it with the memory of its buffers."""
    if not buffers:
        return of_launches, launch.enqueue
    sizes, where = _memory(buffers)
    if len(buffers) == 1 and sizes[2] == 1:
        return of_launches, _with_counter(launch, index)
    return (of_launches, sizes, where), _with_buffers(launch, index)


def _with_counter(launch: Launch, index: int) -> Enqueue:
    """Of the fastest kernels, whose calls must not cost more than they have to."""

    def enqueue(numbers: ProgramNumbers, stream: int, *addresses: int) -> None:
        launch.enqueue(numbers, stream, *addresses, tile_counters.address(index, stream))

    return enqueue


def _with_buffers(launch: Launch, index: int) -> Enqueue:
    """Of all others."""
    device, zeros = torch.device("cuda", index), _zeros

    def enqueue(numbers: tuple[Any, ...], stream: int, *addresses: int, kept: torch.Tensor | None = None, is_found: bool = False) -> None:
        of_launches, (zeroed_bytes, other_bytes, counters, kept_bytes), (kinds, offsets) = numbers
        # Memory that PyTorch's allocator takes back once this returns goes to nobody else before the stream is done with it.
        zeroed = zeros(zeroed_bytes, device) if zeroed_bytes else None
        other = empty_strided((other_bytes,), _DENSE, torch.uint8) if other_bytes else None
        if kept is None and kept_bytes:
            kept = empty_strided((kept_bytes,), _DENSE, torch.uint8)
        at = (
            0 if zeroed is None else zeroed.data_ptr(),
            0 if other is None else other.data_ptr(),
            tile_counters.address(index, stream, counters) if counters else 0,
            0 if kept is None else kept.data_ptr(),
        )
        run = launch.enqueue_others if is_found else launch.enqueue
        run(of_launches, stream, *addresses, *map(add, map(at.__getitem__, kinds), offsets))

    return enqueue


def _with_kept(launch: Launch, enqueue: Enqueue) -> Enqueue:
    """Of programs that find what a block mask keeps."""
    kernel, of_finding = launch.kernel, itemgetter(*launch.finding)

    def enqueue_kept(kept: KeptTiles, tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...], stream: int, *addresses: int) -> None:
        key = kernel, stream, of_finding(numbers[0])
        memory = kept.get(key, tensors)
        if memory is not None:
            return enqueue(numbers, stream, *addresses, kept=memory, is_found=True)
        memory = empty_strided((numbers[1][3],), _DENSE, torch.uint8)
        enqueue(numbers, stream, *addresses, kept=memory)
        kept.put(key, tensors, memory)

    return enqueue_kept


def _program(kernel: Kernel, call: Call) -> Program:
    family, config = kernel.spec.family, kernel.spec.config
    family.require_call(call, config)
    return family.program(config, call, kernel.gpu.device)


_Memory = tuple[tuple[int, int, int, int], tuple[tuple[int, ...], tuple[int, ...]]]
"""Of the buffers of a call, those of each kind one after the other, as each allocation costs a call a microsecond or two: how much memory
of each kind, in bytes and in counters, and the kinds of the buffers, and where in that each lies."""


def _memory(buffers: Iterable[Buffer]) -> _Memory:
    ends, kinds, offsets = [0, 0, 0, 0], list[int](), list[int]()
    for buffer in buffers:
        counts, kind = buffer.kind is BufferKind.STREAM_COUNTER, _KINDS.index(buffer.kind)
        kinds.append(kind)
        offsets.append(0 if counts else ends[kind])  # one such buffer at most, in no whole piece of memory
        ends[kind] += buffer.bytes if counts else -(-buffer.bytes // _ALIGNED) * _ALIGNED
    return (ends[0], ends[1], -(-ends[2] // COUNTER_BYTES), ends[3]), (tuple(kinds), tuple(offsets))


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def addresses_of(names: Iterable[str], tensors: Mapping[str, torch.Tensor], excluded: Iterable[str] = ()) -> tuple[int, ...]:
    """Where these operands lie; 0 for those that are not there, and those that nobody wants."""
    wanted = tensors.keys() - set(excluded)
    return tuple(tensors[name].data_ptr() if name in wanted else 0 for name in names)
