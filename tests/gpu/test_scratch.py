"""Tile counters on a GPU: zero, in memory that a graph's capture does not mind, in graphs as well as between them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.build.gpu.device_memory import zeroed_memory
from flashgen.build.gpu.driver import check, driver, gpu
from flashgen.build.gpu.kernel import Kernel, Launch
from flashgen.build.nvrtc import compile_source
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.program import BlockResources, Buffer, BufferKind, KernelLaunch, KernelText, Program
from flashgen.codegen.render import Source
from flashgen.launch.tile_counters import COUNTER_BYTES, COUNTERS_AT_ONCE, TileCounters

pytestmark = pytest.mark.gpu

BLOCKS, ROUNDS = 16, 2000
BLOCK = ParameterBlock((Parameter("int*", "out"), Parameter("int*", "tile_counter"), Parameter("int", "rounds")))
# Every block draws numbers until they reach `rounds`. Each number is drawn once unless somebody else draws from the same counter.
DRAW = f"""
struct Parameters {{ {"".join(f"{f.c_type} {f.name}; " for f in BLOCK.fields)}}};
extern "C" __global__ void draw(const __grid_constant__ Parameters p) {{
    int drawn = 0;
    while ((drawn = atomicAdd(p.tile_counter, 1)) < p.rounds) {{
        atomicAdd(p.out + drawn, 1);
        __nanosleep(100);
    }}
    if (drawn == p.rounds + {BLOCKS} - 1) atomicExch(p.tile_counter, 0);  // the last block to come
}}
"""


@pytest.fixture
def launch() -> Launch:
    torch.zeros(1, device="cuda")
    spec: Any = SimpleNamespace(problem=Problem(Dtype.BF16, 64), kernels={"": KernelText(BLOCK)}, resources={"": BlockResources(1, 0)})
    return Kernel(spec, compile_source(Source("draw", DRAW), gpu(0).device.target.name), gpu(0)).bind(
        Program((KernelLaunch(BLOCKS, {"rounds": ROUNDS}),), (Buffer("tile_counter", 4, BufferKind.STREAM_COUNTER),))
    )


class Draws:
    """Launches with counters of their own kind, each with an output of its own."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.counters = launch, TileCounters()
        self.drawn: list[torch.Tensor] = []
        self.expected: list[int] = []

    def enqueue(self, out: torch.Tensor) -> None:
        """On the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        self.launch(stream, 0, 0, 0, out.data_ptr(), 0, self.counters.address(0, stream))

    def output(self, times: int) -> torch.Tensor:
        """For so many launches."""
        self.drawn.append(torch.zeros(ROUNDS, dtype=torch.int32, device="cuda"))
        self.expected.append(times)
        return self.drawn[-1]

    def wrong(self) -> Iterator[tuple[int, int]]:
        torch.cuda.synchronize()
        for i, (drawn, times) in enumerate(zip(self.drawn, self.expected, strict=True)):
            if not (drawn == times).all():
                yield i, times


def test_the_memory_is_zero() -> None:
    torch.zeros(1, device="cuda")
    size = COUNTERS_AT_ONCE * COUNTER_BYTES
    contents = bytearray(b"\xff" * size)
    check(driver().cuMemcpyDtoH(contents, zeroed_memory(size), size), "reading")
    assert not any(contents)


def test_streams_graphs_and_eager_launches_at_once(launch: Launch) -> None:
    draws, streams = Draws(launch), [torch.cuda.Stream() for _ in range(3)]
    graphs = []
    for _ in range(3):  # the first capture is also the first to need memory
        graph, outs = torch.cuda.CUDAGraph(), [draws.output(times=5) for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for out in outs:
                draws.enqueue(out)
        graphs.append(graph)
    eager = [draws.output(times=10) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(5):
        for stream, graph, out in zip(streams, graphs, eager, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                draws.enqueue(out)
        for stream, out in zip(streams[1:] + streams[:1], eager, strict=True):
            with torch.cuda.stream(stream):
                draws.enqueue(out)
    assert list(draws.wrong()) == []


def test_a_shared_counter_would_be_seen(launch: Launch) -> None:
    """The check above can fail: with one counter for two streams numbers are missed."""
    draws, streams = Draws(launch), [torch.cuda.Stream() for _ in range(2)]
    shared = zeroed_memory(COUNTER_BYTES)
    outs = [draws.output(times=1) for _ in streams]
    torch.cuda._sleep(50_000_000)  # until both launches are enqueued: they must run at the same time
    gate = torch.cuda.Event()
    gate.record()
    for stream, out in zip(streams, outs, strict=True):
        with torch.cuda.stream(stream):
            stream.wait_event(gate)
            launch(stream.cuda_stream, 0, 0, 0, out.data_ptr(), 0, shared)
    assert list(draws.wrong()) != []
