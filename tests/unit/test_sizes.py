"""Functions of sizes: what they give is what was recorded would, and nothing that they cannot remember goes by unseen."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.family import Family, families
from flashgen.codegen.operation import operation_of, operations
from flashgen.codegen.problem import Problem
from flashgen.codegen.sizes import Size, function_of_sizes, of_sizes, whole
from flashgen.codegen.workload import Workload

H200 = find_device("h200")
_divisor = of_sizes(math.gcd)


def everything(sizes: tuple[Any, ...], numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a size can do."""
    (a, b, _), (c, none) = sizes, numbers
    values = [a + b, 1 + a, a - b, 7 - a, a * b, 3 * a, a // 4, 100 // b, a % 8, 100 % b, -a, abs(3 - a), 1 << (b % 5), a << 2, -(-a // b)]
    values += [
        min(a, b, 5),
        max(a, 9),
        (a - 1).bit_length(),
        round(a / b),
        20 / a,
        whole(a / 2),
        _divisor(a, b),
        sum([a, b]),
        math.prod([a, c]),
    ]
    ways = [a < b, a <= 8, a > b, b >= 3, a == b, a != 4, bool(c), (a, b) == (8, 3), a in (4, 5)]
    return tuple(values), none, (a, ("text", 0.1, None, -3), ()), tuple(ways)


@pytest.mark.parametrize("seed", range(5))
def test_a_function_gives_what_was_recorded_would(seed: int) -> None:
    draw = random.Random(seed)
    ways = [((draw.randint(2, 9), draw.randint(1, 9), 1), (draw.randint(0, 2), None)) for _ in range(200)]
    made: Callable[..., Any] = function_of_sizes(everything, ways[0])
    assert made(*ways[0]) == everything(*ways[0])
    alike = 0
    for sizes in ways:
        found, wanted = made(*sizes), everything(*sizes)
        assert found is None or found == wanted, sizes
        alike += found is not None
        if wanted[3] != everything(*ways[0])[3]:
            assert found is None, f"{sizes} would go another way"
    assert alike


@pytest.mark.parametrize("seed", range(20))
def test_a_size_and_numbers_go_the_way_of_all_comparisons(seed: int) -> None:
    """And no other size is refused: the closest bounds tell all that the others do."""
    draw = random.Random(seed)
    signs = [draw.choice([operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]) for _ in range(6)]
    compared = [(sign, draw.choice([-1, 0, 3, 4, 5, 6, 9])) for sign in signs]

    def ways(of: Any) -> list[bool]:
        return [bool(sign(of, number)) for sign, number in compared]

    def compute(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        (n,) = sizes
        half = n / 2
        return tuple(ways(n)), tuple(ways(half)), bool(n), half

    for known in range(8):
        made: Callable[..., Any] = function_of_sizes(compute, ((known,),))
        for other in range(20):
            alike = [ways(other), ways(other / 2), bool(other)] == [ways(known), ways(known / 2), bool(known)]
            assert made((other,)) == (compute((other,)) if alike else None)


def test_of_bounds_the_closest_are_asked_for() -> None:
    def compute(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        return all(sizes[0] < most for most in range(100, 1000)), sizes[0] * 2

    made: Callable[..., Any] = function_of_sizes(compute, ((50,),))
    assert [made((size,)) for size in (-7, 99, 100)] == [(True, -14), (True, 198), None]
    few: Callable[..., Any] = function_of_sizes(lambda sizes: (sizes[0] < 100, sizes[0] * 2), ((50,),))
    assert made.__code__.co_code == few.__code__.co_code


def test_what_changes_nothing_is_no_step() -> None:
    def compute(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        a = sizes[0]
        assert all(one is a for one in (a + 0, 0 + a, a - 0, a * 1, 1 * a, a // 1))
        return 0 - a, 1 // a, a + 1

    made: Callable[..., Any] = function_of_sizes(compute, ((3,),))
    assert made((1,)) == (-1, 1, 2)


def test_only_what_counts_is_computed() -> None:
    counted: list[int] = []

    @of_sizes
    def count(size: int) -> int:
        counted.append(size)
        return size

    def compute(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        count(sizes[0] * 2)  # which nobody needs
        return (count(sizes[1]) + count(sizes[1]),)

    made: Callable[..., Any] = function_of_sizes(compute, ((3, 5),))
    counted.clear()
    assert made((7, 11)) == (22,)
    assert counted == [11]


@pytest.mark.parametrize(
    "compute",
    [
        lambda size: range(size),
        lambda size: [1, 2, 3][size],
        lambda size: {size: 1},
        lambda size: lru_cache(abs)(size),
        lambda size: int(size),
        lambda size: float(size),
        lambda size: math.sqrt(size),
        lambda size: size.to_bytes(4),
        lambda size: hash(size),
        lambda size: size & 1,
        lambda size: f"{size:5d}",
        lambda size: size in {1, 2},
    ],
)
def test_what_cannot_be_remembered_is_refused(compute: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        function_of_sizes(lambda sizes: (compute(sizes[0]),), ((2,),))


def test_what_is_refused_is_no_function() -> None:
    def compute(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        require_int("size", sizes[0], 1, 8)
        return (sizes[0] * 2,)

    made: Callable[..., Any] = function_of_sizes(compute, ((3,),))
    assert [made((size,)) for size in (0, 1, 8, 9)] == [None, (2,), (16,), None]
    with pytest.raises(ArgumentError, match="size must be an integer from 1 to 8"):
        function_of_sizes(compute, ((9,),))


def test_a_workload_may_be_of_sizes() -> None:
    def compute(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        workload = Workload(*sizes)
        assert isinstance(workload.len_q, Size)
        return (workload.longest, workload == Workload(2, 4, 2, 8, 8))

    made: Callable[..., Any] = function_of_sizes(compute, ((2, 4, 2, 7, 9),))
    assert made((2, 4, 2, 10, 20)) == (30, False)
    assert made((2, 4, 2, 8, 8)) is None, "which is the other one"
    assert made((2, 4, 2, -1, 8)) is None
    assert made((2, 4, 3, 7, 9)) is None


def programs() -> Iterator[Any]:
    """Families that may be chosen, each with the examples of its operation that it computes."""
    for operation in operations().values():
        for problem, workload in operation.examples():
            for family in families().values():
                if family.operation == operation.name and family.automatic and not family.refusals(problem, H200.target):
                    yield pytest.param(family, problem, workload, id=f"{family.name}-{problem.name}")


@pytest.mark.parametrize(("family", "problem", "workload"), list(programs()))
def test_every_program_is_a_function_of_sizes(family: Family, problem: Problem, workload: Workload) -> None:
    """So that a call of new sizes costs little: what loops, or is kept by its arguments, has `of_sizes`."""
    config = family.default(problem, H200.target)
    names = "batch", "len_q", "len_kv", "tokens_q", "tokens_kv", "pages", "table_pages", "new_keys"
    varying = [name for name in names if getattr(workload, name) and not (name == "len_kv" and workload.page_size)]

    def compute(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        given = dict(zip(varying, sizes, strict=True))
        if workload.page_size:
            given["len_kv"] = given.get("table_pages", workload.table_pages) * workload.page_size
        call = operation_of(problem).call(problem, replace(workload, **given))
        family.require_call(call, config)
        found = family.program(config, call, H200)
        launches = tuple(
            (one.grid, tuple(one.values.values()), tuple(shape.fields for shape in one.maps.values())) for one in found.launches
        )
        return launches, tuple(buffer.bytes for buffer in found.buffers)

    known = tuple(getattr(workload, name) for name in varying)
    made: Callable[..., Any] = function_of_sizes(compute, (known,))
    assert made(known) == compute(known)
    draw = random.Random(problem.name)
    for _ in range(20):
        sizes = tuple(draw.choice([size, max(1, size + draw.randint(-9, 9))]) for size in known)
        found = made(sizes)
        assert found is None or found == compute(sizes), sizes
