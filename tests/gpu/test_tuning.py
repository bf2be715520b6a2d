"""The tuner on a GPU: it records, resumes, survives being killed, and two do not spoil each other."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.build.artifact import Artifact
from flashgen.build.gpu.driver import gpu
from flashgen.build.nvrtc import compile_source
from flashgen.cells import cells_of
from flashgen.codegen.render import Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.launch import once
from flashgen.launch.once import HungKernelError
from flashgen.records import sources
from flashgen.records.store import Failure, Records
from flashgen.selection import compilation
from flashgen.tuning import Progress, Request
from flashgen.tuning import timed as timed_tuning

pytestmark = pytest.mark.gpu

COMMAND = [sys.executable, "-m", "flashgen", "tune", "--head-dim", "32", "--seqlen", "512", "--seqlen", "1024", "--no-causal", "--json"]


def start(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        COMMAND, env={**os.environ, "FLASHGEN_CACHE_DIR": str(cache)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


def rows(cache: Path) -> list[tuple[Any, ...]]:
    path = cache / "records.sqlite3"
    if not path.exists():
        return []
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [row for table in tables for row in connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2")]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


def test_tune_records_and_the_second_run_measures_nothing(cache: Path) -> None:
    first = finish(start(cache))
    assert first["timed"]
    assert first["complete"]
    assert first["measured"] > 10
    for row in first["rows"]:
        assert row["seconds"] > 0
        assert row["spill_bytes"] == 0
        assert row["gain"] > 0.9
    second = finish(start(cache))
    assert second["measured"] == 0
    assert second["rows"] == first["rows"]
    assert second["seconds"] < 2


def test_kill_at_20_random_moments_loses_nothing(cache: Path) -> None:
    draw = random.Random(0)
    known: list[tuple[Any, ...]] = []
    for _ in range(20):
        process = start(cache)
        time.sleep(draw.uniform(0.2, 7.0))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        now = rows(cache)
        assert set(known) <= set(now), "a record was lost or changed"
        assert len(now) == len(set(now))
        known = now
    result = finish(start(cache))
    assert result["complete"]
    assert set(known) <= set(rows(cache))
    assert finish(start(cache))["measured"] == 0


def test_two_tunes_at_once_share_the_work(cache: Path) -> None:
    one, two = start(cache), start(cache)
    results = [finish(one), finish(two)]
    assert all(r["complete"] for r in results)
    assert results[0]["rows"] == results[1]["rows"]
    assert min(r["measured"] for r in results) == 0, "both measured"
    assert len(rows(cache)) == sum(r["measured"] for r in results)


def test_a_kernel_that_does_not_end_is_recorded_and_not_tried_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(cache))
    monkeypatch.setattr(once, "FIRST_LAUNCH_LIMIT", 0.3)
    records = Records()
    monkeypatch.setattr(sources, "own_records", lambda: records)
    on = gpu(0)
    request = Request(cells_of(24, seqlens=(512,), causal=False), settings={"block_kv": "96"})
    (cell,) = request.cells
    slow = request.candidates(cell, on.device)[-1]

    def compile_spec(spec: KernelSpec) -> Artifact:
        source = render(spec)
        if spec == slow:
            nap = "for (int i = 0; i < 2000; ++i) __nanosleep(1000000);"
            source = Source(source.entry, source.text.replace("    const Work work =", f"    {nap}\n    const Work work ="))
        return compile_source(source, spec.target.name)

    monkeypatch.setattr(compilation, "compile_spec", compile_spec)
    with pytest.raises(HungKernelError, match=r"did not finish in 0\.3 s"):
        timed_tuning.run_timed(request, on, Progress())
    torch.cuda.synchronize()  # here it does end, for the tests that follow
    failed = [record for record in records.for_device(on.device.name, on.device.sm_count) if isinstance(record.outcome, Failure)]
    assert [record.key.spec_digest for record in failed] == [slow.digest]
    monkeypatch.setattr(once, "FIRST_LAUNCH_LIMIT", 20.0)
    result = timed_tuning.run_timed(request, on, Progress())
    assert result.complete
    assert "launch: kernel did not finish" in result.failures[slow.name]


def test_interrupt_keeps_the_records(cache: Path) -> None:
    process = start(cache)
    deadline = time.monotonic() + 60
    while not rows(cache) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 0)
    assert "Traceback" not in err
    assert rows(cache)
