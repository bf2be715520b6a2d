"""`flashgen compare` on a GPU: a forward pass, alone and with its backward pass."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flashgen.build.gpu.driver import gpu
from flashgen.cells import Cell
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.workload import Workload
from flashgen.compare import shapes
from flashgen.compare.measured import Measurement
from flashgen.compare.predicted import predict
from flashgen.progress import Progress

pytestmark = pytest.mark.gpu

NAMES = ["standard_attention", "flash1_forward", "flash2_forward", "attention_forward", "math", "flash"]
CELL = Cell(Problem(Dtype.FP16, 64, mask=Mask.CAUSAL, operation="backward"), Workload(4, 8, 8, 1024, 1024))


def test_both_passes() -> None:
    on = gpu(0)
    cells = {"articles": shapes.calls_of(CELL)}
    run = Measurement(NAMES, on, 2, "", None)
    run.run(cells, Progress(), lambda found: None)
    forward, both = ({row.name: row for row in cell.rows} for cell in run.result.cells)
    assert list(forward) == NAMES
    assert list(both) == [*NAMES[1:], "eager_fp16"]
    assert {row.error for row in (*forward.values(), *both.values())} == {""}
    expected = {row.name: row.peak_bytes for row in predict(cells, NAMES, on.device).cells[1].rows}
    tensor = 4 * 8 * 1024 * 64 * 2
    for name, row in both.items():
        assert row.ms is not None
        assert row.peak_bytes is not None
        assert row.peak_bytes >= 4 * tensor, "out and the gradients"
        if name in forward:
            before = forward[name].ms
            assert before is not None
            assert row.ms.median > before.median
        if name in shapes.BACKWARD_FAMILIES:
            assert row.peak_bytes == pytest.approx(expected[name], rel=0.05)
    assert (both["eager_fp16"].peak_bytes or 0) > 2 * 4 * 8 * 1024**2, "S is in memory"


def test_the_command_with_backward() -> None:
    options = ["--grid", "articles", "--pass", "backward", "--peers", "flash2_forward,efficient", "--rounds", "2", "--json"]
    done = subprocess.run([sys.executable, "-m", "flashgen", "compare", *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["complete"]
    assert {cell["pass"] for cell in found["cells"]} == {"forward_backward"}
    rows = [row for cell in found["cells"] for row in cell["rows"]]
    assert {(row["name"], row["backward"], row["error"]) for row in rows} == {
        ("flash2_forward", "flash2_backward", ""), ("efficient", "", ""),
    }  # fmt: skip
