"""A family of two kernels in one text, with a buffer between them: what a program may be, made up for tests.

The first kernel gives each row twice its number, the second adds the scale: lse = 2 * row + scale. There are 32 rows a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from flashgen import templates
from flashgen.codegen import render
from flashgen.codegen.config import Config, tagged
from flashgen.codegen.devices import Device
from flashgen.codegen.family import Family, Prediction
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import BlockResources, Buffer, BufferKind, KernelLaunch, KernelText, Program
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload

TEMPLATE = "kernels/two_steps.cu.j2"
TEXT = """// {{ spec.name }}
//% for path in atoms
{{ source(path) }}
//% endfor
constexpr int kThreads = 32, kBlocks = 1;
//% for kernel in kernels.values()
struct {{ kernel.struct }} {
//% for field in kernel.parameters.fields
    {{ field.c_type }} {{ field.name }};
//% endfor
};
//% endfor
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks){{ clusters }}
{{ spec.name }}(const __grid_constant__ Parameters p) {
//% if clusters
    barrier_cluster_sync();
//% endif
    const int row = block_index() * kThreads + thread_index();
    if (row < p.rows) p.doubled[row] = p.doubled[row] * 0.0f == 0.0f ? -1.0f : 2.0f * row;  // what is there before is NaN
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
{{ spec.name }}_add(const __grid_constant__ AddParameters p) {
    const int row = block_index() * kThreads + thread_index();
    if (row < p.rows) p.lse[row] = p.doubled[row] + p.scale;
}
"""


@dataclass(frozen=True)
class TwoStepsConfig(Config):
    """rows: of a block."""

    rows: int = tagged("r", 32)


class TwoSteps(Family):
    """See the module's docstring."""

    name, revision, template, config_type = "two_steps", 1, TEMPLATE, TwoStepsConfig
    atoms: ClassVar[tuple[str, ...]] = ("types", "register", "index", "shared_memory", "barrier")
    tiles = ()
    parameters = ParameterBlock((Parameter("float*", "doubled"), Parameter("int", "rows")))
    second = ParameterBlock(
        (Parameter("float*", "doubled"), Parameter("float*", "lse"), Parameter("int", "rows"), Parameter("float", "scale"))
    )

    def refusals(self, problem: Problem, target: Target) -> list[str]:
        return []

    def check(self, problem: Problem, config: Any, target: Target) -> list[str]:
        return []

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        yield TwoStepsConfig()

    def default(self, problem: Problem, target: Target) -> Config:
        return TwoStepsConfig()

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        return {"clusters": ""}

    def kernels(self, problem: Problem, config: Any) -> tuple[KernelText, ...]:
        return KernelText(self.parameters), KernelText(self.second, "_add", "AddParameters")

    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        return {"": BlockResources(32, 0), "_add": BlockResources(32, 1024)}

    def program(self, config: Any, call: Call, device: Device) -> Program:
        w = call.workload
        rows = w.batch * w.heads_q * w.len_q
        grid, values = -(-rows // 32), {"rows": rows}
        first, second = KernelLaunch(grid, values), KernelLaunch(grid, {**values, **call.scalars}, suffix="_add")
        return Program((first, second), (Buffer("doubled", 4 * rows, BufferKind.CALL),))

    def predict(self, problem: Problem, config: Any, workload: Workload, device: Device, registers: int | None = None) -> Prediction:
        return Prediction(1e-6, "nothing")


class InClusters(TwoSteps):
    """The same, the first kernel in clusters of two blocks that meet."""

    name = "in_clusters"
    atoms = (*TwoSteps.atoms, "cluster", "barrier_cluster")

    def context(self, problem: Problem, config: Any, target: Target) -> dict[str, object]:
        return {"clusters": " __cluster_dims__(2, 1, 1)"}

    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        return {"": BlockResources(32, 0, cluster=2), "_add": BlockResources(32, 1024)}


@pytest.fixture
def two_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoSteps]:
    """The family, whose template is found beside the package's own."""
    read = templates.read
    monkeypatch.setattr(templates, "read", lambda path: TEXT if path == TEMPLATE else read(path))
    render.jinja_environment.cache_clear()
    yield TwoSteps()
    render.jinja_environment.cache_clear()
