"""Functions that users give, traced: their trees, their C++ and their derivatives say what the functions themselves say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashgen import templates
from flashgen.build.nvrtc import compile_source
from flashgen.codegen.expressions.canonical_text import parse_tree, text_of
from flashgen.codegen.expressions.struct import struct_of
from flashgen.codegen.expressions.tree import FLOAT32, Expression, constant
from flashgen.codegen.render import Source
from flashgen.traced.evaluation import evaluated
from flashgen.traced.modifier import ModifierInCall, modifier_in_call
from flashgen.traced.tracing import trace
from tests.support.traced_functions import CASES, SIZES
from tests.support.traced_values import CxxValues, called, random_inputs

COUNT = 48
EXACT = 2e-6
by_name = pytest.mark.parametrize("name", CASES)


def in_call(name: str) -> ModifierInCall:
    case = CASES[name]
    return modifier_in_call(mask_mod=case.function) if case.is_mask else modifier_in_call(case.function)


def functions_of(made: ModifierInCall) -> dict[str, Expression]:
    modifier = made.modifier
    trees: dict[str, Expression | None] = {"changed": modifier.score, "d_score": modifier.d_score, "visible": modifier.mask}
    trees |= {f"gradient{i}": gradient.factor for i, gradient in enumerate(modifier.gradients)}
    return {name: tree for name, tree in trees.items() if tree is not None}


def named(made: ModifierInCall) -> tuple[dict[str, Tensor], dict[str, int | float]]:
    kinds = made.modifier.tensor_kinds, made.modifier.number_types
    return dict(zip(kinds[0], made.tensors, strict=True)), dict(zip(kinds[1], made.numbers, strict=True))


@pytest.fixture(scope="module")
def cxx(tmp_path_factory: pytest.TempPathFactory) -> CxxValues:
    return CxxValues(tmp_path_factory.mktemp("traced"), {name: functions_of(in_call(name)) for name in CASES})


@by_name
def test_values(name: str, cxx: CxxValues) -> None:
    case, made = CASES[name], in_call(name)
    tree = made.modifier.mask if case.is_mask else made.modifier.score
    assert tree is not None
    inputs = random_inputs(COUNT, SIZES)
    wanted = called(case.function, inputs, case.is_mask)
    assert wanted.dtype is (torch.bool if case.is_mask else torch.float32), "the function is one that FlexAttention takes"
    tensors, numbers = named(made)
    found = evaluated(tree, inputs, tensors, numbers).expand(COUNT)
    if case.is_mask:
        assert found.tolist() == wanted.tolist()
        assert cxx(name, "visible", inputs, made.tensors, made.numbers).tolist() == wanted.tolist()
        return
    torch.testing.assert_close(found, wanted.detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(cxx(name, "changed", inputs, made.tensors, made.numbers).float(), wanted.detach(), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.is_mask and case.smooth])
def test_derivatives(name: str, cxx: CxxValues) -> None:
    """By the score and by every captured tensor, against autograd in float64, and the C++ against the trees."""
    made = in_call(name)
    modifier, inputs = made.modifier, random_inputs(COUNT, SIZES, seed=1)
    tensors, numbers = named(made)
    exact = {each: tensor.detach().double().requires_grad_() if tensor.is_floating_point() else tensor for each, tensor in tensors.items()}
    score = inputs["score"].double().requires_grad_()
    assert modifier.score is not None
    assert modifier.d_score is not None
    value = evaluated(modifier.score, {**inputs, "score": score}, exact, numbers, torch.float64).expand(COUNT)
    finite = torch.where(value.isfinite(), value, 0.0)
    floating = {each: tensor for each, tensor in exact.items() if tensor.is_floating_point()}
    wanted = torch.autograd.grad(finite.sum(), [score, *floating.values()], allow_unused=True, retain_graph=True)

    def evaluate_factor(factor: Expression) -> Tensor:
        return evaluated(factor, {**inputs, "score": score}, exact, numbers, torch.float64).detach().expand(COUNT)

    d_score = torch.where(value.isfinite(), evaluate_factor(modifier.d_score), 0.0)
    torch.testing.assert_close(d_score, torch.zeros_like(score) if wanted[0] is None else wanted[0], rtol=1e-6, atol=1e-6)
    sums = {each: torch.zeros_like(tensor) for each, tensor in floating.items()}
    for gradient in modifier.gradients:
        factor = torch.where(value.isfinite(), evaluate_factor(gradient.factor), 0.0)
        at = tuple(evaluated(index, inputs, exact, numbers, torch.float64).expand(COUNT).long() for index in gradient.load.operands)
        sums[gradient.tensor].index_put_(at, factor, accumulate=True) if at else sums[gradient.tensor].add_(factor.sum())
    for (each, own), gradient_wanted in zip(sums.items(), wanted[1:], strict=True):
        expected = torch.zeros_like(own) if gradient_wanted is None else gradient_wanted
        torch.testing.assert_close(own.detach(), expected, rtol=1e-6, atol=1e-6, msg=f"gradient of {each}")
    factors = {"d_score": modifier.d_score} | {f"gradient{i}": gradient.factor for i, gradient in enumerate(modifier.gradients)}
    for function, tree in factors.items():
        printed = cxx(name, function, inputs, made.tensors, made.numbers)
        single = evaluated(tree, inputs, tensors, numbers).detach().expand(COUNT).double()
        torch.testing.assert_close(printed, single, rtol=2e-5, atol=2e-5)


def test_what_is_rounded_has_no_derivative() -> None:
    modifier = in_call("rounded").modifier
    assert modifier.d_score is constant(0.0, FLOAT32)
    assert modifier.gradients == ()


@by_name
def test_text_is_the_tree(name: str) -> None:
    for tree in in_call(name).modifier.trees:
        assert parse_tree(text_of(tree)) is tree


@by_name
def test_is_traced_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """None of these needs a trace on each call, and none a captured value as it is because a stand-in of it fails."""
    with caplog.at_level("DEBUG", "flashgen"):
        assert not trace(CASES[name].function, CASES[name].argument).is_open
    assert caplog.records == []


def test_nvrtc_compiles_the_same_text() -> None:
    prelude = ("atoms/ptx/types.cuh", "atoms/ptx/cvt_f32.cuh", "tile/common/expressions.cuh")
    texts = [templates.read(path) for path in prelude]
    body = []
    for name in CASES:
        functions = functions_of(in_call(name))
        texts.append(struct_of(f"Struct_{name}", functions))
        for function in functions:
            score = "" if function == "visible" else "1.5f, "
            body.append(f"out[i++] = reinterpret_cast<Struct_{name}*>(data)->{function}({score}1, 2, 3, 4);")
    kernel = f'extern "C" __global__ void probe(float* out, char* data) {{\n    int i = 0;\n    {" ".join(body)}\n}}\n'
    assert compile_source(Source("probe", "\n".join((*texts, kernel))), "sm_90a").cubin
