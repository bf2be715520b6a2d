"""How out and gradients lie in memory under each layout: what runs, what is compiled and what fakes say must be one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen
from tests.support.plan import few_of

WIDTH = 16
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    torch.compiler.reset()


def rows(batch: int, length: int, heads: int) -> torch.Tensor:
    """[batch, heads, length, width], which lies as [batch, length, heads, width]."""
    return torch.randn(batch, length, heads, WIDTH, dtype=torch.bfloat16).transpose(1, 2)


def heads_first(batch: int, length: int, heads: int) -> torch.Tensor:
    return torch.randn(batch, heads, length, WIDTH, dtype=torch.bfloat16)


def projected(batch: int, length: int, heads: int) -> Tensors:
    """Three parts of what one projection gives."""
    return torch.randn(batch, length, 3, heads, WIDTH, dtype=torch.bfloat16).transpose(1, 3).unbind(2)


def rows_of(tensor: torch.Tensor) -> bool:
    """Whether a dense tensor lies as [batch, length, heads, width]."""
    return tensor.transpose(1, 2).is_contiguous()


# q, k and v of layout bhsd, and whether out lies as [batch, length, heads, width].
CALLS: dict[str, tuple[Callable[[], Tensors], bool]] = {
    "rows": (lambda: (rows(2, 5, 4), rows(2, 7, 2), rows(2, 7, 2)), True),
    "heads": (lambda: (heads_first(2, 5, 4), heads_first(2, 7, 2), heads_first(2, 7, 2)), False),
    "one projection": (lambda: projected(2, 5, 2), True),
    "rows on a cache of heads": (lambda: (rows(2, 5, 4), heads_first(2, 7, 2), rows(2, 7, 2)), True),
    "heads on rows": (lambda: (heads_first(2, 5, 4), rows(2, 7, 2), rows(2, 7, 2)), False),
    "a part of longer rows": (lambda: (rows(2, 9, 4)[:, :, :5], rows(2, 7, 2), rows(2, 7, 2)), True),
    "a part of longer heads": (lambda: (heads_first(2, 9, 4)[:, :, :5], rows(2, 7, 2), rows(2, 7, 2)), False),
    "batch innermost": (lambda: (torch.randn(5, 2, 4, WIDTH).bfloat16().permute(1, 2, 0, 3), rows(2, 7, 2), rows(2, 7, 2)), True),
    "one head in all": (lambda: (heads_first(2, 5, 1).expand(-1, 4, -1, -1), rows(2, 7, 2), rows(2, 7, 2)), True),
    "one query of rows": (lambda: (rows(2, 1, 4), rows(2, 7, 2), rows(2, 7, 2)), True),
    "one query of heads": (lambda: (heads_first(2, 1, 4), rows(2, 7, 2), rows(2, 7, 2)), True),
    "one head of rows": (lambda: (rows(2, 5, 1), rows(2, 7, 1), rows(2, 7, 1)), True),
    "a batch of 1": (lambda: (rows(1, 5, 4), rows(1, 7, 2), rows(1, 7, 2)), True),
    "no queries": (lambda: (rows(2, 0, 4), rows(2, 7, 2), rows(2, 7, 2)), True),
    "no keys": (lambda: (rows(2, 5, 4), rows(2, 0, 2), rows(2, 0, 2)), True),
}


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    return flashgen.attention(q, k, v, causal=True, layout="bhsd", return_lse=True)


def with_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Out, and what the operator of the backward pass gives."""
    out, lse = attended(q, k, v)
    found: Tensors = torch.ops.flashgen.attention_backward(q, k, v, out, lse, out, None, True, None, "bhsd")
    return out, *found


@pytest.mark.parametrize("name", CALLS)
def test_out_lies_as_q_and_gradients_as_their_tensors(name: str) -> None:
    make, by_rows = CALLS[name]
    q, k, v = make()
    out, *gradients = with_gradients(q, k, v)
    assert rows_of(out) is by_rows or not out.numel()
    assert out.is_contiguous() is not by_rows or 1 in out.shape or not out.numel()
    own = flashgen.attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=True)
    assert own.is_contiguous(), "layout bshd is what it says, whatever lies how"
    assert torch.equal(own.transpose(1, 2), out)
    for gradient, tensor in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == tensor.shape
        first = tensor.stride(1) < tensor.stride(2)
        assert not gradient.numel() or (rows_of(gradient) if first else gradient.is_contiguous())


@pytest.mark.parametrize("name", CALLS)
def test_fakes_say_how_outputs_lie(name: str) -> None:
    tensors = CALLS[name][0]()
    with FakeTensorMode() as mode:
        fakes = with_gradients(*map(mode.from_tensor, tensors))
    for fake, found in zip(fakes, with_gradients(*tensors), strict=True):
        assert fake.shape == found.shape
        assert fake.stride() == found.stride() or not found.numel()


@pytest.mark.parametrize("name", few_of([name for name in CALLS if not name.startswith("no ")], "one projection"))
def test_compiled_calls_give_what_others_give(name: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in CALLS[name][0]()]

    def call(*tensors: torch.Tensor) -> Tensors:
        out, lse = attended(*(tensor * 2 for tensor in tensors))
        return out, torch.cat([out.transpose(1, 2).flatten(2).mT, lse.bfloat16()], 1)

    found, wanted = torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves), call(*leaves)
    assert found[0].stride() == wanted[0].stride()
    gradients = [torch.autograd.grad(each[1].float().square().sum(), leaves) for each in (found, wanted)]
    for one, other in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        assert torch.equal(one, other)


class Layer(torch.nn.Module):
    """Attention as models call it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(2 * WIDTH, 6 * WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 2, WIDTH).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        out = flashgen.attention(q, k, v, causal=True, layout="bhsd")
        return out.transpose(1, 2).view(batch, length, -1)  # not a reshape: a copy would be an error


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_is_for_all_lengths(backend: str) -> None:
    layer, counter = Layer(), CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for length in (5, 9, 20, 33):
        x = torch.randn(2, length, 2 * WIDTH).bfloat16()
        torch._dynamo.mark_dynamic(x, 1)
        found, wanted = ((out := call(x), *torch.autograd.grad(out.float().sum(), layer.project.weight)) for call in (compiled, layer))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1


def test_lengths_that_only_the_device_knows() -> None:
    layer, counter = Layer(), CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(layer, backend=counter, fullgraph=True)
    for length in (5, 9):
        x = torch.randn(2, length, 2 * WIDTH).bfloat16()
        torch._dynamo.decorators.mark_unbacked(x, 1)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_exported_programs_of_other_lengths() -> None:
    layer, length = Layer(), torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(layer, (torch.randn(2, 8, 2 * WIDTH).bfloat16(),), dynamic_shapes=({1: length},)).module()
    x = torch.randn(2, 11, 2 * WIDTH).bfloat16()
    assert torch.equal(program(x), layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "rows on a cache of heads", "one query of rows"])
def test_the_operators_pass_pytorchs_own_checks(name: str) -> None:
    tensors = CALLS[name][0]()
    for operator in (torch.ops.flashgen.attention_output.default, torch.ops.flashgen.attention_forward.default):
        torch.library.opcheck(operator, (*tensors, True, 0.3, "bhsd"))
    out, lse = attended(*tensors)
    torch.library.opcheck(torch.ops.flashgen.attention_backward.default, (*tensors, out, lse, out, None, True, None, "bhsd"))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    torch.library.opcheck(torch.ops.flashgen.attention.default, (*leaves, True, 0.3, "bhsd"))


def test_transforms_of_torch_func() -> None:
    q, k, v = projected(2, 5, 2)
    out = torch.vmap(lambda *each: attended(*each)[0])(*(torch.stack([tensor, tensor]) for tensor in (q, k, v)))
    assert torch.equal(out[1], attended(q, k, v)[0])
    found = torch.func.grad(lambda q: attended(q, k, v)[0].float().sum())(q)
    leaf = q.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(attended(leaf, k, v)[0].float().sum(), leaf)
    assert torch.equal(found, wanted)
    assert rows_of(found)
