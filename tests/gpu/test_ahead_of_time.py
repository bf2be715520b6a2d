"""Kernels ahead of time on a GPU: loaded ones give the bits of compiled ones, in Python, in C++ and in exported programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.build.gpu.driver import gpu
from flashgen.cli.generate import generate
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.records import sources
from flashgen.selection import loaded
from tests.support.cpp_example import EXAMPLE, build, run
from tests.support.inductor import with_shared_libstdcpp, without_vectors

pytestmark = pytest.mark.gpu

SIZES = ((1, 16, 512), (2, 32, 4096), (1, 7, 100), (4, 2, 1300))  # batch, heads, length
RECORDED: dict[str, Any] = {"head_dim": 64, "dtype": "bf16", "causal": True, "passes": "forward", "from_records": True}


def inputs(batch: int, heads: int, length: int, kv_heads: int = 0, length_kv: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(length)
    shapes = ((batch, length, heads, 64), *2 * [(batch, length_kv or length, kv_heads or heads, 64)])
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes]


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    flashgen.unload()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tuned kernels of this GPU's records."""
    device = gpu(0).device
    if not any(source().for_device(device.name, device.sm_count) for source in (sources.own_records, sources.shipped_records)):
        pytest.skip(f"needs tuning records of {device.name}")
    folder = tmp_path_factory.mktemp("recorded") / "kernels"
    generate(folder, device.target.name, **RECORDED)
    return folder


def python(code: str, folder: Path, *arguments: object, **environment: str) -> str:
    """What a process prints that can import neither Jinja nor NVRTC, with an empty cache."""
    blocked = f"import sys\nsys.modules['jinja2'] = sys.modules['cuda.bindings.nvrtc'] = None\n{code}"
    kept = {**os.environ, "FLASHGEN_CACHE_DIR": str(folder / "cache"), **environment}
    done = subprocess.run([sys.executable, "-c", blocked, *map(str, arguments)], capture_output=True, text=True, env=kept, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


IN_ANOTHER_PROCESS = """
import torch, flashgen
flashgen.register_kernels(sys.argv[1])
for case in torch.load(sys.argv[2]):
    assert torch.equal(flashgen.attention(*(tensor.cuda() for tensor in case["inputs"]), causal=True).cpu(), case["out"])
try:
    flashgen.attention(*3 * [torch.ones(1, 8, 1, 80, dtype=torch.bfloat16, device="cuda")])
except flashgen.FlashgenError as error:
    print(error)
"""


def test_loaded_kernels_give_the_bits_of_compiled_ones(recorded: Path, tmp_path: Path) -> None:
    """Those that records choose: near ones in this process, and any size in a process that can compile none."""
    problem = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL)
    compiled = [flashgen.attention(*inputs(*sizes), causal=True) for sizes in SIZES]
    kernels = flashgen.load(recorded)
    assert {kernel.spec.problem for kernel in kernels} >= {problem}
    for sizes, out in zip(SIZES, compiled, strict=True):
        batch, heads, length = sizes
        chosen = loaded.kernels.choose(problem, flashgen.Workload(batch, heads, heads, length, length), gpu(0))
        assert torch.equal(flashgen.attention(*inputs(*sizes), causal=True), out), chosen.spec.name
    assert loaded.kernels.choose(problem, flashgen.Workload(2, 32, 32, 4096, 4096), gpu(0)) in kernels
    cases = [{"inputs": [t.cpu() for t in inputs(*sizes)], "out": out.cpu()} for sizes, out in zip(SIZES[:2], compiled, strict=False)]
    torch.save(cases, tmp_path / "cases.pt")
    said = python(IN_ANOTHER_PROCESS, tmp_path, recorded, tmp_path / "cases.pt")
    assert "none of the loaded kernels takes it, and none can be compiled here" in said


def test_a_package_for_another_architecture_is_named_at_the_first_call(tmp_path: Path) -> None:
    other = "sm_80" if gpu(0).device.target.name != "sm_80" else "sm_90a"
    generate(tmp_path / "kernels", other, 64, causal=True)
    flashgen.register_kernels(tmp_path / "kernels")
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"must hold a kernel for {gpu(0).device.target.name}; got kernels for {other}"):
            flashgen.attention(*inputs(1, 3, 333), causal=True)
    flashgen.unload()
    flashgen.attention(*inputs(1, 3, 333), causal=True)


def test_a_registered_folder_is_loaded_before_a_capture_or_refused_in_it(recorded: Path) -> None:
    flashgen.register_kernels(recorded)
    q, k, v = inputs(1, 5, 200)
    with pytest.raises(flashgen.CaptureError, match=r"flashgen\.warm"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        flashgen.attention(q, k, v, causal=True)
    out, graph = flashgen.attention(q, k, v, causal=True), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flashgen.attention(q, k, v, causal=True)
    graph.replay()
    assert torch.equal(captured, out)


@pytest.mark.parametrize("causal", [False, True])
def test_the_cpp_example_gives_python_s_bits(causal: bool, tmp_path: Path) -> None:
    prebuilt = os.environ.get("FLASHGEN_TEST_CPP_EXAMPLE")  # for a machine without a C++ compiler
    program = Path(prebuilt) if prebuilt else build(EXAMPLE / "attention.cpp", tmp_path / "attention")
    generate(tmp_path / "kernels", gpu(0).device.target.name, 64, causal=causal, family="attention_forward")
    q, k, v = inputs(2, 8, 1000, kv_heads=2, length_kv=1300)
    flashgen.load(tmp_path / "kernels")
    out, lse = flashgen.attention(q, k, v, causal=causal, scale=0.11, return_lse=True)
    (tmp_path / "inputs").write_bytes(b"".join(t.cpu().view(torch.uint8).numpy().tobytes() for t in (q, k, v)))
    problem, files = f"bf16_d64_{'causal' if causal else 'full'}", (tmp_path / "inputs", tmp_path / "outputs")
    code, said = run(program, tmp_path / "kernels", problem, 2, 8, 2, 1000, 1300, 0.11, *files, environment=os.environ)
    assert code == 0, said
    wanted = b"".join(t.contiguous().cpu().view(torch.uint8).numpy().tobytes() for t in (out, lse))
    assert (tmp_path / "outputs").read_bytes() == wanted


class Twice(torch.nn.Module):
    """Attention with a modifier that has a tensor, and one without: other kernels of a compiled model need not give eager's bits."""

    slopes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unflatten(-1, (3, 4, 64)).unbind(2)
        first = flashgen.attention(q, k, v, causal=True, alibi_slopes=self.slopes)
        return flashgen.attention(first, k, v, window=(100, 0))


LOADED = """
import sys, torch, flashgen
x, want = torch.load("data.pt", map_location="cuda")
got = torch._inductor.aoti_load_package("model.pt2")(x) if sys.argv[1] == "aoti" else torch.export.load("model.pt2").module()(x)
print(torch.equal(got, want))
"""


@pytest.mark.parametrize("way", ["export", "aoti"])
def test_an_exported_model_is_as_eager_in_a_fresh_process(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = Twice().cuda(), torch.randn(2, 500, 768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        want = layer(x)
        program = torch.export.export(layer, (x[:, :384].contiguous(),), dynamic_shapes=({1: torch.export.Dim("length", min=8, max=4096)},))
        assert torch.equal(program.module()(x), want)
    if way == "aoti":
        without_vectors(monkeypatch)
        with_shared_libstdcpp(monkeypatch)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    else:
        torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, want), tmp_path / "data.pt")
    command = [sys.executable, "-X", "faulthandler", "-c", LOADED, way]
    environment = {**os.environ, "PYTHONPATH": str(Path(flashgen.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
