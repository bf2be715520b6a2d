"""What gets installed: builds the wheel and the sdist, installs each away from the checkout, and renders a kernel from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flashgen
from flashgen import templates
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.records.exchange import to_text
from tests.support.plan import few_of

PACKAGE = Path(flashgen.__file__).parent
CHECKOUT = PACKAGE.parent
if not (CHECKOUT / "pyproject.toml").is_file():
    pytest.skip("needs a checkout: flashgen comes from an installed package", allow_module_level=True)

SHIPPED = "flashgen/records/shipped/made_up_gpu.json"

# Run by a Python that ignores PYTHONPATH and its working folder, with the installed package ahead of everything else.
PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
import json
import flashgen
from flashgen import templates
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from importlib.metadata import distribution

family, target = find_family("attention_forward"), find_target("sm_90a")
problem = Problem(Dtype.BF16, 64)
installed = next(iter(distribution("flashgen").discover(name="flashgen", path=[sys.argv[1]])))
print(json.dumps({
    "file": flashgen.__file__,
    "templates": str(templates.ROOT),
    "version": [flashgen.__version__, installed.version],
    "scripts": {e.name: e.value for e in installed.entry_points if e.group == "console_scripts"},
    "paths": templates.paths(),
    "text": render(KernelSpec(family, problem, family.default(problem, target), target)).text,
}))
"""


def run(*arguments: str | Path, cwd: Path) -> str:
    # Without settings of the run's own: a relative PIP_CONSTRAINT or a PYTHONPATH would not hold in another folder.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-P", *map(str, arguments)], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, by kind, built from a copy of the checkout to which a file of records to ship was added."""
    out, copy = tmp_path_factory.mktemp("archives"), tmp_path_factory.mktemp("checkout") / "flashgen"
    shutil.copytree(CHECKOUT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "dist"))
    (copy / SHIPPED).write_text(to_text([]))
    run("-m", "hatchling", "build", "-d", out, cwd=copy)
    found = sorted(p.name for p in out.iterdir())
    assert found == [f"flashgen-{flashgen.__version__}-py3-none-any.whl", f"flashgen-{flashgen.__version__}.tar.gz"]
    return {"wheel": out / found[0], "sdist": out / found[1]}


@pytest.fixture(scope="module", params=few_of(["wheel", "sdist"], "wheel"))
def installed(request: pytest.FixtureRequest, archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but flashgen, installed from one of the two."""
    folder = tmp_path_factory.mktemp(f"installed-{request.param}")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--disable-pip-version-check")
    run("-m", "pip", "install", *options, "--target", folder, archives[request.param], cwd=folder)
    return folder


def checkout_files() -> set[str]:
    """Every file of the package, links followed, as paths from the folder above it."""
    found = set()
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        found |= {(Path(folder) / n).relative_to(CHECKOUT).as_posix() for n in names if not n.endswith(".pyc")}
    return found


@pytest.mark.slow
def test_all_files_are_installed_and_no_others(installed: Path) -> None:
    files = {p.relative_to(installed).as_posix() for p in installed.rglob("*") if p.is_file()}
    package = {f for f in files if f.startswith("flashgen/")}
    assert package == checkout_files() | {SHIPPED}
    assert "flashgen/py.typed" in package
    assert {f"flashgen/templates/{p}" for p in templates.paths()} <= package
    assert not [p for p in installed.rglob("*") if p.is_symlink()]
    top = {f.split("/")[0] for f in files}
    assert top == {"flashgen", "bin", f"flashgen-{flashgen.__version__}.dist-info"}, "codegen, build and templates are names of others"


def test_an_installed_package_renders_what_the_checkout_does(installed: Path, tmp_path: Path) -> None:
    answer = json.loads(run("-I", "-c", PROBE, installed, cwd=tmp_path))
    assert answer["file"] == str(installed / "flashgen" / "__init__.py")
    assert answer["templates"] == str(installed / "flashgen" / "templates")
    assert answer["version"] == [flashgen.__version__] * 2
    assert answer["scripts"] == {"flashgen": "flashgen.cli:main"}
    assert answer["paths"] == templates.paths()
    family, target = find_family("attention_forward"), find_target("sm_90a")
    problem = Problem(Dtype.BF16, 64)
    assert answer["text"] == render(KernelSpec(family, problem, family.default(problem, target), target)).text


def test_the_wheel_carries_its_licence(archives: dict[str, Path]) -> None:
    with zipfile.ZipFile(archives["wheel"]) as wheel:
        licence = wheel.read(f"flashgen-{flashgen.__version__}.dist-info/licenses/LICENSE").decode()
        metadata = wheel.read(f"flashgen-{flashgen.__version__}.dist-info/METADATA").decode()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
