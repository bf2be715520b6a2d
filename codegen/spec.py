"""`KernelSpec`: everything that decides the source text of one kernel, with its name and digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import Config
from .errors import ArgumentError
from .family import Family, find_family
from .plain import digest, from_plain, to_plain
from .problem import Problem
from .program import BlockResources, KernelText
from .target import Target, find_target
from .typed import require_field_types, require_type


@dataclass(frozen=True)
class KernelSpec:
    """(family, problem, config, target). Raises IllegalConfigError, with all reasons, if they do not go together."""

    family: Family
    problem: Problem
    config: Config
    target: Target

    def __post_init__(self) -> None:
        require_field_types(self)
        self.family.require_legal(self.problem, self.config, self.target)

    @property
    def name(self) -> str:
        """For people; also the kernel's extern "C" entry and the stem of its files."""
        return f"{self.family.name}_{self.problem.variant}_{self.config.name}_{self.target.name}"

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON, as hex digits."""
        return digest(self.to_json())

    @property
    def kernels(self) -> dict[str, KernelText]:
        """The kernels of its text, by suffix."""
        return {kernel.suffix: kernel for kernel in self.family.kernels(self.problem, self.config)}

    @property
    def resources(self) -> Mapping[str, BlockResources]:
        """What a block of each of its kernels takes, by suffix."""
        return self.family.resources(self.problem, self.config)

    @property
    def largest_block(self) -> BlockResources:
        """The one figure to show for a text: the most threads and the most shared memory that a block of any of its kernels takes."""
        blocks = self.resources.values()
        return BlockResources(max(block.threads for block in blocks), max(block.shared_bytes for block in blocks))

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON values, the family's revision included."""
        plain = PlainSpec(self.family.name, self.family.revision, self.problem, self.config.to_json(), self.target.name)
        values: dict[str, Any] = to_plain(plain)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], target: Target | None = None) -> KernelSpec:
        """The reverse of `to_json`. `target` is taken where it has the name asked for: it may be one without a file.

        Raises ArgumentError if the family's revision is another, or a value is not allowed.
        """
        require_type("target", target, Target | None)
        plain = PlainSpec.from_json(values)
        family = find_family(plain.family)
        if plain.revision != family.revision:
            raise ArgumentError(f"revision of {family.name} must be {family.revision}; got {plain.revision}: generate the kernel again")
        return plain.as_of_now(target)


@dataclass(frozen=True)
class PlainSpec:
    """What the JSON of a spec holds, of any revision: the config is the family's of then, so it is only known to be an object."""

    family: str
    revision: int
    problem: Problem
    config: dict[str, Any]
    target: str

    @classmethod
    def from_json(cls, values: object) -> PlainSpec:
        """Reads what `KernelSpec.to_json` gave. Raises ArgumentError for a field that is unknown, missing or not allowed."""
        return from_plain(cls, values, "spec")

    def as_of_now(self, target: Target | None = None, problem: Problem | None = None) -> KernelSpec:
        """The spec of that problem, config and target in the family's present revision. Raises ArgumentError if there is none.

        problem: another one, for which the config is adapted
        """
        family = find_family(self.family)
        named = target if target and target.name == self.target else find_target(self.target)
        config = family.config_type.from_json(self.config)
        if problem is not None:
            return KernelSpec(family, problem, family.adapted(problem, config), named)
        return KernelSpec(family, self.problem, config, named)


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem as JSON values."""
    values: dict[str, Any] = to_plain(problem)
    return values


def problem_from_json(values: object) -> Problem:
    """The reverse of `problem_to_json`. Raises ArgumentError for a field that is unknown, missing or not allowed."""
    return from_plain(Problem, values, "problem")
