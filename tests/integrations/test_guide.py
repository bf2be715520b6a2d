"""The Python of the guide, word for word, in one process on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_guide() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    shown = "assert q.grad is not None and packed_q.grad is not None; print(lengths.tolist(), out.shape)"
    environment = {**os.environ, "FLASHGEN_CPU": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "\n".join((*blocks, shown))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[103, 40] torch.Size([300, 4, 64])"
