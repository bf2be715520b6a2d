"""Functions of scores and masks that were traced. Each has a modifier of its own, whose name says all of it: `traced(score: ...)`.

`score_mod` acts on scaled scores behind softcap, ALiBi and bias, `mask_mod` hides keys among those that all other masks let a query see.
Captured tensors may have any shape: their sizes and strides are numbers of a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from flashgen.codegen.attention import float32
from flashgen.codegen.expressions.functions import TracedFunctions, functions_of
from flashgen.codegen.expressions.recognition import added_term
from flashgen.codegen.expressions.struct import struct_of
from flashgen.codegen.modifier import Modifier, score_unit
from flashgen.codegen.modifiers import TRACED
from flashgen.codegen.operands import Call, Element, Operand
from flashgen.codegen.operation import dense
from flashgen.codegen.parameters import Parameter
from flashgen.codegen.problem import Problem
from flashgen.codegen.workload import Workload

TILE_FILE = "common/expressions"
CAPTURED_NUMBER, CAPTURED_TENSOR = "traced_number_", "traced_tensor_"
_ELEMENTS = {
    **{"bf16": Element.BF16, "fp16": Element.F16, "fp32": Element.F32, "int64": Element.I64, "int32": Element.I32},
    **{"int16": Element.I16, "int8": Element.I8, "uint8": Element.U8, "bool": Element.BOOL},
}
_C_TYPES = {
    **{"bf16": "u16", "fp16": "u16", "fp32": "float", "int64": "i64", "int32": "int"},
    **{"int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool"},
}
_IN_KERNELS = {"bf16": "Bf16", "fp16": "Fp16"}  # what else kernels call elements
VERIFIED_SIZES = (64, 48, 8, 4)  # of captured tensors in verification, by axis
LONGEST, MOST_HEADS = 2**29, 2**24  # of what int32 arithmetic of expressions counts on (expressions/bounds.py)
FARTHEST = 2**31  # elements
_EXAMPLE = functions_of(
    "score: add(score, mul(t0:bf16[head, add(add(query, neg(key)), 20)], n0:float32)) | "
    "mask: or(le(key, query), eq(t1:int32[batch, query], t1:int32[batch, key]))"
)


def name_of_functions(functions: TracedFunctions) -> str:
    """Of their modifier."""
    return f"{TRACED}{functions.text})"


class Captured(NamedTuple):
    """What a modifier's functions capture. numbers, whole: names of its numbers, and of those that are integers. ranks: of its tensors."""

    numbers: tuple[str, ...]
    whole: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class TracedModifier(Modifier):
    """See the module's docstring."""

    rank = 13
    link = "TracedLink"
    tiles = (TILE_FILE,)
    adds_to_scores = has_heads = True

    def __init__(self, name: str, functions: TracedFunctions) -> None:
        self.name, self.functions = name, functions
        kinds, types = self.functions.tensor_kinds, self.functions.number_types
        self.words = " and ".join(f"{name}_mod" for name in ("score", "mask") if getattr(self.functions, name) is not None)
        self.tensors = tuple(CAPTURED_TENSOR + name for name in kinds)
        of_tensors = [of_shape for name, (_, rank) in kinds.items() for of_shape in _names_of_shape(name, rank)]
        numbers = tuple(CAPTURED_NUMBER + name for name in types)
        whole = tuple(CAPTURED_NUMBER + name for name, kind in types.items() if kind != "float32")
        self.captured = Captured(numbers, whole, tuple(rank for _, rank in kinds.values()))
        self.numbers = (*numbers, *of_tensors)
        self.parameters = (
            *(Parameter(f"const {_C_TYPES[dtype]}*", CAPTURED_TENSOR + name) for name, (dtype, _) in kinds.items()),
            *(Parameter("int", name) for name in of_tensors),
            *(Parameter("float" if kind == "float32" else "int", CAPTURED_NUMBER + name) for name, kind in types.items()),
            *(Parameter("float", name) for name in ("traced_unit", "traced_per_unit")),
        )
        self.reads_scores = bool(kinds)
        self.widest_tile = 64 if kinds else 2**31  # by experiment: wider ones spill where two tensors are read for each score
        score = self.functions.score
        self.added = None if score is None else added_term(score)
        self.bends_scores = score is not None and self.added is None

    @property
    def tile_file(self) -> str:
        """See Modifier."""
        return "modifiers/traced"

    def operands(self, problem: Problem | None = None) -> tuple[Operand, ...]:
        """See Modifier."""
        return tuple(
            Operand(CAPTURED_TENSOR + name, (), _ELEMENTS[dtype], free=True) for name, (dtype, _) in self.functions.tensor_kinds.items()
        )

    def scalars(self, problem: Problem, workload: Workload) -> Mapping[str, float]:
        """See Modifier. For captured tensors of some size."""
        found = {CAPTURED_NUMBER + name: 1.0 if kind == "float32" else 3 for name, kind in self.functions.number_types.items()}
        for name, (_, rank) in self.functions.tensor_kinds.items():
            found |= shape_scalars(name, VERIFIED_SIZES[:rank], dense(VERIFIED_SIZES[:rank]))
        return found

    def values(self, call: Call) -> Mapping[str, int | float]:
        """See Modifier."""
        types = self.functions.number_types
        whole = {name for name in self.numbers if types.get(name.removeprefix(CAPTURED_NUMBER)) != "float32"}
        unit = float32(score_unit(call))
        of_call = {name: int(call.scalars[name]) if name in whole else call.scalars[name] for name in self.numbers}
        return {**of_call, "traced_unit": unit, "traced_per_unit": float32(1 / unit)}

    def call_refusals(self, call: Call) -> list[str]:
        """See Modifier."""
        reasons, w = [], call.workload
        if w.len_q >= LONGEST or w.len_kv >= LONGEST or w.batch >= MOST_HEADS or w.heads_q >= MOST_HEADS:
            given = f"len_q {w.len_q}, len_kv {w.len_kv}, batch {w.batch}, heads_q {w.heads_q}"
            reasons.append(f"with traced functions lengths must be below {LONGEST}, batch and heads_q below {MOST_HEADS}; got {given}")
        for name, (_, rank) in self.functions.tensor_kinds.items():
            sizes, steps = ([call.scalars[f"{CAPTURED_TENSOR}{name}_{kind}{axis}"] for axis in range(rank)] for kind in ("size", "step"))
            farthest = sum((size - 1) * abs(step) for size, step in zip(sizes, steps, strict=True))
            if farthest >= FARTHEST:
                reasons.append(f"captured tensors must have their elements within {FARTHEST} of the first; got {farthest:.0f}")
        return reasons

    def of_name(self, name: str) -> Modifier:
        """See Modifier."""
        return self if name == self.name else _of_text(name.removeprefix(TRACED).removesuffix(")"))

    @property
    def conditions(self) -> dict[str, object]:
        """What its tile file asks for: the text of its functions; whether its score_mod is `added` or `bent`; whether it has a mask_mod."""
        score = "" if self.functions.score is None else "bent" if self.bends_scores else "added"
        return {"traced": self.source, "traced_score": score, "traced_mask": self.functions.mask is not None}

    @property
    def source(self) -> str:
        """C++: the struct `Traced`, and `traced_of`, which makes it from a kernel's parameters."""
        functions, kinds = self.functions, self.functions.tensor_kinds
        trees = {"bent": functions.score} if self.bends_scores else {"added": self.added}
        trees["visible"] = functions.mask
        struct = struct_of("Traced", {name: tree for name, tree in trees.items() if tree is not None})
        fields = [f"p.{CAPTURED_NUMBER}{name}" for name in functions.number_types]
        for name, (dtype, rank) in kinds.items():
            element = _IN_KERNELS.get(dtype)
            first = f"p.{CAPTURED_TENSOR}{name}" if element is None else f"reinterpret_cast<const {element}*>(p.{CAPTURED_TENSOR}{name})"
            lists = ("{" + ", ".join(f"p.{CAPTURED_TENSOR}{name}_{kind}{axis}" for axis in range(rank)) + "}" for kind in ("size", "step"))
            fields.append("{" + ",\n             ".join((first, *lists)) + "}")
        listed = ",\n            ".join(fields)
        return (
            f"{struct}template <class Parameters>\n__device__ __forceinline__ Traced traced_of(const Parameters& p) {{\n"
            f"    return {{{listed}}};\n}}"
        )


def shape_scalars(name: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, float]:
    """The numbers by which kernels know the shape of the captured tensor of that name."""
    return dict(zip(_names_of_shape(name, len(sizes)), (*sizes, *strides), strict=True))


def _names_of_shape(name: str, rank: int) -> list[str]:
    return [f"{CAPTURED_TENSOR}{name}_{kind}{axis}" for kind in ("size", "step") for axis in range(rank)]


@cache
def _of_text(text: str) -> TracedModifier:
    functions = functions_of(text)
    return TracedModifier(name_of_functions(functions), functions)


MODIFIER = TracedModifier("traced", _EXAMPLE)
