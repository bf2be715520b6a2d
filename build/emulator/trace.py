"""`TracedKernel`: an emulated kernel that records what its threads do, with the lines of the text that do it."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from flashgen.codegen.errors import FlashgenError

from .compiler import TEXT_FILE, Emulated
from .folder import program_folder
from .kernel import EmulatedKernel, EmulatedLaunch, EmulatedLibrary, EmulationLimits, EmulationOrder
from .memory import MemoryView

_FRAMES, _STACKS, _OPS, _OP_CHARS = 24, 1 << 12, 64, 32  # of templates/emulator/trace.cuh
_RECORD = np.dtype(
    [
        ("offset", "u8"),
        ("shared", "u4"),
        ("block", "u4"),
        ("stack", "u4"),
        ("thread", "i2"),
        ("operand", "i2"),
        ("bytes", "u2"),
        ("op", "u1"),
        ("written", "u1"),
        ("mbarrier", "u4"),
    ]
)
_HEADER = np.dtype(
    [("count", "u8"), ("capacity", "u8"), ("base", "u8"), ("ops", f"S{_OP_CHARS}", _OPS), ("stacks", "u8", (_STACKS, _FRAMES))]
)
_TRACED = 1 << 26  # bytes of address space for a launch: what it does not use costs no memory
_ADDRESS_TOOLS = ("addr2line", "llvm-addr2line")


@dataclass(frozen=True)
class Frame:
    """A function that was under way, and the line of the text at which it was; line 0: not of the text."""

    function: str
    line: int


@dataclass(frozen=True)
class LaunchTrace:
    """What the threads of one launch did, in the order in which they did it.

    operands:  names of the tensors and buffers, by the records' `operand`
    ops:       names by the records' `op`: atoms, and 'global' for a load or store of plain C++
    stacks:    by the records' `stack`, from the innermost function to the kernel
    records:   a numpy array of `_RECORD`
    """

    operands: tuple[str, ...]
    ops: tuple[str, ...]
    stacks: dict[int, tuple[Frame, ...]]
    records: np.ndarray[Any, np.dtype[Any]]


class TraceError(FlashgenError):
    """A launch cannot be traced. The message says why."""


class TracedKernel(EmulatedKernel):
    """As EmulatedKernel, of a text that was compiled for Emulated.TRACED: `traces` has one trace for each launch so far."""

    kind: ClassVar[Emulated] = Emulated.TRACED

    @property
    def traces(self) -> list[LaunchTrace]:
        """Of all launches so far, in their order. Launch on one worker: else the records of blocks are mixed."""
        assert isinstance(self._library, _TracedLibrary)
        return self._library.traces

    def _loaded(self, library: bytes) -> EmulatedLibrary:
        return _TracedLibrary(library)


class _TracedLibrary(EmulatedLibrary):
    def __init__(self, library: bytes) -> None:
        super().__init__(library)
        self.traces: list[LaunchTrace] = []
        self._binary = library

    def run(
        self,
        launches: Sequence[EmulatedLaunch],
        interleaving: EmulationOrder,
        *,
        tensors: Sequence[MemoryView] = (),
        workers: int = 1,
        limits: EmulationLimits | None = None,
    ) -> None:
        """See EmulatedLibrary. Launches that may overlap run one after the other, as they may: so each has a trace of its own."""
        if workers != 1:
            raise TraceError(f"a trace needs 1 worker; got {workers}")
        for launch in launches:
            self.traces.append(self._trace(launch, interleaving, tensors, limits))

    def _trace(
        self, launch: EmulatedLaunch, interleaving: EmulationOrder, tensors: Sequence[MemoryView], limits: EmulationLimits | None
    ) -> LaunchTrace:
        """What one launch does. It may run in a process of its own: the records are in memory that both see."""
        with mmap.mmap(-1, _TRACED, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x4000) as memory:  # MAP_NORESERVE of Linux
            window = ctypes.c_char.from_buffer(memory)
            try:
                self._loaded.flashgen_emulator_trace(ctypes.byref(window), ctypes.c_uint64(_TRACED))
                super().run([launch], interleaving, tensors=tensors, limits=limits)
            finally:
                del window
            header = np.frombuffer(memory, _HEADER, 1)[0].copy()
            if header["count"] > header["capacity"]:
                raise TraceError(f"a trace holds {header['capacity']} records; the launch made {header['count']}: take a smaller problem")
            records = np.frombuffer(memory, _RECORD, int(header["count"]), _HEADER.itemsize).copy()
        ops = tuple(op.decode() for op in header["ops"] if op)
        stacks = {int(number): header["stacks"][number] for number in np.unique(records["stack"])}
        frames = self._resolved(stacks)
        own = [number for number, stack in frames.items() if stack[0].function.startswith("emulator::")]
        if "global" in ops:  # what the emulator copies for an atom, the atom has told
            records = records[(records["op"] != ops.index("global")) | ~np.isin(records["stack"], own)]
        return LaunchTrace(tuple(tensor.name for tensor in tensors), ops, frames, records)

    def _resolved(self, stacks: dict[int, Any]) -> dict[int, tuple[Frame, ...]]:
        """The functions and lines of return addresses."""
        addresses = sorted({int(address) for stack in stacks.values() for address in stack if address})
        frames = dict(zip(addresses, frames_at(self._binary, addresses), strict=True))
        return {number: tuple(frames[int(address)] for address in stack if address) for number, stack in stacks.items()}


def frames_at(library: bytes, addresses: Sequence[int]) -> list[Frame]:
    """What the compiler's tables say of these offsets in a library. Raises TraceError without a tool that reads them."""
    tool = next(filter(None, map(shutil.which, _ADDRESS_TOOLS)), None)
    if tool is None:
        raise TraceError(f"a trace needs one of {', '.join(_ADDRESS_TOOLS)} on the PATH (apt install binutils)")
    with tempfile.NamedTemporaryFile(prefix="flashgen-", suffix=".so", dir=program_folder()) as file:
        Path(file.name).write_bytes(library)
        asked = "\n".join(hex(address - 1) for address in addresses)  # a return address is behind the call
        done = subprocess.run([tool, "-f", "-C", "-e", file.name], input=asked, capture_output=True, text=True, errors="replace")
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != 2 * len(addresses):
        raise TraceError(f"{tool} cannot read a library's lines: {done.stderr.strip() or done.stdout[-200:]}")
    found = []
    for function, at in zip(lines[::2], lines[1::2], strict=True):
        line = re.search(rf"{re.escape(TEXT_FILE)}:(\d+)", at)
        found.append(Frame(function, int(line[1]) if line else 0))
    return found
