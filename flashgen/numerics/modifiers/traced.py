"""Traced functions of scores and masks: see flashgen/codegen/modifiers/traced.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from flashgen.codegen.expressions.tree import Expression
from flashgen.codegen.modifier import modifier_named
from flashgen.codegen.modifiers.traced import CAPTURED_NUMBER, CAPTURED_TENSOR, VERIFIED_SIZES, TracedModifier
from flashgen.codegen.operands import Element

from ...traced.evaluation import evaluated
from ..link import Link, Rows


class TracedLink(Link):
    """What the functions of `modifier` make of scores. tensors, numbers: those that they capture, by their names in expressions."""

    modifier: ClassVar[TracedModifier]

    def __init__(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        self.tensors, self.numbers = tensors, numbers

    @classmethod
    def of_name(cls, name: str) -> type[Link]:
        """See Link."""
        return _link_of(name)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> Self:
        """See Link."""
        functions = cls.modifier.functions
        captured = {name: tensors[CAPTURED_TENSOR + name] for name in functions.tensor_kinds}
        return cls(captured, {name: scalars[CAPTURED_NUMBER + name] for name in functions.number_types})

    @classmethod
    def drawn(cls, name: str, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See Link. Of the sizes that verification has; whole numbers are few, so that some are equal."""
        operand = next(operand for operand in cls.modifier.operands() if operand.name == name)
        _, rank = cls.modifier.functions.tensor_kinds[name.removeprefix(CAPTURED_TENSOR)]
        if operand.element in (Element.F32, Element.BF16, Element.F16):
            return torch.randn(VERIFIED_SIZES[:rank], generator=generator, device=generator.device)
        return torch.randint(3, VERIFIED_SIZES[:rank], generator=generator, device=generator.device)

    def _inputs(self, s: Tensor, rows: Rows) -> dict[str, Tensor]:
        assert rows.heads is not None
        of_rows = {"head": rows.heads[..., None], "query": rows.queries[:, None], "key": rows.keys}
        return {"score": s, "batch": torch.tensor(rows.batch, device=s.device), **of_rows}

    @property
    def keeps_scores(self) -> bool:
        """See Link."""
        return self.modifier.bends_scores or bool(self.modifier.learned)

    def derivative(self, changed: Tensor, before: Tensor | None, rows: Rows) -> Tensor | None:
        """See Link. PyTorch's, as those of tensors are: the derivatives of flashgen.codegen.expressions are not asked."""
        if not self.modifier.bends_scores or self.modifier.functions.score is None:
            return None
        assert before is not None
        with torch.enable_grad():
            s = before.detach().requires_grad_()
            value = evaluated(self.modifier.functions.score, self._inputs(s, rows), self.tensors, self.numbers, s.dtype, nearest=True)
            (found,) = torch.autograd.grad(value.expand(s.shape).sum(), s, allow_unused=True) if value.requires_grad else (None,)
        return torch.zeros_like(before) if found is None else found

    def add_gradients(self, sums: Mapping[str, Tensor], d_scores: Tensor, rows: Rows, before: Tensor | None, squared: bool = False) -> None:
        """See Link."""
        wanted, score = self.modifier.learned, self.modifier.functions.score
        if not wanted or score is None:
            return
        assert before is not None
        parts: list[tuple[str, Tensor, Sequence[Tensor]]] = []

        def loaded(node: Expression, value: Tensor, indices: Sequence[Tensor]) -> Tensor:
            name = CAPTURED_TENSOR + node.value.tensor
            if name not in wanted:
                return value
            own = value.expand(before.shape).clone().requires_grad_()  # of each score, so that what each of them gives is there
            parts.append((name, own, indices))
            return own

        inputs = self._inputs(before.detach(), rows)
        with torch.enable_grad():
            value = evaluated(score, inputs, self.tensors, self.numbers, before.dtype, nearest=True, loaded=loaded)
            found = torch.autograd.grad(value.expand(before.shape), [own for _, own, _ in parts], d_scores[None], allow_unused=True)
        for (name, _, indices), given in zip(parts, found, strict=True):
            if given is None:
                continue
            of_scores = torch.where(d_scores == 0, 0.0, given)
            of_scores = of_scores.square() if squared else of_scores
            at = tuple(index.expand(of_scores.shape) for index in indices)
            total = sums[f"d_{name}"]
            if at:
                total.index_put_(at, of_scores.to(total.dtype), accumulate=True)
            else:
                total.add_(of_scores.sum())

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link."""
        inputs, functions = self._inputs(s, rows), self.modifier.functions
        if functions.score is not None:
            s = evaluated(functions.score, inputs, self.tensors, self.numbers, s.dtype, nearest=True).expand(s.shape).clone()
        if functions.mask is not None:
            s = s.masked_fill_(~evaluated(functions.mask, inputs, self.tensors, self.numbers, s.dtype, nearest=True), -torch.inf)
        return s


@cache
def _link_of(name: str) -> type[TracedLink]:
    return type("TracedLink", (TracedLink,), {"modifier": modifier_named(name)})


LINK = TracedLink
