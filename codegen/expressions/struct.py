"""The C++ struct of a traced modifier: its numbers and tensors as fields, and a function for each expression."""

from __future__ import annotations

from collections.abc import Mapping

from .cxx import CXX_TYPES, printed
from .tile_logic import tile_logic
from .tree import BOOL, INPUTS, Expression, depends_on, loads_of, numbers_of

_ELEMENTS = {
    **{"bf16": "Bf16", "fp16": "Fp16", "fp32": "float", "int8": "signed char", "uint8": "unsigned char", "int16": "short"},
    **{"int32": "int", "int64": "i64", "bool": "bool"},
}


def struct_of(name: str, functions: Mapping[str, Expression]) -> str:
    """A struct with a member function for each expression, of (score, batch, head, query, key), and without the score for a condition.

    Its fields are the numbers and the captured tensors, sorted by name; those of tensors are of CapturedTensor in
    templates/tile/common/expressions.cuh.
    """
    trees = tuple(functions.values())
    numbers = {each.value: CXX_TYPES[each.type] for each in numbers_of(*trees)}
    tensors = {each.value.tensor: f"CapturedTensor<{_ELEMENTS[each.value.dtype]}, {len(each.operands)}>" for each in loads_of(*trees)}
    fields = [(kinds[field], field) for kinds in (numbers, tensors) for field in sorted(kinds, key=by_number)]
    lines = [f"    {kind} {field};" for kind, field in fields]
    for function, tree in functions.items():
        lines += ["", *_function(function, tree)] if lines else _function(function, tree)
    return "\n".join((f"struct {name} {{", *lines, "};")) + "\n"


def struct_with_slope(name: str, base: str, slope: Expression) -> str:
    """A struct on `base`, which `struct_of` has made, with one function more: `slope`, the changed score's derivative by the score."""
    return "\n".join((f"struct {name} : {base} {{", *_function("slope", slope), "};")) + "\n"


def struct_of_gradient(name: str, base: str, sums: int, load: Expression, factor: Expression) -> str:
    """A struct on `base` for a part of a captured tensor's gradient: see templates/tile/common/captured_sums.cuh.

    sums: which of a kernel's sums are the tensor's
    """
    depends = depends_on(load)
    on_query, on_key = (str(each in depends).lower() for each in ("query", "key"))
    inputs = [each for each in INPUTS if each != "score"]
    indices = printed(load.operands)
    lines = [
        f"    static constexpr int kSums = {sums};",
        f"    static constexpr bool kOnQuery = {on_query}, kOnKey = {on_key};",
        "",
        *_function("factor", factor),
        f"    __device__ __forceinline__ int position({', '.join(f'int {each}' for each in inputs)}) const {{",
        *(f"        {statement}" for statement in indices.statements),
        f"        return position_in({', '.join((load.value.tensor, *indices.results))});",
        "    }",
    ]
    return "\n".join((f"struct {name} : {base} {{", *lines, "};")) + "\n"


def struct_of_tiles(name: str, base: str, mask: Expression) -> str:
    """A struct on `base` with the function `seen_in`, of a tile: see tile_logic.py. kIsKnown: whether that asks all of the mask."""
    logic = tile_logic(mask)
    lines = [
        f"    static constexpr bool kIsKnown = {str(logic.is_known).lower()};",
        "",
        "    __device__ __forceinline__ SeenInTile seen_in(int batch, int head, const TileBounds& tile) const {",
        *(f"        {statement}" for statement in logic.statements),
        f"        return {logic.result};",
        "    }",
    ]
    return "\n".join((f"struct {name} : {base} {{", *lines, "};")) + "\n"


def by_number(name: str) -> tuple[str, int]:
    """The key by which n10 and t10 come behind n2 and t2."""
    return name[:1], int(name[1:])


def parameters_of(tree: Expression) -> list[str]:
    """What the function of an expression is given: the inputs, a condition the score only if it asks for it."""
    return [each for each in INPUTS if each != "score" or tree.type is not BOOL or each in depends_on(tree)]


def _function(name: str, tree: Expression) -> list[str]:
    inputs = parameters_of(tree)
    parameters = ", ".join(f"{CXX_TYPES[INPUTS[each]]} {each}" for each in inputs)
    body = printed([tree])
    return [
        f"    __device__ __forceinline__ {CXX_TYPES[tree.type]} {name}({parameters}) const {{",
        *(f"        {statement}" for statement in body.statements),
        f"        return {body.results[0]};",
        "    }",
    ]
