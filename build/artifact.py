"""What a compile yields: `Artifact`, with the compiler's report read from its log, and `CompileError`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.codegen.errors import ArgumentError, FlashgenError

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# "C7508: setmaxnreg ignored", "C7510 ... wgmma serialized": the assembler did not do what the text asks for.
_IGNORED = re.compile(r"^.*\b(C75\d\d)\b.*$|^.*(?:ignored|serializ).*$", re.IGNORECASE | re.MULTILINE)


class CompileError(FlashgenError):
    """NVRTC refused a source. The message holds its log."""


@dataclass(frozen=True)
class EntryReport:
    """What the compiler says of one kernel, by thread.

    registers: of a thread; spill_bytes: stored and loaded, with those of functions that it calls; stack_bytes: kept in local memory
    """

    registers: int
    spill_bytes: int = 0
    stack_bytes: int = 0

    @property
    def defects(self) -> list[str]:
        """Why the kernel is broken, however right its output: empty if it is sound."""
        if self.spill_bytes:
            return [f"spills {self.spill_bytes} B a thread"]
        return [f"keeps {self.stack_bytes} B a thread in local memory"] if self.stack_bytes else []


@dataclass(frozen=True)
class Report:
    """What the compiler says of a text.

    entries: of each kernel, by name; warnings: lines of the log by which a directive was ignored or wgmma serialised.
    """

    entries: Mapping[str, EntryReport]
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_log(cls, log: str) -> Report:
        """Reads the log of a text compiled with `--ptxas-options=-v`. Raises CompileError if it is no such log."""
        _, *parts = _ENTRY.split(log)
        entries = dict(zip(parts[::2], map(_entry_report, parts[1::2]), strict=True))
        if not entries or None in entries.values():
            raise CompileError(f"log of the compiler has no report of registers and spills:\n{log}")
        warnings = tuple(match.group(0).strip() for match in _IGNORED.finditer(log))
        return cls({name: entry for name, entry in entries.items() if entry}, warnings)

    @property
    def registers(self) -> int:
        """Of a thread, in the kernel that has most."""
        return max(entry.registers for entry in self.entries.values())

    @property
    def spill_bytes(self) -> int:
        """Of all kernels together."""
        return sum(entry.spill_bytes for entry in self.entries.values())

    @property
    def stack_bytes(self) -> int:
        """Of a thread, in the kernel that has most."""
        return max(entry.stack_bytes for entry in self.entries.values())

    @property
    def defects(self) -> list[str]:
        """Why a text with this report is broken, however right its output: empty if all of its kernels are sound."""
        if len(self.entries) == 1:
            (only,) = self.entries.values()
            return only.defects + list(self.warnings)
        return [f"{name} {defect}" for name, entry in self.entries.items() for defect in entry.defects] + list(self.warnings)


def _entry_report(section: str) -> EntryReport | None:
    """From what the log says until the next kernel; the lines of functions that are called come in it, too."""
    registers, frames = re.search(r"Used (\d+) registers", section), _FRAME.findall(section)
    if not registers or not frames:
        return None
    stack, stored, loaded = zip(*(map(int, frame) for frame in frames), strict=True)
    return EntryReport(int(registers[1]), sum(stored) + sum(loaded), max(stack))


@dataclass(frozen=True)
class Artifact:
    """One compiled text: its (first) entry, architecture, machine code, compiler log and the version that made it."""

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
