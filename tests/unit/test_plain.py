"""The JSON codec, on types made up here: what is written, what is read back, and what is refused by name."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from flashgen.codegen.errors import ArgumentError, require_int
from flashgen.codegen.plain import (
    ADDED_LATER,
    INLINE,
    MAX_BYTES,
    MAX_DEPTH,
    canonical,
    digest,
    from_plain,
    keys,
    named,
    parse,
    to_plain,
)


class Place(enum.Enum):
    HERE = "here"
    ONE = 1


@dataclass(frozen=True)
class Softcap:
    kind: ClassVar[str] = "softcap"
    cap: float


@dataclass(frozen=True)
class Window:
    kind: ClassVar[str] = "window"
    left: int
    right: int = 0


@dataclass(frozen=True)
class Size:
    rows: int
    columns: int

    def __post_init__(self) -> None:
        require_int("rows", self.rows, 1, 2**31 - 1)


@dataclass(frozen=True)
class Seconds:
    seconds: float
    rounds: int


@dataclass(frozen=True)
class Fault:
    kind: str = field(metadata=named("fault"))
    message: str


@dataclass(frozen=True)
class Whole:
    name: str
    size: Size = field(metadata=INLINE)
    on: bool
    place: Place
    nested: Size
    maybe: Size | None
    outcome: Seconds | Fault
    numbers: tuple[int, ...]
    pair: tuple[int, str]
    by_name: Mapping[str, Seconds]
    texts: list[str]
    anything: dict[str, Any]
    layout: Literal["bshd", "bhsd"]
    number: int | None
    way: str = field(metadata=named("pass", first=True))
    chain: tuple[Softcap | Window, ...] = field(default=(), metadata=ADDED_LATER)
    later: int = field(default=0, metadata=ADDED_LATER)


WHOLE = Whole(
    "x", Size(1, 2), True, Place.ONE, Size(3, 4), None, Fault("wrong", ""), (5, 6), (7, "8"), {"a": Seconds(0.5, 3)}, ["t"], {"k": [None]},
    "bhsd", None, "forward",
)  # fmt: skip
PLAIN = {
    "pass": "forward", "name": "x", "rows": 1, "columns": 2, "on": True, "place": 1, "nested": {"rows": 3, "columns": 4}, "maybe": None,
    "outcome": {"fault": "wrong", "message": ""}, "numbers": [5, 6], "pair": [7, "8"], "by_name": {"a": {"seconds": 0.5, "rounds": 3}},
    "texts": ["t"], "anything": {"k": [None]}, "layout": "bhsd", "number": None,
}  # fmt: skip


def test_what_is_written_and_read_back() -> None:
    assert json.dumps(to_plain(WHOLE)) == json.dumps(PLAIN), "the order of keys counts, too"
    assert from_plain(Whole, PLAIN, "whole") == WHOLE
    assert (*PLAIN, "chain", "later") == keys(Whole)


def test_a_field_added_later_is_left_out_while_it_has_its_default() -> None:
    changed = from_plain(Whole, {**PLAIN, "later": 2, "chain": [{"kind": "window", "left": 3, "right": 0}]}, "whole")
    assert (changed.later, changed.chain) == (2, (Window(3),))
    assert to_plain(changed) == {**PLAIN, "chain": [{"kind": "window", "left": 3, "right": 0}], "later": 2}
    assert from_plain(Whole, {**PLAIN, "later": 0}, "whole") == WHOLE
    with pytest.raises(ArgumentError, match=r"^whole field later must be of type int; got False"):
        from_plain(Whole, {**PLAIN, "later": False}, "whole")


def test_unions_go_by_kind_and_else_by_their_keys() -> None:
    chain = [{"kind": "softcap", "cap": 30.0}, {"kind": "window", "left": 1, "right": 2}]
    assert from_plain(Whole, {**PLAIN, "chain": chain}, "whole").chain == (Softcap(30.0), Window(1, 2))
    assert from_plain(Whole, {**PLAIN, "outcome": {"seconds": 1.0, "rounds": 7}}, "whole").outcome == Seconds(1.0, 7)
    assert from_plain(Softcap, to_plain(Softcap(2.0)), "softcap") == Softcap(2.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"window": 3}, "whole must have the fields pass, name, rows, .*; got pass, .*, window"),
    "bool for int": ({"rows": True}, "whole field rows must be of type int; got True"),
    "text for int": ({"rows": "1"}, "whole field rows must be of type int; got '1'"),
    "float for int": ({"rows": 1.0}, r"whole field rows must be of type int; got 1\.0"),
    "int for bool": ({"on": 1}, "whole field on must be of type bool; got 1"),
    "none for text": ({"name": None}, "whole field name must be of type str; got None"),
    "huge": ({"rows": 10**400}, "rows must be an integer from 1 to 2147483647; got 1000"),
    "true for enum 1": ({"place": True}, "whole field place must be one of here, 1; got True"),
    "list for enum": ({"place": []}, r"whole field place must be one of here, 1; got \[\]"),
    "nested unknown": (
        {"nested": {"rows": 1, "columns": 2, "depth": 3}},
        "nested must have the fields rows, columns; got rows, columns, depth",
    ),
    "nested missing": ({"nested": {"rows": 1}}, "nested must have the fields rows, columns; got rows$"),
    "nested text": ({"nested": "x"}, "nested must have the fields rows, columns; got 'x'"),
    "optional text": ({"maybe": "x"}, "maybe must have the fields rows, columns; got 'x'"),
    "optional number": ({"number": "x"}, "whole field number must be of type int; got 'x'"),
    "NaN": ({"outcome": {"seconds": float("nan"), "rounds": 1}}, "outcome field seconds must be a finite number; got nan"),
    "infinite": ({"outcome": {"seconds": float("-inf"), "rounds": 1}}, "outcome field seconds must be a finite number; got -inf"),
    "int for float": ({"outcome": {"seconds": 1, "rounds": 1}}, "outcome field seconds must be of type float; got 1"),
    "two of a union": ({"outcome": {"seconds": 1.0, "rounds": 1, "fault": "", "message": ""}}, "outcome must have the fields"),
    "none of a union": ({"outcome": None}, "outcome must have the fields seconds, rounds; got None"),
    "array": ({"numbers": {"0": 1}}, "whole field numbers must be of type list; got {'0': 1}"),
    "item": ({"numbers": [1, None]}, "whole field numbers value 1 must be of type int; got None"),
    "pair of one": ({"pair": [7]}, "whole field pair must have 2 values; got 1"),
    "mapping": ({"by_name": []}, r"by_name must be of type dict; got \[\]"),
    "in a mapping": ({"by_name": {"a": {}}}, "by_name a must have the fields seconds, rounds; got none"),
    "key of a mapping": ({"by_name": {1: {}}}, "key of by_name must be of type str; got 1"),
    "literal": ({"layout": "sbhd"}, "whole field layout must be one of bshd, bhsd; got 'sbhd'"),
    "no kind": ({"chain": [{"cap": 1.0}]}, "kind of chain value 0 must be one of softcap, window; got None"),
    "unknown kind": ({"chain": [{"kind": "alibi"}]}, "kind of chain value 0 must be one of softcap, window; got 'alibi'"),
    "kind is a list": ({"chain": [{"kind": []}]}, r"kind of chain value 0 must be one of softcap, window; got \[\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=f"^{message}"):
        from_plain(Whole, {**PLAIN, **change}, "whole")


@pytest.mark.parametrize("missing", PLAIN)
def test_a_missing_field_is_refused(missing: str) -> None:
    with pytest.raises(ArgumentError, match=r"^whole must have the fields pass, .*later; got "):
        from_plain(Whole, {key: value for key, value in PLAIN.items() if key != missing}, "whole")


def test_another_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^kind of softcap must be one of softcap; got 'window'"):
        from_plain(Softcap, {"kind": "window", "cap": 1.0}, "softcap")


def test_long_values_are_cut_short() -> None:
    for values in ({**PLAIN, "name": ["x" * 10**6]}, {**PLAIN, "x" * 10**6: 1}, 10**5000):
        with pytest.raises(ArgumentError, match=r"^whole ") as caught:
            from_plain(Whole, values, "whole")
        assert len(str(caught.value)) < 600


@dataclass(frozen=True)
class Careless:
    later: int = field(metadata=ADDED_LATER)


@dataclass(frozen=True)
class Unknown:
    folder: Path


def test_a_type_that_json_cannot_hold_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match=r"Careless\.later was added later and needs a default"):
        from_plain(Careless, {}, "careless")
    with pytest.raises(TypeError, match=r"unknown field folder has type .*Path"):
        from_plain(Unknown, {"folder": "/"}, "unknown")


def test_canonical_text_and_digest() -> None:
    assert canonical({"b": [1, 2.5], "a": "\u00e4"}) == '{"a":"\\u00e4","b":[1,2.5]}'
    assert digest({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for wrong in ({1, 2}, float("nan"), {"x": Path()}, deep):
        with pytest.raises(ArgumentError, match=r"^value must hold finite JSON values only; got "):
            canonical(wrong)


TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "whole JSON; got "),
    "cut off": (b'{"a": [1, 2', "whole JSON; got "),
    "two values": (b"1 2", "whole JSON; got Extra data"),
    "NaN": (b'{"a": NaN}', "whole JSON; got NaN, which is no number"),
    "infinite": (b"[-Infinity]", "whole JSON; got -Infinity, which is no number"),
    "beyond a float": (b"[1e999]", "whole JSON; got 1e999, which is no number"),
    "number of thousands of digits": (b"[" + b"9" * 5000 + b"]", "whole JSON; got Exceeds the limit"),
    "key twice": (b'{"a": {"b": 1, "b": 1}}', "whole JSON; got the key 'b' twice"),
    "no UTF-8": (b'{"a": "\xff"}', "whole JSON; got .*utf-8"),
    "half a character": (b'{"a": "\\ud83d"}', "whole JSON; got .*surrogates not allowed"),
    "half a character as a key": (b'{"\\uDC00": 1}', "whole JSON; got .*surrogates not allowed"),
    "nested lists": (b"[" * 10**6, f"whole JSON; got more than {MAX_DEPTH} levels"),
    "nested objects": (b'{"a":' * 10**5, f"whole JSON; got more than {MAX_DEPTH} levels"),
    "a little too deep": (b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH, f"whole JSON; got more than {MAX_DEPTH} levels"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_nobody_wrote_is_refused_with_the_file_s_name(name: str) -> None:
    text, message = TEXTS[name]
    with pytest.raises(ArgumentError, match=f"^file x.json must be {message}"):
        parse(text, "file x.json")


def test_text_that_is_whole() -> None:
    assert parse(b'\xef\xbb\xbf{"a": [1, 2.5, null, true, "\\ud83d\\ude00", "\xc3\xa4"]}', "file") == {
        "a": [1, 2.5, None, True, "\U0001f600", "\u00e4"]
    }
    assert parse("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "file")


def test_a_text_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BYTES > 10**8, "hundreds of thousands of records"
    monkeypatch.setattr("flashgen.codegen.plain.MAX_BYTES", 10)
    with pytest.raises(ArgumentError, match=r"^file must have at most 10 bytes; got 11"):
        parse(b"[1,2,3,4,5]", "file")
