"""What a call costs in Python: one whose signature the thread knows, and one with a length that it has not seen before.

    python tools/call_overhead.py
    python tools/call_overhead.py --causal --calls 2000 --profile
    python tools/call_overhead.py --gpu

With --gpu it calls `flashgen.attention` on the machine's GPU, whose launches it waits for every 64 calls. Without, no GPU is needed, and
none is used: tensors lie in main memory and say that they are on a GPU, and the driver is made up, so that what the driver and PyTorch's
allocator for a GPU take is not in the figures. Either way the kernel of the bucket is loaded before anything is timed, and the user's own
records are left out. Microseconds, the median of all calls; each call of a new length has 8 more keys than the one before.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import itertools
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cuda.bindings import driver as binding

import flashgen
from flashgen.build.artifact import Artifact
from flashgen.build.gpu import driver, kernel, parameter_memory, tensor_map
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.devices import find_device
from flashgen.codegen.parameters import TENSOR_MAP_BYTES
from flashgen.codegen.spec import KernelSpec
from flashgen.launch import bound as launch_bound
from flashgen.launch import gpu as launch_gpu
from flashgen.operators import plans
from flashgen.records import sources
from flashgen.records.store import Records
from flashgen.selection import compilation, loaded

LENGTHS_APART = 8  # keys
ON = torch.device("cuda", 0)
TYPES = ("CUresult", "CUfunction", "CUfunction_attribute", "CUtensorMapDataType", "CUtensorMapInterleave", "CUtensorMapSwizzle")
LAUNCH_TYPES = ("CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchConfig")
MORE_TYPES = ("CUtensorMapL2promotion", "CUtensorMapFloatOOBfill", "cuuint64_t", "cuuint32_t")

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # q, k, v


class OnGpu(torch.Tensor):
    """A tensor in main memory that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: ON)
    is_cuda = property(lambda self: True)


class Names(SimpleNamespace):
    """Names that can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def fake_driver() -> Any:
    """The binding's types, and functions that do nothing."""
    done = binding.CUresult.CUDA_SUCCESS
    encoded = ctypes.create_string_buffer(TENSOR_MAP_BYTES)
    tensor_map_made = (done, SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded)))
    values = {"cuLibraryLoadData": 1, "cuLibraryGetKernel": 2, "cuDeviceGet": 0, "cuDevicePrimaryCtxRetain": 3, "cuKernelGetFunction": 4}
    functions = {name: lambda *given, value=value: (done, value) for name, value in values.items()}
    return Names(
        **{name: getattr(binding, name) for name in (*TYPES, *LAUNCH_TYPES, *MORE_TYPES)},
        **functions,
        **dict.fromkeys(("cuKernelSetAttribute", "cuCtxPushCurrent", "cuCtxPopCurrent"), lambda *given: (done,)),
        cuTensorMapEncodeTiled=lambda *given: tensor_map_made,
        cuLaunchKernel=lambda *given: (0,),
        cuLaunchKernelEx=lambda *given: (0,),
    )


def artifact_of(spec: KernelSpec) -> Artifact:
    """Machine code that nobody runs, of a kernel without defects."""
    frame = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    log = f"Compiling entry function '{spec.name}' for '{spec.target.name}'\n{frame}\nUsed 168 registers"
    return Artifact(spec.name, spec.target.name, "text", spec.name.encode(), log, "13.0")


def _on_cpu(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def pretend(device: str, folder: Path, put: Callable[[Any, str, Any], object] = setattr) -> None:
    """From here on there is such a GPU, with an empty file of records in `folder`. `put` sets an attribute of a module."""
    fake, on, own = fake_driver(), Gpu(0, find_device(device), "uuid", "580.0"), Records(folder / "records.sqlite3")
    patches: tuple[tuple[Any, str, Any], ...] = (
        *((module, "driver", lambda: fake) for module in (driver, kernel, parameter_memory, tensor_map)),
        (loaded, "kernels", loaded.Kernels()),
        (compilation, "compile_spec", artifact_of),
        (sources, "own_records", lambda: own),
        (launch_gpu, "gpu", lambda ordinal: on),
        (launch_gpu, "require_context", lambda ordinal: None),
        *((module, "empty_strided", _on_cpu) for module in (launch_gpu, launch_bound)),
        (launch_gpu, "current_device", lambda: 0),
        (launch_gpu, "current_stream", lambda index: 0),
        (launch_bound, "tile_counters", SimpleNamespace(address=lambda device, stream, count=1: 4096)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    )
    for module, name, value in patches:
        put(module, name, value)


def microseconds(calls: Iterable[Callable[[], object]]) -> tuple[float, float]:
    """The median of what the calls take, and the mean of what they take of the processor: that has the garbage collector's share, too."""
    found, before = [], time.process_time()
    for call in calls:
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return statistics.median(found) * 1e6, (time.process_time() - before) / len(found) * 1e6


def plain_call(causal: bool) -> Attention:
    """A call by way of the plans, which need no driver: `pretend` first."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        return plans.plan_for(q, k, v, causal, None, "bshd").run(q, k, v, False)

    return call


def gpu_call(causal: bool) -> Attention:
    """A user's call. The GPU is waited for now and then, by the call that comes next."""
    count = itertools.count()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        if next(count) % 64 == 0:
            torch.cuda.synchronize()
        return flashgen.attention(q, k, v, causal=causal)

    return call


def main(arguments: Iterable[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h200", help="named device whose kernels are chosen")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--calls", type=int, default=1000, help="how many calls of each kind are timed")
    parser.add_argument("--gpu", action="store_true", help="call flashgen.attention on this machine's GPU")
    parser.add_argument("--profile", action="store_true", help="show where calls of new lengths spend their time")
    options = parser.parse_args(None if arguments is None else list(arguments))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        call: Attention
        on_gpu: Callable[[torch.Tensor], torch.Tensor]
        if options.gpu:
            os.environ["FLASHGEN_CACHE_DIR"] = folder
            call, on_gpu = gpu_call(options.causal), lambda tensor: tensor.cuda()
        else:
            pretend(options.device, Path(folder))
            call, on_gpu = plain_call(options.causal), OnGpu
        longest = LENGTHS_APART * options.calls
        cache = [on_gpu(torch.zeros(1, 2 * longest, 8, options.head_dim, dtype=torch.bfloat16)) for _ in "kv"]
        q = on_gpu(torch.zeros(1, 1, 32, options.head_dim, dtype=torch.bfloat16))  # one query, as in a step of a generation
        lengths = range(longest + LENGTHS_APART, 2 * longest, LENGTHS_APART)
        for length in (lengths[0] - 1, 2 * longest):
            call(q, *(on_gpu(memory[:, :length]) for memory in cache))  # the kernel is there, and the maps' shapes are known
        known = microseconds(partial(call, q, *cache) for _ in lengths)
        steps = [[on_gpu(memory[:, :length]) for memory in cache] for length in lengths]
        with cProfile.Profile() if options.profile else nullcontext() as profile:
            new = microseconds(partial(call, q, *keys) for keys in steps)
    for name, (median, mean) in {"known signature": known, "new length": new}.items():
        print(f"{name}: median {median:.1f} us, mean of the processor's time {mean:.1f} us")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
