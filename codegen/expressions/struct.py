"""The C++ struct of a traced modifier: its numbers and tensors as fields, and a function for each expression."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .blocks import block_parts
from .cxx import CXX_TYPES, nodes_down_to, printed
from .distances import lines_of
from .tile_logic import tile_logic
from .tree import BOOL, INPUTS, QUERY, Expression, dependences, depends_on, loads_of, numbers_of

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


def struct_of_distances(name: str, base: str, added: Expression) -> str:
    """A struct on `base` for what is added to scores, if `distances.is_of_distance` holds: see templates/tile/common/distance_terms.cuh.

    Lines, lines_from: elements of captured tensors in a line, from that of a distance on, which goes up or down from column to column
    are_inside:        whether all of them are there, from a distance to another one
    added:             by lines, for one of two neighbouring columns
    """
    lines = lines_of(added)
    names = {load: f"line{i}" for i, load in enumerate(lines)}
    inside: list[str] = []
    statements: list[str] = []
    for end in ("least", "most"):
        own = printed([line.at(load, QUERY)[line.dimension] for load, line in lines.items()], {QUERY: end}, f"{end}_")
        statements += own.statements
        for index, (load, line) in zip(own.results, lines.items(), strict=True):
            inside.append(f"is_inside({index}, {load.value.tensor}.sizes[{line.dimension}])")
    indices = printed([index for load, line in lines.items() for index in line.at(load, QUERY)], {QUERY: "distance"})
    left, made = iter(indices.results), []
    for load, line in lines.items():
        by = "by" if line.sign > 0 else "-by"
        given = (load.value.tensor, "are_there", by, *(next(left) for _ in load.operands))
        made.append(f"line_of<{line.dimension}>({', '.join(given)})")
    moves = " ".join(f"{field}.advance();" for field in names.values())
    body = printed([added], {load: f"lines.{field}.at(e)" for load, field in names.items()})
    text = [
        "    struct Lines {",
        *(f"        CapturedLine<{_ELEMENTS[load.value.dtype]}> {field};" for load, field in names.items()),
        "",
        f"        __device__ __forceinline__ void advance() {{{f' {moves} ' if moves else ''}}}",
        "    };",
        "",
        "    __device__ __forceinline__ bool are_inside(int batch, int head, int least, int most) const {",
        *(f"        {statement}" for statement in statements),
        f"        return {' && '.join(inside) or 'true'};",
        "    }",
        "    __device__ __forceinline__ Lines lines_from(bool are_there, int batch, int head, int distance, int by) const {",
        *(f"        {statement}" for statement in indices.statements),
        f"        return {{{', '.join(made)}}};",
        "    }",
        "    __device__ __forceinline__ float added(const Lines& lines, int e, int batch, int head, int query, int key) const {",
        *(f"        {statement}" for statement in body.statements),
        f"        return {body.results[0]};",
        "    }",
    ]
    return "\n".join((f"struct {name} : {base} {{", *text, "};")) + "\n"


def struct_of_tiles(name: str, base: str, mask: Expression) -> str:
    """A struct on `base` of what a mask is in a whole tile, and in a fragment of scores: see templates/tile/modifiers/traced.cuh.

    kIsKnown, seen_in: of a tile, see tile_logic.py; whether that asks all of the mask
    Parts, parts_of:   what of the mask is the same for kAlikeQueries and kAlikeKeys, which begin at multiples of these (0: for all)
    visible_beside:    the mask by these; kIsShort: whether that takes few instructions
    """
    logic, alike = tile_logic(mask), block_parts(mask)
    names = {node: f"part{i}" for i, node in enumerate(alike.parts)}
    fields = "".join(f"        {CXX_TYPES[node.type]} {field};\n" for node, field in names.items()).rstrip()
    parts = printed(alike.parts)
    known = {node: f"parts.{field}" for node, field in names.items()}
    unknown = [node for node in nodes_down_to([mask], known) if node not in known]
    depends = dependences(mask)
    is_short = not any(_is_long(node, depends[node]) for node in unknown)
    loads = [node for node in unknown if node.operation == "load"]
    loaded = []
    for i, load in enumerate(loads):  # all of them, whatever else hides a key: so none waits for a branch
        body = printed([load], known, prefix=f"at{i}_")
        loaded += [*body.statements, f"const {CXX_TYPES[load.type]} element{i} = {body.results[0]};"]
        known[load] = f"element{i}"
    rest = printed([mask], known, branches=False)
    inputs = "int batch, int head, int query, int key"
    lines = [
        f"    static constexpr bool kIsKnown = {str(logic.is_known).lower()};",
        f"    static constexpr bool kIsShort = {str(is_short).lower()};",
        f"    static constexpr int kAlikeQueries = {alike.sizes[0]}, kAlikeKeys = {alike.sizes[1]};",
        "    struct Parts {",
        *([fields] if fields else []),
        "    };",
        "",
        "    __device__ __forceinline__ SeenInTile seen_in(int batch, int head, const TileBounds& tile) const {",
        *(f"        {statement}" for statement in logic.statements),
        f"        return {logic.result};",
        "    }",
        f"    __device__ __forceinline__ Parts parts_of({inputs}) const {{",
        *(f"        {statement}" for statement in parts.statements),
        f"        return {{{', '.join(parts.results)}}};",
        "    }",
        f"    __device__ __forceinline__ bool visible_beside(const Parts& parts, {inputs}) const {{",
        *(f"        {statement}" for statement in (*loaded, *rest.statements)),
        f"        return {rest.results[0]};",
        "    }",
    ]
    return "\n".join((f"struct {name} : {base} {{", *lines, "};")) + "\n"


def _is_long(node: Expression, depends: Collection[str]) -> bool:
    """Whether it is not to be written out for many scores: it reads a table of queries and keys, or divides by a number."""
    if node.operation == "load":
        return {"query", "key"} <= {*depends}
    return node.operation in ("floor_div", "mod") and node.operands[1].operation != "constant"


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
