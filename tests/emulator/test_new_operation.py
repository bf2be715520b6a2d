"""A new operation, its oracle and a family of two kernels with a buffer are files of their own: all machinery takes them as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashgen import numerics, templates
from flashgen.build.nvrtc import compile_source
from flashgen.cells import Cell
from flashgen.codegen import families as family_folder
from flashgen.codegen import family as family_module
from flashgen.codegen import operation as operation_module
from flashgen.codegen import operations as operation_folder
from flashgen.codegen import render as render_module
from flashgen.codegen.devices import find_device
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.spec import PlainSpec
from flashgen.codegen.target import find_target
from flashgen.launch import cpu
from flashgen.launch.tensors import Tensors
from flashgen.selection.families import default_spec
from flashgen.tuning import Request, dry_run
from flashgen.verification import cases, debug
from flashgen.verification.screen import verify_kernel
from tests.support.added_files import added_files

FILES = {
    "operations/row_norms.py": '''
        """The squared length of each row of x, times a factor."""
        from flashgen.codegen.operands import Axis, Element, Operand, Role
        from flashgen.codegen.operation import Operation
        from flashgen.codegen.problem import Dtype, Problem
        from flashgen.codegen.workload import Workload


        class RowNorms(Operation):
            name = "row_norms"

            def operands(self, problem):
                rows = (Axis.BATCH, Axis.LEN_Q, Axis.HEADS_Q)
                return Operand("x", (*rows, Axis.HEAD_DIM)), Operand("norms", rows, Element.F32, Role.OUT)

            def scalars(self, problem, workload):
                return {"factor": 1.0}

            def flops(self, problem, workload):
                return 2.0 * workload.batch * workload.len_q * workload.heads_q * problem.head_dim

            def examples(self):
                return ((Problem(Dtype.BF16, 64, operation="row_norms"), Workload(2, 3, 3, 50, 1)),)


        OPERATION = RowNorms()
        ''',
    "numerics/row_norms.py": '''
        """The oracle of row_norms."""
        import torch
        from flashgen.numerics.oracle import Oracle


        class RowNormsOracle(Oracle):
            def exact(self, problem, tensors, scalars, sample=None):
                norms = tensors["x"].double().square().sum(-1) * scalars["factor"]
                return {"norms": norms} if sample is None else self.sampled({"norms": norms}, sample)

            def plain(self, problem, tensors, scalars, sample=None):
                norms = tensors["x"].float().square().sum(-1) * scalars["factor"]
                return {"norms": norms} if sample is None else self.sampled({"norms": norms}, sample)

            def sample(self, problem, workload, count, seed):
                sizes = torch.tensor([workload.batch, workload.heads_q, workload.len_q])
                return (torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)) * sizes).long()

            def sampled(self, outputs, sample):
                batch, head, query = sample.unbind(1)
                return {"norms": outputs["norms"][batch, query, head]}

            def rows_of(self, touched):
                return touched["norms"].transpose(1, 2).nonzero()


        ORACLE = RowNormsOracle()
        ''',
    "families/two_kernels.py": '''
        """Squares into a buffer, then sums of its rows."""
        from dataclasses import dataclass
        from flashgen.codegen.config import Config, tagged
        from flashgen.codegen.family import Family, Prediction
        from flashgen.codegen.parameters import Parameter, ParameterBlock
        from flashgen.codegen.program import BlockResources, Buffer, KernelLaunch, KernelText, Program


        @dataclass(frozen=True)
        class TwoKernelsConfig(Config):
            threads: int = tagged("t", 64)


        class TwoKernels(Family):
            name, revision, operation, automatic = "two_kernels", 1, "row_norms", True
            template, config_type = "kernels/two_kernels.cu.j2", TwoKernelsConfig
            atoms, tiles = ("types", "index"), ()
            squares = ParameterBlock((Parameter("const u16*", "x"), Parameter("float*", "squares"), Parameter("i64", "batch_stride"),
                Parameter("i64", "head_stride"), Parameter("i64", "row_stride"), Parameter("int", "heads"), Parameter("int", "rows"),
                Parameter("int", "elements")))
            sums = ParameterBlock((Parameter("const float*", "squares"), Parameter("float*", "norms"), Parameter("int", "count"),
                Parameter("float", "factor")))
            parameters = squares

            def refusals(self, problem, target):
                return [] if problem.operation == self.operation else [f"pass must be {self.operation}; got {problem.operation}"]

            def check(self, problem, config, target):
                return self.refusals(problem, target)

            def space(self, problem, target):
                yield TwoKernelsConfig(32)
                yield TwoKernelsConfig()

            def default(self, problem, target):
                return TwoKernelsConfig()

            def context(self, problem, config, target):
                return {"head_dim": problem.head_dim}

            def kernels(self, problem, config):
                return KernelText(self.squares), KernelText(self.sums, "_sums", "SumParameters")

            def resources(self, problem, config):
                return dict.fromkeys(("", "_sums"), BlockResources(config.threads, 0))

            def program(self, config, call, device):
                batch, row, head, _ = call.views["x"].strides
                w, width = call.workload, call.problem.head_dim
                count = w.batch * w.len_q * w.heads_q
                strides = {"batch_stride": batch, "row_stride": row, "head_stride": head}
                first = {**strides, "heads": w.heads_q, "rows": w.len_q, "elements": count * width}
                blocks = lambda n: -(-n // config.threads)
                launches = (KernelLaunch(blocks(count * width), first),
                    KernelLaunch(blocks(count), {"count": count, **call.scalars}, suffix="_sums"))
                return Program(launches, (Buffer("squares", 4 * count * width),))

            def predict(self, problem, config, workload, device, registers=None):
                return Prediction(1e-6 * config.threads, "memory")


        FAMILY = TwoKernels()
        ''',
    "templates/two_kernels.cu.j2": """
        // Two kernels for a test.
        //% for path in atoms
        {{ source(path) }}
        //% endfor
        struct Parameters {
        //% for field in kernels[""].parameters.fields
            {{ field.c_type }} {{ field.name }};
        //% endfor
        };
        struct SumParameters {
        //% for field in kernels["_sums"].parameters.fields
            {{ field.c_type }} {{ field.name }};
        //% endfor
        };
        constexpr int kHeadDim = {{ head_dim }}, kThreads = {{ config.threads }};

        extern "C" __global__ void __launch_bounds__(kThreads, 1) {{ spec.name }}(const __grid_constant__ Parameters p) {
            const int i = block_index() * kThreads + thread_index();
            if (i >= p.elements) return;
            const int row = i / kHeadDim, head = row % p.heads, query = row / p.heads % p.rows, batch = row / p.heads / p.rows;
            const u32 bits = p.x[batch * p.batch_stride + query * p.row_stride + head * p.head_stride + i % kHeadDim];
            const float x = __uint_as_float(bits << 16);
            p.squares[i] = x * x;
        }

        extern "C" __global__ void __launch_bounds__(kThreads, 1) {{ spec.name }}_sums(const __grid_constant__ SumParameters p) {
            const int row = block_index() * kThreads + thread_index();
            if (row >= p.count) return;
            double sum = 0.0;
            for (int column = 0; column < kHeadDim; ++column) sum += p.squares[row * kHeadDim + column];
            p.norms[row] = float(sum) * p.factor;
        }
        """,
}
CACHES = (family_module.families, family_module._refusals_everywhere, operation_module.operations, render_module.jinja_environment)


@pytest.fixture
def added(tmp_path: Path) -> Iterator[None]:
    packages: dict[str, ModuleType] = {"operations": operation_folder, "families": family_folder, "numerics": numerics}
    with added_files(tmp_path, FILES, packages, ("kernels/two_kernels.cu.j2", "templates/two_kernels.cu.j2"), CACHES):
        yield


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification without its long shapes, whose rows take most of the time: how many there are is no matter to an operation."""
    monkeypatch.setattr(cases, "SHAPES", [shape for shape in cases.SHAPES if math.prod(shape[:2]) * shape[3] < 1500])


@pytest.mark.slow
@pytest.mark.usefixtures("added", "short")
def test_a_new_operation_is_files_of_its_own(tmp_path: Path) -> None:
    ((problem, workload),) = operation_module.find_operation("row_norms").examples()
    hopper, h200 = find_target("sm_90a"), find_device("h200")
    spec = default_spec(problem, hopper)
    assert spec.family is find_family("two_kernels")
    assert PlainSpec.from_json(spec.to_json()).as_of_now() == spec
    report = compile_source(render_module.render(spec), hopper.name).report
    assert report.entries.keys() == {spec.name, f"{spec.name}_sums"}
    assert report.defects == []
    kernel = cpu.load_emulated(spec)
    results = verify_kernel(kernel)
    assert len(results) > 5
    assert all(result.verdict.ok for result in results), [result.verdict.message for result in results]
    tensors = Tensors.random(problem, workload, torch.Generator().manual_seed(0)).apart()
    found = debug.run_blocks(spec, tensors, tmp_path / "debug", kernel="_sums", block=1, output=(tmp_path / "said").open("w"))
    assert (found.ok, len(found.rows)) == (True, 64)
    ((cell,)) = dry_run(Request([Cell(problem, workload)], device="h200"), h200)["cells"]
    assert [candidate["kernel"] for candidate in cell["candidates"]][1:] == [spec.name]


@pytest.mark.usefixtures("added", "short")
def test_its_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of the new operation judges: sums of half of a row are wrong."""
    ((problem, _),) = operation_module.find_operation("row_norms").examples()
    spec, read = default_spec(problem, find_target("sm_90a")), templates.read
    monkeypatch.setattr(templates, "read", lambda path: read(path).replace("column < kHeadDim", "column < kHeadDim / 2"))
    results = verify_kernel(cpu.load_emulated(spec))
    assert not any(result.verdict.ok for result in results if result.workload.len_q)
    assert "norms max error" in results[0].verdict.message


def test_a_problem_names_an_operation_that_is_there() -> None:
    with pytest.raises(ValueError, match=r"^pass must be one of .*; got 'row_norms'$"):
        Problem(Dtype.BF16, 64, operation="row_norms")
