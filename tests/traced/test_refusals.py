"""What cannot be traced is refused, with the function, the line and the cure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flashgen.codegen.errors import ArgumentError
from flashgen.launch.recorded_call import recorded_call
from flashgen.traced.modifier import compile_modifier
from flashgen.traced.tracing import trace
from tests.support.plan import few_of

T = torch.rand(4)
T2, DOUBLE, COMPLEX, FIVE = torch.rand(4, 4), torch.rand(4).double(), torch.rand(4) * 1j, torch.rand(1, 1, 1, 1, 1)
LIST, ARRAY = [1.0, 2.0, 3.0, 4.0], np.ones(4)
COUNT = 0
BOX: dict[str, int] = {}


class Holder:
    def __init__(self) -> None:
        self.calls = 0


HOLDER = Holder()


def branch(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    if s > 0:
        return s
    return -s


def changes_global(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    global COUNT
    COUNT += 1
    return s


def changes_attribute(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    HOLDER.calls += 1
    return s


def changes_captured() -> Callable[..., Any]:
    count = 0

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal count
        count += 1
        return s + count

    return function


def changes_tensor(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    T[h].add_(1)
    return s


def changes_list(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    LIST.append(1.0)
    return s + LIST[0]


def loops(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for i in range(q):
        s = s + i
    return s


SCORES: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (
        branch,
        r"must not branch on a tensor in Python.*use torch\.where.* in branch \(.*test_refusals\.py, line \d+\): `if s > 0:`",
    ),
    "and": (lambda s, b, h, q, k: s * (q > k and h > 1), "must not branch on a tensor"),
    "chain": (lambda s, b, h, q, k: s * (0 < q < 5), "must not branch on a tensor"),
    "python_max": (lambda s, b, h, q, k: max(s, 0), "must not branch on a tensor.*torch.minimum"),
    "item": (lambda s, b, h, q, k: s + q.item(), r"must not read a tensor's value by item\(\)"),
    "tolist": (lambda s, b, h, q, k: s + T[h].tolist(), r"must not read a tensor's value by item\(\)"),
    "range": (loops, r"must not use a tensor as a Python integer.* in loops .*`for i in range\(q\):`"),
    "iterate": (lambda s, b, h, q, k: sum(x for x in s), "must not loop over a tensor.*in <lambda>"),
    "list_index": (lambda s, b, h, q, k: s + LIST[h], "must not use a tensor as a Python integer"),
    "array_index": (lambda s, b, h, q, k: s + ARRAY[h], "must not use a tensor as a Python integer"),
    "math": (lambda s, b, h, q, k: s + math.sqrt(q), "must not make a Python number of a tensor.*torch's functions"),
    "to_int": (lambda s, b, h, q, k: s + int(q), "must not make a Python number of a tensor"),
    "numpy": (lambda s, b, h, q, k: np.exp(s), "must not give tensors to NumPy"),
    "unknown": (lambda s, b, h, q, k: torch.lgamma(s), r"that flashgen knows \(docs/traced-modifiers\.md.*torch's lgamma in <lambda>"),
    "softmax": (lambda s, b, h, q, k: torch.softmax(s, 0), "functions of torch that flashgen knows"),
    "new_tensor": (lambda s, b, h, q, k: s + torch.arange(4)[h], "functions of torch that flashgen knows.*arange"),
    "shaped": (lambda s, b, h, q, k: s + torch.zeros(4)[h], "must make tensors of more than one number outside"),
    "listed": (lambda s, b, h, q, k: s + torch.tensor(LIST)[h], "must make tensors of more than one number outside"),
    "random": (lambda s, b, h, q, k: s + torch.rand(()), "functions of torch that flashgen knows.*rand"),
    "random_of_sizes": (lambda s, b, h, q, k: s + torch.rand(2, 3), "functions of torch that flashgen knows.*rand"),
    "whole_tensor": (lambda s, b, h, q, k: s + T2[h], "must index captured tensors with an integer for each dimension.*lacks 1 of 2"),
    "tensor_method": (lambda s, b, h, q, k: s + T.exp()[h], "must index captured tensors"),
    "slice": (lambda s, b, h, q, k: s + T2[h, :], "must index captured tensors by integers"),
    "none": (lambda s, b, h, q, k: s + T[None, h], "must index captured tensors by integers"),
    "mask_index": (lambda s, b, h, q, k: s + T[h > 1], r"must index captured tensors by integers, such as bool\.to\(torch\.int32\)"),
    "float_index": (lambda s, b, h, q, k: s + T[h / 2], "must index captured tensors by integers"),
    "too_many": (lambda s, b, h, q, k: s + T[h, q], "must have at most 1 indices"),
    "scalar_index": (lambda s, b, h, q, k: s[0], "must not index a tensor without dimensions"),
    "double": (lambda s, b, h, q, k: s + DOUBLE[h], "must capture tensors of bf16.*got one of float64"),
    "complex": (lambda s, b, h, q, k: s + COMPLEX[h], "must capture tensors of.*complex64"),
    "rank": (lambda s, b, h, q, k: s + FIVE[b, h, q, k, 0], "must capture tensors of at most 4 dimensions"),
    "to_half": (lambda s, b, h, q, k: s.to(torch.bfloat16).float(), "must compute in float32, int32, int64 or bool"),
    "to_double": (lambda s, b, h, q, k: s.double(), "that flashgen knows"),
    "number": (lambda s, b, h, q, k: 1.0, "score_mod must return a float32 score"),
    "integer": (lambda s, b, h, q, k: q - k, "score_mod must return a float32 score.*int32"),
    "condition": (lambda s, b, h, q, k: q >= k, "score_mod must return a float32 score.*bool"),
    "vector": (lambda s, b, h, q, k: T, "score_mod must return a float32 score.*1 dimensions"),
    "nothing": (lambda s, b, h, q, k: None, "score_mod must return a float32 score.*None"),
    "huge": (lambda s, b, h, q, k: torch.where(q < 2**40, s, 0), "must compute with numbers that int32 holds"),
    "bools": (lambda s, b, h, q, k: s * ((q > k) - (k > q)), "must use &, | and ~ on bools"),
    "power": (lambda s, b, h, q, k: s.abs() ** T[h], "constant base or exponent"),
    "integer_power": (lambda s, b, h, q, k: s + q**h, "raise integers to constant powers"),
    "condition_of_where": (lambda s, b, h, q, k: torch.where(q, s, 0.0), "must have a bool as the condition"),
    "out": (lambda s, b, h, q, k: torch.exp(s, out=s), "that flashgen knows"),
    "keyword": (lambda s, b, h, q, k: s.clamp(lowest=0), "clamp|lowest"),
    "inplace_relu": (lambda s, b, h, q, k: torch.nn.functional.relu(s, inplace=True), "must leave inplace out.*inplace=True"),
    "inplace_silu": (lambda s, b, h, q, k: torch.nn.functional.silu(s, inplace=True), "must leave inplace out.*inplace=True"),
    "text": (lambda s, b, h, q, k: s + "a", "must compute with tensors and numbers|unsupported operand"),
    "global": (changes_global, "must not assign to variables that it captures.*COUNT"),
    "nonlocal": (changes_captured(), "must not assign to variables that it captures.*count"),
    "attribute": (changes_attribute, "must not change what it captures.*Holder"),
    "list": (changes_list, "must not change what it captures.*list"),
    "dict": (lambda s, b, h, q, k: s + BOX.setdefault("a", 1), "must not change what it captures.*dict"),
    "tensor": (changes_tensor, "must not change tensors that it captures"),
    "signature": (lambda s, q, k: s, r"score_mod must take \(score, batch, head, query, key\); got a function of \(s, q, k\)"),
}
# Python's max of tensors is torch.maximum to Dynamo, which also sees what is changed in Python, and changes it. PyTorch 2.11's tells no
# mode of functions that are given no tensors: what they make is captured.
TAKEN_BY_DYNAMO = {"python_max", "global", "nonlocal", "attribute", "list", "dict", "new_tensor", "listed", "random"}
MASKS: dict[str, tuple[Callable[..., Any], str]] = {
    "score": (
        lambda b, h, q, k: (q - k) * 1.0,
        "mask_mod must return a bool: whether the query sees the key; got a tensor of 0 dimensions and dtype float32",
    ),
    "integer": (lambda b, h, q, k: q - k, "mask_mod must return a bool.*int32"),
    "python_number": (lambda b, h, q, k: 1, "mask_mod must return a bool.*got 1"),
    "signature": (lambda s, b, h, q, k: s, r"mask_mod must take \(batch, head, query, key\)"),
    "branch": (lambda b, h, q, k: q >= k or k == 0, "mask_mod must not branch"),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str) -> None:
    function, match = SCORES[name]
    before = COUNT, HOLDER.calls, [*LIST], {**BOX}
    with pytest.raises((ArgumentError, TypeError), match=match) as raised:
        compile_modifier(function)
    assert isinstance(raised.value, ArgumentError) or name in ("keyword", "text")
    assert (COUNT, HOLDER.calls, LIST, BOX) == before, "nothing has been changed"


@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name: str) -> None:
    function, match = MASKS[name]
    with pytest.raises(ArgumentError, match=match):
        compile_modifier(mask_mod=function)


_DYNAMOS = (
    "[Dd]ata-dependent",
    "making fake tensor",
    "builtin operator `range",
    "unpack scalar",
    "ndarray",
    "bind arguments",
    "Indexing list",
)


_REFUSED = [*(("score_mod", name) for name in SCORES if name not in TAKEN_BY_DYNAMO), *(("mask_mod", name) for name in MASKS)]


@pytest.mark.parametrize(("argument", "name"), few_of(_REFUSED, *_REFUSED[::5]))
def test_within_torch_compile(argument: str, name: str) -> None:
    """By the recording, or by Dynamo before it."""
    function, _ = (SCORES if argument == "score_mod" else MASKS)[name]

    def call() -> object:
        return recorded_call(function, None, 0, False) if argument == "score_mod" else recorded_call(None, function, 0, False)

    torch.compiler.reset()
    with pytest.raises(Exception, match="|".join((f"{argument} must", *_DYNAMOS))):
        torch.compile(call, fullgraph=True, backend="eager")()


def test_other_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"score_mod must be a function of \(score, batch, head, query, key\); got 5"):
        compile_modifier(5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="score_mod must be a function where mask_mod is None"):
        compile_modifier()
    with pytest.raises(ArgumentError, match="argument must be one of score_mod, mask_mod"):
        trace(branch, "other")


def test_errors_of_the_function_itself_stay() -> None:
    def fails(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        compile_modifier(fails)


def test_kept_arguments_are_of_no_use() -> None:
    kept = []

    def keeps(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        try:  # which cannot be seen through: the function gets what it captures as it is
            kept.append(s)
        finally:
            s = s + 1
        return s

    compile_modifier(keeps)
    with pytest.raises(ArgumentError, match="must not keep their arguments"):
        kept[0] + 1
