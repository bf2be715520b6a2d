"""Values as JSON and back: the one codec of problems, configs, specs, records and results. It is strict, and driven by annotations.

A dataclass becomes an object with a key for each field, an enum its value, a tuple or list an array. A field's metadata may say more:

- `named("pass")`: the JSON key, where it is not the field's name
- `INLINE`: the fields of this dataclass stand among its owner's
- `ADDED_LATER`: JSON of before the field was added lacks it, so the key is left out while the field has its default

In a union of dataclasses the key "kind" tells them apart, which has the value of the class attribute `kind`; where they have none, the
member that shares most keys with the object is taken. Reading refuses what it does not know, what is missing and what has another type:
True is no int, 1 is no float, and a number is finite. What a value may be beyond its type is checked by the class that is made of it.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ArgumentError, choice_error, shown

MAX_BYTES, MAX_DEPTH = 2**28, 64

T = TypeVar("T")

_SCALARS = (int, float, bool, str, types.NoneType)

_KEY, _INLINE, _LATER, _FIRST = "json key", "json inline", "json added later", "json first"
INLINE = {_INLINE: True}
ADDED_LATER = {_LATER: True}

_LONGEST = 300  # characters of a list of fields, or of a parser's words, that an error repeats


def named(key: str, first: bool = False) -> dict[str, Any]:
    """Metadata of a field that has another name in JSON; `first`: its key comes before those of the fields above it."""
    return {_KEY: key, _FIRST: first}


def to_plain(value: Any) -> Any:
    """`value` as JSON values: what `from_plain` reads."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _object_of(value)
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], value: Any, what: str) -> T:
    """A `kind` made of JSON values, the reverse of `to_plain`; `what` names the value in errors.

    Raises ArgumentError that names the field and its owner for one that is unknown, missing or of a wrong type.
    """
    made: T = _read(kind, value, what)
    return made


@cache
def keys(kind: Any) -> tuple[str, ...]:
    """The keys that a dataclass has in JSON, in order."""
    return tuple(key for field in _fields(kind) for key in (keys(field.kind) if field.inline else (field.key,)))


def canonical(value: Any) -> str:
    """One text for equal JSON values, for digests. Raises ArgumentError for anything that is no JSON value."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"value must hold finite JSON values only; got {shown(value)}") from error


def digest(value: Any) -> str:
    """sha256 of the canonical text, as hex digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def parse(data: bytes | str, what: str) -> Any:
    """Reads JSON text, UTF-8 if it is bytes. `what` names it in errors: 'file x.json'.

    Raises ArgumentError for anything but whole JSON, and for what JSON allows but nobody writes: a key given twice, NaN and numbers beyond
    a float, lone surrogates, more than MAX_BYTES or MAX_DEPTH.
    """
    if len(data) > MAX_BYTES:
        raise ArgumentError(f"{what} must have at most {MAX_BYTES} bytes; got {len(data)}")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_float)
        _require_shallow(value)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate has no UTF-8
    except RecursionError:
        raise ArgumentError(f"{what} must be whole JSON; got more than {MAX_DEPTH} levels") from None
    except ValueError as error:  # of the decoder, the parser, the encoder, and our own
        raise ArgumentError(f"{what} must be whole JSON; got {_brief(str(error)) or 'nothing'}") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} twice")
    return values


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no number")


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(_brief(text))


def _require_shallow(value: Any) -> None:
    """Raises RecursionError beyond MAX_DEPTH: whoever walks the value later must not meet Python's own limit."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        level = [item for v in level if isinstance(v, (dict, list)) for item in (v.values() if isinstance(v, dict) else v)]


@dataclass(frozen=True)
class _Field:
    """A field of a dataclass, as JSON has it. `default` is `dataclasses.MISSING` unless the key may be left out.

    is_object: whether errors about it begin with its own key, as those of its class do, and not with its owner's
    """

    name: str
    key: str
    kind: Any
    inline: bool
    default: Any
    is_object: bool


@cache
def _fields(kind: type) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    found: list[_Field] = []
    for field in dataclasses.fields(kind):
        later = field.metadata.get(_LATER, False)
        if later and field.default is dataclasses.MISSING:
            raise TypeError(f"{kind.__name__}.{field.name} was added later and needs a default")
        key, inline = field.metadata.get(_KEY, field.name), field.metadata.get(_INLINE, False)
        default, hint = field.default if later else dataclasses.MISSING, hints[field.name]
        made = _Field(field.name, key, hint, inline, default, _is_object(hint))
        found.insert(0 if field.metadata.get(_FIRST) else len(found), made)
    return tuple(found)


def _tag(kind: Any) -> str | None:
    """The value of a dataclass's class attribute `kind`; None where it has none, or where `kind` is a field."""
    tag = getattr(kind, "kind", None)
    return tag if isinstance(tag, str) and all(field.name != "kind" for field in _fields(kind)) else None


def _object_of(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    tag = _tag(kind)
    plain: dict[str, Any] = {} if tag is None else {"kind": tag}
    for field in _fields(kind):
        item = getattr(value, field.name)
        if field.inline:
            plain |= to_plain(item)
        elif not (type(item) is type(field.default) and item == field.default):
            plain[field.key] = to_plain(item)
    return plain


def _read(kind: Any, value: Any, what: str) -> Any:
    if kind in _SCALARS:
        return _typed(kind, value, what)
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, what)
    if origin is Literal:
        return _one_of(arguments, value, what)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_one_of([member.value for member in kind], value, what))
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, value, what)
    if (origin or kind) in (tuple, list):
        return _read_array(kind, value, what)
    if isinstance(origin or kind, type) and issubclass(origin or kind, Mapping):
        of = (arguments or (str, Any))[1]
        for key in _typed(dict, value, what):
            _typed(str, key, f"key of {what}")
        return dict(value) if of is Any else {key: _read(of, item, f"{what} {_name(key)}") for key, item in value.items()}
    raise TypeError(f"{what} has type {kind!r}, which has no JSON")


def _typed(kind: Any, value: Any, what: str) -> Any:
    if type(value) is not kind:
        raise ArgumentError(f"{what} must be of type {kind.__name__}; got {shown(value)}")
    if kind is float and not math.isfinite(value):
        raise ArgumentError(f"{what} must be a finite number; got {value}")
    return value


def _one_of(allowed: Any, value: Any, what: str) -> Any:
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise choice_error(what, value, allowed)
    return value


def _read_array(kind: Any, value: Any, what: str) -> Any:
    origin, arguments = get_origin(kind) or kind, get_args(kind) or (Any, ...)
    items = _typed(list, value, what)
    if origin is list or arguments[1:] == (...,):
        arguments = (arguments[0],) * len(items)
    if len(items) != len(arguments):
        raise ArgumentError(f"{what} must have {len(arguments)} values; got {len(items)}")
    return origin(_read(a, item, f"{what} value {i}") for i, (a, item) in enumerate(zip(arguments, items, strict=True)))


def _read_union(members: tuple[Any, ...], value: Any, what: str) -> Any:
    if value is None and types.NoneType in members:
        return None
    classes = [m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type)]
    if classes and (isinstance(value, dict) or len(classes) == len(members) - (types.NoneType in members)):
        given = value if isinstance(value, dict) else {}
        tags = {tag: member for member in classes if (tag := _tag(member)) is not None}
        if tags:
            return _read(tags[_one_of(list(tags), given.get("kind"), f"kind of {what}")], value, what)
        return _read(max(classes, key=lambda member: len(given.keys() & set(keys(member)))), value, what)
    others = [m for m in members if m not in classes and m is not types.NoneType]
    fitting = [m for m in others if type(value) is (get_origin(m) or m)]
    if len(others) > 1 and not fitting:
        raise ArgumentError(f"{what} must be of type {' or '.join(getattr(m, '__name__', str(m)) for m in others)}; got {shown(value)}")
    return _read((fitting or others)[0], value, what)


def _read_object(kind: Any, value: Any, what: str) -> Any:
    tag = () if _tag(kind) is None else ("kind",)
    allowed = (*tag, *keys(kind))
    if not isinstance(value, dict) or not _required(kind).union(tag) <= value.keys() <= set(allowed):
        got = ", ".join(map(_name, value)) or "none" if isinstance(value, dict) else shown(value)
        raise ArgumentError(f"{what} must have the fields {', '.join(allowed)}; got {_brief(got)}")
    if tag:
        _one_of([_tag(kind)], value["kind"], f"kind of {what}")
    return kind(**_arguments(kind, value, what))


def _arguments(kind: Any, value: dict[str, Any], what: str) -> dict[str, Any]:
    found = {}
    for field in _fields(kind):
        if field.inline:
            found[field.name] = field.kind(**_arguments(field.kind, value, what))
        elif field.key in value:
            inner = field.key if field.is_object else f"{what} field {field.key}"
            found[field.name] = _read(field.kind, value[field.key], inner)
    return found


def _is_object(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or any(map(_is_object, get_args(kind)))


@cache
def _required(kind: Any) -> frozenset[str]:
    found: set[str] = set()
    for field in _fields(kind):
        if field.inline:
            found |= _required(field.kind)
        elif field.default is dataclasses.MISSING:
            found.add(field.key)
    return frozenset(found)


def _name(key: Any) -> str:
    return key if isinstance(key, str) and key.isprintable() else shown(key)  # what a terminal could take for a command is escaped


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
