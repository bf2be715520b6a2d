"""A family of three kernels that overlap, made up for tests: one clears sums, one adds to them, one hands them out.

lse = 2 * row + scale, of 32 rows a block. What the sums are before is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from flashgen import templates
from flashgen.codegen import render
from flashgen.codegen.devices import Device
from flashgen.codegen.operands import Call
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import BlockResources, Buffer, KernelLaunch, KernelText, Program
from tests.support.two_steps import TwoSteps

TEMPLATE = "kernels/overlapping.cu.j2"
WAIT = "    griddepcontrol_wait();\n"
ADD = "    if (row < p.rows) red_add_f32(p.sums + row, 2.0f * row);\n"
HAND_OUT = "    if (row < p.rows) p.lse[row] = p.sums[row] + p.scale;\n"
TEXT = f"""// {{{{ spec.name }}}}
//% for path in atoms
{{{{ source(path) }}}}
//% endfor
constexpr int kThreads = 32, kBlocks = 1;
//% for kernel in kernels.values()
struct {{{{ kernel.struct }}}} {{
//% for field in kernel.parameters.fields
    {{{{ field.c_type }}}} {{{{ field.name }}}};
//% endfor
}};
//% endfor
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
{{{{ spec.name }}}}_clear(const __grid_constant__ SumParameters p) {{
    griddepcontrol_launch_dependents();
    const int row = block_index() * kThreads + thread_index();
    if (row < p.rows) p.sums[row] = 0.0f;
}}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
{{{{ spec.name }}}}(const __grid_constant__ Parameters p) {{
    griddepcontrol_launch_dependents();
    const int row = block_index() * kThreads + thread_index();
{WAIT}{ADD}}}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
{{{{ spec.name }}}}_hand_out(const __grid_constant__ OutParameters p) {{
    const int row = block_index() * kThreads + thread_index();
{WAIT}{HAND_OUT}}}
"""


class Overlapping(TwoSteps):
    """See the module's docstring."""

    name, template = "overlapping", TEMPLATE
    atoms: ClassVar[tuple[str, ...]] = ("types", "register", "index", "shared_memory", "barrier", "red", "griddepcontrol")
    parameters = ParameterBlock((Parameter("float*", "sums"), Parameter("int", "rows")))
    out_parameters = ParameterBlock(
        (Parameter("float*", "sums"), Parameter("float*", "lse"), Parameter("int", "rows"), Parameter("float", "scale"))
    )

    def context(self, problem: Problem, config: Any, target: Any) -> dict[str, object]:
        return {}

    def kernels(self, problem: Problem, config: Any) -> tuple[KernelText, ...]:
        clear, out = KernelText(self.parameters, "_clear", "SumParameters"), KernelText(self.out_parameters, "_hand_out", "OutParameters")
        return clear, KernelText(self.parameters), out

    def resources(self, problem: Problem, config: Any) -> Mapping[str, BlockResources]:
        return dict.fromkeys(("_clear", "", "_hand_out"), BlockResources(32, 0))

    def program(self, config: Any, call: Call, device: Device) -> Program:
        w = call.workload
        rows = w.batch * w.heads_q * w.len_q
        grid, values = -(-rows // 32), {"rows": rows}
        launches = (
            KernelLaunch(grid, values, suffix="_clear"),
            KernelLaunch(grid, values, overlaps=True),
            KernelLaunch(grid, {**values, **call.scalars}, suffix="_hand_out", overlaps=True),
        )
        return Program(launches, (Buffer("sums", 4 * rows),))


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Overlapping]:
    """The family, whose template is found beside the package's own."""
    read = templates.read
    monkeypatch.setattr(templates, "read", lambda path: TEXT if path == TEMPLATE else read(path))
    render.jinja_environment.cache_clear()
    yield Overlapping()
    render.jinja_environment.cache_clear()
