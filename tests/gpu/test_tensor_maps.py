"""Tensor maps on a GPU: what `TensorMapShape` allows the driver encodes, and a launch passes it on whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.build.gpu import tensor_map
from flashgen.build.gpu.driver import DriverError, driver, gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.build.gpu.tensor_map import tensor_maps_of
from flashgen.build.nvrtc import compile_source
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.program import BlockResources, Buffer, BufferKind, KernelLaunch, KernelText, Program
from flashgen.codegen.render import Source
from flashgen.codegen.tensor_map import TensorMapShape

pytestmark = pytest.mark.gpu

BLOCK = ParameterBlock(
    (
        *(Parameter("TensorMap", f"{name}_map") for name in ("v", "k")),
        *(Parameter(kind, name) for kind, name in (("u64*", "out"), ("u64*", "q"))),
        Parameter("int", "words"),
    )
)
ECHO = f"""
using u64 = unsigned long long;
struct alignas(64) TensorMap {{ u64 opaque[16]; }};
struct Parameters {{ {"".join(f"{f.c_type} {f.name}; " for f in BLOCK.fields)}}};
extern "C" __global__ void echo(const __grid_constant__ Parameters p) {{
    for (int i = 0; i < p.words; ++i) p.out[i] = reinterpret_cast<const u64*>(&p)[i];
}}
"""


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if gpu(0).device.target.capability < (9, 0):
        pytest.skip(f"needs a GPU with tensor maps, sm_90 or newer; got {gpu(0).device.target.name}")
    torch.zeros(1, device="cuda")


def shape_of(tensor: torch.Tensor, swizzle_bytes: int = 128) -> TensorMapShape:
    """Of a tensor whose last dimension is contiguous, copied 64 elements by 8."""
    sizes, strides = tuple(tensor.shape[::-1]), tuple(2 * stride for stride in tensor.stride()[-2::-1])
    rows = (8,) + (1,) * (len(sizes) - 2) if len(sizes) > 1 else ()
    return TensorMapShape(Dtype.BF16, sizes, strides, (max(16, swizzle_bytes) // 2, *rows), swizzle_bytes)


def tensor(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("swizzle_bytes", [0, 32, 64, 128])
@pytest.mark.parametrize(
    "make",
    [
        lambda: tensor(100, 64),
        lambda: tensor(2, 100, 4, 128),
        lambda: tensor(2, 100, 4, 128).transpose(1, 2),
        lambda: tensor(2, 3, 100, 4, 72),
        lambda: tensor(2, 100, 1, 128).expand(2, 100, 4, 128),
        lambda: tensor(100, 64).as_strided((1, 100, 1, 64), (0, 64, 0, 1)),
    ],
    ids=["2d", "dense", "heads first", "5d", "expanded", "sizes of one"],
)
def test_the_driver_encodes_what_a_shape_allows(make: Any, swizzle_bytes: int) -> None:
    given = make()
    first, second = (tensor_map._new_maps(driver(), *shape_of(given, swizzle_bytes).fields).at(given.data_ptr()) for _ in range(2))
    assert len(first) == 128
    assert first == second
    assert first != tensor_maps_of(shape_of(given, swizzle_bytes)).at(given.data_ptr() + 256)


def test_a_refusal_says_what_was_asked_for() -> None:
    given = tensor(100, 64)
    with pytest.raises(
        DriverError, match=r"^encoding a tensor map of .*sizes=\(64, 100\).* at address 0x\w+8 failed: CUDA_ERROR_INVALID_VALUE"
    ):
        tensor_maps_of(shape_of(given)).at(given.data_ptr() + 8)


def test_a_launch_passes_maps_and_pointers_of_this_call() -> None:
    on = gpu(0)
    spec: Any = SimpleNamespace(problem=Problem(Dtype.BF16, 64), kernels={"": KernelText(BLOCK)}, resources={"": BlockResources(1, 0)})
    kernel = Kernel(spec, compile_source(Source("echo", ECHO), on.device.target.name), on)
    v, k = ([tensor(2, length, 4, 64) for _ in range(3)] for length in (100, 300))
    shapes = shape_of(v[0]), shape_of(k[0])
    out = torch.zeros(35, dtype=torch.int64, device="cuda")
    (value,) = (field.name for field in BLOCK.values)
    counter = Buffer("tile_counter", 4, BufferKind.STREAM_COUNTER)
    launch = kernel.bind(Program((KernelLaunch(1, {value: 35}, {"v": shapes[0], "k": shapes[1]}),), (counter,)))
    stream = torch.cuda.current_stream().cuda_stream
    for i, j in ((0, 0), (1, 0), (1, 0), (0, 2), (2, 1)):
        out.fill_(-1)
        launch(stream, 4711, k[j].data_ptr(), v[i].data_ptr(), out.data_ptr(), 0)
        found = out.cpu().numpy().tobytes()
        maps = tensor_maps_of(shapes[0]).at(v[i].data_ptr()) + tensor_maps_of(shapes[1]).at(k[j].data_ptr())
        assert found == maps + b"".join(n.to_bytes(8, "little") for n in (out.data_ptr(), 4711, 35))
