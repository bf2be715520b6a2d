"""Running some blocks of a kernel on the CPU as a program of its own, under sanitizers if asked for: what they find, what it wrote."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from flashgen.build.emulator.compiler import TEXT_FILE, Emulated
from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.folder import allows_programs, program_folder
from flashgen.build.emulator.kernel import EmulationOrder, packed_parameters
from flashgen.build.emulator.program import FILES, EmulatedProgram, ProgramLaunch
from flashgen.build.files import make_folders, require_writable
from flashgen.build.own_files import require_own
from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.problem import Mask
from flashgen.codegen.program import KernelLaunch
from flashgen.codegen.render import Source, render_program
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload

from ..launch.tensors import Tensors
from ..numerics.rule import Verdict
from ..selection import compilation
from .expected import Expected

_INPUTS = ("q", "k", "v")
_POISON = {2: 0x7FA5, 4: 0x7FA5A5A5}  # by bytes of an element: NaNs that no arithmetic gives
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Debugged:
    """What came of a run of `blocks` of `grid`: a fault that a check or a sanitizer found, or else the verdict on what was written.

    rows: [n, 3] (batch, head, query), which were written; missing: why the verdict on them is not enough, empty if it is.
    """

    program: EmulatedProgram
    blocks: range
    grid: int
    fault: EmulatorFaultError | None
    rows: torch.Tensor
    verdict: Verdict | None
    missing: str

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict is not None and self.verdict.ok and not self.missing


def workload_of(tensors: Tensors) -> Workload:
    """The sizes of these tensors."""
    (batch, len_q, heads_q, _), (_, len_kv, heads_kv, _) = tensors.q.shape, tensors.k.shape
    return Workload(batch, heads_q, heads_kv, len_q, len_kv)


def read_text(path: Path, spec: KernelSpec) -> Source:
    """An edited text of the spec's program. Raises ArgumentError if it cannot be read, or is of another kernel."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"text must be a file that can be read; got {path} ({error})") from error
    if f"#define FLASHGEN_KERNEL {spec.name}\n" not in text:
        raise ArgumentError(f"text must be an edited {spec.name}, as these options write it; got {path}, which does not launch that")
    return Source(spec.name, text)


def run_blocks(
    spec: KernelSpec,
    tensors: Tensors,
    folder: Path | None = None,
    *,
    block: int = 0,
    blocks: int = 1,
    sanitize: bool = False,
    order: EmulationOrder | None = None,
    source: Source | None = None,
    output: IO[str] | None = None,
) -> Debugged:
    """Runs `blocks` blocks from `block` on, in a program that is left in `folder` (a new temporary one) with its text and what it has read.

    tensors: on the CPU, any strides; each gets an allocation of exactly what it spans. source: a text in place of the rendered one.
    order: by default copies happen where they are issued, so that a bad one is found at its line. output: where the kernel's printf
    goes, stdout by default.
    Raises ArgumentError for sizes and strides that the config cannot take, blocks that are not there and a folder in which no program can
    be written and run, or in which a file of somebody else's, or an altered one, would be replaced; CxxCompilerMissingError,
    SanitizerMissingError, and CompileError.
    """
    workload = workload_of(tensors)
    call = attention_call(spec.problem, workload, tensors.strides(), _scale(spec))
    spec.family.require_call(call, spec.config)
    asked = spec.family.program(spec.config, call, device_of_target(spec.target))
    (launch,) = asked.launches
    grid = launch.grid
    require_int("block", block, 0, grid - 1)
    require_int("blocks", blocks, 1, grid - block)
    some = range(block, block + blocks)
    source = source or render_program(spec)
    folder = _make_folder(folder, source)
    artifact = compilation.store().get_or_compile(source, Emulated.SANITIZED if sanitize else Emulated.PROGRAM)
    program = EmulatedProgram(artifact, folder)
    _poison(tensors)
    given = {field.name: _bytes(getattr(tensors, field.name)) for field in dataclasses.fields(tensors)}
    given |= {buffer.name: bytes(buffer.bytes) for buffer in asked.buffers}
    try:
        results = program.run(
            _launch(spec, launch, list(given), some, order or EmulationOrder(late_copies=False)), given, len(_INPUTS), output or sys.stdout
        )
    except EmulatorFaultError as fault:
        return Debugged(program, some, grid, fault, torch.empty(0, 3, dtype=torch.int64), None, "")
    for tensor, name in ((tensors.out, "out"), (tensors.lse, "lse")):
        _span(tensor).view(torch.uint8).copy_(torch.frombuffer(bytearray(results[name]), dtype=torch.uint8))
    rows = _written_rows(tensors)
    missing = [f"{name} was written to" for name in _INPUTS if results[name] != given[name]]
    if not len(rows) or (blocks == grid and len(rows) < tensors.lse.numel()):
        missing.append(f"{tensors.lse.numel() - len(rows)} rows were not written" if len(rows) else "no row was written")
    expected = Expected.of(tensors, spec.problem.mask is Mask.CAUSAL, _scale(spec), rows) if len(rows) else None
    return Debugged(program, some, grid, None, rows, expected.judge(tensors) if expected else None, "; ".join(missing))


def _make_folder(folder: Path | None, source: Source) -> Path:
    """The folder, absolute and there, in which no file of somebody else's stands in the way; a new temporary one for None."""
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="flashgen-debug-", dir=program_folder()))
    try:
        if not allows_programs(folder):
            raise ArgumentError(f"out must be a folder in which programs may be run; got {folder}, which is mounted noexec")
        make_folders(folder)
        require_writable(folder)
        require_own(folder, FILES, {TEXT_FILE: source.text.encode()})
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written; got {folder}: {error.strerror or error}") from error
    return folder.absolute()


def _scale(spec: KernelSpec) -> float:
    return float(spec.problem.head_dim**-0.5)


def _launch(spec: KernelSpec, launch: KernelLaunch, names: list[str], blocks: range, order: EmulationOrder) -> ProgramLaunch:
    """`names`: of all that the program is given, in its order."""
    block = spec.kernels[launch.suffix].parameters
    places = tuple((p.offset, names.index(p.name)) for p in (*block.tensor_maps, *block.pointers) if p.name in names)
    parameters = packed_parameters(block, launch, dict.fromkeys(names, 0))
    return ProgramLaunch(bytes(parameters), places, launch.threads, launch.shared_bytes, blocks, order)


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """All elements from a tensor's first to its last in memory, those between its rows included."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((elements,), (1,))


def _bytes(tensor: torch.Tensor) -> bytes:
    return _span(tensor).view(torch.uint8).numpy().tobytes()


def _poison(tensors: Tensors) -> None:
    for tensor in (tensors.out, tensors.lse):
        _span(tensor).view(_INTEGERS[tensor.element_size()]).fill_(_POISON[tensor.element_size()])


def _written_rows(tensors: Tensors) -> torch.Tensor:
    """(batch, head, query) of each row of which an element of out, or its lse, is no longer as it was."""
    touched = [t.view(_INTEGERS[t.element_size()]) != _POISON[t.element_size()] for t in (tensors.out, tensors.lse)]
    return (touched[0].any(-1).transpose(1, 2) | touched[1]).nonzero()
