"""Tiny kernels, a few atoms each: the same body on PTX and on emulated atoms, words in and words out."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashgen import templates
from flashgen.build.emulator import compiler
from flashgen.build.emulator.kernel import EmulatedLaunch, EmulatedLibrary, EmulationOrder
from flashgen.build.emulator.memory import MemoryView
from flashgen.build.emulator.tensor_map import emulated_map
from flashgen.build.gpu.tensor_map import tensor_maps_of
from flashgen.build.nvrtc import compile_source
from flashgen.build.parameter_buffer import parameter_buffer
from flashgen.codegen.render import Atoms, Source, atom_files
from flashgen.codegen.tensor_map import TensorMapShape

SHARED_BYTES = 48 * 1024
# All files of atoms, those first that others look into: each must have a twin in the emulator, whether a family lists it yet or not.
_FIRST = ("types", "shared_memory", "mbarrier", "cp_async_bulk_tensor")
ATOM_FILES = (*_FIRST, *sorted({Path(p).stem for p in templates.paths() if p.startswith("atoms/ptx/")} - set(_FIRST)))
Words = np.ndarray  # of uint32


@dataclass(frozen=True)
class Probe:
    """`body` runs in each of `threads` threads of `blocks` blocks: it reads `in`, and writes the `width` words at `out`.

    `t` is the thread among all of the launch. `inputs` gives the words of `in`; `agree` compares (emulated, other) words, equal by default.
    `resident`: how many blocks run together in the emulator; `cluster`: how many a cluster has. `maps`: what `in_map` says of `in` and, if
    there are two, `out_map` of `out`.
    `arch`: the least that has these atoms; `instructions`: text that they need there, from codegen.
    """

    name: str
    body: str
    inputs: Callable[[], Words]
    width: int = 1
    threads: int = 64
    blocks: int = 1
    resident: int = 1
    cluster: int = 1
    agree: Callable[[Words, Words], bool] = np.array_equal
    maps: tuple[TensorMapShape, ...] = ()
    arch: str = "sm_80"
    instructions: str = ""

    def text(self, linkage: str = "") -> str:
        """The kernel, without atoms."""
        maps = "".join(f"TensorMap {name}; " for name in ("in_map", "out_map")[: len(self.maps)])
        cluster = f" __cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else ""
        return f"""
struct Parameters {{ {maps}const u32* in; u32* out; }};
{linkage}__global__ void __launch_bounds__({self.threads}, 1){cluster} probe(const __grid_constant__ Parameters p) {{
    const u32* in = p.in;
    const int t = block_index() * {self.threads} + thread_index();
    u32* out = p.out + t * {self.width};
    {self.body}
}}
"""

    def source(self) -> Source:
        """The whole text for a GPU, with all atoms there are."""
        return Source("probe", _atoms(Atoms.PTX) + self.instructions + self.text('extern "C" '))

    @property
    def words(self) -> int:
        """Of the output."""
        return self.threads * self.blocks * self.width

    def _parameters(self, encode: Callable[[TensorMapShape, int], bytes], inputs: int, output: int) -> bytes:
        maps = [encode(shape, address) for shape, address in zip(self.maps, (inputs, output), strict=False)]
        return b"".join(maps) + struct.pack("=2Q", inputs, output)

    def on_cpu(self, order: EmulationOrder, readable: int | None = None) -> Words:
        """The output on the CPU. `readable`: how many bytes of `in` copies may read, all by default.

        Raises EmulatorFaultError if a check of the runtime fails.
        """
        inputs, output = _aligned(self.inputs()), np.full(self.words, 0xDEADBEEF, np.uint32)
        parameters = self._parameters(emulated_map, inputs.ctypes.data, output.ctypes.data)
        seen = inputs.nbytes if readable is None else readable
        tensors = [MemoryView("in", inputs.ctypes.data, 1, (seen,), (1,))]
        tensors.append(MemoryView("out", output.ctypes.data, 1, (output.nbytes,), (1,), writable=True))
        compile_at_once([self])
        library, number = _COMPILED[self.text()]
        chosen = struct.pack("=Q56x", number) + parameters + bytes(_PARAMETER_BYTES - len(parameters))
        resident = max(self.resident, self.cluster)
        launch = EmulatedLaunch(chosen, self.threads, SHARED_BYTES, range(self.blocks), resident=resident, cluster=self.cluster)
        library.run([launch], order, tensors=tensors)
        return output

    def on_gpu(self) -> Words:
        """The output on the GPU that is here."""
        import torch

        from flashgen.build.gpu.driver import check, driver, gpu

        cu, on = driver(), gpu(0)
        artifact = compile_source(self.source(), on.device.target.name)
        inputs = torch.from_numpy(self.inputs().view(np.int32)).cuda()
        output = torch.full((self.words,), -559038737, dtype=torch.int32, device="cuda")
        library = check(cu.cuLibraryLoadData(artifact.cubin, [], [], 0, [], [], 0), "loading a probe")
        kernel = check(cu.cuLibraryGetKernel(library, b"probe"), "finding a probe")
        packed = self._parameters(lambda shape, address: tensor_maps_of(shape).at(address), inputs.data_ptr(), output.data_ptr())
        parameters = parameter_buffer(packed)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        shape = (cu.CUfunction(int(kernel)), self.blocks, 1, 1, self.threads, 1, 1, SHARED_BYTES)
        check(cu.cuLaunchKernel(*shape, torch.cuda.current_stream().cuda_stream, ctypes.addressof(arguments), 0), "launching a probe")
        torch.cuda.synchronize()
        return output.cpu().numpy().view(np.uint32)


def _atoms(atoms: Atoms) -> str:
    return "".join(map(templates.read, atom_files(ATOM_FILES, atoms)))


# By their texts: where the probes that have been compiled for the CPU are, and which of that library's each is.
_COMPILED: dict[str, tuple[EmulatedLibrary, int]] = {}
_PARAMETER_BYTES = 512


def compile_at_once(probes: Iterable[Probe]) -> None:
    """Compiles these for the CPU on all cores, a library for each core: what all texts share takes most of the time."""
    texts = [text for text in dict.fromkeys(probe.text() for probe in probes) if text not in _COMPILED]
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(_compile, filter(None, (texts[core::cores] for core in range(cores)))))


def _compile(texts: list[str]) -> None:
    """One library of all: which probe runs is the first of its parameters."""
    probes = "".join(f"namespace probe_{number} {{{text}}}\n" for number, text in enumerate(texts))
    cases = "".join(
        f"    case {number}: return probe_{number}::probe(*reinterpret_cast<const probe_{number}::Parameters*>(p.chosen));\n"
        for number in range(len(texts))
    )
    source = f"""{_atoms(Atoms.EMULATED)}{probes}
struct Parameters {{
    u64 number;
    alignas(64) unsigned char chosen[{_PARAMETER_BYTES}];
}};
void probe(const Parameters& p) {{
    switch (p.number) {{
{cases}    }}
}}
#define FLASHGEN_KERNELS(kernel) kernel(probe, Parameters, 0, 0, 0)
{templates.read("emulator/entry.cuh")}"""
    library = EmulatedLibrary(compiler.compile_for_emulator(Source("probe", source)).cubin)
    _COMPILED.update((text, (library, number)) for number, text in enumerate(texts))


def _aligned(words: Words) -> Words:
    """A copy at an address that is a multiple of 16."""
    room = np.empty(len(words) + 4, np.uint32)
    start = -room.ctypes.data // 4 % 4
    room[start : start + len(words)] = words
    return room[start : start + len(words)]
