"""The atoms that sm_90a brings, in the emulator: against a model of what the PTX ISA says. In all orders, and on a GPU: test_atoms.py."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from flashgen import templates
from flashgen.build.emulator.kernel import EmulationOrder
from flashgen.codegen.tensor_map import TensorMapShape
from tests.support.hopper_probes import (
    BOX_ROWS,
    DEPTH,
    LOADED,
    LOADED_ROWS,
    OPERAND_SETS,
    PACKED_ROWS,
    PROBES,
    RS_SHAPES,
    SOURCE,
    SS_SHAPES,
    STORED,
    STORED_ROWS,
    TARGET,
    bits,
    fragment_place,
    numbers,
    operand_set,
    panels,
    whole_numbers,
)
from tests.support.probes import Words, compile_at_once

BY_NAME = {probe.name: probe for probe in PROBES}


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once() -> None:
    compile_at_once(PROBES)


def found(name: str) -> Words:
    return BY_NAME[name].on_cpu(EmulationOrder())


def test_mbarrier_phases() -> None:
    out = found("mbarrier").reshape(64, 4)
    assert (out[:, 0] == 1).all(), "the phase before the first one counts as complete"
    for phase in range(3):
        assert np.array_equal(out[:, 1 + phase], bits(64)[np.arange(64) ^ 37] + phase)


def test_named_barriers() -> None:
    assert np.array_equal(found("named-barrier"), np.concatenate([np.zeros(64), 2 * bits(64)[np.arange(64) ^ 33].astype(np.int64) + 1]))


def test_unaligned_barriers() -> None:
    assert np.array_equal(found("unaligned-barrier"), np.concatenate([np.zeros(64), bits(64)[np.arange(64) ^ 5]]))


def test_stmatrix() -> None:
    """Lane 8i + r says where row r of matrix i goes: lane l of a warp has row l/4, columns 2(l%4) and the next, of each."""
    given, out = bits(256).reshape(2, 32, 4), found("stmatrix").reshape(64, 4)
    for t in range(64):
        warp, matrix, row = t // 32, t % 32 // 8, t % 8
        assert np.array_equal(out[t * 13 % 64], given[warp, row * 4 : row * 4 + 4, matrix])


def elements(shape: TensorMapShape, words: Words) -> np.ndarray:
    """The elements of a tensor within these words, as [batch, head, row, column]."""
    strides = tuple(reversed((2, *shape.strides)))
    return np.lib.stride_tricks.as_strided(words.view(np.uint16), tuple(reversed(shape.sizes)), strides)


def places(shape: TensorMapShape, at: tuple[int, int, int, int]) -> list[tuple[int, int, tuple[int, int, int, int]]]:
    """(row, column) within a box at (column, row, head, batch), and index in the tensor, of each element that the tensor has."""
    column, row, head, batch = at
    columns, rows, heads, batches = shape.sizes
    if not (0 <= head < heads and 0 <= batch < batches):
        return []
    return [
        (r, c, (batch, head, row + r, column + c))
        for r in range(BOX_ROWS)
        for c in range(64)
        if 0 <= row + r < rows and 0 <= column + c < columns
    ]


def test_tensor_load() -> None:
    source = elements(SOURCE, BY_NAME["tensor-load"].inputs())
    boxes = found("tensor-load").view(np.uint16).reshape(len(LOADED), -1)
    filled = 0
    for at, box in zip(LOADED, boxes, strict=True):
        expected = np.zeros((BOX_ROWS, 64), np.uint16)
        for r, c, index in places(SOURCE, at):
            expected[r, c] = source[index]
        filled += int(np.count_nonzero(expected))
        assert np.array_equal(box, panels(expected)), at
    assert filled > 2 * BOX_ROWS * 64


def test_tensor_store() -> None:
    given, out = BY_NAME["tensor-store"].inputs().view(np.uint16).reshape(len(STORED), BOX_ROWS, 8, 8), found("tensor-store")
    expected = np.full(len(out), 0xDEADBEEF, np.uint32)
    target = elements(TARGET, expected)
    for at, box in zip(STORED, given, strict=True):
        for r, c, index in places(TARGET, at):
            target[index] = box[r, c // 8 ^ r % 8, c % 8]
    assert (target != elements(TARGET, np.full(len(out), 0xDEADBEEF, np.uint32))).mean() > 0.3
    assert np.array_equal(out, expected)


def test_copies_of_packed_rows() -> None:
    """They end with their sequence, on both sides."""
    (given,) = (probe.inputs().view(np.uint16).reshape(PACKED_ROWS, 2, 72) for probe in PROBES if probe.name == "packed-copies")
    expected = np.full(PACKED_ROWS * 72, 0xDEADBEEF, np.uint32).view(np.uint16).reshape(PACKED_ROWS, 2, 72)
    for loaded, stored in zip(LOADED_ROWS, STORED_ROWS, strict=True):
        box = np.zeros((BOX_ROWS, 64), np.uint16)
        column, first, length, row, head = loaded
        rows = given[first + row : min(first + length, first + row + BOX_ROWS), head, column : column + 64]
        box[: len(rows), : rows.shape[1]] = rows
        column, first, length, row, head = stored
        rows = expected[first + row : min(first + length, first + row + BOX_ROWS), head, column : column + 64]
        rows[...] = box[: len(rows), : rows.shape[1]]
    assert np.array_equal(found("packed-copies"), expected.reshape(-1).view(np.uint32))


def test_a_pipeline_of_copies_and_products() -> None:
    tiles, out = (torch.from_numpy(w.view(np.int16)).view(torch.bfloat16).reshape(2, 64, 64) for w in (whole_numbers(), found("pipeline")))
    assert torch.equal(out, (tiles.float() @ tiles.float().mT).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("atom", "element", "columns", "depth"),
    [*(("wgmma_ss", *shape, DEPTH) for shape in SS_SHAPES), *(("wgmma_rs", *shape, DEPTH // 2) for shape in RS_SHAPES)],
)
def test_wgmma(atom: str, element: str, columns: int, depth: int) -> None:
    out = found(f"{atom}-{element}-{columns}").view(np.float32).reshape(OPERAND_SETS, 128, columns // 2)
    for index in range(OPERAND_SETS):
        a, b = (numbers(matrix, element) for matrix in operand_set(index, element, columns, depth))
        expected, result = a @ b, np.empty((64, columns))
        for thread in range(128):
            for i in range(columns // 2):
                result[fragment_place(thread, i)] = out[index, thread, i]
        tolerance = 2.0**-18 if index == OPERAND_SETS - 1 else 0.0
        assert (np.abs(result - expected) <= tolerance * np.maximum(1, np.abs(expected))).all()


def test_descriptors_are_those_of_the_gpu() -> None:
    """The bits of a descriptor are computed, not an instruction: both files of atoms say the same."""
    bodies = [
        re.search(r"u64 matrix_descriptor\(.*?\n}", templates.read(f"atoms/{kind}/wgmma.cuh"), re.DOTALL) for kind in ("ptx", "emulated")
    ]
    first, second = (body[0] for body in bodies if body)
    assert first == second


def test_two_mbarriers() -> None:
    rows = elements(SOURCE, BY_NAME["two-mbarriers"].inputs())[0, 0, :2, :2].copy().view(np.uint32)
    assert np.array_equal(found("two-mbarriers").reshape(64, 2), np.tile(rows.reshape(1, 2), (64, 1)))
