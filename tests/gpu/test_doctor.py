"""The doctor on a machine whose GPUs work: nothing is wrong, and a kernel ran on each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.build.gpu.driver import gpu, gpu_count

pytestmark = pytest.mark.gpu


def doctor(cache: Path, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and the findings by name."""
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", "doctor", "--json"],
        env={**os.environ, "FLASHGEN_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is (done.returncode == 0)
    return done.returncode, {finding["name"]: finding for finding in report["findings"]}


def test_a_healthy_machine_has_nothing_wrong_and_launches(tmp_path: Path) -> None:
    code, findings = doctor(tmp_path / "cache")
    assert [finding for finding in findings.values() if finding["status"] == "wrong"] == []
    assert code == 0
    assert findings["driver"]["status"] == "ok"
    assert f"sees {gpu_count()} GPU" in findings["PyTorch"]["found"]
    for ordinal in range(gpu_count()):
        device, found = gpu(ordinal).device, findings[f"GPU {ordinal}"]["found"]
        gib = torch.cuda.get_device_properties(ordinal).total_memory / 2**30
        assert found == (
            f"{device.name}: compute capability {'.'.join(map(str, device.target.capability))}, {device.sm_count} SMs, "
            f"{gib:.1f} GiB of memory"
        )
        launch = findings[f"launch on GPU {ordinal}"]
        assert launch["status"] == "ok"
        assert "2 of 2 workloads right" in launch["found"]
    own = findings[f"records of {gpu(0).device.name}"]
    assert own["found"].startswith("0 own, ")


def test_hidden_gpus_are_wrong_and_the_cure_is_named(tmp_path: Path) -> None:
    code, findings = doctor(tmp_path / "cache", CUDA_VISIBLE_DEVICES="")
    assert code == 1
    assert findings["driver"]["status"] == "wrong"
    assert findings["driver"]["cure"] == "unset CUDA_VISIBLE_DEVICES"
    assert not [name for name in findings if name.startswith("launch")]
    assert findings["compile"]["status"] == "ok"
