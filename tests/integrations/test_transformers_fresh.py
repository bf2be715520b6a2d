"""transformers in fresh environments: README's lines word for word, and the oldest version that pyproject.toml names.

Each environment finds what it does not install itself, as PyTorch, in the one that runs the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables of a fresh environment."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib"))
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**variables, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(folder), "FLASHGEN_CPU": "1"}


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def readme_lines() -> tuple[str, str]:
    """The shell's and Python's, under README's headline."""
    part = re.search(r"^## From transformers\n(.*?)^## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert part
    shell, python = (re.search(rf"```{kind}\n(.*?)```", part[1], re.DOTALL) for kind in ("sh", "python"))
    assert shell
    assert python
    return shell[1], python[1]


@pytest.mark.slow
def test_readme(environment: dict[str, str]) -> None:
    shell, python = readme_lines()
    run(["bash", "-ec", shell], environment)
    told = run(["python", "-c", python], environment)
    calls = 4 * 2  # tokens, layers
    assert f"AttentionReport(run={{'attention': {calls}}}, refused={{}})" in told


@pytest.mark.slow
def test_the_oldest_version(environment: dict[str, str]) -> None:
    oldest = re.search(r'^transformers = \["transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert oldest
    environment = {name: value for name, value in environment.items() if name != "PIP_CONSTRAINT"}  # where CI names the newest
    run(["pip", "install", "--quiet", f"transformers=={oldest[1]}.0"], environment)
    told = "import transformers; print(transformers.__version__)"
    assert run(["python", "-c", told], environment).startswith(oldest[1])
    tests = ["tests/integrations/test_transformers.py", "-q", "-n", "0", "-p", "no:cacheprovider"]
    assert " passed" in run([str(Path(environment["VIRTUAL_ENV"]) / "bin" / "python"), "-m", "pytest", *tests], environment)


def test_versions_are_named_once() -> None:
    from flashgen.integrations.transformers import OLDEST, TOO_NEW

    oldest, too_new = (".".join(map(str, version)) for version in (OLDEST, TOO_NEW))
    assert f"transformers>={oldest},<{too_new}" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_importing_loads_no_library() -> None:
    code = "import sys, flashgen.integrations.transformers; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
