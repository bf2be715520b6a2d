"""Types checked by annotation: what fits one, what does not, and that every public face and every type of values asks."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import flashgen
from flashgen.cells import cells_of
from flashgen.codegen.config import Config
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.family import families, find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.typed import checked, require_field_types, require_type
from flashgen.codegen.workload import Workload
from flashgen.tuning import Request
from tests.support.examples import examples


class Text(str):
    """Says something else where it is rendered."""

    def __str__(self) -> str:
        return "injected"


class Number(int):
    def __str__(self) -> str:
        return "injected"


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("annotation", "fitting", "others"),
    [
        (bool, [True], [1, 0.0, "yes", None, np.True_]),
        (int, [0, -1, 10**30], [True, 1.0, "1", None, np.int64(1), Number(1)]),
        (float, [0.5, 1, np.float64(0.5), np.float32(0.5), float("nan")], [True, "0.5", None, 1j, np.zeros(1)]),
        (float | None, [None, 2], ["x", False]),
        (str, ["a"], [b"a", Text("a"), 1, None]),
        (str | Path, ["a", Path("a")], [3, None]),
        (Colour, [Colour.RED], ["red", "RED", None]),
        (Literal["cpu"] | int, ["cpu", 3], ["gpu", True]),
        (Sequence[int], [(), [1, 2], range(3)], [5, "12", b"12", [1, "2"], [True], {1}, {1: 2}, np.arange(3)]),
        (Mapping[str, str], [{}, {"a": "b"}], [["a"], {"a": 1}, {1: "a"}, "a"]),
        (list[int], [[], [1, 2]], [(1, 2), ["1"], [True], None]),
        (dict[str, int], [{}, {"a": 1}], [["a"], {"a": "1"}, {1: 1}, {"a": True}, None]),
        (Any, [None, 1], []),
    ],
)
def test_what_fits_an_annotation(annotation: Any, fitting: list[object], others: list[object]) -> None:
    for value in fitting:
        require_type("it", value, annotation)
    for value in others:
        with pytest.raises(ArgumentError, match=r"^it must be .*; got .*"):
            require_type("it", value, annotation)


def test_a_message_names_types_and_shows_values_of_pythons_own() -> None:
    for value, annotation, message in (
        (5, Sequence[int], "it must be of type Sequence of int; got 5"),
        ("no", bool | None, "it must be of type bool or None; got 'no'"),
        (np.int64(5), int, "it must be of type int; got a value of type numpy.int64"),
        ("red", Colour, "it must be one of Colour.RED; got 'red'"),
        ({"a": 1}, Mapping[str, str], "it must be of type Mapping of str to str; got {'a': 1}"),
    ):
        with pytest.raises(ArgumentError) as raised:
            require_type("it", value, annotation)
        assert str(raised.value) == message


def test_showing_a_value_never_fails_and_is_never_long() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    for value in (10**5000, [Mute()], Mute(), "x" * 10**6, b"\xff" * 500, np.zeros(10**6)):
        assert len(shown(value)) < 250


def test_a_checked_function_refuses_before_it_runs() -> None:
    ran = []

    @checked
    def run(size: int, *rest: object, name: str = "a", **options: object) -> int:
        ran.append(size)
        return size

    assert run(3, "anything", name="b", other=5) == 3
    for wrong in ({"size": "3"}, {"size": True}, {"size": 3, "name": None}):
        with pytest.raises(ArgumentError, match=r"^(size|name) must be of type "):
            run(**wrong)
    with pytest.raises(TypeError, match="missing"):
        run()  # type: ignore[call-arg]
    assert ran == [3]


class Nonsense:
    """Of no type that anything asks for."""


def annotated(function: Callable[..., Any]) -> list[str]:
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@pytest.mark.parametrize("name", ["attention", "block_mask", "compile", "load", "tune", "verify", "warm"])
def test_every_argument_of_every_public_function_is_checked(name: str) -> None:
    import torch

    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    every: dict[str, dict[str, Any]] = {
        "attention": {"q": q, "k": q, "v": q},
        "block_mask": {"mask_mod": lambda b, h, q, k: q >= k, "len_q": 8, "len_kv": 8, "device": "cpu"},
        "compile": {"problem": PLAIN},
        "load": {"folder": "nowhere"},
        "tune": {"head_dim": 64},
        "verify": {"problem": PLAIN},
        "warm": {"head_dim": 64, "batch": 1, "heads": 1, "len_q": 1},
    }
    sound = every[name]
    function = getattr(flashgen, name)
    names = annotated(function)
    for argument in names:
        with pytest.raises(ArgumentError, match=f"^{argument} must be "):
            function(**{**sound, argument: Nonsense()})


PLAIN, HOPPER = Problem(Dtype.BF16, 64), find_target("sm_90a")
CONFIGS = [family.default(*next((p, t) for p, _, t in examples(family) if t.name == HOPPER.name)) for family in families().values()]
FORWARD = find_family("attention_forward")
VALUES: list[Any] = [
    PLAIN,
    Workload(1, 1, 1, 1, 1),
    Request(cells_of(64)),
    HOPPER,
    find_device("h200"),
    KernelSpec(FORWARD, PLAIN, FORWARD.default(PLAIN, HOPPER), HOPPER),
    *CONFIGS,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_field_of_every_value_is_checked(value: Any) -> None:
    sound = {f.name: getattr(value, f.name) for f in fields(value)}
    for name in sound:
        with pytest.raises(ArgumentError, match=f"^(config field )?{name} must be "):
            type(value)(**{**sound, name: Nonsense()})


@pytest.mark.parametrize("value", [v for v in VALUES if isinstance(v, Config)], ids=lambda value: type(value).__name__)
def test_a_config_takes_nothing_that_renders_as_something_else(value: Any) -> None:
    sound = {f.name: getattr(value, f.name) for f in fields(value)}
    for name, kept in sound.items():
        if type(kept) is int:
            others = [float(kept), Number(kept), np.int64(kept), str(kept), bool(kept)]
        elif type(kept) is bool:
            others = [1, "true"]
        else:
            others = [kept.value, kept.name, Text(kept.value)]
        for other in others:
            with pytest.raises(ArgumentError, match=f"^config field {name} must be "):
                type(value)(**{**sound, name: other})


def test_a_config_of_another_class_belongs_to_no_family() -> None:
    family, config = FORWARD, FORWARD.default(PLAIN, HOPPER)

    @dataclass(frozen=True)
    class Injecting(type(config)):  # type: ignore[misc]
        def describe(self) -> str:
            return "injected"

    mine = Injecting(**{f.name: getattr(config, f.name) for f in fields(config)})
    for call in (
        lambda: KernelSpec(family, PLAIN, mine, HOPPER),
        lambda: flashgen.verify(PLAIN, mine, device="cpu"),
        lambda: flashgen.verify(PLAIN, Config(), device="cpu"),
    ):
        with pytest.raises(ArgumentError, match=r"^config must be one of .*AttentionForwardConfig"):
            call()


def test_a_class_without_checked_fields_would_be_noticed() -> None:
    @dataclass(frozen=True)
    class Lax:
        size: int

    @dataclass(frozen=True)
    class Strict(Lax):
        def __post_init__(self) -> None:
            require_field_types(self)

    assert Lax("x").size == "x"  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(ArgumentError):
        Strict("x")  # type: ignore[arg-type]
