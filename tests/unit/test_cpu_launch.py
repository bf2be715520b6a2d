"""What a kernel on the CPU is launched with: addresses, sizes, strides, and how far it may read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.build.emulator.kernel import EmulationOrder
from flashgen.codegen.devices import device_of_target, find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config
from flashgen.codegen.family import families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.program import Program
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch import cpu
from flashgen.launch.tensors import Tensors
from tests.support.examples import families_of, taken
from tests.support.programs import program_of

PROBLEM = Problem(Dtype.BF16, 64, 32, Mask.CAUSAL)
WORKLOAD = Workload(2, 6, 3, 70, 130)
SM_90 = find_device("h200").target


class Launched:
    """A kernel that keeps what it is launched with."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def launch(self, program: Program, tensors: Any, order: Any = None, **more: Any) -> None:
        assert list(tensors) == [tensor.name for tensor in tensors.values()]
        values = {name: value for launch in program.launches for name, value in launch.values.items()}
        maps = {name: shape for launch in program.launches for name, shape in launch.maps.items()}
        grids = [launch.grid for launch in program.launches]
        self.given = SimpleNamespace(grids=grids, values=values, maps=maps, tensors=list(tensors.values()), order=order, **more)


def launch(spec: KernelSpec, tensors: Tensors, scale: float | None = None, order: EmulationOrder | None = None) -> Any:
    kernel: Any = Launched(spec)
    cpu.run_on_cpu(kernel, tensors, {} if scale is None else {"scale": scale}, order)
    return kernel.given


@pytest.mark.parametrize("family", families_of(), ids=lambda family: family.name)
def test_a_launch_has_the_tensors_and_no_more(family: Any) -> None:
    spec = KernelSpec(family, PROBLEM, family.default(PROBLEM, SM_90), SM_90)
    tensors = Tensors.random(PROBLEM, taken(family, PROBLEM, WORKLOAD), torch.Generator().manual_seed(0))
    tensors["out"].zero_()
    given = launch(spec, tensors)
    operands = {"q": tensors["q"], "k": tensors["k"], "v": tensors["v"], "out": tensors["out"], "lse": tensors["lse"]}
    assert [(t.name, t.address, t.sizes, t.strides) for t in given.tensors] == [
        (name, t.data_ptr(), tuple(t.shape), t.stride()) for name, t in operands.items()
    ]
    assert [t.name for t in given.tensors if t.writable] == ["out", "lse"]
    assert tensors["out"].isnan().all(), "what is not written shows"
    assert tensors["lse"].isnan().all()
    expected = program_of(family, PROBLEM, spec.config, WORKLOAD, device_of_target(SM_90))
    assert given.grids == [launch.grid for launch in expected.launches]
    assert [given.values[name] for name in ("len_q", "len_kv")] == [70, tensors.workload.len_kv]
    assert given.values["scale_log2"] == pytest.approx(64**-0.5 * 1.4426950408889634)
    assert given.maps.keys() == {place.name for kernel in spec.kernels.values() for place in kernel.parameters.tensor_maps}
    assert launch(spec, tensors, 0.3).values["scale_log2"] == pytest.approx(0.3 * 1.4426950408889634)
    order = EmulationOrder(late_copies=False)
    assert launch(spec, tensors, None, order).order is order


def test_strides_are_those_of_the_tensors() -> None:
    (family,) = (f for f in families().values() if f.name == "attention_forward")
    spec = KernelSpec(family, PROBLEM, family.default(PROBLEM, SM_90), SM_90)
    q, k, v = (torch.randn(2, n, h, w).bfloat16() for n, h, w in ((70, 6, 72), (130, 3, 80), (130, 3, 88)))
    out, lse = torch.empty(2, 70, 6, 40).bfloat16(), torch.empty(2, 6, 70)
    given = launch(
        spec, Tensors(PROBLEM, WORKLOAD, {"q": q[..., :64], "k": k[..., :64], "v": v[..., :32], "out": out[..., :32], "lse": lse})
    )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        batch, row, head, _ = tensor.stride()
        assert [given.values[f"{name}_{dim}"] for dim in ("batch", "head", "row")] == [batch, head, row]


def test_heads_that_a_tile_cannot_pack_are_refused() -> None:
    (family,) = (f for f in families().values() if f.name == "attention_forward_sm90")
    spec = KernelSpec(family, PROBLEM, AttentionForwardSm90Config(2, 64, out_panels=1, pack_gqa=4), SM_90)
    with pytest.raises(ArgumentError, match="pack_gqa must divide the 2 query heads"):
        launch(spec, Tensors.random(PROBLEM, WORKLOAD, torch.Generator()))
