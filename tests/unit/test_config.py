"""The base of all configs: JSON, settings from text, names. On a config type made up here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest

from flashgen.codegen.config import Config, tagged
from flashgen.codegen.errors import ArgumentError


class Place(enum.Enum):
    HERE = "here"
    THERE = "there"


@dataclass(frozen=True)
class MadeUp(Config):
    block_q: int = tagged("bq")
    query: Place = tagged("q")
    persistent: bool = tagged("p", False)


CONFIG = MadeUp(64, Place.HERE)


def test_json_round_trip() -> None:
    assert CONFIG.to_json() == {"block_q": 64, "query": "here", "persistent": False}
    for config in (CONFIG, MadeUp(1, Place.THERE, True)):
        assert MadeUp.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": "nowhere"}, r"^config field query must be one of here, there; got 'nowhere'$"),
        ({"query": Place.HERE}, r"^config field query must be one of here, there; got "),
        ({"block_q": "64"}, r"^config field block_q must be of type int; got '64'$"),
        ({"block_q": True}, r"^config field block_q must be of type int; got True$"),
        ({"persistent": 1}, r"^config field persistent must be of type bool; got 1$"),
        ({"warps": 4}, r"^config must have the fields block_q, query, persistent; got block_q, query, persistent, warps$"),
    ],
)
def test_from_json_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MadeUp.from_json({**CONFIG.to_json(), **change})


def test_from_json_refuses_a_missing_field() -> None:
    with pytest.raises(ArgumentError, match=r"^config must have the fields block_q, query, persistent; got none$"):
        MadeUp.from_json({})


def test_settings_from_text() -> None:
    assert CONFIG.replace_from_text({}) == CONFIG
    changed = CONFIG.replace_from_text({"block_q": "128", "query": "there", "persistent": "True"})
    assert changed == MadeUp(128, Place.THERE, True)
    assert CONFIG.block_q == 64, "the original stays"


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("FALSE", False), ("0", False)])
def test_booleans_from_text(text: str, value: bool) -> None:
    assert CONFIG.replace_from_text({"persistent": text}).persistent is value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("blok_q", "64", r"^config field must be one of block_q, query, persistent; got 'blok_q'$"),
        ("block_q", "many", r"^config field block_q must be an integer in plain digits, such as 128; got 'many'$"),
        *(
            ("block_q", text, r"^config field block_q must be an integer in plain digits")
            for text in ("1_28", " 128", "١٢٨", "9" * 5000, "")
        ),
        ("block_q", "6.4", r"^config field block_q must be an integer in plain digits, such as 128; got '6\.4'$"),
        ("persistent", "maybe", r"^config field persistent must be one of true, false; got 'maybe'$"),
        ("query", "HERE", r"^config field query must be one of here, there; got 'HERE'$"),
    ],
)
def test_text_that_fits_no_field(name: str, text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CONFIG.replace_from_text({name: text})


def test_names_tell_configs_apart() -> None:
    assert CONFIG.name == "bq64_qhere_p0"
    assert MadeUp(64, Place.THERE, True).name == "bq64_qthere_p1"


def test_a_number_and_a_word_may_have_one_tag() -> None:
    @dataclass(frozen=True)
    class Both(Config):
        stages: int = tagged("s")
        schedule: Place = tagged("s", Place.HERE)

    assert Both(2).name == "s2_shere"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (tagged("s", 1), r"^Twice\.slices must have a tag of its own; got 's', which is that of stages$"),
        (1, r"^Twice\.slices must be tagged with letters; got ''$"),
        (tagged("s2", 1), r"^Twice\.slices must be tagged with letters; got 's2'$"),
    ],
)
def test_names_that_could_be_mixed_up_are_refused(other: Any, message: str) -> None:
    @dataclass(frozen=True)
    class Twice(Config):
        stages: int = tagged("s", 2)
        slices: int = other

    with pytest.raises(TypeError, match=message):
        _ = Twice().name
