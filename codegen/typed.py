"""Types of values, checked against annotations: arguments of public functions (`checked`), fields of dataclasses (`require_field_types`).

Types are exact where a value decides text or a key: True is no int, 128.0 is no int, an instance of a subclass of str is no str.
A float is any real number but a bool, as in a call: `scale=1` and a float64 of NumPy are fine.
"""

from __future__ import annotations

import enum
import inspect
import numbers
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ArgumentError, choice_error, shown

P = ParamSpec("P")
T = TypeVar("T")

_EXACT = (bool, int, str)


def require_type(name: str, value: object, annotation: Any) -> None:
    """Raises ArgumentError, which begins with `name`, unless `value` has the annotated type."""
    if not _fits(value, annotation):
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            raise choice_error(name, value, annotation)
        raise ArgumentError(f"{name} must be of type {_name(annotation)}; got {shown(value)}")


def require_field_types(instance: Any, owner: str = "") -> None:
    """Checks the fields of a dataclass, for its `__post_init__`. Errors begin with the field's name, after `owner` where it is given."""
    cls: type = type(instance)
    for name, kind in _field_types(cls):
        value = getattr(instance, name)
        if type(value) is not kind:  # else there is nothing to look into: configs are made by the thousand
            require_type(f"{owner}{name}", value, kind)


def parse_int(name: str, text: str) -> int:
    """The integer that `text` writes in plain digits. Raises ArgumentError for anything else that Python takes, such as 1_28 or blanks."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ArgumentError(f"{name} must be an integer in plain digits, such as 128; got {shown(text)}")
    return int(text)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which checks its arguments against its annotations before anything else."""
    signature = inspect.signature(function)
    named = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says what is missing or too much
        kinds = _argument_types(function)
        for name in named:
            if name in given:
                require_type(name, given[name], kinds[name])
        return function(*args, **kwargs)

    return call


@cache
def _field_types(cls: type) -> tuple[tuple[str, Any], ...]:
    kinds = get_type_hints(cls)
    return tuple((field.name, kinds[field.name]) for field in fields(cls))


@cache
def _argument_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Without the type that it returns, which may be known to type checkers only."""
    written = {name: text for name, text in function.__annotations__.items() if name != "return"}
    return get_type_hints(types.SimpleNamespace(__annotations__=written), globalns=function.__globals__)


def _fits(value: object, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if kind is None:
        return value is None
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in inner)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in inner)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, origin) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if type(value) is range and origin is Sequence:  # which may have no end to speak of
        return _fits(value.start, inner[0])
    if origin is not None and issubclass(origin, Sequence):
        return isinstance(value, origin) and not isinstance(value, (str, bytes)) and all(_fits(item, inner[0]) for item in value)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind in _EXACT:
        return type(value) is kind
    return isinstance(value, kind)


def _name(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is None or kind is types.NoneType:
        return "None"
    if origin in (Union, types.UnionType):
        return " or ".join(map(_name, inner))
    if origin is Literal:
        return ", ".join(map(repr, inner))
    if origin is not None:
        return f"{origin.__name__} of {' to '.join(_name(member) for member in inner if member is not ...)}"
    return getattr(kind, "__name__", str(kind))
