"""Tiny kernels, a few atoms each: the same body on PTX and on host atoms, words in and words out."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from flashgen import templates
from flashgen.build.compiler import compile_source
from flashgen.build.host_compiler import compile_host_source
from flashgen.build.host_kernel import HostLibrary, HostOrder
from flashgen.build.parameter_buffer import parameter_buffer
from flashgen.build.tensor_map import Encoder, host_map
from flashgen.codegen.render import HOST_RUNTIME, Atoms, Source
from flashgen.codegen.tensor_map import TensorMapShape

SHARED_BYTES = 48 * 1024
# All files of atoms, those first that others look into: each must have a twin on the host, whether a family lists it yet or not.
_FIRST = ("types", "shared_memory", "mbarrier")
ATOM_FILES = (*_FIRST, *sorted({Path(p).stem for p in templates.paths() if p.startswith("atoms/ptx/")} - set(_FIRST)))
Words = np.ndarray  # of uint32


@dataclass(frozen=True)
class Probe:
    """`body` runs in each of `threads` threads of `blocks` blocks: it reads `in`, and writes the `width` words at `out`.

    `t` is the thread among all of the launch. `inputs` gives the words of `in`; `agree` compares (host, other) words, equal by default.
    `resident`: how many blocks run together on the host. `maps`: what `in_map` says of `in` and, if there are two, `out_map` of `out`.
    `arch`: the least that has these atoms; `instructions`: text that they need there, from codegen.
    """

    name: str
    body: str
    inputs: Callable[[], Words]
    width: int = 1
    threads: int = 64
    blocks: int = 1
    resident: int = 1
    agree: Callable[[Words, Words], bool] = np.array_equal
    maps: tuple[TensorMapShape, ...] = ()
    arch: str = "sm_80"
    instructions: str = ""

    def source(self, atoms: Atoms) -> Source:
        """The whole text, with all atoms there are."""
        files = [f"atoms/{atoms.value}/{name}.cuh" for name in ATOM_FILES]
        if atoms is Atoms.HOST:
            files = [f"host/{name}.cuh" for name in HOST_RUNTIME] + files
        text = "".join(map(templates.read, files))
        if atoms is Atoms.PTX:
            text += self.instructions
        maps = "".join(f"TensorMap {name}; " for name in ("in_map", "out_map")[: len(self.maps)])
        text += f"""
struct Parameters {{ {maps}const u32* in; u32* out; }};
extern "C" __global__ void __launch_bounds__({self.threads}, 1) probe(const __grid_constant__ Parameters p) {{
    const u32* in = p.in;
    const int t = block_index() * {self.threads} + thread_index();
    u32* out = p.out + t * {self.width};
    {self.body}
}}
"""
        if atoms is Atoms.HOST:
            text += f"#define FLASHGEN_KERNEL probe\n{templates.read('host/launch.cuh')}"
        return Source("probe", text)

    @property
    def words(self) -> int:
        """Of the output."""
        return self.threads * self.blocks * self.width

    def _parameters(self, encode: Callable[[TensorMapShape, int], bytes], inputs: int, output: int) -> bytes:
        maps = [encode(shape, address) for shape, address in zip(self.maps, (inputs, output), strict=False)]
        return b"".join(maps) + struct.pack("=2Q", inputs, output)

    def on_host(self, order: HostOrder, readable: int | None = None) -> Words:
        """The output on the CPU. `readable`: how many bytes of `in` copies may read, all by default.

        Raises HostFaultError if a check of the runtime fails.
        """
        inputs, output = _aligned(self.inputs()), np.full(self.words, 0xDEADBEEF, np.uint32)
        parameters = self._parameters(host_map, inputs.ctypes.data, output.ctypes.data)
        extents = [(inputs.ctypes.data, inputs.nbytes if readable is None else readable)]
        blocks = range(self.blocks)
        library(self.source(Atoms.HOST)).run(parameters, self.threads, SHARED_BYTES, order, blocks, extents=extents, resident=self.resident)
        return output

    def on_gpu(self) -> Words:
        """The output on the GPU that is here."""
        import torch

        from flashgen.build.driver import check, driver, gpu

        cu, on = driver(), gpu(0)
        artifact = compile_source(self.source(Atoms.PTX), on.device.target.name)
        inputs = torch.from_numpy(self.inputs().view(np.int32)).cuda()
        output = torch.full((self.words,), -559038737, dtype=torch.int32, device="cuda")
        library = check(cu.cuLibraryLoadData(artifact.cubin, [], [], 0, [], [], 0), "loading a probe")
        kernel = check(cu.cuLibraryGetKernel(library, b"probe"), "finding a probe")
        packed = self._parameters(lambda shape, address: Encoder(shape)(address), inputs.data_ptr(), output.data_ptr())
        parameters = parameter_buffer(packed)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        shape = (cu.CUfunction(int(kernel)), self.blocks, 1, 1, self.threads, 1, 1, SHARED_BYTES)
        check(cu.cuLaunchKernel(*shape, torch.cuda.current_stream().cuda_stream, ctypes.addressof(arguments), 0), "launching a probe")
        torch.cuda.synchronize()
        return output.cpu().numpy().view(np.uint32)


@cache
def library(source: Source) -> HostLibrary:
    """A probe's text for the CPU, compiled once."""
    return HostLibrary(compile_host_source(source).cubin)


def compile_at_once(probes: Iterable[Probe]) -> None:
    """Compiles these on all cores: one after the other would take most of a test's time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(library, (probe.source(Atoms.HOST) for probe in probes)))


def _aligned(words: Words) -> Words:
    """A copy at an address that is a multiple of 16."""
    room = np.empty(len(words) + 4, np.uint32)
    start = -room.ctypes.data // 4 % 4
    room[start : start + len(words)] = words
    return room[start : start + len(words)]
