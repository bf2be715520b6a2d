"""`flashgen.attention` and its neighbours on a GPU: layouts, streams, threads, graphs, tracing, imports, errors."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import flashgen
from flashgen.build.gpu.driver import gpu
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.launch import arguments
from flashgen.launch.gpu import CaptureError
from flashgen.numerics.forward import exact_attention, plain
from flashgen.records.choice import bucket
from flashgen.selection import bundle, compilation, loaded
from flashgen.selection.families import default_spec
from tests.support.judging import judge_forward

pytestmark = pytest.mark.gpu


def inputs(
    batch: int = 2, len_q: int = 200, len_kv: int = 300, heads: int = 4, kv_heads: int = 2, d: int = 64, dv: int = 0, seed: int = 0
) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((batch, len_q, heads, d), (batch, len_kv, kv_heads, d), (batch, len_kv, kv_heads, dv or d))
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes]


def assert_right(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> None:
    ref = exact_attention(q, k, v, causal=causal, scale=scale)
    verdict = judge_forward(out, lse, ref, plain(q, k, v, causal=causal, scale=scale), q.dtype)
    assert verdict.ok, verdict.message


def test_what_lies_by_rows_stays_so_under_heads_first() -> None:
    rows = [tensor.requires_grad_() for tensor in inputs(dv=128)]
    d_out = torch.randn(*rows[0].shape[:3], 128, device="cuda", dtype=rows[0].dtype)
    wanted = flashgen.attention(*rows, causal=True, deterministic=True)
    for _ in range(3):  # planned, known, known again
        views = [tensor.transpose(1, 2) for tensor in rows]
        out = flashgen.attention(*views, causal=True, layout="bhsd", deterministic=True)
        assert out.stride() == wanted.transpose(1, 2).stride()
        assert torch.equal(out.transpose(1, 2), wanted)
        gradients = torch.autograd.grad(out, views, d_out.transpose(1, 2))
        for found, other in zip(gradients, torch.autograd.grad(wanted, rows, d_out, retain_graph=True), strict=True):
            assert found.transpose(1, 2).is_contiguous()
            assert torch.equal(found.transpose(1, 2), other)
    with torch.no_grad():
        for length in (33, 40, 57):  # lengths that nobody has met
            q, k, v = (tensor.detach()[:, :length] for tensor in rows)
            out = flashgen.attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=True, layout="bhsd")
            assert torch.equal(out.transpose(1, 2), flashgen.attention(q, k, v, causal=True))
            assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
def test_layouts_and_the_lse(layout: str, causal: bool) -> None:
    q, k, v = inputs(dv=128)
    given = [t if layout == "bshd" else t.transpose(1, 2).contiguous() for t in (q, k, v)]
    out, lse = flashgen.attention(*given, causal=causal, scale=0.2, layout=layout, return_lse=True)
    assert out.is_contiguous()
    assert out.shape == (*given[0].shape[:3], 128)
    assert_right(out if layout == "bshd" else out.transpose(1, 2), lse, q, k, v, causal, 0.2)
    assert torch.equal(flashgen.attention(*given, causal=causal, scale=0.2, layout=layout), out)


def test_the_default_scale() -> None:
    q, k, v = inputs()
    assert torch.equal(flashgen.attention(q, k, v), flashgen.attention(q, k, v, scale=64**-0.5))


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_sizes(shape: tuple[int, int, int]) -> None:
    batch, len_q, len_kv = shape
    q, k, v = inputs(batch, len_q, len_kv)
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_agreement_with_sdpa() -> None:
    q, k, v = inputs(len_q=512, len_kv=512, heads=8, kv_heads=8)
    q_bhsd, k_bhsd, v_bhsd = (t.transpose(1, 2) for t in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q_bhsd, k_bhsd, v_bhsd, is_causal=True)
    torch.testing.assert_close(flashgen.attention(q, k, v, causal=True), theirs.transpose(1, 2), atol=2e-2, rtol=2e-2)


def test_two_streams_and_two_threads_at_once() -> None:
    sets = [inputs(2, 512 + 64 * i, 700, seed=i) for i in range(4)]
    alone = [flashgen.attention(*tensors, causal=True) for tensors in sets]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(100):
                i = (number + turn) % len(sets)
                out = flashgen.attention(*sets[i], causal=True)
                stream.synchronize()
                if not torch.equal(out, alone[i]):
                    wrong.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_has_not_touched_cuda() -> None:
    q, k, v = inputs()
    expected = flashgen.attention(q, k, v)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(flashgen.attention(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


@pytest.mark.parametrize("d", [64, 128])
def test_a_thousand_launches_are_bit_equal(d: int) -> None:
    q, k, v = inputs(4, 1000, 1000, 8, 8, d)
    first, first_lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        differences += (out.view(torch.int16) != first.view(torch.int16)).sum() + (
            lse.view(torch.int32) != first_lse.view(torch.int32)
        ).sum()
    assert int(differences) == 0


def test_cuda_graph_cold_is_an_error_and_warm_replays() -> None:
    q, k, v = inputs(len_q=77, len_kv=5000, d=48)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=r"flashgen\.warm"), torch.cuda.graph(graph):
        flashgen.attention(q, k, v)
    flashgen.warm(head_dim=48, batch=2, heads=4, kv_heads=2, len_q=77, len_kv=5000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashgen.attention(q, k, v)
    other = inputs(len_q=77, len_kv=5000, d=48, seed=9)
    for mine, theirs in zip((q, k, v), other, strict=True):
        mine.copy_(theirs)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, flashgen.attention(*other))


def test_torch_compile_fullgraph() -> None:
    q, k, v = inputs()

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashgen.attention(q * 2, k, v, causal=True) + 1

    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), model(q, k, v))


def test_those_who_listen_hear_every_call() -> None:
    q, k, v = inputs()
    expected = flashgen.attention(q, k, v)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        flashgen.attention(q, k, v)
    assert "flashgen::attention_output" in {event.key for event in profile.key_averages()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(flashgen.attention(q, k, v), FakeTensor)
    traced = make_fx(lambda q: flashgen.attention(q, k, v, return_lse=True))(q)
    assert torch.ops.flashgen.attention_forward.default in [node.target for node in traced.graph.nodes]
    assert torch.equal(traced(q)[0], expected)
    with forward_ad.dual_level(), pytest.raises(FlashgenError, match="has no forward-mode derivative"):
        flashgen.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    for argument in ({"causal": "no"}, {"scale": "1"}, {"layout": 3}):
        with pytest.raises(ArgumentError, match=next(iter(argument))):
            flashgen.attention(q, k, v, **argument)
    assert torch.equal(flashgen.attention(q, k, v), expected)


@pytest.mark.parametrize("name", ["attention_output", "attention_forward", "attention"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_opcheck(name: str, layout: str) -> None:
    torch.library.opcheck(getattr(torch.ops.flashgen, name).default, (*inputs(2, 64, 64, 4, 4), True, None, layout))


def test_strides_and_alignment_errors() -> None:
    q, k, v = inputs()
    wide = torch.randn(2, 300, 2, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"^k must be contiguous in its last dimension"):
        flashgen.attention(q, wide[..., ::2], v)
    with pytest.raises(ArgumentError, match=r"^k must begin at an address that is a multiple of 16 bytes; got one 2 past it"):
        flashgen.attention(q, wide[..., 1:65], v)
    with pytest.raises(ArgumentError, match=r"^head_dim must be a multiple of 8 from 8 to 256; got 60"):
        flashgen.attention(q[..., :60], k[..., :60], v)
    with pytest.raises(ArgumentError, match=r"^k must be on q's device cuda:0; got cpu"):
        flashgen.attention(q, k.cpu(), v)


def test_a_second_call_with_a_misaligned_view_is_refused_too() -> None:
    """The plan is there already; alignment belongs to the tensor, not to its signature."""
    q, _, v = inputs()
    wide = torch.randn(2, 300, 2, 128, device="cuda", dtype=torch.bfloat16)
    flashgen.attention(q, wide[..., :64], v)
    with pytest.raises(ArgumentError, match=r"^k must begin at an address"):
        flashgen.attention(q, wide[..., 3:67], v)


def test_compile_gives_the_kernel() -> None:
    problem = Problem(Dtype.FP16, 64, mask=Mask.CAUSAL)
    kernel = flashgen.compile(problem)
    assert kernel.artifact.report.spill_bytes == 0
    assert kernel.spec.problem == problem
    assert flashgen.compile(problem, kernel.spec.config, "9.0" if kernel.spec.target.name == "sm_90a" else kernel.spec.target) is kernel
    with pytest.raises(ArgumentError, match=r"^target must be"):
        flashgen.compile(problem, target="sm_80" if kernel.spec.target.name != "sm_80" else "sm_90a")


def test_imported_kernels_are_preferred_and_need_neither_nvrtc_nor_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = gpu(0).device.target
    problem = Problem(Dtype.BF16, 88, mask=Mask.CAUSAL)
    spec = default_spec(problem, target)
    bundle.write(tmp_path / "out", [bundle.Generated(spec, compilation.compile_spec(spec))])
    q, k, v = inputs(d=88)

    def broken(*_: object) -> None:
        raise AssertionError("an imported kernel needed NVRTC, templates or the store")

    for where, name in (
        ("flashgen.selection.compilation", "render"),
        ("flashgen.selection.loaded", "nvrtc_version"),
        ("flashgen.selection.compilation", "store"),
    ):
        monkeypatch.setattr(f"{where}.{name}", broken)
    try:
        (kernel,) = flashgen.load(tmp_path / "out")
        assert kernel.spec == spec
        out, lse = flashgen.attention(q, k, v, causal=True, return_lse=True)
        assert_right(out, lse, q, k, v, True, 88**-0.5)
        _, workload = arguments.problem_and_workload(q, k, v, True, "bshd")
        assert loaded.kernels.choose(problem, bucket(workload), gpu(0)) is kernel
    finally:
        flashgen.unload()


def test_a_generated_folder_works_without_jinja_and_nvrtc(tmp_path: Path) -> None:
    """In a process of its own where importing either fails, from the command line's own output."""
    name = gpu(0).device.target.name
    generate = ["generate", "--head-dim", "64", "--causal", "--arch", f"sm_80,{name}", "--out", str(tmp_path / "kernels")]
    subprocess.run([sys.executable, "-m", "flashgen", *generate], check=True, capture_output=True)
    program = f"""
import sys
sys.modules["jinja2"] = sys.modules["cuda.bindings.nvrtc"] = None
import torch, flashgen
(kernel,) = flashgen.load({str(tmp_path / "kernels")!r})
q = torch.randn(1, 300, 2, 64, dtype=torch.bfloat16, device="cuda")
theirs = torch.nn.functional.scaled_dot_product_attention(*(q.transpose(1, 2),) * 3, is_causal=True).transpose(1, 2)
torch.testing.assert_close(flashgen.attention(q, q, q, causal=True), theirs, atol=2e-2, rtol=2e-2)
try:
    flashgen.attention(q, q, q)
except flashgen.FlashgenError as error:
    print(error)
"""
    environment = {**os.environ, "FLASHGEN_CACHE_DIR": str(tmp_path / "empty")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "NVRTC cannot be loaded" in done.stdout, "what was not generated should have needed the compiler"


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = inputs()
    there = [t.to("cuda:1") for t in (q, k, v)]
    out = flashgen.attention(*there, causal=True)
    assert torch.cuda.current_device() == 0
    assert out.device == torch.device("cuda:1")
    assert torch.equal(out.to("cuda:0"), flashgen.attention(q, k, v, causal=True))
    with pytest.raises(ArgumentError, match=r"^k must be on q's device cuda:1; got cuda:0"):
        flashgen.attention(there[0], k, v)


def test_a_new_length_in_a_known_bucket_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    flashgen.attention(*inputs(len_q=600, len_kv=600))

    def broken(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("flashgen.selection.compilation.compile_spec", broken)
    for length in (513, 777, 1024):
        flashgen.attention(*inputs(len_q=length, len_kv=length))


def test_verify() -> None:
    results = flashgen.verify(Problem(Dtype.BF16, 64, mask=Mask.CAUSAL))
    assert len(results) > 10
    assert all(case.verdict.ok for case in results), [case.verdict.message for case in results if not case.verdict.ok]


def test_infinite_inputs_do_not_hang_or_spread() -> None:
    """A NaN in one row of q makes that row NaN, and no other."""
    q, k, v = inputs()
    clean = flashgen.attention(q, k, v)
    q[0, 7, 1, 3] = math.nan
    out = flashgen.attention(q, k, v)
    assert out[0, 7, 1].isnan().all()
    out[0, 7, 1] = clean[0, 7, 1]
    assert torch.equal(out, clean)
