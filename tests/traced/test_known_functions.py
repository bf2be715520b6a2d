"""What becomes of functions is found once for calls that look the same: never for others, and never with values of an earlier call."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen.launch import known_functions, traced_call
from flashgen.launch.asked import asked
from flashgen.launch.keywords import modified_of_call
from flashgen.launch.private_names import knows_tensors

Mod = Callable[..., Any]
SIZES = (2, 4, 16, 16)
Q = torch.zeros(2, 16, 4, 16, dtype=torch.bfloat16)

pytestmark = pytest.mark.skipif(not knows_tensors, reason="this PyTorch has no guards that tell tensors apart")


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each time that it is found out what becomes of functions."""
    times: list[int] = []
    anew = traced_call.call_of_functions

    def counted(*given: Any) -> Any:
        times.append(len(times))
        return anew(*given)

    monkeypatch.setattr(known_functions, "_known", {})
    monkeypatch.setattr(known_functions, "call_of_functions", counted)
    return times


def told(
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    q: torch.Tensor = Q,
    sizes: tuple[int, int, int, int] = SIZES,
    causal: Any = False,
    scale: float | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """Names, sizes, numbers, tensors; what is remembered of them is what `asked` finds."""
    given: dict[str, Any] = {"window": None, "softcap": None, "alibi_slopes": None, "sinks": None} | others
    given |= {"score_mod": score_mod, "mask_mod": mask_mod, "top_left": sizes[2] - sizes[3], "call": (sizes, q, scale)}
    _, modified, known = modified_of_call(causal, **given)
    assert modified
    assert known is None or known == asked(*modified)[0]
    return modified


def test_the_same_function_is_found_out_once(found: list[int]) -> None:
    table, number = torch.rand(4, 32), 16
    score_mod: Mod = lambda s, b, h, q, k: s + table[h, q - k + number]  # noqa: E731
    for _ in range(3):
        assert told(score_mod)[3] == [table]
        table = table.clone()
    assert told(lambda s, b, h, q, k: s * 0.5 + table[h, 0])[3] == [table]
    assert len(found) == 2
    number = 17
    assert told(score_mod)[1] == (17,)
    table = torch.rand(4, 33)
    assert told(score_mod)[3] == [table]
    assert len(found) == 4, "its strides are numbers of the kernel"


def test_whatever_decides_is_asked(found: list[int]) -> None:
    slopes = torch.rand(4)
    alibi: Mod = lambda s, b, h, q, k: s - slopes[h] * (q - k)  # noqa: E731
    assert told(alibi, causal=True)[0] == "alibi"
    assert told(alibi)[0].startswith("traced("), "nothing cuts the distance"
    assert told(alibi, window=(None, 0))[0] == "alibi"
    assert told(alibi, sizes=(2, 4, 16, 20), causal=True)[0].startswith("traced(")
    assert told(alibi, causal=True, alibi_slopes=slopes.clone())[0].startswith("alibi,traced(")
    assert told(alibi, causal=True, prefix_len=torch.zeros(2, dtype=torch.int32))[0].startswith("prefix_len,traced(")
    assert told(alibi, causal=True, q=Q.half())[0] == "alibi"
    assert told(alibi, causal=True, scale=2.0**61)[0].startswith("traced("), "no kernel can divide by it"
    slopes.requires_grad_()
    assert told(alibi, causal=True)[0].startswith("traced(")
    with torch.no_grad():
        assert told(alibi, causal=True)[0] == "alibi"
    slopes = slopes.detach().double()
    with pytest.raises(Exception, match="capture tensors of"):
        told(alibi, causal=True)
    slopes = torch.rand(3)
    assert told(alibi, causal=True)[0].startswith("traced("), "too few"
    before = len(found)
    assert told(alibi, causal=True)[0].startswith("traced(")
    assert len(found) == before


def test_tensors_are_known_by_who_captures_them() -> None:
    """And not by which they are: two functions may capture the same one in one call, and different ones in the next."""
    of_score = of_mask = torch.zeros(16, dtype=torch.int32)
    score_mod: Mod = lambda s, b, h, q, k: s * 0.5 + of_score[q]  # noqa: E731
    mask_mod: Mod = lambda b, h, q, k: of_mask[q] == of_mask[k]  # noqa: E731
    first = told(score_mod, mask_mod)
    of_mask = of_mask.clone()
    second = told(score_mod, mask_mod)
    assert [id(tensor) for tensor in first[3]] == [id(of_score), id(of_score)]
    assert sorted(id(tensor) for tensor in second[3]) == sorted((id(of_score), id(of_mask)))


def test_part_of_a_tensor_is_that_of_this_call() -> None:
    bias = torch.rand(32, 40)
    score_mod: Mod = lambda s, b, h, q, k: s + bias[q, k]  # noqa: E731
    for _ in range(3):
        names, _, _, (tensor,) = told(score_mod)
        assert names == "bias_fp32"
        assert tensor.shape == (16, 16)
        assert tensor.data_ptr() == bias.data_ptr()
        bias = bias.clone()


def test_nothing_captured_is_kept_alive() -> None:
    def called() -> list[weakref.ref[Any]]:
        slopes, table, q = torch.rand(4), torch.rand(4, 32), Q.clone()
        score_mod: Mod = lambda s, b, h, q, k: s - slopes[h] * (q - k).abs() + table[h, q - k + 16]  # noqa: E731
        for _ in range(2):
            told(score_mod, q=q)
        return [weakref.ref(each) for each in (slopes, table, q, score_mod)]

    kept = called()
    gc.collect()
    assert [each() for each in kept] == [None] * 4


def test_computed_slopes_are_not_those_of_a_mode(found: list[int]) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    alibi: Mod = lambda s, b, h, q, k: s - torch.exp2(-(h + 1) * 2.0) * (q - k).abs()  # noqa: E731
    first = told(alibi)
    assert told(alibi)[3][0] is first[3][0]
    assert len(found) == 1
    assert first[0] == "alibi"
    with Mode():  # type: ignore[no-untyped-call]
        assert told(alibi)[0].startswith("traced(")
    assert told(alibi)[0] == "alibi"


def test_what_is_traced_on_each_call_is_not_remembered() -> None:
    state = {1, 2}
    score_mod: Mod = lambda s, b, h, q, k: s * 0.5 + sum(state)  # noqa: E731
    told(score_mod), told(score_mod)
    assert known_functions._known == {}


def test_wrong_arguments_are_refused_after_a_right_call() -> None:
    score_mod: Mod = lambda s, b, h, q, k: s * 0.5 + q  # noqa: E731
    told(score_mod, causal=True), told(score_mod, window=(1, None)), told(score_mod, softcap=2.0)
    for wrong in ({"causal": 1}, {"window": (1.0, None)}, {"window": (True, None)}, {"softcap": True}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must"):
            told(score_mod, **wrong)


def test_it_is_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_functions, "_MOST_KNOWN", 3)
    number = 0.5
    score_mod: Mod = lambda s, b, h, q, k: s * number + q  # noqa: E731
    for _ in range(8):
        assert told(score_mod)[2] == (number,)
        number += 0.5
    assert len(known_functions._known) <= 3


def test_what_is_beside_functions_counts(found: list[int]) -> None:
    """Each call is told as one of a thread that has called nothing before."""
    table, sinks, documents = torch.rand(4, 32), torch.rand(4), torch.zeros(2, 16, dtype=torch.int32)
    prefix, padding = torch.ones(2, dtype=torch.int32), torch.ones(2, 17, dtype=torch.bool)
    bias, cap = torch.rand(16, 16), 30.0
    functions: tuple[tuple[Mod | None, Mod | None], ...] = (
        (lambda s, b, h, q, k: s * 0.5 + table[h, q - k + 16], None),
        (lambda s, b, h, q, k: cap * torch.tanh(s / cap), lambda b, h, q, k: q - k < 3),
        (lambda s, b, h, q, k: s + bias[q, k], lambda b, h, q, k: documents[b, q] == documents[b, k]),
        (lambda s, b, h, q, k: s - torch.exp2(-(h + 1) * 2.0) * (q - k).abs(), None),
        (None, lambda b, h, q, k: q >= k),
    )
    beside: tuple[dict[str, Any], ...] = (
        {},
        {"causal": True},
        {"causal": "top_left"},
        {"window": (3, None)},
        {"chunk": 4},
        {"softcap": 2.0},
        {"softcap": 3.0},
        {"sinks": sinks},
        {"prefix_len": prefix},
        {"document_ids": (documents, torch.zeros(2, 17, dtype=torch.int32))},
        {"key_padding_mask": padding},
        {"dropout_p": 0.5},
        {"dropout_p": 0.25, "sinks": sinks, "bias": bias},
    )

    def plain(score_mod: Mod | None, mask_mod: Mod | None, options: dict[str, Any]) -> tuple[Any, ...]:
        try:
            names, sizes, numbers, tensors = told(score_mod, mask_mod, sizes=(2, 4, 16, 17), **options)
        except AssertionError:
            return ()
        seeds = [tensor for tensor in tensors if tensor.dtype == torch.int64]
        return names, tuple(sizes), tuple(numbers), [tensor.tolist() for tensor in tensors if not any(tensor is seed for seed in seeds)]

    cases = [(score, mask, options) for score, mask in functions for options in beside]
    alone = []
    for case in cases:
        known_functions._known.clear()
        alone.append(plain(*case))
    known_functions._known.clear()
    for _ in range(3):
        assert [plain(*case) for case in cases] == alone
    before = len(found)
    assert [plain(*case) for case in reversed(cases)] == alone[::-1]
    assert len(found) == before


TRACED_FIRST = """
import torch
import flashgen
from torch.fx.experimental.proxy_tensor import make_fx

table = torch.rand(4, 32)
call = lambda q: flashgen.attention(
    q, q, q, score_mod=lambda s, b, h, q, k: s * 0.5 + table[h, q - k + 16], window=(q.shape[1] // 4, None)
)
graph = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.randn(2, 16, 4, 16).bfloat16()).graph
print([str(node.target) for node in graph.nodes])
from flashgen.launch import known_functions
assert not known_functions._known, "symbols are no part of what is known"
"""


@pytest.mark.slow
def test_a_first_call_that_is_traced_puts_nothing_else_into_the_graph() -> None:
    """In a process of its own, which has called nothing before."""
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", TRACED_FIRST], cwd=root, capture_output=True, text=True, check=True).stdout
    operator = "flashgen.attention_output.default"
    assert found == f"['q_1', 'aten.sym_size.int', '<built-in function floordiv>', '_tensor_constant0', '{operator}', 'output']\n"
