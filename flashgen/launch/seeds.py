"""Seeds of dropout: int64 numbers in memory, which follow from the state of PyTorch's generator of the device.

A number that PyTorch draws costs a kernel each time, whose launch takes as long as much of a call. So seeds of a GPU come from tables of
many, which one kernel draws. A generator's state is a seed and an offset: the offset says where in which table a seed lies, and goes on, so
that torch.manual_seed repeats a call, a state that is put back (as in checkpointing) gives the same seed again, and each call another one.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from .tracers import is_gpu, nobody_traces
from .views import element

_MOST = 2**63 - 1
_SEEDS = 2**10  # of a table
_STEP = 4  # by which an offset goes on, as PyTorch's own go in multiples of it
_BYTES = 8  # of a seed
_OWN = 0x666C617368676E  # tables come from generators of other seeds than PyTorch's: else the numbers would be some of those it draws
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream)
_tables: dict[tuple[int, int], _Table] = {}  # the last of a device and a stream
_lock = Lock()  # else two threads could take one offset
_acquire, _release = _lock.acquire, _lock.release


class _Table(NamedTuple):
    """Seeds of a generator's offsets from `begin` on to `end`, of one of this seed, and where they lie."""

    seed: int
    begin: int
    end: int
    seeds: torch.Tensor
    address: int


_NO_TABLE: tuple[int, int, int, Any, int] = (-1, 0, 0, None, 0)  # of a seed that no generator has


def drawn_seed(device: torch.device | None) -> torch.Tensor:
    """Of no dimensions, on the device. Each replay of a CUDA graph, and each run of a compiled graph, draws another one."""
    if is_dynamo_compiling() or device is None or not is_gpu(device) or not nobody_traces():
        return torch.randint(_MOST, (), device=device)
    index: int = device.index
    seeds, position, _ = next_seed(index, _raw_stream(index))
    return element(seeds, position)


def next_seed(index: int, stream: int) -> tuple[torch.Tensor, int, int]:
    """A tensor of one dimension on that GPU, which holds the seed until it is let go, the seed's position there, and its address.

    For what is enqueued on the stream, which must be the current one, and where nobody traces. The state of PyTorch's generator goes on. A
    table is of one stream: no other one waits until it is there. The default stream, 0, cannot be captured: asking takes the driver long.
    """
    if stream and torch.cuda.is_current_stream_capturing():
        drawn = torch.randint(_MOST, (1,), device=torch.device("cuda", index))
        return drawn, 0, drawn.data_ptr()
    generator, key = torch.cuda.default_generators[index], (index, stream)
    _acquire()  # sooner done than `with`
    try:
        offset = generator.get_offset()
        generator.set_offset(offset + _STEP)
    finally:
        _release()
    wanted = generator.initial_seed()
    seed, begin, end, seeds, address = _tables.get(key, _NO_TABLE)
    if seed != wanted or not begin <= offset < end:
        number = offset // _STEP // _SEEDS
        seeds, begin = _table(torch.device("cuda", index), wanted, number), number * _SEEDS * _STEP
        address = seeds.data_ptr()
        _tables[key] = _Table(wanted, begin, begin + _SEEDS * _STEP, seeds, address)
    position = (offset - begin) // _STEP
    return seeds, position, address + _BYTES * position


def _table(device: torch.device, seed: int, number: int) -> torch.Tensor:
    """The seeds of all offsets from number * _SEEDS * _STEP on to the next table's."""
    with torch.inference_mode(False):  # they may be kept for a backward pass
        generator = torch.Generator(device)
        generator.manual_seed((seed ^ _OWN) & (2**64 - 1))
        generator.set_offset(number * _SEEDS * _STEP)
        return torch.randint(_MOST, (_SEEDS,), generator=generator, device=device)
