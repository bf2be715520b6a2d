"""What a score_mod and a mask_mod are together, as expressions: their text, their C++, their derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from flashgen.codegen.errors import ArgumentError, shown

from .canonical_text import parse_tree, text_of
from .derivative import derivative
from .struct import by_number, struct_of
from .tree import FLOAT32, SCORE, Expression, loads_of, numbers_of


@dataclass(frozen=True)
class TracedGradient:
    """A part of the gradient of a captured tensor: its element `load` gains factor * dS for each score, dS being the changed score's."""

    tensor: str
    load: Expression
    factor: Expression


@dataclass(frozen=True)
class TracedFunctions:
    """A score_mod, a mask_mod or both, as expressions whose numbers are n0, n1, ... and whose tensors are t0, t1, ...

    score, mask: None where there is no such function
    text:        decides both, and with them the C++
    """

    score: Expression | None
    mask: Expression | None

    @cached_property
    def text(self) -> str:
        """`score: ...`, `mask: ...`, or both with `|` between them; each as flashgen.codegen.expressions.canonical_text says."""
        parts = {"score": self.score, "mask": self.mask}
        return " | ".join(f"{name}: {text_of(tree)}" for name, tree in parts.items() if tree is not None)

    @cached_property
    def source(self) -> str:
        """C++: a struct with the functions `changed`, of a score, its derivative `d_score`, and `visible`."""
        trees = {"changed": self.score, "d_score": self.d_score, "visible": self.mask}
        return struct_of("Traced", {name: tree for name, tree in trees.items() if tree is not None})

    @cached_property
    def trees(self) -> tuple[Expression, ...]:
        """Those that there are."""
        return tuple(tree for tree in (self.score, self.mask) if tree is not None)

    @cached_property
    def number_types(self) -> dict[str, str]:
        """int32 or float32 of each number, in the order of a call's numbers."""
        types = {each.value: str(each.type) for each in numbers_of(*self.trees)}
        return {name: types[name] for name in sorted(types, key=by_number)}

    @cached_property
    def tensor_kinds(self) -> dict[str, tuple[str, int]]:
        """Dtype and rank of each tensor, in the order of a call's tensors."""
        kinds = {each.value.tensor: (each.value.dtype, len(each.operands)) for each in loads_of(*self.trees)}
        return {name: kinds[name] for name in sorted(kinds, key=by_number)}

    @cached_property
    def d_score(self) -> Expression | None:
        """The changed score's derivative by the score; None without a score_mod."""
        return None if self.score is None else derivative(self.score, SCORE)

    @cached_property
    def gradients(self) -> tuple[TracedGradient, ...]:
        """Of all captured tensors of floating-point numbers that the score depends on. A mask has no gradients."""
        loads = [] if self.score is None else [load for load in loads_of(self.score) if load.type is FLOAT32]
        made = (TracedGradient(load.value.tensor, load, derivative(self.score, load)) for load in loads if self.score is not None)
        return tuple(each for each in made if each.factor.operation != "constant" or each.factor.value != 0)


@lru_cache(maxsize=2**10)
def functions_of(text: str) -> TracedFunctions:
    """The functions of a text. Raises ArgumentError for one that `TracedFunctions.text` never is."""
    found: dict[str, Expression] = {}
    for part in text.split(" | "):
        name, _, tree = part.partition(": ")
        if name not in ("score", "mask") or name in found:
            raise ArgumentError(f"text of traced functions must be `score: ..`, `mask: ..`, or both with | between; got {shown(text)}")
        found[name] = parse_tree(tree)
    functions = TracedFunctions(found.get("score"), found.get("mask"))
    if functions.text != text:
        raise ArgumentError(f"text of traced functions must be {functions.text}; got {shown(text)}")
    return functions
