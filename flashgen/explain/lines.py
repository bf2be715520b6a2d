"""From lines of the text that the emulator runs to those of the text that a GPU gets, which is the one that people read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.build.emulator.trace import Frame
from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.prune import MARK
from flashgen.codegen.render import Source

# The first line that begins so is behind the atoms: from here on both texts are the same.
_BEGIN = ("using Element = ", "// ---- tile operations")
# The first line that begins so ends the tile operations. What the roles of a warp-specialised kernel do is the kernel.
_KERNEL = ('extern "C" __global__', *(f"{MARK}tile/warpgroup/{name}.cuh" for name in ("forward_producer", "backward_inputs")))


@dataclass(frozen=True)
class CallLines:
    """Where a thread was: lines of the kernel, from the outermost call to the innermost, and of the tile operations that it had called."""

    kernel: tuple[int, ...]
    tile: tuple[int, ...]


class ShownText:
    """The text with PTX atoms, and where a line of the emulated one is in it."""

    def __init__(self, shown: Source, emulated: Source) -> None:
        """Raises FlashgenError if the texts differ in more than their atoms."""
        self.lines = shown.text.splitlines()
        of_emulated = emulated.text.splitlines()
        begin, self._begin = (next(i for i, line in enumerate(lines) if line.startswith(_BEGIN)) for lines in (self.lines, of_emulated))
        same = self.lines[begin:]
        if of_emulated[self._begin : self._begin + len(same)] != same:
            raise FlashgenError(f"{shown.entry} has tile operations or kernels that differ between a GPU and the emulator")
        self._distance = self._begin - begin
        self._kernel = next(i for i, line in enumerate(self.lines) if line.startswith(_KERNEL))

    def call(self, stack: Sequence[Frame]) -> CallLines:
        """The lines of a stack, counted from 1 in the text that is shown."""
        lines = [frame.line - self._distance for frame in stack if self._begin < frame.line <= self._distance + len(self.lines)]
        lines.reverse()
        return CallLines(
            tuple(line for line in lines if line > self._kernel), tuple(dict.fromkeys(line for line in lines if line <= self._kernel))
        )

    def operation(self, stack: Sequence[Frame]) -> str:
        """The outermost tile operation of a stack, without template arguments; empty if there is none."""
        for frame in reversed(stack):
            if self._begin < frame.line <= self._distance + self._kernel and "for_each_tile" not in frame.function:
                return plain_name(frame.function)
        return ""


def plain_name(function: str) -> str:
    """Of a function as a debugger's tables have it: without its type, template arguments, parameters and the struct that it belongs to."""
    shorter = re.sub(r"<[^<>]*>", "", function)
    return plain_name(shorter) if shorter != function else re.split(r"::|\s", function.partition("(")[0])[-1]
