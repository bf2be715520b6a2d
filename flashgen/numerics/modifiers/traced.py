"""Traced functions of scores and masks: see flashgen/codegen/modifiers/traced.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

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

    def changed(self, s: Tensor, rows: Rows) -> Tensor:
        """See Link."""
        assert rows.heads is not None
        inputs = {"score": s, "batch": torch.tensor(rows.batch, device=s.device), "head": rows.heads[..., None]}
        inputs |= {"query": rows.queries[:, None], "key": rows.keys}
        functions = self.modifier.functions
        if functions.score is not None:
            s = evaluated(functions.score, inputs, self.tensors, self.numbers, s.dtype, nearest=True).expand(s.shape).clone()
        if functions.mask is not None:
            s = s.masked_fill_(~evaluated(functions.mask, inputs, self.tensors, self.numbers, s.dtype, nearest=True), -torch.inf)
        return s


@cache
def _link_of(name: str) -> type[TracedLink]:
    return type("TracedLink", (TracedLink,), {"modifier": modifier_named(name)})


LINK = TracedLink
