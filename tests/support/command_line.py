"""`flashgen ...` in a process of its own, as `python -m flashgen` runs it on a machine without a GPU: exit code, stdout, stderr.

Most of such a process's time goes into importing libraries; so the processes are forks of one that has imported them, and nothing of ours.
What they compile is compiled once in a run, as in the tests' own processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}
TIMEOUT = 120  # seconds

_FORKS = multiprocessing.get_context("forkserver")
# What nearly all commands load; one that is not there is left out.
_CUDA = [f"cuda.bindings.{name}" for name in ("driver", "runtime", "nvrtc")]
_FORKS.set_forkserver_preload(["torch", "typer._adapters", "rich.table", "jinja2", *_CUDA])


def flashgen(*arguments: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command that must end with that exit code, and without a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _FORKS.Process(target=_run, args=(arguments, {**os.environ, **ENVIRONMENT}, out, err))
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"flashgen {' '.join(arguments)} did not end within {TIMEOUT} s")
        stdout, stderr = (path.read_text(encoding="utf-8") for path in (out, err))
    assert process.exitcode == code, f"exit code {process.exitcode}\n{stdout}\n{stderr}"
    assert "Traceback" not in stderr
    return stdout, stderr


def as_json(*arguments: str) -> dict[str, Any]:
    """What a command prints with --json."""
    value = json.loads(flashgen(*arguments, "--json")[0])
    assert isinstance(value, dict)
    return value


def share_compiles() -> None:
    """Makes this process compile for GPUs as the run does whose folder the environment names."""
    from flashgen.build import nvrtc
    from tests.support.compiles import VARIABLE, source_once

    nvrtc.compile_source = source_once(Path(os.environ[VARIABLE]), nvrtc.compile_source)


def _run(arguments: tuple[str, ...], environment: dict[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    share_compiles()
    sys.argv = ["flashgen", *arguments]
    runpy.run_module("flashgen", run_name="__main__", alter_sys=True)
