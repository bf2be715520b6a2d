"""`KernelSpec`: everything that decides the source text of one kernel, with its name and digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import Config
from .errors import ArgumentError
from .family import Family, find_family
from .problem import Dtype, Mask, Pass, Problem
from .target import Target, find_target


@dataclass(frozen=True)
class KernelSpec:
    """(family, problem, config, target). Raises IllegalConfigError, with all reasons, if they do not go together."""

    family: Family
    problem: Problem
    config: Config
    target: Target

    def __post_init__(self) -> None:
        self.family.require_legal(self.problem, self.config, self.target)

    @property
    def name(self) -> str:
        """For people; also the kernel's extern "C" entry and the stem of its files."""
        return f"{self.family.name}_{self.problem.name}_{self.config.name}_{self.target.name}"

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON, as hex digits."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON values, the family's revision included."""
        return {
            "family": self.family.name,
            "revision": self.family.revision,
            "problem": problem_to_json(self.problem),
            "config": self.config.to_json(),
            "target": self.target.name,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], target: Target | None = None) -> KernelSpec:
        """The reverse of `to_json`. `target` is taken where it has the name asked for: it may be one without a file.

        Raises ArgumentError if the family's revision is another, or a value is not allowed.
        """
        try:
            family = find_family(values["family"])
            if values["revision"] != family.revision:
                raise ArgumentError(
                    f"revision of {family.name} must be {family.revision}; got {values['revision']!r}: generate the kernel again"
                )
            problem = problem_from_json(values["problem"])
            named = target if target and target.name == values["target"] else find_target(values["target"])
            return cls(family, problem, family.config_type.from_json(values["config"]), named)
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"spec must have family, revision, problem, config and target; got {dict(values)!r}") from error


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem as JSON values."""
    return {
        "pass": problem.direction.value,
        "dtype": problem.dtype.value,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "mask": problem.mask.value,
    }


def problem_from_json(values: Mapping[str, Any]) -> Problem:
    """The reverse of `problem_to_json`. Raises ArgumentError for a value that is not allowed."""
    try:
        dtype, mask, direction = Dtype(values["dtype"]), Mask(values["mask"]), Pass(values["pass"])
        widths = values["head_dim"], values["head_dim_v"]
    except (KeyError, ValueError) as error:
        raise ArgumentError(f"problem must have pass, dtype, head_dim, head_dim_v and mask; got {dict(values)!r}") from error
    return Problem(dtype, *widths, mask, direction)
