"""What a compile yields: `Artifact`, with the compiler's report read from its log, and `CompileError`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.errors import ArgumentError, FlashgenError

# "C7508: setmaxnreg ignored", "C7510 ... wgmma serialized": the assembler did not do what the text asks for.
_IGNORED = re.compile(r"^.*\b(C75\d\d)\b.*$|^.*(?:ignored|serializ).*$", re.IGNORECASE | re.MULTILINE)


class CompileError(FlashgenError):
    """NVRTC refused a source. The message holds its log."""


@dataclass(frozen=True)
class Report:
    """What the compiler says of a kernel.

    registers: a thread; spill_bytes: stored and loaded, a thread; stack_bytes: a thread;
    warnings: lines of the log by which a directive was ignored or wgmma serialised.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_log(cls, log: str) -> Report:
        """Reads the log of one kernel compiled with `--ptxas-options=-v`. Raises CompileError if it is no such log."""
        registers = re.search(r"Used (\d+) registers", log)
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        if not registers or not frame:
            raise CompileError(f"log of the compiler has no report of registers and spills:\n{log}")
        warnings = tuple(match.group(0).strip() for match in _IGNORED.finditer(log))
        return cls(int(registers[1]), int(frame[2]) + int(frame[3]), int(frame[1]), warnings)

    @property
    def defects(self) -> list[str]:
        """Why a kernel with this report is broken, however right its output: empty if it is sound."""
        spills = [f"spills {self.spill_bytes} B a thread"] if self.spill_bytes else []
        stack = [f"keeps {self.stack_bytes} B a thread in local memory"] if self.stack_bytes and not self.spill_bytes else []
        return spills + stack + list(self.warnings)


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel: its text and entry, architecture, machine code, compiler log and the version that made it."""

    entry: str
    arch: str
    source: str
    cubin: bytes
    log: str
    compiler_version: str

    @property
    def report(self) -> Report:
        """The compiler's report, read from the log."""
        return Report.from_log(self.log)

    def meta(self) -> dict[str, Any]:
        """All but the two large members, as JSON values."""
        return {"entry": self.entry, "arch": self.arch, "log": self.log, "compiler_version": self.compiler_version}

    @classmethod
    def from_parts(cls, meta: object, source: str, cubin: bytes) -> Artifact:
        """The reverse of `meta`. Raises ArgumentError unless it has the fields of `meta` and no others, all of them texts."""
        fields = ("entry", "arch", "log", "compiler_version")
        if not isinstance(meta, dict) or meta.keys() != set(fields) or not all(isinstance(value, str) for value in meta.values()):
            raise ArgumentError(f"artifact must have the texts {', '.join(fields)}, and nothing else")
        return cls(source=source, cubin=cubin, **meta)
