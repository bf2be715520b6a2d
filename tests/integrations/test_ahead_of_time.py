"""Kernels without a compiler: a package of them in an environment without NVRTC and Jinja, the C++ example, exported programs."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen
from flashgen.build.emulator.compiler import CxxCompilerMissingError, cxx_compiler
from flashgen.cli.generate import generate
from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.records.choice import bucket
from flashgen.selection import bundle
from flashgen.selection.bundle import Generated
from flashgen.selection.families import default_spec
from tests.support.cpp_example import EXAMPLE, build, run
from tests.support.inductor import with_shared_libstdcpp, without_vectors
from tests.support.made_artifacts import made_artifact

SUPPORT = Path(__file__).parents[1] / "support"
CHECKOUT = Path(flashgen.__file__).parents[1]

# The C++ example


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "kernels"
    generate(folder, "sm_90a", 64, causal=True, family="attention_forward")
    return folder


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(EXAMPLE / "attention.cpp", tmp_path_factory.mktemp("example") / "attention")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the example finds a stub of the driver."""
    folder = tmp_path_factory.mktemp("driver")
    build(SUPPORT / "stub_driver.cpp", folder / "libcuda.so.1", "-shared", "-fPIC")
    return {"LD_LIBRARY_PATH": str(folder), "STUB_CAPABILITY": "90", "STUB_LAUNCH": str(folder / "launch")}


@pytest.mark.slow
def test_the_example_launches_what_python_does(kernels: Path, example: Path, driver: dict[str, str], tmp_path: Path) -> None:
    (kernel,) = bundle.read_bundle(kernels, find_target("sm_90a"))
    spec, scale, sizes = kernel.spec, 0.125, (2, 6, 2, 300, 411)
    block = spec.kernels[""].parameters
    lengths = (2 * 300 * 6 * 64 * 2, 2 * 411 * 2 * 64 * 2, 2 * 411 * 2 * 64 * 2)
    (tmp_path / "inputs").write_bytes(bytes(sum(lengths)))
    environment = driver | {"STUB_BYTES": str(block.size)}
    code, said = run(example, kernels, spec.problem.name, *sizes, scale, tmp_path / "inputs", tmp_path / "outputs", environment=environment)
    assert code == 0, said
    line, _, given = Path(driver["STUB_LAUNCH"]).read_bytes().partition(b"\n")
    device = dataclasses.replace(find_device("h200"), l2_bytes=0)  # one head at a time shares the L2, as in the example
    call = attention_call(spec.problem, Workload(*sizes), scale=scale)
    (launch,) = spec.family.program(spec.config, call, device).launches
    resources = spec.resources[""]
    numbers = [launch.grid, 1, 1, resources.threads, resources.shared_bytes, resources.shared_bytes]
    assert line.decode().split() == [spec.name, *map(str, numbers)]
    assert given[block.values_begin :] == block.pack_values(launch.values)
    q, k, v, out, lse = struct.unpack("=5Q", given[: block.values_begin])
    assert (k - q, v - k) == lengths[:2]
    assert lse - out == 2 * 300 * 6 * 64 * 2
    assert (tmp_path / "outputs").stat().st_size == 2 * 300 * 6 * (64 * 2 + 4)


@pytest.mark.slow
def test_the_example_names_what_is_wrong(kernels: Path, example: Path, driver: dict[str, str], tmp_path: Path) -> None:
    kind, sizes = "bf16_d64_causal", (1, 2, 1, 100, 100, 0.125)
    (tmp_path / "inputs").write_bytes(bytes(100))
    files = (tmp_path / "inputs", tmp_path / "outputs")
    stub = driver | {"STUB_BYTES": "0"}
    generate(tmp_path / "hopper", "sm_90a", 64, causal=True)
    wrong: list[tuple[tuple[object, ...], dict[str, str], str]] = [
        ((kernels, kind, *sizes, *files), {"LD_LIBRARY_PATH": "/nowhere"}, "no NVIDIA driver: libcuda.so.1"),
        ((kernels, kind, *sizes, *files), stub | {"STUB_CAPABILITY": "80"}, f"of {kind} for sm_80, this GPU's architecture, "),
        ((tmp_path / "hopper", kind, *sizes, *files), stub, f"must hold an attention_forward kernel of {kind} for sm_90, "),
        ((kernels, kind, *sizes, *files), stub, "must hold 51200 bytes, q, k and v; got 100"),
        ((kernels, kind, 1, 3, 2, 100, 100, 0.125, *files), stub, "HEADS_Q must be a multiple of HEADS_KV"),
        ((kernels, kind, 0, *sizes[1:], *files), stub, "BATCH must be an integer from 1; got 0"),
        ((tmp_path, kind, *sizes, *files), stub, "manifest.json cannot be read"),
        *(((kernels, kind, *sizes[:-1], scale, *files), stub, f"SCALE must be a number from 1.1755e-38 to 2.3587e+38; got {scale}\n")
          for scale in ("", "0.125abc", "0.125,5", "x", "0", "-1", "nan", "inf", "1e-45", "1.17e-38", "2.36e38")),
    ]  # fmt: skip
    for arguments, environment, message in wrong:
        if environment is not stub and torch.cuda.is_available() and "no NVIDIA driver" in message:
            continue
        code, said = run(example, *arguments, environment=environment)
        assert (code, message in said) == (1, True), said
    assert run(example, environment=stub)[0] == 2


def made(problem: Problem, **of: Any) -> Generated:
    """A kernel that the driver's stub takes; `of`: the bucket or the workloads that it is for."""
    target = find_target("sm_90a")
    spec = default_spec(problem, target, family="attention_forward")
    artifact = made_artifact(spec)
    return Generated(spec, dataclasses.replace(artifact, cubin=b"\x7fELF" + artifact.cubin), **of)


@pytest.mark.slow
def test_the_example_launches_the_kernel_that_was_named(example: Path, driver: dict[str, str], tmp_path: Path) -> None:
    full, causal, half = Problem(Dtype.BF16, 64), Problem(Dtype.BF16, 64, mask=Mask.CAUSAL), Problem(Dtype.FP16, 64, mask=Mask.CAUSAL)
    mixed, capped = Problem(Dtype.BF16, 64, 32), Problem(Dtype.BF16, 64, modifiers=("softcap",))
    some = Workload(1, 2, 1, 100, 100)
    of_bucket, tuned = made(Problem(Dtype.BF16, 32), bucket=bucket(some)), made(Problem(Dtype.BF16, 96), workloads=(some,))
    for_all = [made(problem) for problem in (full, mixed, half, causal)]
    bundle.write(tmp_path / "kernels", [made(capped), of_bucket, tuned, *for_all])
    bundle.write(tmp_path / "none", [made(capped), of_bucket, tuned])
    (tmp_path / "inputs").write_bytes(bytes(4 * 100 * 64 * 2))
    rest = (1, 2, 1, 100, 100, 0.125, tmp_path / "inputs", tmp_path / "outputs")
    stub = driver | {"STUB_BYTES": "0"}
    for spec in (kernel.spec for kernel in for_all if kernel.spec.problem != mixed):
        code, said = run(example, tmp_path / "kernels", spec.problem.name, *rest, environment=stub)
        assert (code, said.split(": ")[0]) == (0, spec.name), said
        assert Path(driver["STUB_LAUNCH"]).read_text().split()[0] == spec.name
    there = ", ".join(f"{kernel.spec.problem.name} for sm_90a" for kernel in for_all)
    for folder, got in (("kernels", there), ("none", "none of any problem")):
        for name in (capped.name, of_bucket.spec.problem.name, tuned.spec.problem.name, "bf16_d64", ""):
            code, said = run(example, tmp_path / folder, name, *rest, environment=stub)
            wanted = f" kernel of {name} for sm_90, this GPU's architecture, and for all lengths; got {got}\n"
            assert (code, said.endswith(wanted)) == (1, True), said


# A package of kernels


def executed(python: Path | str, *arguments: object, cwd: Path, environment: dict[str, str] | None = None) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        [python, *map(str, arguments)], cwd=cwd, env=kept | (environment or {}), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with PyTorch and CUDA's bindings, without NVRTC and Jinja."""
    folder = tmp_path_factory.mktemp("bare")
    executed(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    absent = ("jinja2", "markupsafe", "nvidia", "flashgen", "_flashgen", "__editable__", "pip", "_", "hatch", "typer", "rich")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.lower().startswith(absent) and not (site / path.name).exists() and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return folder / "venv/bin/python"


IN_PACKAGE = """
import importlib.util, json, sys
assert importlib.util.find_spec("jinja2") is None and importlib.util.find_spec("nvidia") is None
from types import SimpleNamespace
import tuned_kernels
import flashgen
from flashgen.build.gpu.driver import Gpu
from flashgen.codegen.devices import find_device
from flashgen.selection import compilation, imports, loaded

imports.Kernel = lambda spec, artifact, gpu: SimpleNamespace(spec=spec, artifact=artifact, gpu=gpu)  # which loads it on a GPU
problem = flashgen.Problem(flashgen.Dtype.BF16, 64, mask=flashgen.Mask.FULL)
h200, a100 = (Gpu(ordinal, find_device(name), "uuid", "13.0") for ordinal, name in enumerate(("h200", "a100")))

def chosen(gpu, **sizes):
    try:
        return loaded.kernels.choose(problem, flashgen.Workload(**sizes), gpu).spec.name
    except flashgen.FlashgenError as error:
        return str(error)

sizes = {"heads_q": 32, "heads_kv": 32, "len_q": 4096, "len_kv": 4096}
print(json.dumps({
    "file": tuned_kernels.__file__,
    "tuned": chosen(h200, batch=4, **sizes),
    "far": chosen(h200, batch=1, heads_q=1, heads_kv=1, len_q=1, len_kv=3),
    "a100": chosen(a100, batch=4, **sizes),
    "why": compilation.why_no_compile(),
    "loaded": [name for name in ("jinja2", "typer", "rich") if name in sys.modules],
}))
"""


@pytest.mark.slow
def test_a_package_runs_without_nvrtc_and_jinja(bare: Path, tmp_path: Path) -> None:
    generate(tmp_path / "wheels", None, 64, dtype="bf16", causal=False, passes="forward", from_records=True, device="h200",
             wheel="tuned-kernels")  # fmt: skip
    executed(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "wheels", cwd=CHECKOUT)
    wheels = sorted((tmp_path / "wheels").iterdir())
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["flashgen", "tuned_kernels"]
    executed(bare, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", *wheels, cwd=tmp_path)
    empty = {"FLASHGEN_CACHE_DIR": str(tmp_path / "cache")}
    answer: dict[str, Any] = json.loads(executed(bare, "-c", IN_PACKAGE, cwd=tmp_path, environment=empty))
    assert Path(answer["file"]).is_relative_to(bare.parents[1])
    assert answer["tuned"] == tuned_name()
    assert answer["far"].endswith("_sm_90a")
    assert "must hold a kernel for sm_80; got kernels for sm_90a" in answer["a100"]
    assert "NVRTC cannot be loaded" in answer["why"] or "jinja2 cannot be imported" in answer["why"]  # some machines have a CUDA toolkit
    assert answer["loaded"] == []


def tuned_name() -> str:
    """What a call of the package's test gets where kernels are compiled."""
    from flashgen.selection.picks import picks

    workload, device = Workload(4, 32, 32, 4096, 4096), find_device("h200")
    pick = next(picks(Problem(Dtype.BF16, 64, mask=Mask.FULL), workload, device, ("", "")))
    return pick.choice.spec(device.target).name


# Exported programs, on the CPU


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    try:
        cxx_compiler()
    except CxxCompilerMissingError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    yield
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    """Projections around an attention that has a modifier with a tensor."""

    slopes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).bfloat16().unflatten(-1, (3, 2, 8)).unbind(2)
        return self.out(flashgen.attention(q, k, v, causal=True, alibi_slopes=self.slopes).float().flatten(2))  # type: ignore[no-any-return]


class Decoding(torch.nn.Module):
    """A step against a cache, which it changes."""

    def forward(self, q: torch.Tensor, new: torch.Tensor, cache: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return flashgen.attention_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths, causal=True)


LOADED = """
import sys
import torch, flashgen
inputs, want = torch.load("data.pt")
got = torch._inductor.aoti_load_package("model.pt2")(*inputs) if sys.argv[1] == "aoti" else torch.export.load("model.pt2").module()(*inputs)
print(torch.equal(got, want))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["export", "aoti"])
@pytest.mark.usefixtures("on_cpu")
def test_a_model_is_exported_and_run_by_a_fresh_process(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = Layer().eval(), torch.randn(2, 11, 16)
    with torch.no_grad():
        want = layer(torch.randn(2, 19, 16)), layer(x)
        program = torch.export.export(layer, (torch.randn(2, 16, 16),), dynamic_shapes=({1: torch.export.Dim("length", min=8, max=64)},))
        assert torch.equal(program.module()(x), want[1])
    if way == "aoti":
        without_vectors(monkeypatch)
        with_shared_libstdcpp(monkeypatch)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    else:
        torch.export.save(program, tmp_path / "model.pt2")
    torch.save(((x,), want[1]), tmp_path / "data.pt")
    environment = {"FLASHGEN_CPU": "1", "PYTHONPATH": str(CHECKOUT)}
    assert executed(sys.executable, "-W", "ignore", "-c", LOADED, way, cwd=tmp_path, environment=environment) == "True\n"


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_an_exported_step_changes_its_cache_as_eager(tmp_path: Path) -> None:
    torch.manual_seed(0)
    q, new = torch.randn(2, 1, 2, 8).bfloat16(), torch.randn(2, 1, 2, 8).bfloat16()
    cache, lengths = torch.randn(2, 16, 2, 8).bfloat16(), torch.tensor([3, 9], dtype=torch.int32)
    program = torch.export.export(Decoding(), (q, new, cache.clone(), lengths))
    mine, theirs = cache.clone(), cache.clone()
    assert torch.equal(program.module()(q, new, mine, lengths), Decoding()(q, new, theirs, lengths))
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, cache)
