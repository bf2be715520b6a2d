"""Running some blocks of a kernel on the CPU as a program of its own, under sanitizers if asked for: what they find, what it wrote."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
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
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.errors import ArgumentError, choice_error, require_int
from flashgen.codegen.operands import Role
from flashgen.codegen.program import KernelLaunch, Program, Waits
from flashgen.codegen.render import Source, render_program
from flashgen.codegen.spec import KernelSpec

from ..launch.cpu import load_emulated, view_of
from ..launch.tensors import Tensors
from ..numerics.oracle import oracle_of
from ..numerics.rule import Verdict
from ..selection import compilation
from .expected import Expected

_POISON = {2: 0x7FA5, 4: 0x7FA5A5A5}  # by bytes of an element: NaNs that no arithmetic gives
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Debugged:
    """What came of a run of `blocks` of `grid`: a fault that a check or a sanitizer found, or else the verdict on what was written.

    rows: those of the outputs that were written, as the operation's oracle samples them; missing: why the verdict on them is not enough,
    empty if it is. There is no verdict, and nothing is missing, where a later kernel of the program writes the outputs.
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
        return self.fault is None and not self.missing and (self.verdict is None or self.verdict.ok)


def read_text(path: Path, spec: KernelSpec) -> Source:
    """An edited text of the spec's program. Raises ArgumentError if it cannot be read, or is of another kernel."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"text must be a file that can be read; got {path} ({error})") from error
    if f"#define FLASHGEN_KERNELS(kernel) kernel({spec.name}," not in text:
        raise ArgumentError(f"text must be an edited {spec.name}, as these options write it; got {path}, which does not launch that")
    return Source(spec.name, text)


def run_blocks(
    spec: KernelSpec,
    tensors: Tensors,
    folder: Path | None = None,
    *,
    kernel: str = "",
    block: int = 0,
    blocks: int = 1,
    sanitize: bool = False,
    interleaving: EmulationOrder | None = None,
    source: Source | None = None,
    output: IO[str] | None = None,
) -> Debugged:
    """Runs `blocks` blocks from `block` on, in a program that is left in `folder` (a new temporary one) with its text and what it has read.

    tensors: on the CPU, any strides; each gets an allocation of exactly what it spans. kernel: the suffix of the one whose blocks run; the
    kernels before it run whole in the emulator first, and so do the blocks before `block` where blocks wait for those; the kernels after
    it run once all of its blocks have.
    source: a text in place of the rendered one. interleaving: by default copies happen where they are issued, so that a bad one is
    found at its line. output: where the kernel's printf goes, stdout by default.
    Raises ArgumentError for a kernel that is not there, sizes and strides that the config cannot take, blocks that are not there or are no
    whole clusters, and a folder in which no program can be written and run, or in which a file of somebody else's, or an altered one,
    would be replaced; CxxCompilerMissingError, SanitizerMissingError, and CompileError.
    """
    spec.family.require_correct()
    call = tensors.call()
    spec.family.require_call(call, spec.config)
    if kernel not in spec.kernels:
        raise choice_error("kernel", kernel, [suffix or "''" for suffix in spec.kernels])
    program = spec.family.program(spec.config, call, device_of_target(spec.target))
    asked = next(i for i, launch in enumerate(program.launches) if launch.suffix == kernel)
    launch, last = program.launches[asked], asked == len(program.launches) - 1
    require_int("block", block, 0, launch.grid - 1)
    require_int("blocks", blocks, 1, launch.grid - block)
    for name, count in (("block", block), ("blocks", blocks)):
        spec.resources[kernel].require_clusters(name, count)
    some = range(block, block + blocks)
    source = source or render_program(spec)
    folder = _make_folder(folder, source)
    artifact = compilation.store().get_or_compile(source, Emulated.SANITIZED if sanitize else Emulated.PROGRAM)
    emulated = EmulatedProgram(artifact, folder)
    _poison(tensors)
    before = tensors.replacing(**tensors.changed())
    memory = {buffer.name: torch.zeros(buffer.bytes, dtype=torch.uint8) for buffer in program.buffers}
    _run_whole(spec, tensors, memory, program.launches[:asked])
    if launch.waits is not Waits.NOBODY and block:
        _run_whole(spec, tensors, memory, (launch,), block)
    inputs = [operand.name for operand in tensors.operands if operand.role is Role.IN]
    given = {name: _bytes(tensors[name]) for name in (*inputs, *tensors.outputs)}
    given |= {name: _bytes(buffer) for name, buffer in memory.items()}
    try:
        how = _launch(spec, launch, list(given), some, interleaving or EmulationOrder(late_copies=False))
        results = emulated.run(how, given, len(inputs), output or sys.stdout)
    except EmulatorFaultError as fault:
        return Debugged(emulated, some, launch.grid, fault, torch.empty(0, 3, dtype=torch.int64), None, "")
    for name, tensor in {**tensors.outputs, **memory}.items():
        if tensor.numel():
            _span(tensor).view(torch.uint8).copy_(torch.frombuffer(bytearray(results[name]), dtype=torch.uint8))
    missing = [f"{name} was written to" for name in inputs if results[name] != given[name]]
    if whole := len(some) == launch.grid:
        _run_whole(spec, tensors, memory, program.launches[asked + 1 :])
    if not (whole or last):
        return Debugged(emulated, some, launch.grid, None, torch.empty(0, 3, dtype=torch.int64), None, "; ".join(missing))
    oracle = oracle_of(spec.problem)
    touched = _touched(tensors, before)
    rows = oracle.rows_of(touched)
    written, every = (len(oracle.rows_of(_only_written(tensors, masks))) for masks in (touched, None))
    if not len(rows) or (whole and written < every):
        missing.append(f"{every - written} rows were not written" if len(rows) else "no row was written")
    verdict = Expected.of(before, sample=rows).judge(tensors) if len(rows) else None
    return Debugged(emulated, some, launch.grid, None, rows, verdict, "; ".join(missing))


def _run_whole(
    spec: KernelSpec,
    tensors: Tensors,
    memory: Mapping[str, torch.Tensor],
    launches: tuple[KernelLaunch, ...],
    blocks: int | None = None,
) -> None:
    """Runs kernels of the program in the emulator, with the buffers in `memory`: all of their blocks, or the first ones."""
    if launches:
        given = {operand.name: view_of(operand.name, tensors[operand.name], operand.role is not Role.IN) for operand in tensors.operands}
        given |= {name: view_of(name, buffer, writable=True) for name, buffer in memory.items()}
        first, *others = launches
        load_emulated(spec).launch(Program((first._replace(overlaps=False), *others)), given, blocks=blocks)


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


def _launch(spec: KernelSpec, launch: KernelLaunch, names: list[str], blocks: range, interleaving: EmulationOrder) -> ProgramLaunch:
    """`names`: of all that the program is given, in its order."""
    kernel, block = spec.kernels[launch.suffix].parameters, spec.resources[launch.suffix]
    number = list(spec.kernels).index(launch.suffix)
    address_fields = tuple((p.offset, names.index(p.name)) for p in (*kernel.tensor_maps, *kernel.pointers) if p.name in names)
    parameters = packed_parameters(kernel, launch, dict.fromkeys(names, 0))
    return ProgramLaunch(number, bytes(parameters), address_fields, block.threads, block.shared_bytes, blocks, interleaving, block.cluster)


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """All elements from a tensor's first to its last in memory, those between its rows included."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((elements,), (1,))


def _bytes(tensor: torch.Tensor) -> bytes:
    return _span(tensor).view(torch.uint8).numpy().tobytes()


def _poison(tensors: Tensors) -> None:
    for operand in tensors.operands:
        if operand.role is Role.OUT:
            size = (tensor := tensors[operand.name]).element_size()
            _span(tensor).view(_INTEGERS[size]).fill_(_POISON[size])


def _touched(tensors: Tensors, before: Tensors) -> dict[str, torch.Tensor]:
    """Of each output the elements that are no longer as they were; before: with copies of those that are read as well."""
    found = {}
    for name, tensor in tensors.outputs.items():
        size = tensor.element_size()
        was = before[name].view(_INTEGERS[size]) if before[name] is not tensor else _POISON[size]
        found[name] = tensor.view(_INTEGERS[size]) != was
    return found


def _only_written(tensors: Tensors, masks: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """These masks, or all, of outputs of which a kernel writes every row: nothing of those that it reads as well."""
    changed = {operand.name for operand in tensors.operands if operand.role is Role.INOUT}
    every = {name: torch.full(tensor.shape, name not in changed) for name, tensor in tensors.outputs.items()}
    return every if masks is None else {name: mask & every[name] for name, mask in masks.items()}
