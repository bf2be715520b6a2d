"""Traces that are used again: whatever changes in what a function captures, the next call sees it; and what need not be traced is not."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import time
import timeit
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.traced import modifier
from flashgen.traced.evaluation import evaluated
from flashgen.traced.modifier import compile_modifier, modifier_in_call
from flashgen.traced.reuse import TraceCache
from tests.support.traced_values import called, random_inputs

SIZES = {"batch": 2, "head": 4, "query": 16, "key": 16}
INPUTS = random_inputs(12, SIZES, seed=7)
Function = Callable[..., Any]
GLOBAL_NUMBER: Any = 3
GLOBAL_TENSOR: Any = torch.rand(4)
GLOBAL_LIST: list[Any] = [1.0, 2.0]
GLOBAL_DICT: dict[str, Any] = {"scale": 2.0}
SETTINGS = types.ModuleType("settings")
SETTINGS.window = 4  # type: ignore[attr-defined]


def global_helper(x: Any) -> Any:
    return x + 1


def traces() -> int:
    return modifier._SCORES.traces + modifier._MASKS.traces


def check(function: Function, is_mask: bool = False) -> modifier.ModifierInCall:
    """What was traced, or used again, says what the function itself says now."""
    made = modifier_in_call(None, function) if is_mask else modifier_in_call(function)
    tree = made.modifier.mask if is_mask else made.modifier.score
    assert tree is not None
    tensors = dict(zip(made.modifier.tensor_kinds, made.tensors, strict=True))
    numbers = dict(zip(made.modifier.number_types, made.numbers, strict=True))
    found = evaluated(tree, INPUTS, tensors, numbers).expand(12)
    torch.testing.assert_close(found, called(function, INPUTS, is_mask).detach(), rtol=1e-6, atol=1e-6)
    return made


@dataclass
class Change:
    """A function, and how it is changed in steps. again: of how many of the steps a trace must be made; None: of each call."""

    function: Function
    steps: Sequence[Callable[[], object]]
    again: int | None = 0


class Owner:
    class_number = 1.5

    def __init__(self) -> None:
        self.number: Any = 2.0
        self.tensor: Any = torch.rand(4)
        self.inner = SimpleNamespace(window=3)
        self.causal = False

    @property
    def doubled(self) -> Any:
        return self.number * 2

    def scaled(self, x: Any) -> Any:
        return x * self.number

    def score_mod(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if self.causal:
            s = torch.where(q >= k, s, -1e4)
        return self.scaled(s) + self.tensor[h] * self.class_number + self.doubled + (q - k < self.inner.window)


def cell() -> tuple[Callable[[Any], None], Function]:
    value: Any = 2

    def change(new: Any) -> None:
        nonlocal value
        value = new

    return change, lambda s, b, h, q, k: s * value + (q - k) * value


def set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


def number_in_cell() -> Change:
    change, function = cell()
    return Change(function, [lambda: change(7), lambda: change(-1), lambda: change(0)])


def type_in_cell() -> Change:
    change, function = cell()
    return Change(function, [lambda: change(2.5), lambda: change(True), lambda: change(2**31 - 1), lambda: change(3)], 3)


def global_number() -> Change:
    return Change(lambda s, b, h, q, k: s + GLOBAL_NUMBER, [set_global("GLOBAL_NUMBER", 8), set_global("GLOBAL_NUMBER", 3)])


def global_tensor() -> Change:
    steps = [set_global("GLOBAL_TENSOR", torch.rand(9)), lambda: GLOBAL_TENSOR.mul_(2), set_global("GLOBAL_TENSOR", torch.rand(4))]
    return Change(lambda s, b, h, q, k: s + GLOBAL_TENSOR[h], steps)


def dtype_and_rank() -> Change:
    steps = [
        *(set_global("GLOBAL_TENSOR", torch.rand(4).half()), set_global("GLOBAL_TENSOR", torch.ones(4, dtype=torch.int64))),
        *(set_global("GLOBAL_TENSOR", torch.nn.Parameter(torch.rand(4))), set_global("GLOBAL_TENSOR", torch.rand(4))),
    ]
    return Change(lambda s, b, h, q, k: s + GLOBAL_TENSOR[h], steps, 3)


def global_function() -> Change:
    old, new = global_helper, lambda x: x * 3
    return Change(lambda s, b, h, q, k: global_helper(s), [set_global("global_helper", new), set_global("global_helper", old)], 1)


def builtin() -> Change:
    def shadow() -> None:
        globals()["abs"] = lambda x: x * 2

    return Change(lambda s, b, h, q, k: abs(s), [shadow, lambda: globals().pop("abs")], 1)


def items() -> Change:
    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i, factor in enumerate(GLOBAL_LIST):
            s = s + factor * (q == i)
        return s * GLOBAL_DICT["scale"] + len(GLOBAL_DICT)

    def change(place: Any, key: Any, value: Any) -> Callable[[], None]:
        return lambda: place.__setitem__(key, value)

    steps = [
        change(GLOBAL_LIST, 0, -4.0),
        lambda: GLOBAL_LIST.append(0.5),
        change(GLOBAL_DICT, "scale", 5.0),
        change(GLOBAL_DICT, "more", 1),
    ]
    return Change(function, [*steps, GLOBAL_LIST.pop, lambda: GLOBAL_DICT.pop("more")], 3)


def attributes() -> Change:
    owner = Owner()

    def change(name: str, value: Any, of: Any = owner) -> Callable[[], None]:
        return lambda: setattr(of, name, value)

    steps = [
        change("number", -1.0),
        change("tensor", torch.rand(4)),
        change("window", 9, owner.inner),
        change("inner", SimpleNamespace(window=-2)),
    ]
    steps += [change("class_number", 0.25, Owner), change("class_number", 0.75), change("number", 4.0)]
    return Change(owner.score_mod, steps)


def structure_of_attributes() -> Change:
    owner = Owner()

    def change(name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(owner, name, value)

    other = Owner()
    other.number = 17.0
    steps = [
        change("causal", True),
        change("number", 3),
        change("scaled", lambda x: x - 1),
        change("causal", False),
        change("scaled", other.scaled),
    ]
    return Change(owner.score_mod, steps, 5)


def method_of_another_object() -> Change:
    owner, other = Owner(), Owner()
    other.number = 17.0
    return Change(owner.score_mod, [lambda: setattr(owner, "scaled", other.scaled)], 1)


def method_of_class() -> Change:
    class Own(Owner):
        def scaled(self, x: Any) -> Any:
            return x - self.number

    def other(self: Any, x: Any) -> Any:
        return x * 0.5

    return Change(Own().score_mod, [lambda: setattr(Own, "scaled", other), lambda: delattr(Own, "scaled")], 2)


def defaults() -> Change:
    def function(s: Any, b: Any, h: Any, q: Any, k: Any, n: Any = 2, *, factor: Any = 0.5) -> Any:
        return s * factor + n

    def change(name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(function, name, value)

    return Change(function, [change("__defaults__", (5,)), change("__kwdefaults__", {"factor": 3.0}), change("__defaults__", (0.5,))], 1)


def code() -> Change:
    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + 1

    def other(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - q

    return Change(function, [lambda: setattr(function, "__code__", other.__code__)], 1)


def structure() -> Change:
    value: Any = 2

    def change(new: Any) -> None:
        nonlocal value
        value = new

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if value > 4:
            return s
        for i in range(value):
            s = s + i * q
        return s**value

    return Change(function, [lambda: change(3), lambda: change(5), lambda: change(2)], 2)


def optional() -> Change:
    tensor: Any = None

    def change(new: Any) -> None:
        nonlocal tensor
        tensor = new

    def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s if tensor is None else s + tensor[h]

    return Change(function, [lambda: change(torch.rand(4)), lambda: change(torch.rand(4)), lambda: change(None)], 1)


def module() -> Change:
    return Change(lambda s, b, h, q, k: s + (q - k < SETTINGS.window), [lambda: setattr(SETTINGS, "window", 8)])


def same_tensor_twice() -> Change:
    first = second = torch.rand(4)

    def part() -> None:
        nonlocal second
        second = torch.rand(4)

    return Change(lambda s, b, h, q, k: s * first[h] - second[h], [part], 1)


def shape() -> Change:
    table = torch.rand(3)

    def change(new: Any) -> None:
        nonlocal table
        table = new

    steps = [lambda: change(torch.rand(4)), lambda: change(torch.rand(4)), lambda: change(torch.rand(3))]
    return Change(lambda s, b, h, q, k: s + table[q % table.shape[0]] * len(table) + table.size(0), steps, 1)


def formula() -> Change:
    base, power = 3, 2

    def change(new: Any) -> None:
        nonlocal power
        power = new

    steps = [lambda: change(3), lambda: change(-1), lambda: change(2), lambda: change(19), lambda: change(25)]
    return Change(lambda s, b, h, q, k: s * (10 - power) / (7 / base) + (q + base**power) // 2 - 2**power % 5, steps[:3], 1)


def large_formula() -> Change:
    base = 3

    def change(new: Any) -> None:
        nonlocal base
        base = new

    return Change(
        lambda s, b, h, q, k: torch.where(q < base * base * 7, s, 0), [lambda: change(5), lambda: change(17000), lambda: change(3)], 1
    )


def sum_of_numbers() -> Change:
    first = second = 5

    def change(new: int, other: int) -> None:
        nonlocal first, second
        first, second = new, other

    steps = [lambda: change(-7, 2), lambda: change(2**30, -4), lambda: change(2**30, 2**30 - 5)]
    return Change(lambda s, b, h, q, k: s + (q < first + second) + (q + 1 - first < -second), steps, 1)


def shared_tensor() -> Change:
    def helper(h: Any) -> Any:
        return GLOBAL_TENSOR[h]

    return Change(lambda s, b, h, q, k: s + helper(h) * GLOBAL_TENSOR[h], [set_global("GLOBAL_TENSOR", torch.rand(4))])


def library_tensor() -> Change:
    torch.flashgen_table = torch.rand(4)  # type: ignore[attr-defined]
    step = lambda: setattr(torch, "flashgen_table", torch.rand(4))  # noqa: E731
    return Change(lambda s, b, h, q, k: s + torch.flashgen_table[h], [step], None)  # type: ignore[attr-defined]


def opaque_helper() -> Change:
    value: Any = 2

    def helper(x: Any, n: Any) -> Any:
        return x * n if type(n) is int else x - n

    def change(new: Any) -> None:
        nonlocal value
        value = new

    return Change(lambda s, b, h, q, k: helper(s, value), [lambda: change(3), lambda: change(0.5)], None)


def clock() -> Change:
    return Change(lambda s, b, h, q, k: s + 0 * time.time() + (time.time() < 0), [lambda: None], None)


def sign_of_zero() -> Change:
    value = 0.0

    def change(new: float) -> None:
        nonlocal value
        value = new

    return Change(lambda s, b, h, q, k: s + (1.0 if str(value) == "0.0" else 2.0), [lambda: change(-0.0), lambda: change(0.0)], 1)


def seen_through(kind: str) -> Change:
    value: Any = 2
    owner = Owner()

    def change(new: Any) -> None:
        nonlocal value
        value = new

    def by_type(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * value if type(value) is int else s - value

    def by_error(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        try:
            return s + owner.missing  # type: ignore[attr-defined]
        except AttributeError:
            return s * value

    def by_name(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * getattr(owner, "extra", 1.0) + value

    def by_class(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * owner.__class__.class_number + value

    def by_set(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + sum(numbers) + value

    numbers = {1, 2}
    function = {"type": by_type, "error": by_error, "name": by_name, "class": by_class, "set": by_set}[kind]

    def class_number() -> None:
        owner.__class__ = type("Other", (Owner,), {"class_number": 9.0})

    steps = [lambda: change(3), lambda: change(0.5), lambda: setattr(owner, "missing", 4.0), lambda: setattr(owner, "extra", 2.0)]
    return Change(function, [*steps, class_number, lambda: numbers.add(7), lambda: delattr(owner, "extra")], None)


def counted() -> Change:
    count = itertools.count()
    return Change(lambda s, b, h, q, k: s + next(count) * 0, [lambda: None], None)


MAKERS: dict[str, Callable[[], Change]] = {
    make.__name__: make
    for make in (
        *(number_in_cell, type_in_cell, global_number, global_tensor, dtype_and_rank, global_function, builtin, items, attributes),
        *(
            structure_of_attributes,
            method_of_another_object,
            method_of_class,
            defaults,
            code,
            structure,
            optional,
            module,
            same_tensor_twice,
            shape,
            formula,
        ),
        *(large_formula, sum_of_numbers, shared_tensor, library_tensor, opaque_helper, clock, sign_of_zero, counted),
    )
} | {f"seen_through_{kind}": functools.partial(seen_through, kind) for kind in ("type", "error", "name", "class", "set")}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = dict(globals())
    yield
    globals().update(before)
    globals().pop("abs", None)
    vars(torch).pop("flashgen_table", None)
    Owner.class_number = 1.5
    SETTINGS.window = 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MAKERS)
def test_the_next_call_sees_a_change(name: str) -> None:
    change = MAKERS[name]()
    check(change.function)
    again = 0
    for step in change.steps:
        step()
        before = traces()
        check(change.function)
        again += traces() - before
        before = traces()
        check(change.function)
        if change.again is None:
            assert traces() == before + 1, "what cannot be guarded is traced on each call"
        else:
            assert traces() == before, "the same function once more"
    assert again == (len(change.steps) if change.again is None else change.again)


def test_fresh_functions_share_a_trace() -> None:
    def make(slopes: torch.Tensor, n: int, helper: Function) -> Function:
        def inner(x: Any) -> Any:
            return helper(x) * n

        return lambda s, b, h, q, k: inner(s) + slopes[h]

    def helper_of(value: float) -> Function:
        return lambda x: x + value

    first = check(make(torch.rand(4), 1, helper_of(0.5)))
    before = traces()
    slopes = torch.rand(7)
    second = check(make(slopes, 5, helper_of(1.5)))
    assert traces() == before
    assert second.modifier is first.modifier
    assert second.tensors[0] is slopes
    assert set(second.numbers) == {5.0, 1.5}
    check(make(slopes, 5, lambda x: x))
    check(make(slopes.long(), 5, helper_of(1.5)))
    assert traces() == before + 2
    partial = functools.partial(lambda s, b, h, q, k, n: s * n, n=2)
    check(partial)
    before = traces()
    check(functools.partial(partial.func, n=3))
    assert traces() == before
    check(functools.partial(partial.func, n=3.5))
    assert traces() == before + 1


def test_equal_functions_are_one_modifier() -> None:
    a, b = torch.rand(4), torch.rand(4)
    first = modifier_in_call(lambda s, _, h, q, k: s + a[h] - b[q % 4])
    second = modifier_in_call(lambda score, batch, head, query, key: -a[query % 4] + (b[head] + score))
    assert second.modifier is first.modifier
    assert [id(tensor) for tensor in second.tensors] == [id(tensor) for tensor in reversed(first.tensors)]


def test_score_and_mask_have_names_of_their_own() -> None:
    table, ids = torch.rand(4), torch.zeros(16, dtype=torch.int32)
    made = modifier_in_call(
        lambda s, b, h, q, k: s + table[h] * GLOBAL_NUMBER, lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < GLOBAL_NUMBER)
    )
    assert made.modifier.text == (
        "score: add(score, mul(t0:fp32[head], n0:float32)) | mask: and(lt(query, add(key, n1:int32)), eq(t1:int32[query], t1:int32[key]))"
    )
    assert made.tensors == (table, ids)
    assert made.numbers == (GLOBAL_NUMBER, GLOBAL_NUMBER)
    assert made.modifier.tensor_kinds == {"t0": ("fp32", 1), "t1": ("int32", 1)}
    assert made.modifier.number_types == {"n0": "float32", "n1": "int32"}


def test_numbers_are_as_kernels_take_them() -> None:
    small, large = 0.1, 1e300
    made = modifier_in_call(lambda s, b, h, q, k: s * small + large)
    assert set(made.numbers) == {0.10000000149011612, float("inf")}


def test_a_compiled_modifier_reads_anew() -> None:
    table = torch.rand(4)
    compiled = compile_modifier(lambda s, b, h, q, k: s + table[h] * GLOBAL_NUMBER)
    assert compiled.text == "score: add(score, mul(t0:fp32[head], n0:float32))"
    assert compiled.text in repr(compiled)
    assert compiled.tensors[0] is table
    assert compiled.numbers == (3.0,)
    assert "score + t0.at(head) * n0" in compiled.source
    assert "visible" not in compiled.source
    table = torch.rand(5)
    globals()["GLOBAL_NUMBER"] = 4
    assert modifier_in_call(compiled).tensors[0] is table
    assert modifier_in_call(compiled).numbers == (4.0,)
    with pytest.raises(ValueError, match="mask_mod must be None"):
        modifier_in_call(compiled, lambda b, h, q, k: q >= k)
    mask = compile_modifier(mask_mod=lambda b, h, q, k: q >= k)
    assert mask.text == "mask: le(key, query)"
    assert "return key <= query;" in mask.source


def test_nothing_captured_is_kept_alive() -> None:
    class Captured:
        factor = 2.0

    def make() -> list[weakref.ref[Any]]:
        table, owner = torch.rand(4), Captured()

        def function(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s * owner.factor + table[h]

        check(function)
        return [weakref.ref(each) for each in (table, owner, function)]

    weak = make()
    gc.collect()
    assert [each() for each in weak] == [None, None, None]


def test_threads_trace_at_once() -> None:
    def make(i: int) -> Function:
        scope: dict[str, Any] = {"table": torch.full((4,), float(i))}
        exec(f"def function(s, b, h, q, k):\n    return s * {i % 5} + table[h]", scope)
        return scope["function"]  # type: ignore[no-any-return]

    errors = []

    def work(start: int) -> None:
        try:
            for i in range(start, start + 40):
                made = modifier_in_call(make(i))
                assert made.tensors[0][0] == i
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_a_trace_used_again_is_cheap() -> None:
    """A tenth of a trace's time at most: the times themselves are in docs/traced-modifiers.md."""
    slopes = torch.rand(4)

    def make(n: int) -> Function:
        return lambda s, b, h, q, k: torch.where(q - k <= n, s - slopes[h] * (q - k).abs(), -1e4)

    function = make(3)
    modifier_in_call(function)
    repeat = min(timeit.repeat(lambda: modifier_in_call(function), number=200, repeat=5))
    fresh = min(timeit.repeat(lambda: modifier_in_call(make(4)), number=200, repeat=5))
    anew = min(timeit.repeat(lambda: TraceCache("score_mod").read(function), number=20, repeat=5)) * 10
    assert max(repeat, fresh) < anew / 10, (repeat, fresh, anew)
