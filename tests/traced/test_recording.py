"""What torch.compile notes of functions: they are the same as those of a trace, and what it cannot see is on no device."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flashgen.codegen.expressions.functions import TracedFunctions, functions_of
from flashgen.codegen.modifiers import TRACED
from flashgen.launch.recorded_call import recorded_call
from flashgen.launch.traced_call import TracedCall
from flashgen.traced.evaluation import evaluated
from flashgen.traced.recording import described
from tests.support.plan import few_of
from tests.support.traced_functions import CASES, SIZES
from tests.support.traced_values import called, random_inputs

Mod = Callable[..., Any]
COUNT = 48
EXACT = 2e-6


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(
    score_mod: Any, mask_mod: Mod | None = None, takes_window: bool = False, dynamic: bool | None = None, device: Any = None
) -> TracedCall:
    """What `recorded_call` gives within torch.compile."""
    found: TracedCall = torch.compile(
        lambda: recorded_call(score_mod, mask_mod, 0, takes_window, device), fullgraph=True, backend="eager", dynamic=dynamic
    )()
    return found


def functions_in(call: TracedCall) -> TracedFunctions:
    return functions_of(call.name.removeprefix(TRACED).removesuffix(")"))


def named(call: TracedCall) -> tuple[dict[str, Tensor], dict[str, float]]:
    functions = functions_in(call)
    return dict(zip(functions.tensor_kinds, call.tensors, strict=True)), dict(zip(functions.number_types, call.numbers, strict=True))


@pytest.mark.parametrize("name", few_of(CASES, *list(CASES)[::6]))
def test_values(name: str) -> None:
    case = CASES[name]
    call = compiled(*((None, case.function) if case.is_mask else (case.function, None)))
    functions, inputs = functions_in(call), random_inputs(COUNT, SIZES)
    tree = functions.mask if case.is_mask else functions.score
    assert tree is not None
    found, wanted = evaluated(tree, inputs, *named(call)).expand(COUNT), called(case.function, inputs, case.is_mask)
    if case.is_mask:
        assert found.tolist() == wanted.tolist()
    else:
        torch.testing.assert_close(found, wanted.detach(), rtol=EXACT, atol=EXACT)


def test_pythons_operators_are_those_of_tensors() -> None:
    """Exported graphs have them. `and_` changes nothing in place, though PyTorch's names for what does end so."""
    x, y = torch.tensor([5, 3]), torch.tensor([2, 7])
    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "and_",
        "or_",
        "xor",
        "lshift",
        "eq",
        "lt",
        "ge",
        "neg",
        "invert",
        "abs",
    ]:
        known, kind = described(getattr(operator, name))
        assert (known, kind) == (name.removesuffix("_"), "makes")
    for name in ["iadd", "isub", "imul", "ifloordiv", "imod", "iand", "ior", "ixor"]:
        known, kind = described(getattr(operator, name))
        assert kind == "in place"
        assert torch.equal(getattr(x.clone(), f"{known}" if hasattr(x, known) else f"__{name}__")(y), getattr(operator, name)(x.clone(), y))
    assert described(operator.getitem) == ("__getitem__", "makes")
    assert described(torch.Tensor.clamp_) == ("clamp_", "in place")
    assert described(torch.Tensor.item) == ("item", "unknown")


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q, k: score * score.item(),
        lambda score, b, h, q, k: score * float(score),
        lambda score, b, h, q, k: score * int(q),
        lambda score, b, h, q, k: score * [1, 2, 3][q],
        lambda score, b, h, q, k: score * math.exp(score),
        lambda score, b, h, q, k: score if q > k else -score,
        lambda score, b, h, q, k: torch.cond(q > k, lambda s: s + 1, lambda s: s - 1, (score,)),
        lambda score, b, h, q, k: torch.stack([score, score])[0],
    ],
)
def test_values_of_stand_ins_become_no_numbers(function: Mod) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True), pytest.raises(Exception, match=r"\w"):
        compiled(function, dynamic=True)


def test_what_gets_past_the_recording_is_on_no_device() -> None:
    """So an operator refuses it as a captured tensor."""

    def unseen(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        with torch._C.DisableTorchFunction():
            hidden = score * 2
        return hidden + score

    assert [tensor.device.type for tensor in compiled(unseen).tensors] == ["meta"]


def test_symbols() -> None:
    def call(table: Tensor, whole: int, other: float) -> TracedCall:
        plus: Mod = lambda score, b, h, q, k: score * whole + table[q] * other + k // whole  # noqa: E731
        return recorded_call(plus, lambda b, h, q, k: (q >= k - whole) & (q < table.shape[0]), 3, True)

    for dynamic in (False, True):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("eager")
        compiled_call = torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic)
        for size, whole in ((20, 3), (30, 5), (40, 7)):
            table = torch.arange(float(size))
            found = compiled_call(table, whole, 0.5)
            assert found.window == (None, whole + 3)
            assert (found.numbers, sorted(found.whole)) == (([0.5], [whole, whole, size]) if dynamic else ([], []))
            assert [tensor is table for tensor in found.tensors] == [True]


def test_constants_without_dimensions_go_with_any_device() -> None:
    """PyTorch 2.11 does not tell the recording that a function makes them: they are tensors that it captures, then, on the CPU."""
    one, table = torch.tensor(1.0), torch.ones(8)
    found = compiled(lambda score, b, h, q, k: score * one + table[q] + torch.tensor(2.0), device=torch.device("meta"))
    assert [tensor.device.type for tensor in found.tensors if not tensor.dim()] == ["meta"] * (len(found.tensors) - 1)
    assert [tensor is table for tensor in found.tensors if tensor.dim()] == [True]
    assert [tensor is one for tensor in compiled(lambda score, b, h, q, k: score * one, device=one.device).tensors] == [True]
