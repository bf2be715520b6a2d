"""What kernels on the CPU may touch: views of every stride are taken, and whatever goes beside them, or crashes, becomes a report."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import pytest
import torch

import flashgen
from flashgen.build.emulator.fault import EmulatorFaultError
from flashgen.build.emulator.kernel import EmulatedKernel, EmulationLimits
from flashgen.build.emulator.memory import MemoryView
from flashgen.codegen.family import Family, families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import run_on_cpu
from flashgen.launch.tensors import Tensors
from tests.support.runs import emulated_kernel

PROBLEM, WORKLOAD = Problem(Dtype.BF16, 64, 64, Mask.FULL), Workload(2, 4, 2, 70, 100)
B, S, H, D = 2, 70, 4, 64


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)


def cache_slice() -> list[torch.Tensor]:
    return [cache[1:3, 16 : 16 + S] for cache in (drawn(4, 128, H, D), drawn(4, 160, H, D), drawn(4, 200, H, D))]


# Views of [batch, length, heads, width], as callers have them.
VIEWS = {
    "packed": lambda: list(drawn(B, S, 3, H, D).unbind(2)),
    "slices of a cache": cache_slice,
    "columns": lambda: [drawn(B, S, H, 2 * D)[..., :D], drawn(B, S, H, 2 * D)[..., D:], drawn(B, S, H, 72)[..., 8:]],
    "transposed": lambda: [drawn(B, H, S, D).transpose(1, 2), drawn(S, B, H, D).transpose(0, 1), drawn(H, B, S, D).permute(1, 2, 0, 3)],
    "expanded": lambda: [drawn(1, S, H, D).expand(B, S, H, D), drawn(B, S, 1, D).expand(B, S, H, D), drawn(B, 1, H, D).expand(B, S, H, D)],
    "overlapping": lambda: [drawn(B, S, H, D), *(drawn(B * S * H * D).as_strided((B, S, H, D), (S * D, 16, 16 * 33, 1)) for _ in "kv")],
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_views_give_what_dense_tensors_give(views: Callable[[], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    q, k, v = views()
    out, lse = flashgen.attention(q, k, v, return_lse=True)
    expected, expected_lse = flashgen.attention(*(t.clone(memory_format=torch.contiguous_format) for t in (q, k, v)), return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_an_extent_holds_the_elements_and_nothing_else() -> None:
    rng = random.Random(5)
    for _ in range(200):
        dims = rng.randint(1, 4)
        sizes = tuple(rng.choice((1, 2, 3, 5)) for _ in range(dims))
        strides = tuple(rng.choice((0, 1, 2, 3, 7, 8, 40)) for _ in range(dims))
        tensor = MemoryView("t", 1000, 2, sizes, strides)
        extent = tensor.extent()
        spans = [list(range(extent.sizes[d])) for d in range(extent.dims)]
        rows = {1000 + sum(i * extent.strides[d] for d, i in enumerate(index)) for index in itertools.product(*spans)}
        held = {row + byte for row in rows for byte in range(extent.spans[extent.dims])}
        elements = {1000 + 2 * sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, sizes))}
        assert held == {element + byte for element in elements for byte in (0, 1)}
        assert tensor.span == extent.spans[0] == max(held) + 1 - 1000


@dataclasses.dataclass(frozen=True)
class Breach:
    """A statement put where the first thread of the first block begins, and what must be reported."""

    name: str
    statement: str
    check: str
    says: str


_FAR = "reinterpret_cast<volatile unsigned char*>(std::uintptr_t{0x123456789000})[0] = 1;"
BREACHES = (
    Breach("between-rows-of-out", "p.out[64].bits = 0;", "global memory", "2 bytes beside the elements of out were written: at byte 128$"),
    Breach("far-past-the-end-of-lse", "p.lse[100000000] = 1.0f;", "global memory", r"399997760 bytes past the end of lse$"),
    Breach("before-the-begin-of-lse", "p.lse[-1] = 1.0f;", "global memory", "beside the elements of lse were written: at byte -4"),
    Breach("far-before-the-begin-of-lse", "p.lse[-5000] = 1.0f;", "global memory", "20000 bytes before the begin of lse$"),
    Breach("to-an-input", "*const_cast<u16*>(&p.k->bits) = 1;", "global memory", r"may not: in a row 0 bytes after the begin of k$"),
    Breach("to-nowhere", _FAR, "crash", r"block 0: thread 0 \(warp 0, lane 0\) ends by a signal: Segmentation fault"),
    Breach("to-null", "*reinterpret_cast<volatile int*>(p.query_tiles - 2) = 1;", "crash", "Segmentation fault"),
    Breach("division-by-zero", "volatile int zero = 0; zero = 7 / zero;", "crash", "Floating point exception"),
    Breach("abort", "std::abort();", "crash", "thread 0 .* ends by a signal: Aborted$"),
    Breach("exit", "_Exit(7);", "crash", "exit code 7"),
    Breach("endless", "for (volatile int i = 0;; ++i) {}", "endless", "no thread of the kernel has waited or ended for 1 s"),
    Breach("recursion", "overflow(0);", "crash", "Segmentation fault"),
)
_BEGIN = "    SharedRegions regions;\n"
_KERNEL = 'extern "C" __global__'
_OVERFLOW = "int overflow(volatile int depth) { volatile int used[64]; return used[0] = depth, overflow(depth + 1) + used[0]; }\n"


@pytest.fixture(scope="module")
def breached() -> EmulatedKernel:
    """One text of all breaches, to spare compiles: len_kv says which of them happens."""
    spec = spec_of(families()["attention_forward"])
    text = render(spec, Atoms.EMULATED).text
    assert text.count(_BEGIN) == 1
    cases = "".join(f"        case {number}: {{ {breach.statement} }} break;\n" for number, breach in enumerate(BREACHES))
    planted = f"    if (block_index() == 0 && thread_index() == 0) switch (p.len_kv - 100) {{\n{cases}    }}\n"
    return emulated_kernel(spec, Source(spec.name, text.replace(_BEGIN, planted + _BEGIN).replace(_KERNEL, _OVERFLOW + _KERNEL)))


def spec_of(family: Family) -> KernelSpec:
    target = find_target("sm_90a")
    return KernelSpec(family, PROBLEM, family.default(PROBLEM, target), target)


@pytest.mark.parametrize("breach", BREACHES, ids=lambda breach: breach.name)
def test_a_crash_or_a_stray_write_is_a_report(breach: Breach, breached: EmulatedKernel) -> None:
    workload = dataclasses.replace(WORKLOAD, len_kv=100 + BREACHES.index(breach))
    tensors = Tensors.random(PROBLEM, workload, torch.Generator().manual_seed(1))
    tensors = tensors.replacing(out=torch.empty(B, S, H, 72, dtype=torch.bfloat16)[..., :D])
    with pytest.raises(EmulatorFaultError, match=breach.says) as caught:
        run_on_cpu(breached, tensors, limits=EmulationLimits(stall_seconds=1.0))
    assert caught.value.check == breach.check
    assert tensors["out"].isnan().all(), "a launch that failed changes nothing"


def test_a_stray_write_beside_a_row_far_from_the_others_is_seen(breached: EmulatedKernel) -> None:
    """Where only pages of the elements can be touched, as well: more of such a page than a row does not belong to the tensor."""
    tensors = Tensors.random(PROBLEM, WORKLOAD, torch.Generator().manual_seed(1)).far()
    with pytest.raises(EmulatorFaultError, match=r"2 bytes beside the elements of out were written: at byte 128$"):
        run_on_cpu(breached, tensors)


def test_a_launch_that_goes_on_for_ever_is_stopped() -> None:
    """Its threads wait for each other again and again."""
    spec = spec_of(families()["attention_forward"])
    text = render(spec, Atoms.EMULATED).text.replace(_BEGIN, _BEGIN + "    for (;;) barrier_sync();\n")
    tensors = Tensors.random(PROBLEM, WORKLOAD, torch.Generator().manual_seed(1))
    with pytest.raises(EmulatorFaultError, match=r"^endless: the launch did not end in 1 s$"):
        run_on_cpu(emulated_kernel(spec, Source(spec.name, text)), tensors, limits=EmulationLimits(seconds=1.0))
