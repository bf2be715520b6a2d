"""Writes the wgmma atoms that a kernel needs: there are dozens of shapes, and each names every register of its accumulator.

PTX ISA, "wgmma.mma_async". Declarations, layouts and descriptors are in templates/atoms/ptx/wgmma.cuh.
"""

from __future__ import annotations

_TYPES = {"Bf16": "bf16", "Fp16": "f16"}


def wgmma_ss(element: str, columns: int) -> str:
    """The specialisation of `wgmma_ss` for d of 64 x `columns`: a multiple of 8, up to 256."""
    count = columns // 2
    return _atom(
        "wgmma_ss", element, columns, "u64 a", f"%{count}, %{count + 1}, p, 1, 1, 0, 0", count + 2, '"l"(a), "l"(b), "r"(accumulate)'
    )


def wgmma_ss_trans_a(element: str, columns: int) -> str:
    """The same of `wgmma_ss_trans_a`: templates/atoms/ptx/wgmma_transposed.cuh."""
    return _transposed("wgmma_ss_trans_a", element, columns, "1, 0")


def wgmma_ss_trans_b(element: str, columns: int) -> str:
    """The same of `wgmma_ss_trans_b`."""
    return _transposed("wgmma_ss_trans_b", element, columns, "0, 1")


def wgmma_ss_trans_ab(element: str, columns: int) -> str:
    """The same of `wgmma_ss_trans_ab`."""
    return _transposed("wgmma_ss_trans_ab", element, columns, "1, 1")


def wgmma_rs(element: str, columns: int) -> str:
    """The same of `wgmma_rs`."""
    count = columns // 2
    registers = ", ".join(f"%{count + i}" for i in range(4))
    operands = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)'
    return _atom("wgmma_rs", element, columns, "const u32 (&a)[4]", f"{{{registers}}}, %{count + 4}, p, 1, 1, 1", count + 5, operands)


def _transposed(name: str, element: str, columns: int, transposes: str) -> str:
    count = columns // 2
    inputs = f"%{count}, %{count + 1}, p, 1, 1, {transposes}"
    return _atom(name, element, columns, "u64 a", inputs, count + 2, '"l"(a), "l"(b), "r"(accumulate)')


def _atom(name: str, element: str, columns: int, a: str, inputs: str, predicate: int, operands: str) -> str:
    count, kind = columns // 2, _TYPES[element]
    accumulator = _wrapped([f"%{i}" for i in range(count)], '"\n        "', 16)
    transposed = "transpose b" if name == "wgmma_rs" else "transpose a, transpose b"
    outputs = _wrapped([f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count)], "\n          ", 8)
    return f"""\
template <>
__device__ __forceinline__ void {name}<{element}, {columns}>(float (&d)[{columns // 8}][4], {a}, u64 b, int accumulate) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{predicate}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{"
        "{accumulator}"
        "}}, {inputs};\\n"  // p: accumulate; then scale a, scale b, {transposed}
        "}}"
        : {outputs}
        : {operands});
}}
"""


def _wrapped(words: list[str], between: str, width: int) -> str:
    """Words with commas between them, so many on a line; `between` goes from line to line."""
    return f",{between}".join(", ".join(words[i : i + width]) for i in range(0, len(words), width))
