"""The C++ example of examples/launch_from_cpp: built, and run on a generated folder."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from cuda.pathfinder import locate_nvidia_header_directory

import flashgen
from flashgen.build.emulator.compiler import CxxCompilerMissingError, cxx_compiler

EXAMPLE = Path(flashgen.__file__).parents[1] / "examples/launch_from_cpp"


def build(text: Path, program: Path, *options: str) -> Path:
    """Builds one C++ text with cuda.h; skips where there is no compiler, no header or no checkout."""
    if not text.exists():
        pytest.skip("needs a checkout: flashgen comes from an installed package")
    try:
        compiler = cxx_compiler()
    except CxxCompilerMissingError as error:
        pytest.skip(str(error))
    headers = locate_nvidia_header_directory("cudart")
    if headers is None:
        pytest.skip("needs cuda.h: pip install 'nvidia-cuda-runtime>=13,<14'")
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = [str(compiler.path), "-std=c++17", *warnings, f"-I{headers.abs_path}", str(text), "-o", str(program), *options, "-ldl"]
    subprocess.run(command, check=True)
    return program


def run(program: Path, *arguments: object, environment: Mapping[str, str]) -> tuple[int, str]:
    """Its exit code, and what it says."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, env=dict(environment), timeout=60)
    return done.returncode, done.stdout + done.stderr
