"""Values of traced functions: of the functions themselves on 0-d tensors, as FlexAttention calls them, and of their C++ through g++."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashgen import templates
from flashgen.build.emulator.compiler import cxx_compiler
from flashgen.codegen.expressions.struct import parameters_of, struct_of
from flashgen.codegen.expressions.tree import BOOL, FLOAT32, INT32, Expression, loads_of, numbers_of
from flashgen.traced.traced_tensor import STORED

INPUTS = ("score", "batch", "head", "query", "key")
PRELUDE = ("emulator/language.cuh", "atoms/emulated/types.cuh", "atoms/emulated/cvt_f32.cuh", "tile/common/expressions.cuh")


def random_inputs(count: int, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Tensor]:
    """Scores from N(0, 3^2), and positions."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {"score": torch.randn(count, generator=generator) * 3}
    for name, size in sizes.items():
        inputs[name] = torch.randint(0, size, (count,), generator=generator, dtype=torch.int32)
    return inputs


def called(function: Any, inputs: Mapping[str, Tensor], is_mask: bool) -> Tensor:
    """What the function itself gives."""
    names = INPUTS[1:] if is_mask else INPUTS
    count = len(inputs["query"])
    rows = [[inputs[name][i].clone() for name in names] for i in range(count)]
    return torch.stack([torch.as_tensor(function(*row)) for row in rows])


class CxxValues:
    """Trees compiled by g++, all in one text."""

    def __init__(self, folder: Path, trees: Mapping[str, Mapping[str, Expression]]) -> None:
        """`trees`: of each struct, its functions."""
        self._trees = trees
        texts = [templates.read(path) for path in PRELUDE]
        for name, functions in trees.items():
            texts += [struct_of(f"Struct_{name}", functions), *(self._loop(name, function) for function in functions)]
        source, library = folder / "traced.cpp", folder / "traced.so"
        source.write_text("\n".join(texts))
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w"]
        options += ["-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error"]  # else it would wrap unseen
        subprocess.run([cxx_compiler().path, *options, source, "-o", library, "-lm"], check=True)
        self._library = ctypes.CDLL(str(library))

    def _fields(self, name: str) -> tuple[list[Expression], dict[str, int]]:
        trees = self._trees[name].values()
        numbers = sorted(dict.fromkeys(numbers_of(*trees)), key=lambda each: int(each.value[1:]))
        tensors = {each.value.tensor: len(each.operands) for each in loads_of(*trees)}
        return numbers, dict(sorted(tensors.items(), key=lambda item: int(item[0][1:])))

    def _loop(self, name: str, function: str) -> str:
        tree = self._trees[name][function]
        numbers, tensors = self._fields(name)
        lines = [f"s.{each.value} = numbers[{i}];" for i, each in enumerate(numbers)]
        for i, (tensor, rank) in enumerate(tensors.items()):
            lines.append(f"s.{tensor}.first = reinterpret_cast<decltype(s.{tensor}.first)>(tensors[{i}]);")
            lines += [f"s.{tensor}.sizes[{d}] = sizes[{i * 4 + d}], s.{tensor}.strides[{d}] = strides[{i * 4 + d}];" for d in range(rank)]
        given = [f"{each}[i]" for each in parameters_of(tree)]
        return f"""extern "C" void {name}_{function}(
    const float* score, const int* batch, const int* head, const int* query, const int* key,
    const double* numbers, void* const* tensors, const i64* sizes, const i64* strides, double* result, int count) {{
    Struct_{name} s;
    {" ".join(lines)}
    for (int i = 0; i < count; ++i) result[i] = s.{function}({", ".join(given)});
}}"""

    def __call__(
        self, name: str, function: str, inputs: Mapping[str, Tensor], tensors: Sequence[Tensor], numbers: Sequence[float]
    ) -> Tensor:
        """The values; `tensors` and `numbers` in the order of their names."""
        arrays = [np.ascontiguousarray(inputs[each].numpy()) for each in INPUTS]
        tensors = [tensor.detach() for tensor in tensors]
        sizes, strides = (np.zeros((max(len(tensors), 1), 4), np.int64) for _ in range(2))
        for i, tensor in enumerate(tensors):
            sizes[i, : tensor.dim()], strides[i, : tensor.dim()] = tensor.shape, tensor.stride()
        result = np.zeros(len(arrays[0]))
        pointers = (ctypes.c_void_p * max(len(tensors), 1))(*(tensor.data_ptr() for tensor in tensors))
        given = np.array([*numbers, 0.0], np.float64)
        addresses = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, given)]
        after = [array.ctypes.data_as(ctypes.c_void_p) for array in (sizes, strides, result)]
        getattr(self._library, f"{name}_{function}")(*addresses, pointers, *after, ctypes.c_int(len(result)))
        return torch.from_numpy(result)


def random_tensor(dtype: str, sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """A tensor that trees load from."""
    kind = {name: each for each, name in STORED.items()}[dtype]
    if kind.is_floating_point:
        return torch.randn(tuple(sizes), generator=generator).to(kind)
    return torch.randint(0, 3, tuple(sizes), generator=generator).to(kind)


TORCH_TYPES = {FLOAT32: torch.float32, INT32: torch.int32, BOOL: torch.bool}
