"""How many cycles a scheduler takes for a mixture of instructions: what the limits in docs/performance-log.md and the model rest on.

    python tools/instruction_mix.py mma=32 mma=32,fma=32 mma=32,ldmatrix=16 mma=32,ex2=16

Each mixture is a loop of independent instructions, spread evenly; one block an SM runs it with 4 and with 8 warps. Prints cycles of a
scheduler for one pass of one warp: 32 products alone take 192 on an H200, and what a mixture takes beyond that is what the rest
costs. `--arch sm_80` compiles only, without a GPU, and prints registers.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen import templates
from flashgen.build.nvrtc import compile_source
from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.render import Source
from flashgen.codegen.target import find_target

ATOMS = ("types", "register", "index", "shared_memory", "barrier", "ldmatrix", "mma_sync", "cvt", "ex2", "mul")
PASSES, WARPS, SHARED_BYTES = 2000, (4, 8), 65536

# What one instruction is, and what its n-th copy works on: each kind has registers of its own, so that only the issue is shared. Loads
# change their address in every pass, or the compiler would load once; more than 16 of them would overwrite what nobody has read.
KINDS = {
    "mma": "mma_sync_m16n8k16<Bf16>(d[{n} % 16], a, b[{n} % 4][0], b[{n} % 4][1]);",
    "ldmatrix": "ldmatrix_x4(loaded[{n} % 16], place + {n} % 16 * 2048);",
    "ex2": "e[{n} % 8] = ex2_approx_ftz(e[{n} % 8]);",
    "fma": "f[{n} % 8] = fmaf(f[{n} % 8], x, y);",
    "max": "m[{n} % 8] = fmaxf(m[{n} % 8], f[{n} % 8]);",
    "add": "s[{n} % 8] += f[{n} % 8];",
}


@dataclass(frozen=True)
class Mix:
    """Instructions of one pass, by kind, and the text that says so."""

    text: str
    counts: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> Mix:
        """'mma=32,fma=16'. Raises ArgumentTypeError for anything else."""
        counts = {}
        for part in text.split(","):
            kind, _, count = part.partition("=")
            if kind not in KINDS or not re.fullmatch("[1-9][0-9]{0,3}", count):
                raise argparse.ArgumentTypeError(f"must be like mma=32,fma=16, of {', '.join(KINDS)}; got {part!r}")
            counts[kind] = int(count)
        return cls(text, counts)

    def source(self) -> Source:
        """The kernel."""
        placed = [((n + 0.5) / count, kind, n) for kind, count in self.counts.items() for n in range(count)]
        body = "\n        ".join(KINDS[kind].format(n=n) for _, kind, n in sorted(placed))
        atoms = "\n".join(templates.read(f"atoms/ptx/{name}.cuh") for name in ATOMS)
        return Source("mix", _KERNEL.replace("ATOMS", atoms).replace("BODY", body))


_KERNEL = """ATOMS
extern "C" __global__ void __launch_bounds__(256, 1) mix(const u32* in, float* out, i64* cycles, int passes) {
    float d[16][4] = {}, e[8], f[8], m[8], s[8] = {};
    u32 a[4], b[4][2], loaded[16][4] = {};
    for (int i = 0; i < 4; ++i) {
        a[i] = in[thread_index() * 16 + i];
        b[i][0] = in[thread_index() * 16 + 4 + i];
        b[i][1] = in[thread_index() * 16 + 8 + i];
    }
    for (int i = 0; i < 8; ++i) e[i] = f[i] = m[i] = __uint_as_float(in[thread_index() * 16 + i]) * 1e-3f;
    const float x = __uint_as_float(in[thread_index() * 16 + 8]), y = __uint_as_float(in[thread_index() * 16 + 9]);
    SharedAddress place = shared_memory() + lane_index() % 16 * 128 + (lane_index() / 16 ^ lane_index() % 8) * 16;
    barrier_sync();
    const i64 begin = clock64();
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
        BODY
        place ^= 1024;
        launder(place);
    }
    barrier_sync();
    if (thread_index() == 0) cycles[block_index()] = clock64() - begin;
    float all = 0.0f;
    for (int i = 0; i < 16; ++i) all += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    for (int i = 0; i < 8; ++i) all += e[i] + f[i] + m[i] + s[i];
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) all += __uint_as_float(loaded[i][j]);
    out[block_index() * 256 + thread_index()] = all;
}
"""


def cycles_per_pass(source: Source) -> list[float]:
    """Of a scheduler, for one pass of one of its warps, with each number of warps an SM."""
    import numpy as np
    import torch

    from flashgen.build.gpu.driver import check, driver, gpu

    cu, on = driver(), gpu(0)
    sms = on.device.sm_count
    inputs = torch.randn(256 * 32, device="cuda").to(torch.bfloat16).view(torch.int32)
    out, cycles = torch.empty(sms * 256, device="cuda"), torch.empty(sms, dtype=torch.int64, device="cuda")
    cubin = compile_source(source, on.device.target.name).cubin
    kernel = check(cu.cuLibraryGetKernel(check(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0), "loading"), b"mix"), "finding the kernel")
    limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(cu.cuKernelSetAttribute(limit, SHARED_BYTES, kernel, check(cu.cuDeviceGet(0), "finding the GPU")), "allowing shared memory")
    values = [np.array([t.data_ptr()], np.uint64) for t in (inputs, out, cycles)] + [np.array([PASSES], np.uint64)]
    arguments = np.array([v.ctypes.data for v in values], np.uint64)
    found = []
    for warps in WARPS:
        for _ in range(2):  # the first warms up
            stream = torch.cuda.current_stream().cuda_stream
            shape = (sms, 1, 1, warps * 32, 1, 1, SHARED_BYTES)
            check(cu.cuLaunchKernel(cu.CUfunction(int(kernel)), *shape, stream, arguments.ctypes.data, 0), "launching")
            torch.cuda.synchronize()
        found.append(statistics.median(cycles.tolist()) / PASSES / (warps / 4))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mix", nargs="+", type=Mix.parse, help="such as mma=32,fma=16; kinds: " + ", ".join(KINDS))
    parser.add_argument("--arch", help="compile for this architecture only")
    options = parser.parse_args(argv)
    try:
        for mix in options.mix:
            print(f"{mix.text:40} {compiled(mix.source(), options.arch) if options.arch else timed(mix.source())}")
    except FlashgenError as error:
        sys.exit(f"error: {error}")


def compiled(source: Source, arch: str) -> str:
    """What the compiler says of a mixture."""
    report = compile_source(source, find_target(arch).name).report
    return f"{report.registers} registers, {report.spill_bytes} B spilled"


def timed(source: Source) -> str:
    """The cycles of a mixture with each number of warps."""
    return "  ".join(f"{warps} warps {cycles:6.1f}" for warps, cycles in zip(WARPS, cycles_per_pass(source), strict=True))


if __name__ == "__main__":
    main()
