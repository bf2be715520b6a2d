"""The atoms that the backward pass brings on sm_90a, in the emulator: against a model of what the PTX ISA says."""

from __future__ import annotations

import numpy as np
import pytest

from flashgen.build.emulator.kernel import EmulationOrder
from tests.support.hopper_backward_probes import PROBES, TRANS_A_SHAPES, TRANS_AB_SHAPES, TRANS_B_SHAPES
from tests.support.hopper_probes import DEPTH, OPERAND_SETS, bits, fragment_place, numbers, operand_set
from tests.support.probes import Words, compile_at_once

BY_NAME = {probe.name: probe for probe in PROBES}


@pytest.fixture(scope="module", autouse=True)
def _compile_at_once() -> None:
    compile_at_once(PROBES)


def found(name: str) -> Words:
    return BY_NAME[name].on_cpu(EmulationOrder())


def test_bulk_copies() -> None:
    assert np.array_equal(found("bulk-copy"), bits(64))
    assert np.array_equal(found("bulk-stores"), bits(64))


def test_stmatrix_trans() -> None:
    """Lane 8i + r says where row r of matrix i goes: lane l of a warp has column l/4, rows 2(l%4) and the next, of each."""
    given = bits(256).view(np.uint16).reshape(2, 32, 4, 2)
    out = found("stmatrix-trans").view(np.uint16).reshape(64, 8)
    for t in range(64):
        warp, matrix, row = t // 32, t % 32 // 8, t % 8
        expected = [given[warp, column * 4 + row // 2, matrix, row % 2] for column in range(8)]
        assert np.array_equal(out[t * 13 % 64], expected)


SHAPES = [
    *(("wgmma_ss_trans_a", *shape) for shape in TRANS_A_SHAPES),
    *(("wgmma_ss_trans_b", *shape) for shape in TRANS_B_SHAPES),
    *(("wgmma_ss_trans_ab", *shape) for shape in TRANS_AB_SHAPES),
]


@pytest.mark.parametrize(("atom", "element", "columns"), SHAPES)
def test_wgmma_with_transposed_operands(atom: str, element: str, columns: int) -> None:
    out = found(f"{atom}-{element}-{columns}").view(np.float32).reshape(OPERAND_SETS, 128, columns // 2)
    for index in range(OPERAND_SETS):
        a, b = (numbers(matrix, element) for matrix in operand_set(index, element, columns, DEPTH))
        expected, result = a @ b, np.empty((64, columns))
        for thread in range(128):
            for i in range(columns // 2):
                result[fragment_place(thread, i)] = out[index, thread, i]
        tolerance = 2.0**-18 if index == OPERAND_SETS - 1 else 0.0
        assert (np.abs(result - expected) <= tolerance * np.maximum(1, np.abs(expected))).all()
