"""`EmulatedProgram`: a text with emulated atoms as a program of its own, in a folder where a person can read, rerun and debug it."""

from __future__ import annotations

import re
import signal
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..artifact import Artifact
from ..own_files import adopt, remove_own, write_own
from .compiler import TEXT_FILE, Emulated
from .fault import EmulatorFaultError
from .kernel import EmulationOrder

PROGRAM_FILE, LAUNCH_FILE, RESULTS_FILE = "kernel", "launch.bin", "results.bin"  # beside TEXT_FILE
FILES = (TEXT_FILE, PROGRAM_FILE, LAUNCH_FILE, RESULTS_FILE)
_FAULT = 3  # exit code where a check of the runtime failed


@dataclass(frozen=True)
class ProgramLaunch:
    """What of a launch is no tensor: the kernel's number in the text, its parameters, a block's size, which blocks run, and in what order.

    `address_fields`: (offset, index) of each address among the parameters, and the tensor whose it is.
    """

    kernel: int
    parameters: bytes
    address_fields: tuple[tuple[int, int], ...]
    threads: int
    shared_bytes: int
    blocks: range
    interleaving: EmulationOrder
    cluster: int = 1


class EmulatedProgram:
    """A program in `folder`: `text`, and files for what it reads and writes. Of the user's files there none is replaced."""

    def __init__(self, artifact: Artifact, folder: Path) -> None:
        """Writes the text and the program. The artifact is of render_program's text, for Emulated.PROGRAM or Emulated.SANITIZED."""
        self.sanitized = artifact.arch == Emulated.SANITIZED
        (self.text,) = write_own(folder, {TEXT_FILE: artifact.source.encode()})
        (self._program,) = write_own(folder, {PROGRAM_FILE: artifact.cubin}, 0o700)
        self._launch, self._results = folder / LAUNCH_FILE, folder / RESULTS_FILE

    @property
    def command(self) -> list[str]:
        """What runs the last launch again."""
        return [str(path) for path in (self._program, self._launch, self._results)]

    def run(self, launch: ProgramLaunch, tensors: Mapping[str, bytes], readable: int, output: IO[str]) -> dict[str, bytes]:
        """Runs the blocks, and gives the tensors as they are then. What the kernel prints goes to `output`.

        `tensors`: operands and buffers by name, inputs first, each exactly as many bytes as may be touched. Copies may read the first
        `readable` ones. Raises EmulatorFaultError for what a check or a sanitizer found, with the sanitizer's report.
        """
        interleaving, blocks = launch.interleaving, launch.blocks
        checked = 0 if self.sanitized else readable
        shape = (launch.threads, launch.shared_bytes, len(launch.parameters), len(tensors), checked)
        fields = launch.address_fields
        how = (
            interleaving.schedule,
            interleaving.late_copies,
            blocks.start,
            len(blocks),
            len(fields),
            launch.kernel,
            launch.cluster,
            interleaving.seed,
        )
        entries = b"".join(struct.pack("=16sQQ", name.encode(), len(data), 0) for name, data in tensors.items())
        packed_fields = b"".join(struct.pack("=2i", *field) for field in fields)
        folder = self.text.parent
        packed = b"".join([struct.pack("12iQ", *shape, *how), entries, packed_fields, launch.parameters, *tensors.values()])
        write_own(folder, {LAUNCH_FILE: packed})
        remove_own(folder, [RESULTS_FILE])
        output.flush()
        try:
            done = subprocess.run(self.command, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace", cwd=folder)
        finally:
            adopt(folder, RESULTS_FILE)
        if done.returncode:
            raise _fault(done.returncode, done.stderr)
        results, found, offset = self._results.read_bytes(), {}, 0
        for name, data in tensors.items():
            found[name] = results[offset : offset + len(data)]
            offset += len(data)
        return found


def _fault(code: int, report: str) -> EmulatorFaultError:
    """What a program that failed has found."""
    lines = report.splitlines()
    if code == _FAULT and len(lines) >= 2:
        return EmulatorFaultError(lines[-2], lines[-1])
    said = re.search(r"^block \d+: thread .*\n(?:\d+ bytes .*\n)?", report, re.MULTILINE)
    thread = ", ".join(said[0].splitlines()) + ": " if said else ""
    if found := re.search(r"^.*: runtime error: (.*)$", report, re.MULTILINE):
        return EmulatorFaultError("UndefinedBehaviorSanitizer", thread + found[0], report)
    if found := re.search(r"^==\d+==ERROR: AddressSanitizer: (\S+)", report, re.MULTILINE):
        # The innermost frame that is not of the runtime: an atom, or what calls it.
        frames = re.findall(rf"^ +#\d+ \w+ in (?!emulator::|void emulator::)(.*) \S*({re.escape(TEXT_FILE)}:\d+)", report, re.MULTILINE)
        where = f" at {frames[0][1]} in {frames[0][0]}" if frames else ""
        return EmulatorFaultError("AddressSanitizer", f"{thread}{found[1]}{where}", report)
    if code < 0:
        return EmulatorFaultError("crash", f"{signal.Signals(-code).name}; the address sanitizer (--sanitize) says more", report)
    return EmulatorFaultError("crash", f"exit code {code}", report)
