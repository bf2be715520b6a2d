"""What may be chosen freely: the base of every family's `Config`, and reading one from `field=value` text."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self, get_type_hints

from .errors import choice_error
from .former_names import renamed
from .plain import ADDED_LATER, from_plain, to_plain
from .typed import parse_int, require_field_types, require_type


def tagged(tag: str, default: Any = dataclasses.MISSING, added_later: bool = False) -> Any:
    """A field of a config, and what stands for it in names of kernels: one to three letters, then its value.

    One that was `added_later` is in no name and no JSON while it has its default: what was recorded before stays what it was.
    """
    return dataclasses.field(default=default, metadata={"tag": tag} | (ADDED_LATER if added_later else {}))


@dataclass(frozen=True)
class Config:
    """Base of the config types. A subclass is a frozen dataclass of `tagged` fields, which are ints, bools or enums, each documented."""

    def __post_init__(self) -> None:
        require_field_types(self, "config field ")

    def to_json(self) -> dict[str, int | bool | str]:
        """Field values as JSON values, enums by value."""
        values: dict[str, int | bool | str] = to_plain(self)
        return values

    @classmethod
    def from_json(cls, values: object) -> Self:
        """The reverse of `to_json`, in this version or an earlier one. Raises ArgumentError for an unknown, missing or wrong field."""
        return from_plain(cls, renamed(values), "config")

    def replace_from_text(self, settings: Mapping[str, str]) -> Self:
        """A copy with fields set from text, as `--set block_q=128` gives them. Earlier names of fields and values are read, too.

        Raises ArgumentError for an unknown field or a value that its type does not allow.
        """
        require_type("settings", settings, Mapping[str, str])
        changes: dict[str, object] = {}
        for name, text in renamed(settings).items():
            kind = _field_type(type(self), name)
            changes[name] = _from_text(name, kind, text)
        return dataclasses.replace(self, **changes)

    def describe(self) -> str:
        """Every field by its name: 'block_q 128, ping_pong true'."""
        return ", ".join(f"{name} {value}" for name, value in self._texts().items())

    def settings(self, default: Config) -> str:
        """The fields that differ from `default`'s, as `--set` takes them: 'block_q=128 ping_pong=false'; empty if there are none."""
        usual = default._texts()
        return " ".join(f"{name}={value}" for name, value in self._texts().items() if value != usual.get(name))

    def _texts(self) -> dict[str, str]:
        return {name: str(value).lower() for name, value in self.to_json().items()}

    @property
    def name(self) -> str:
        """Short and unique within the family: every field's tag and value."""
        tags, values = _tags(type(self)), self.to_json().items()  # type: ignore[arg-type] # mypy takes classes for unhashable
        return "_".join(f"{tags[key]}{value:d}" if isinstance(value, int) else f"{tags[key]}{value}" for key, value in values)


def range_reasons(config: Config, ranges: Iterable[tuple[str, int, int, int]]) -> list[str]:
    """Why fields are illegal that must be from `low` to `high` and a multiple of `step`; ranges: (field, low, high, step)."""
    reasons = []
    for name, low, high, step in ranges:
        value = getattr(config, name)
        if not low <= value <= high or value % step:
            nearest = min(max(low, -(-value // step) * step), high)
            multiple = "" if step == 1 else f"a multiple of {step} "
            reasons.append(f"{name} must be {multiple}from {low} to {high}; got {value} (nearest: {nearest})")
    return reasons


@cache
def _tags(cls: type[Config]) -> dict[str, str]:
    """The tag of each field. Raises TypeError for one without, or that another field has whose value may be written alike."""
    tags: dict[str, str] = {}
    owners: dict[tuple[str, bool], str] = {}
    for field in dataclasses.fields(cls):
        tag, is_word = field.metadata.get("tag", ""), issubclass(_field_type(cls, field.name), enum.Enum)
        if not tag.isalpha():
            raise TypeError(f"{cls.__name__}.{field.name} must be tagged with letters; got {tag!r}")
        if (tag, is_word) in owners:
            raise TypeError(f"{cls.__name__}.{field.name} must have a tag of its own; got {tag!r}, which is that of {owners[tag, is_word]}")
        owners[tag, is_word] = field.name
        tags[field.name] = tag
    return tags


def _field_type(cls: type[Config], name: str) -> type:
    hints = get_type_hints(cls)
    fields = [f.name for f in dataclasses.fields(cls)]
    if name not in fields:
        raise choice_error("config field", name, fields)
    kind: type = hints[name]
    return kind


def _from_text(name: str, kind: type, text: str) -> object:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise choice_error(f"config field {name}", text, ("true", "false"))
        return text.lower() in ("true", "1")
    if kind is int:
        return parse_int(f"config field {name}", text)
    if issubclass(kind, enum.Enum):
        if text not in [k.value for k in kind]:
            raise choice_error(f"config field {name}", text, (k.value for k in kind))
        return kind(text)
    raise TypeError(f"config field {name} has type {kind!r}, which text cannot set")
