"""What torch.compile notes of functions: the same functions as those of a trace, values that change, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.codegen.expressions.functions import TracedFunctions, functions_of
from flashgen.codegen.modifiers import TRACED
from flashgen.launch.recorded_call import recorded_call
from flashgen.launch.traced_call import TracedCall
from flashgen.traced.evaluation import evaluated
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


def compiled(score_mod: Any, mask_mod: Mod | None = None, takes_window: bool = False, dynamic: bool | None = None) -> TracedCall:
    """What `recorded_call` gives within torch.compile."""
    found: TracedCall = torch.compile(
        lambda: recorded_call(score_mod, mask_mod, 0, takes_window), fullgraph=True, backend="eager", dynamic=dynamic
    )()
    return found


def functions_in(call: TracedCall) -> TracedFunctions:
    return functions_of(call.name.removeprefix(TRACED).removesuffix(")"))


def named(call: TracedCall) -> tuple[dict[str, Tensor], dict[str, float]]:
    functions = functions_in(call)
    return dict(zip(functions.tensor_kinds, call.tensors, strict=True)), dict(zip(functions.number_types, call.numbers, strict=True))


@pytest.mark.parametrize("name", CASES)
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
