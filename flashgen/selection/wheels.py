"""Packages of kernels: a generated folder in a wheel, whose import has flashgen use its kernels."""

from __future__ import annotations

import json
import keyword
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from flashgen.build import files
from flashgen.codegen.errors import ArgumentError, FlashgenError, shown

from ..version import __version__
from . import bundle, manifest
from .bundle import Generated

_FOLDER = "kernels"  # of the package, with what `flashgen generate` writes

_INIT = '''"""{description}

Importing this package has flashgen use its kernels, on each GPU from the first call on. That needs no compiler.
"""

from pathlib import Path

import flashgen

FOLDER = Path(__file__).resolve().parent / "{folder}"

flashgen.register_kernels(FOLDER)
'''

_PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {name}
version = {version}
description = {description}
requires-python = ">=3.11"
dependencies = [{dependency}]

[tool.hatch.build]
ignore-vcs = true

[tool.hatch.build.targets.wheel]
packages = [{module}]
core-metadata-version = "2.4"
"""


@dataclass(frozen=True)
class PackageName:
    """What pip calls a package, and its version."""

    name: str
    version: str

    @classmethod
    def parse(cls, text: str) -> PackageName:
        """'NAME' or 'NAME==VERSION', by default flashgen's own version. Raises ArgumentError for what pip or Python would refuse.

        So it does for the names of other packages: those of which flashgen knows and those which are installed here.
        """
        name, equals, version = text.partition("==")
        module = _module_of(name)
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?", name) or not module.isidentifier():
            raise ArgumentError(f"wheel must be a package's name, of letters, digits and hyphens, or NAME==VERSION; got {shown(text)}")
        if keyword.iskeyword(module) or module in sys.stdlib_module_names or module in _needed_here() or _is_another_installed(module):
            raise ArgumentError(f"wheel must be a name that no other package has; got {shown(name)}")
        if equals and not re.fullmatch(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.post|\.dev)[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?", version):
            raise ArgumentError(f"wheel must have a version such as 1.0 or 1.0+h200 behind ==; got {shown(version)}")
        return cls(name, version or __version__)

    @property
    def module(self) -> str:
        """Under which it is imported."""
        return _module_of(self.name)


def _module_of(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _needed_here() -> set[str]:
    """What flashgen imports, and what it can be asked to work with, whether installed or not, as modules are named."""
    try:
        requirements = metadata.requires("flashgen") or []
    except metadata.PackageNotFoundError:  # a checkout on the path
        requirements = []
    # The names that are written out are of modules, whose packages have others.
    required = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return {"flashgen", "cuda", "nvidia", "triton", "flash_attn"} | {_module_of(found[0]) for found in required if found}


def _is_another_installed(module: str) -> bool:
    """Whether a package is installed that pip or Python knows by this name, other than one of kernels, which may be written anew."""
    owners = {name for top, names in metadata.packages_distributions().items() if top.lower() == module for name in names}
    for package in metadata.distributions():
        by_pip = _module_of(package.name or "") == module
        of_kernels = by_pip and Path(str(package.locate_file(module)), _FOLDER, manifest.FILE).is_file()
        if (by_pip or package.name in owners) and not of_kernels:
            return True
    return False


def require_folder(folder: Path) -> None:
    """Raises ArgumentError, which starts with `out`, unless a wheel can be written to `folder`, which need not be there yet."""
    try:
        files.require_writable(files.nearest(folder.absolute()))
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written; got {folder}: {error.strerror or error}") from error


def write_wheel(folder: Path, package: PackageName, kernels: Sequence[Generated]) -> Path:
    """Writes the package to a folder and returns its path; one of the same name and version is replaced.

    It is for any Python and platform, and needs flashgen of this version, whose kernels these are.
    Raises FlashgenError if it cannot be written, or without hatchling, which builds it.
    """
    try:
        from hatchling.builders.wheel import WheelBuilder
    except ImportError as error:
        raise FlashgenError(f"hatchling, which builds packages, cannot be imported ({error}): pip install 'flashgen[wheel]'") from error
    archs = ", ".join(dict.fromkeys(kernel.spec.target.name for kernel in kernels))
    description = f"Kernels of flashgen {__version__} for {archs}, compiled ahead of time."
    fields = {"name": package.name, "version": package.version, "description": description, "dependency": f"flashgen=={__version__}"}
    with tempfile.TemporaryDirectory(prefix="flashgen-") as root:
        module = Path(root, package.module)
        module.mkdir()
        bundle.write(module / _FOLDER, kernels)
        (module / "__init__.py").write_text(_INIT.format(description=description, folder=_FOLDER), encoding="utf-8")
        texts = {name: json.dumps(text) for name, text in {**fields, "module": package.module}.items()}  # as TOML writes them, too
        Path(root, "pyproject.toml").write_text(_PROJECT.format(**texts), encoding="utf-8")
        try:
            (built,) = WheelBuilder(root).build(directory=str(Path(root, "dist")), versions=["standard"])
            files.make_folders(folder.absolute())
            data = Path(built).read_bytes()
        except OSError as error:
            raise FlashgenError(f"{folder} cannot be written: {error.strerror or error}") from error
    files.write_file(folder / Path(built).name, data, 0o644)
    return folder / Path(built).name
