"""What a modifier means in plain PyTorch: `Link`, one of the chain that oracles put scores through, as kernels do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

from flashgen.codegen.discovery import defined
from flashgen.codegen.modifier import modifiers_of
from flashgen.codegen.problem import Problem


@dataclass(frozen=True)
class Rows:
    """Rows of scores: `queries`, int64 [rows], of a sequence of len_q, against all len_kv keys."""

    queries: Tensor
    len_q: int
    len_kv: int

    @property
    def keys(self) -> Tensor:
        """[1, len_kv]."""
        return torch.arange(self.len_kv, device=self.queries.device)[None]

    @property
    def causal_last(self) -> Tensor:
        """The last key that each query sees under a causal mask, [rows, 1]: below 0 and beyond len_kv, too."""
        return (self.queries + self.len_kv - self.len_q)[:, None]


class Link(ABC):
    """`flashgen/numerics/modifiers/<modifier>.py` defines a subclass and names it `LINK`."""

    @classmethod
    @abstractmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """The link of a call with these operands and scalars."""

    @abstractmethod
    def hidden(self, rows: Rows) -> Tensor:
        """Which keys it hides from the rows: bool [rows, len_kv]."""


def links_of(problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> tuple[Link, ...]:
    """The links of a problem's modifiers, in the order of composition."""
    return tuple(_kind(modifier.name).of(tensors, scalars) for modifier in modifiers_of(problem))


@cache
def _kind(name: str) -> type[Link]:
    from . import modifiers as package

    found: type[Link] = defined(package, name, "LINK", type)
    return found


def hidden_keys(rows: Rows, causal: bool, links: Sequence[Link] = ()) -> Tensor:
    """Which keys the mask and the links hide from the rows: bool [rows, len_kv]."""
    end = rows.causal_last if causal else torch.full_like(rows.causal_last, rows.len_kv)
    hidden = rows.keys > end
    for link in links:
        hidden = hidden | link.hidden(rows)
    return hidden
