"""What a decode kernel needs for keys and values that are e4m3 numbers in a cache: see templates/tile/warp/e4m3_gemm.cuh.

To copies and to the layout of tiles two neighbouring elements are one of 16 bits. So strides of k and v are counted in pairs.
"""

from __future__ import annotations

from dataclasses import replace

from .attention import padded
from .operands import Call
from .parameters import Parameter, ParameterBlock
from .problem import Problem
from .sizes import whole
from .target import Target

ATOMS = ("cvt_e4m3", "prmt")
TILES = ("warp/scaled_queries", "warp/e4m3_gemm")
FIRST_CAPABILITY = (8, 9)  # that converts e4m3 numbers
UNIT = 16  # elements of a copy
COLUMNS, PAIRED_COLUMNS = 16, 32  # that a product takes at once, of elements of 16 bits, and where two elements are one of these
_DESCALES = ("k_descale", "v_descale")
_DESCALE_AXES = ("batch", "head")
_STRIDES = tuple(f"{name}_{axis}" for name in ("k", "v") for axis in ("batch", "head", "row"))


def e4m3_reasons(problem: Problem, target: Target) -> list[str]:
    """Why a kernel that computes other caches does not compute this one."""
    if problem.dtype_kv is None:
        return []
    reasons = []
    if target.capability < FIRST_CAPABILITY:
        reasons.append(f"target must be sm_89 or newer where keys and values are {problem.dtype_kv.value}; got {target.name}")
    for name, width in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if width % UNIT:
            rule = f"must be a multiple of {UNIT} where keys and values are {problem.dtype_kv.value}"
            reasons.append(f"{name} {rule}; got {width} (nearest: {-(-width // UNIT) * UNIT})")
    return reasons


def product_columns(problem: Problem, columns: int) -> int:
    """A multiple of 16, or of 32 where two columns of K or V are an element of 16 bits."""
    return padded(columns) if problem.dtype_kv is None else -(-columns // PAIRED_COLUMNS) * PAIRED_COLUMNS


def product_widths(problem: Problem) -> tuple[int, int]:
    """Columns of Q and K, and of V and O, as the matrix products take them."""
    return product_columns(problem, problem.head_dim), product_columns(problem, problem.head_dim_v)


def element_words(problem: Problem) -> dict[str, object]:
    """What texts say of the elements of K and V: columns as products take them and as copies count them, and their type to copies."""
    unit = COLUMNS if problem.dtype_kv is None else PAIRED_COLUMNS
    columns = ", ".join(f"kColumns{of} = (kHeadDim{of} + {unit - 1}) / {unit} * {unit}" for of in ("", "V"))
    if problem.dtype_kv is None:
        return {"columns": columns, "in_pairs": "", "element_kv": "Element", "stored_with": ""}
    return {"columns": columns, "in_pairs": " / 2", "element_kv": "E4m3Pair", "stored_with": ", v_descale"}


def with_e4m3_files(atoms: tuple[str, ...], tiles: tuple[str, ...], problem: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files of atoms and tile operations, with those that take e4m3 numbers where there are some: behind those of queries and products."""
    if problem.dtype_kv is None:
        return atoms, tiles
    at = tiles.index("warp/item_rows") + 1
    return (*atoms, *ATOMS), (*tiles[:at], *TILES, *tiles[at:])


def e4m3_block(block: ParameterBlock, problem: Problem, caches: tuple[str, str] = ("k", "v")) -> ParameterBlock:
    """The parameters of a kernel for caches, whose keys and values may be such numbers. caches: what it calls these."""
    if problem.dtype_kv is None:
        return block
    fields = (
        replace(field, c_type=field.c_type.replace("Element", "E4m3Pair")) if field.name in caches else field for field in block.fields
    )
    return ParameterBlock(tuple(fields)).with_fields(
        *(Parameter("const float*", name) for name in _DESCALES),
        *(Parameter("i64", f"{name}_{axis}") for name in _DESCALES for axis in _DESCALE_AXES),
    )


def e4m3_values(values: dict[str, int | float], call: Call, strides: tuple[str, ...] = _STRIDES) -> dict[str, int | float]:
    """The numbers of a launch as `e4m3_block` has them. strides: names of those of caches."""
    if call.problem.dtype_kv is None:
        return values
    in_pairs = {name: whole(values[name]) // 2 for name in strides}
    of_heads = {
        f"{name}_{axis}": stride for name in _DESCALES for axis, stride in zip(_DESCALE_AXES, call.views[name].strides, strict=True)
    }
    return {**values, **in_pairs, **of_heads}
