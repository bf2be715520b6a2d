"""Tensor maps and the tile counter of a kernel on the CPU, as C sees them."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen.build.emulator import tensor_map as emulated_map
from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel
from flashgen.build.emulator.memory import MemoryView
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.program import BlockResources, Buffer, BufferKind, KernelLaunch, KernelText, Program
from flashgen.codegen.render import Source
from flashgen.codegen.tensor_map import TensorMapShape
from tests.support.runs import compiled

(DECLARATION,) = re.findall(r"struct alignas.*?\};", emulated_map.__doc__ or "", re.DOTALL)
BLOCK = ParameterBlock(
    (
        *(Parameter("TensorMap", f"{name}_map") for name in ("v", "k")),
        *(Parameter(kind, name) for kind, name in (("int*", "tile_counter"), ("uint64_t*", "out"))),
        *(Parameter("int", name) for name in ("rise", "seen")),
    )
)
# Writes down what it is given; leaves `rise` in the tile counter.
TEXT = f"""
#include <cstdint>
#include <initializer_list>
{DECLARATION}
static_assert(sizeof(TensorMap) == 128, "");
struct Parameters {{ {"".join(f"{f.c_type} {f.name}; " for f in BLOCK.fields)}}};
static_assert(sizeof(Parameters) == 320, "");
extern "C" int flashgen_emulator_run(const void* const* launch, int, const void*, char*, char*, int) {{  // which begins with its parameters
    const void* const parameters = *launch;
    const Parameters& p = *static_cast<const Parameters*>(parameters);
    uint64_t* out = p.out;
    for (const TensorMap* map : {{&p.v_map, &p.k_map}}) {{
        *out++ = map->address;
        for (uint64_t stride : map->strides) *out++ = stride;
        for (uint32_t size : map->sizes) *out++ = size;
        for (uint16_t extent : map->box) *out++ = extent;
        *out++ = map->rank, *out++ = map->element_bytes, *out++ = map->swizzle_bytes;
    }}
    *out++ = reinterpret_cast<uint64_t>(parameters) % 64, *out++ = *p.tile_counter, *out++ = p.seen;
    *p.tile_counter += p.rise;
    return 0;
}}
"""
SHAPES = (
    TensorMapShape(Dtype.BF16, (128, 2**32 - 1, 7, 5), (2**40 - 16, 256, 0), (64, 256, 1, 1)),
    TensorMapShape(Dtype.FP16, (24, 9), (48,), (16, 8), 32),
)


def launch(rise: int) -> list[int]:
    family: Any = SimpleNamespace(parameters=BLOCK)
    spec: Any = SimpleNamespace(
        family=family, problem=Problem(Dtype.BF16, 64), config=None, kernels={"": KernelText(BLOCK)}, resources={"": BlockResources(32, 0)}
    )
    out = (ctypes.c_uint64 * 64)()
    kernel = EmulatedKernel(spec, compiled(Source("echo", TEXT)))
    memory = (ctypes.c_ubyte * 256)()
    aligned = -ctypes.addressof(memory) % 128 + ctypes.addressof(memory)
    k, v = (MemoryView(name, aligned + place, 1, (8,), (1,)) for name, place in (("k", 32), ("v", 48)))
    written = MemoryView("out", ctypes.addressof(out), 8, (64,), (1,), writable=True)
    values = dict(zip((field.name for field in BLOCK.values), (rise, 4711), strict=True))
    counter = Buffer("tile_counter", 4, BufferKind.STREAM_COUNTER)
    program = Program((KernelLaunch(1, values, {"v": SHAPES[0], "k": SHAPES[1]}),), (counter,))
    kernel.launch(program, {"k": k, "v": v, "out": written})
    return list(out)


def test_fields_arrive_where_c_has_them() -> None:
    v = [48, 2**40 - 16, 256, 0, 0, 128, 2**32 - 1, 7, 5, 0, 64, 256, 1, 1, 0, 4, 2, 128]
    k = [32, 48, 0, 0, 0, 24, 9, 0, 0, 0, 16, 8, 0, 0, 0, 2, 2, 32]
    aligned, counter, seen = 0, 0, 4711
    found = launch(rise=0)
    for place in (0, len(v)):
        found[place] %= 128  # a launch works on copies, which are as aligned
    assert found[: len(v) + len(k) + 3] == [*v, *k, aligned, counter, seen]


def test_a_tile_counter_that_is_not_left_zero_is_found() -> None:
    with pytest.raises(EmulatorFaultError, match=r"^tile counter: the kernel must leave its tile counter 0; it left 3$"):
        launch(rise=3)
