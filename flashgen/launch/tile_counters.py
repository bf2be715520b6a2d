"""Memory that a kernel needs beside its tensors: the tile counters of persistent kernels, and other counters of blocks.

A counter is an int32 that is 0 when a kernel begins and that the kernel leaves 0 when it ends, so nobody has to clear it between
launches. A kernel that needs several has them in one piece. No two kernels may use one at the same time:

- Launches of one stream share theirs. Those that use it run one after the other: one that overlaps what comes before waits for its end
  first, and of one program at most one uses a counter.
- A stream is known by its handle, together with the thread: the handle of the default stream of a thread is the same in all of them.
  A handle may come back for a new stream once the old one is destroyed. The driver releases it when the work of the old stream is
  done, and the counter is 0 by then; PyTorch's allocator relies on the same.
- A launch that is captured in a CUDA graph gets some of its own, for good: the graph may be replayed on any stream, next to eager
  launches and other graphs. Replays of one graph do not overlap, as they would write the same outputs, too.

Counters are cut from memory that comes zeroed from the driver. It is not PyTorch's, because what is held beyond a call would be taken
for a leak while torch.compile warms up or records a graph (mode "reduce-overhead"), where all that a thread allocates must belong to
the graph. Nothing is given back: for most kernels it is 4 bytes a stream, and 4 bytes a captured launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from flashgen.build.gpu.device_memory import zeroed_memory

COUNTER_BYTES = 4
COUNTERS_AT_ONCE = 16384


class TileCounters:
    """The counters of all devices. Safe to use from several threads; those of a stream that is known already take no lock."""

    def __init__(self, allocate: Callable[[int], int] = zeroed_memory) -> None:
        """`allocate`: gives so many zeroed bytes on the current device."""
        self._allocate, self._lock = allocate, threading.Lock()
        self._unused: dict[int, tuple[int, int]] = {}  # of each device: where they begin, and how many they are
        self._of_streams: dict[tuple[int, int, int], tuple[int, int]] = {}  # the same of each stream and thread

    def address(self, device: int, stream: int, count: int = 1) -> int:
        """Where `count` counters are for a launch on `stream`, the current stream of `device`, which is the current device.

        Raises DriverError if memory is needed and there is none.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._take(device, count)
        key = (device, stream, threading.get_ident())
        address, held = self._of_streams.get(key, (0, 0))
        if held < count:  # those held are not given back: rounded up, they are few even where every launch asks for more
            held = 1 << (count - 1).bit_length()
            address = self._take(device, held)
            self._of_streams[key] = address, held
        return address

    def _take(self, device: int, count: int) -> int:
        """Counters that nobody has had."""
        with self._lock:
            begin, left = self._unused.get(device, (0, 0))
            if left < count:
                left = max(count, COUNTERS_AT_ONCE)
                begin = self._allocate(left * COUNTER_BYTES)
            self._unused[device] = begin + count * COUNTER_BYTES, left - count
            return begin


tile_counters = TileCounters()
