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
from flashgen.codegen.modifiers import kind_of
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload


@dataclass(frozen=True)
class Rows:
    """Rows of scores: `queries`, int64 [rows], of a sequence of len_q, against all len_kv keys.

    batch, heads: the entry of the batch, and the query head of each row, int64 [n, rows], for links that change scores [n, rows, len_kv];
    heads_q: how many heads there are
    """

    queries: Tensor
    len_q: int
    len_kv: int
    batch: int = 0
    heads: Tensor | None = None
    heads_q: int = 0

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
    def of_name(cls, name: str) -> type[Link]:
        """The link of the modifier of that name: see Modifier.of_name."""
        return cls

    @classmethod
    @abstractmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """The link of a call with these operands and scalars."""

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The modifier's operand of that name as verification has it, fp32 on the generator's device."""
        return torch.randn(sizes, generator=generator, device=generator.device)

    def hidden(self, rows: Rows) -> Tensor | None:
        """Which keys it hides from the rows: bool [rows, len_kv]; None for none."""
        return None

    def opened(self, rows: Rows) -> Tensor | None:
        """Which keys the rows see, whatever the causal mask and `hidden` of links hide: bool [rows or 1, len_kv]; None for none."""
        return None

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """What it makes of scaled scores [n, rows, len_kv], in their element type. May reuse their memory."""
        return s

    @property
    def keeps_scores(self) -> bool:
        """Whether what its gradients are depends on the scores that `changed` gets."""
        return False

    def derivative(self, changed: Tensor, before: Tensor | None, rows: Rows) -> Tensor | None:
        """Of `changed` by what came of it, or by the scores `before`, if it `keeps_scores`; None for 1."""
        return None

    def joined(self, rows: Rows) -> Tensor | None:
        """A score without a value that joins the softmax of each row: [n, rows]; None for none."""
        return None

    def kept(self, rows: Rows) -> Tensor | None:
        """What it multiplies P by, [n, rows, len_kv]; None for 1."""
        return None

    def add_gradients(  # noqa: B027  # most have none
        self, sums: Mapping[str, Tensor], d_scores: Tensor, rows: Rows, before: Tensor | None, squared: bool = False
    ) -> None:
        """Adds what rows of a head give to gradients of its operands, by name. d_scores: of scores as it leaves them, [rows, len_kv].

        before:  the scores that `changed` got, if it `keeps_scores`
        squared: the square of what each score gives is added: of one whose gradients are sums, and d_scores errors
        """

    def add_joined(self, sums: Mapping[str, Tensor], d_joined: Tensor, rows: Rows) -> None:  # noqa: B027  # most have none
        """The same, where `joined` has a gradient, d_joined, [n, rows]."""


def links_of(problem: Problem, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> tuple[Link, ...]:
    """The links of a problem's modifiers, in the order of composition."""
    return tuple(_kind(modifier.name).of(tensors, scalars) for modifier in modifiers_of(problem))


def hiding_links(problem: Problem, scalars: Mapping[str, float]) -> tuple[Link, ...]:
    """Those of `links_of` that hide keys, which need no operands. Others may show some of them: `opens_keys`."""
    hiding = (kind for kind in (_kind(modifier.name) for modifier in modifiers_of(problem)) if kind.hidden is not Link.hidden)
    return tuple(kind.of({}, scalars) for kind in hiding)


def drawn_operands(problem: Problem, workload: Workload, generator: torch.Generator) -> dict[str, Tensor]:
    """`Link.drawn` of all operands of a problem's modifiers, by name."""
    return {
        operand.name: _kind(modifier.name).drawn(operand.name, operand.sizes(problem, workload), generator)
        for modifier in modifiers_of(problem)
        for operand in modifier.operands(problem)
    }


@cache
def _kind(name: str) -> type[Link]:
    from . import modifiers as package

    found: type[Link] = defined(package, kind_of(name), "LINK", type)
    return found.of_name(name)


def hidden_keys(rows: Rows, causal: bool, links: Sequence[Link] = ()) -> Tensor:
    """Which keys the causal mask and `hidden` of the links hide from the rows, less those that are `opened`: bool [rows, len_kv]."""
    end = rows.causal_last if causal else torch.full_like(rows.causal_last, rows.len_kv)
    hidden = rows.keys > end
    for link in links:
        own = link.hidden(rows)
        hidden = hidden if own is None else hidden | own
    for shown in (link.opened(rows) for link in links):
        hidden = hidden if shown is None else hidden & ~shown
    return hidden


def joined_scores(rows: Rows, links: Sequence[Link]) -> Tensor | None:
    """The score that joins each row, [n, rows]. One link at most has one."""
    found = [own for own in (link.joined(rows) for link in links) if own is not None]
    return found[0] if found else None


def kept_factors(rows: Rows, links: Sequence[Link]) -> Tensor | None:
    """What P is multiplied by, [n, rows, len_kv]; None for 1. One link at most has such."""
    found = [own for own in (link.kept(rows) for link in links) if own is not None]
    return found[0] if found else None


@dataclass(frozen=True)
class Change:
    """What a link did with scores. before: as it got them, if it `keeps_scores`; derivative: see `Link.derivative`."""

    link: Link
    before: Tensor | None
    derivative: Tensor | None


def changed_scores(s: Tensor, rows: Rows, links: Sequence[Link]) -> Tensor:
    """What links make of scaled scores [n, rows, len_kv], one after the other."""
    for link in links:
        s = link.changed(s, rows)
    return s


def changes_of_scores(s: Tensor, rows: Rows, links: Sequence[Link]) -> tuple[Tensor, list[Change]]:
    """The same, and how."""
    changes = []
    for link in links:
        before = s.clone() if link.keeps_scores else None
        s = link.changed(s, rows)
        changes.append(Change(link, before, link.derivative(s, before, rows)))
    return s, changes


def add_gradients(
    changes: Sequence[Change], sums: Mapping[str, Tensor], d_scores: Tensor, rows: Rows, errors: Mapping[str, Tensor], error: Tensor | None
) -> None:
    """`Link.add_gradients` of all links, from the last to the first; d_scores, of changed scores, becomes the gradient of those before.

    error: of d_scores, whose squares are added to `errors`. A score without a gradient gives none, whatever its derivative is.
    """
    for change in reversed(changes):
        change.link.add_gradients(sums, d_scores, rows, change.before)
        if error is not None:
            change.link.add_gradients(errors, error, rows, change.before, squared=True)
        if change.derivative is not None:
            for each in (d_scores,) if error is None else (d_scores, error):
                each.copy_(torch.where(each == 0, 0.0, each * change.derivative[0]))
