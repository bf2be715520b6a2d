"""What the tools share that measure what calls cost the CPU: their options, a made-up GPU, calls in rounds, and the lines they print.

Without a GPU tensors lie in main memory, PyTorch is made to say that they are on one, and the driver is made up, as in call_overhead.py:
what the driver and PyTorch's allocator take is not in the figures then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashgen.launch import bound as launch_bound
from flashgen.launch import seeds

from . import call_overhead

WARM_UP = 50

Calls = dict[str, Callable[[], object]]  # by what they are
Pairs = dict[str, tuple[Callable[[], object], Callable[[], object]]]  # another library's call, and flashgen's of the same tensors


class Philox:
    """The state of a GPU's generator."""

    def __init__(self) -> None:
        self._offset = 0

    def initial_seed(self) -> int:
        """See torch.Generator."""
        return 7

    def get_offset(self) -> int:
        """See torch.Generator."""
        return self._offset

    def set_offset(self, offset: int) -> None:
        """See torch.Generator."""
        self._offset = offset


def pretend(folder: Path) -> None:
    """From here on there is an H200, and tensors of main memory say that they are on it."""
    call_overhead.pretend("h200", folder)
    table = torch.arange(2**10)
    patches: tuple[tuple[Any, str, Any], ...] = (
        (torch.Tensor, "device", call_overhead.ON),
        (torch.Tensor, "is_cuda", True),
        (torch.cuda, "default_generators", (Philox(),)),
        (seeds, "_raw_stream", lambda index: 0),
        (seeds, "_table", lambda *given: table),
        (launch_bound, "_zeros", lambda size, device: torch.zeros(size, dtype=torch.uint8)),
        (torch.cuda, "synchronize", lambda: None),
    )
    for owner, name, value in patches:
        setattr(owner, name, value)


def parser(description: str | None, calls: int = 200) -> argparse.ArgumentParser:
    """The options of all these tools. calls: how many a kind makes in a row unless told otherwise."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--calls", type=int, default=calls, help="calls in a row of each kind")
    made.add_argument("--gpu", action="store_true", help="call on this machine's GPU")
    return made


@contextmanager
def device_for_calls(gpu: bool) -> Iterator[str]:
    """The device for calls without gradients, whose kernels and records are in a folder of their own: the GPU, or a made-up one's."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if gpu:
            os.environ["FLASHGEN_CACHE_DIR"] = folder
        else:
            pretend(Path(folder))
        yield "cuda" if gpu else "cpu"


def measured(calls: Calls, options: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of a call in each round. In a round every call runs in turn, so that a slow phase of the processor meets them all."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(options.calls):
                call()
            found[name].append((time.perf_counter() - begun) / options.calls * 1e6)
            torch.cuda.synchronize()
    return found


def median_difference(times: Sequence[float], others: Sequence[float]) -> float:
    """Of rounds in which both ran."""
    return statistics.median(one - other for one, other in zip(times, others, strict=True))


def line(name: str, times: Sequence[float]) -> str:
    """A call's median and least."""
    return f"{name:28} median {statistics.median(times):7.2f}  least {min(times):7.2f}"


def print_pairs(pairs: Pairs, options: argparse.Namespace) -> None:
    """What flashgen's call takes, and what the other library's of each pair takes more."""
    times = measured({f"{name} {side}": call for name, both in pairs.items() for side, call in zip((0, 1), both, strict=True)}, options)
    for name in pairs:
        other, own = times[f"{name} 0"], times[f"{name} 1"]
        print(f"{name:22} flashgen {statistics.median(own):7.2f}  more {median_difference(other, own):6.2f}")
