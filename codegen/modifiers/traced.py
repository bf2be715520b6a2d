"""Functions of scores and masks that were traced. Each has a modifier of its own, whose name says all of it: `traced(score: ...)`.

`score_mod` acts on scaled scores behind softcap, ALiBi and bias, `mask_mod` hides keys among those that all other masks let a query see.
Captured tensors may have any shape: their sizes and strides are numbers of a call. The name of a modifier whose captured tensors have
gradients says of which: `traced(score: ... | gradients: t0 t2)`. Only the backward pass has such: what it is differentiated by is known
there. Of each element the gradient is the sum of dS, of the changed scores, times the derivative by the element, over all scores that read
it, in fp32 until all of them are there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache
from typing import NamedTuple

from flashgen.codegen.attention import float32
from flashgen.codegen.errors import ArgumentError, shown
from flashgen.codegen.expressions.blocks import in_blocks, loads_in_blocks
from flashgen.codegen.expressions.distances import is_of_distance, lines_of
from flashgen.codegen.expressions.functions import TracedFunctions, functions_of
from flashgen.codegen.expressions.recognition import added_term
from flashgen.codegen.expressions.struct import struct_of, struct_of_distances, struct_of_gradient, struct_of_tiles, struct_with_slope
from flashgen.codegen.expressions.tree import dependences, loads_of
from flashgen.codegen.gradient_kernel import GradientKernel
from flashgen.codegen.modifier import Modifier, score_unit
from flashgen.codegen.modifiers import TRACED
from flashgen.codegen.modifiers.bias import EACH, THREADS
from flashgen.codegen.operands import Axis, Call, Element, Operand, Role
from flashgen.codegen.operation import dense
from flashgen.codegen.parameters import Parameter, ParameterBlock
from flashgen.codegen.problem import Problem
from flashgen.codegen.program import Buffer, BufferKind
from flashgen.codegen.score_tensors import ROUNDED_FILE, SUMS_FILE
from flashgen.codegen.workload import Workload

TILE_FILE, CAPTURED_SUMS_FILE, DISTANCES_FILE = "common/expressions", "common/captured_sums", "common/distance_terms"
GRADIENTS = " | gradients: "  # before the names of those tensors that have some
CAPTURED_NUMBER, CAPTURED_TENSOR = "traced_number_", "traced_"  # short: the emulator knows 16 letters of a name
_ELEMENTS = {
    **{"bf16": Element.BF16, "fp16": Element.F16, "fp32": Element.F32, "int64": Element.I64, "int32": Element.I32},
    **{"int16": Element.I16, "int8": Element.I8, "uint8": Element.U8, "bool": Element.BOOL},
}
_C_TYPES = {
    **{"bf16": "u16", "fp16": "u16", "fp32": "float", "int64": "i64", "int32": "int"},
    **{"int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool"},
}
_AXES = {"batch": Axis.BATCH, "head": Axis.HEADS_Q}
_IN_KERNELS = {"bf16": "Bf16", "fp16": "Fp16"}  # what else kernels call elements
VERIFIED_SIZES = (64, 48, 8, 4)  # of captured tensors in verification, by axis
LONGEST, MOST_HEADS = 2**29, 2**24  # of what int32 arithmetic of expressions counts on (expressions/bounds.py)
FARTHEST = 2**31  # elements
_EXAMPLE = functions_of(
    "score: add(score, mul(t0:bf16[head, add(add(query, neg(key)), 20)], n0:float32)) | "
    "mask: or(le(key, query), eq(t1:int32[batch, query], t1:int32[batch, key]))"
)


def name_of_functions(functions: TracedFunctions, learned: Collection[str] = ()) -> str:
    """Of their modifier. learned: tensors that have gradients."""
    return f"{TRACED}{functions.text}{GRADIENTS * bool(learned)}{' '.join(learned)})"


def learnable_tensors(functions: TracedFunctions) -> tuple[str, ...]:
    """Those that may have gradients: of floating-point numbers, by which a score has a derivative."""
    having = {gradient.tensor for gradient in functions.gradients}
    return tuple(name for name in functions.tensor_kinds if name in having)


class Captured(NamedTuple):
    """What a modifier's functions capture. numbers, whole: names of its numbers, and of those that are integers. ranks: of its tensors."""

    numbers: tuple[str, ...]
    whole: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class TracedModifier(Modifier):
    """See the module's docstring."""

    rank = 13
    link = "TracedLink"
    tiles: tuple[str, ...] = (TILE_FILE,)
    has_heads = True

    def __init__(self, name: str, functions: TracedFunctions, learned: tuple[str, ...] = ()) -> None:
        """learned: see `name_of_functions`; of those that may have gradients, in their order."""
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
        score, mask = self.functions.score, self.functions.mask
        self.adds_to_scores = score is not None
        self.reads_scores = score is not None and bool(loads_of(score))
        self.scattered_by = None if mask is None else tuple(axis for name, axis in _AXES.items() if name in dependences(mask)[mask])
        self.in_blocks = mask is not None and in_blocks(mask)
        self.loads_in_blocks = mask is None or loads_in_blocks(mask)
        self.widest_tile = 64 if self.reads_scores else 2**31  # by experiment: wider ones spill where two tensors are read for each score
        self.added = None if score is None else added_term(score)
        self.bends_scores = score is not None and self.added is None
        self.of_distance = self.added is not None and is_of_distance(self.added)
        if self.of_distance:
            self.tiles = (TILE_FILE, DISTANCES_FILE)
        self.learnable = learnable_tensors(functions)
        if not learned:
            return
        self.learned = tuple(CAPTURED_TENSOR + name for name in learned)
        if mask is not None or sum(gradient.tensor in learned for gradient in functions.gradients) > 1:
            self.widest_tile = 32  # by experiment, too: with 48 some spill, as beside sinks or a bias
        self.sum_parameters = tuple(Parameter("float*", f"d_{name}_sum") for name in self.learned)
        self.sum_tiles = (SUMS_FILE, ROUNDED_FILE, CAPTURED_SUMS_FILE)
        fields = (
            *(Parameter("const float*", f"d_{name}_sum") for name in self.learned),
            *(Parameter(f"{_C_TYPES[kinds[name][0]]}*", f"d_{CAPTURED_TENSOR}{name}") for name in learned),
            *(Parameter("i64", f"d_{name}_count") for name in self.learned),
        )
        function, title = "round_traced_gradients", "gradients of captured tensors"
        self.gradient = GradientKernel(ParameterBlock(fields), "_traced", "TracedParameters", function, title, THREADS)

    @property
    def tile_file(self) -> str:
        """See Modifier."""
        return "modifiers/traced"

    def operands(self, problem: Problem | None = None) -> tuple[Operand, ...]:
        """See Modifier."""
        return tuple(
            Operand(CAPTURED_TENSOR + name, (), _ELEMENTS[dtype], free=True) for name, (dtype, _) in self.functions.tensor_kinds.items()
        )

    def gradients(self, problem: Problem) -> tuple[Operand, ...]:
        """See Modifier. Dense, in the shape of the tensor."""
        elements = {operand.name: operand.element for operand in self.operands()}
        return tuple(Operand(f"d_{name}", (), elements[name], Role.OUT, optional=True, free=True) for name in self.learned)

    def gradient_buffers(self, call: Call) -> tuple[Buffer, ...]:
        """See Modifier."""
        return tuple(Buffer(f"d_{name}_sum", 4 * self._count(name, call), BufferKind.CALL_ZEROED) for name in self.learned)

    def gradient_values(self, call: Call, rows: int) -> tuple[int, Mapping[str, int | float]]:
        """See Modifier. Each block has the same numbers of all tensors."""
        counts = {name: self._count(name, call) for name in self.learned}
        return -(-max(counts.values()) // (THREADS * EACH)), {f"d_{name}_count": count for name, count in counts.items()}

    def _count(self, tensor: str, call: Call) -> int:
        _, rank = self.functions.tensor_kinds[tensor.removeprefix(CAPTURED_TENSOR)]
        return math.prod(int(call.scalars[f"{tensor}_size{axis}"]) for axis in range(rank))

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
        len_q, len_kv = max(w.len_q, w.tokens_q), max(w.len_kv, w.tokens_kv)  # a packed sequence may have all tokens
        if len_q >= LONGEST or len_kv >= LONGEST or w.batch >= MOST_HEADS or w.heads_q >= MOST_HEADS:
            given = f"len_q {len_q}, len_kv {len_kv}, batch {w.batch}, heads_q {w.heads_q}"
            reasons.append(f"with traced functions lengths must be below {LONGEST}, batch and heads_q below {MOST_HEADS}; got {given}")
        for name, (_, rank) in self.functions.tensor_kinds.items():
            sizes, steps = ([call.scalars[f"{CAPTURED_TENSOR}{name}_{kind}{axis}"] for axis in range(rank)] for kind in ("size", "step"))
            farthest = sum((size - 1) * abs(step) for size, step in zip(sizes, steps, strict=True))
            if farthest >= FARTHEST:
                reasons.append(f"captured tensors must have their elements within {FARTHEST} of the first; got {farthest:.0f}")
        for name in self.learned:
            if (count := self._count(name, call)) >= FARTHEST:
                reasons.append(f"captured tensors that require grad must have less than {FARTHEST} elements; got {count}")
        if self.learned and call.problem.operation != "backward":
            reasons.append(f"gradients of captured tensors must be asked of the backward pass; got {call.problem.operation}")
        if self.learned and call.problem.deterministic:
            reasons.append("deterministic must be False for gradients of captured tensors, which have no order of additions; got True")
        return reasons

    def of_name(self, name: str) -> TracedModifier:
        """See Modifier."""
        return self if name == self.name else _of_text(name.removeprefix(TRACED).removesuffix(")"))

    def learning(self, tensors: Collection[str]) -> TracedModifier:
        """The modifier of the backward pass that gives gradients of these of its `tensors`, as far as it may have some."""
        learned = [name for name in self.learnable if CAPTURED_TENSOR + name in tensors]
        return self.of_name(name_of_functions(self.functions, learned))

    @property
    def conditions(self) -> dict[str, object]:
        """What its tile file asks for.

        traced: the text of its functions; traced_score: whether its score_mod is `added` or `bent`; traced_mask: whether it has a mask_mod
        traced_slope: the text of a bent score's derivative; learns: whether tensors have gradients; traced_gradients: the text of these
        traced_tiles: the text of how much of a tile a mask_mod lets queries see; traced_distances: of what is added by distance alone
        ahead: whether registers do for reading that before scores are there
        """
        score = "" if self.functions.score is None else "bent" if self.bends_scores else "added"
        slope, d_score = "", self.functions.d_score
        if self.bends_scores and d_score is not None:
            slope = struct_with_slope("TracedSlope", "Traced", d_score)
        found: dict[str, object] = {"traced": self.source, "traced_score": score, "traced_mask": self.functions.mask is not None}
        if self.added is not None and self.of_distance:
            found["traced_distances"] = struct_of_distances("TracedDistances", "Traced", self.added)
            found["ahead"] = len(lines_of(self.added)) <= 1  # by experiment: two leave too few registers
        tiles = "" if self.functions.mask is None else struct_of_tiles("TracedTiles", "Traced", self.functions.mask)
        found |= {"traced_slope": slope, "traced_tiles": tiles}
        return {**found, "learns": bool(self.learned), "traced_gradients": self._text_of_gradients}

    @property
    def _text_of_gradients(self) -> str:
        """C++: a struct for each part of a gradient, all of them, and what makes sums of them and gradients of the sums."""
        parts = [part for part in self.functions.gradients if CAPTURED_TENSOR + part.tensor in self.learned]
        names = [f"TracedGradient{i}" for i in range(len(parts))]
        sums = [self.learned.index(CAPTURED_TENSOR + part.tensor) for part in parts]
        structs = [
            struct_of_gradient(name, "Traced", own, part.load, part.factor) for name, own, part in zip(names, sums, parts, strict=True)
        ]
        kinds = {CAPTURED_TENSOR + name: _IN_KERNELS.get(dtype) for name, (dtype, _) in self.functions.tensor_kinds.items()}
        rounded = []
        for name in self.learned:
            to = f"p.d_{name}" if kinds[name] is None else f"reinterpret_cast<{kinds[name]}*>(p.d_{name})"
            rounded.append(f"    round_sums<kThreads>({to}, p.d_{name}_sum, p.d_{name}_count);")
        firsts = ", ".join(f"p.d_{name}_sum" for name in self.learned)
        return "\n".join(
            (
                "\n".join(structs),
                f"using TracedGradients = CapturedGradients<{', '.join(names)}>;",
                "struct TracedSums {",
                f"    float* first[{max(1, len(self.learned))}];",
                "};",
                "template <class Parameters>",
                f"__device__ __forceinline__ TracedSums traced_sums_of(const Parameters& p) {{\n    return {{{{{firsts}}}}};\n}}\n",
                "template <int kThreads, class Parameters>",
                "__device__ __forceinline__ void round_traced_gradients(const Parameters& p) {",
                *rounded,
                "}\n",
            )
        )

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
            f"    return {{{listed}}};\n}}\n"
        )


def shape_scalars(name: str, sizes: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, float]:
    """The numbers by which kernels know the shape of the captured tensor of that name."""
    return dict(zip(_names_of_shape(name, len(sizes)), (*sizes, *strides), strict=True))


def _names_of_shape(name: str, rank: int) -> list[str]:
    return [f"{CAPTURED_TENSOR}{name}_{kind}{axis}" for kind in ("size", "step") for axis in range(rank)]


@cache
def _of_text(text: str) -> TracedModifier:
    of_functions, _, of_gradients = text.partition(GRADIENTS)
    functions, learned = functions_of(of_functions), tuple(of_gradients.split())
    name, learnable = name_of_functions(functions, learned), learnable_tensors(functions)
    if name != f"{TRACED}{text})" or learned != tuple(each for each in learnable if each in learned):
        raise ArgumentError(
            f"gradients of traced functions must be of {' '.join(learnable) or 'none'}, in order; got {shown(of_gradients)}"
        )
    return TracedModifier(name, functions, learned)


MODIFIER = TracedModifier("traced", _EXAMPLE)
