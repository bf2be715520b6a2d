"""The rules of the house: who may import whom, what only the atoms may contain, how long a module is, and that a name means one thing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import flashgen

PACKAGE = Path(flashgen.__file__).parent
# Lowest first: a layer imports itself and those before it.
LAYERS = ("templates", "codegen", "build", "flashgen")
# The same for what is in a layer: files and folders in one place stand on one step. What a layer discovers (families, operations, targets)
# is imported by name at run time, so that it may stand on those who look for it.
STEPS = {
    "build": (("files", "lock", "parameter_buffer"), ("own_files",), ("artifact", "cache_dir"), ("nvrtc", "emulator", "gpu"), ("store",)),
    "flashgen": (
        ("version", "cells", "progress", "pages", "traced"),
        ("numerics", "records"),
        ("selection",),
        ("launch",),
        ("operators", "verification"),
        ("timing",),
        ("tuning",),
        ("ahead", "api", "doctor", "kvcache", "varlen"),
        ("integrations",),
        ("bench",),
        ("compare", "explain"),
        ("tuning_page",),
        ("cli",),
        ("__main__",),
    ),
}
DISCOVERED = {"families", "operations", "targets"}
LONGEST = 300  # lines of a module
# What a command, the function that it stands for, or each of a kind of thing is called: one thing, in several places.
SHARED_NAMES = {"generate", "predict", "tune", "verify"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}


def layer_of(path: Path) -> str:
    """The layer of a file of the package, given by its path in it."""
    return path.parts[0] if path.parts[0] in LAYERS[:3] else "flashgen"


def python_files() -> dict[Path, str]:
    roots = [PACKAGE, *(PACKAGE / name for name in LAYERS[:3])]  # rglob does not follow links
    found = {p.relative_to(PACKAGE) for root in roots for p in root.rglob("*.py")}
    return {p: (PACKAGE / p).read_text(encoding="utf-8") for p in sorted(found)}


def imports(path: Path, text: str) -> set[str]:
    """Everything that a file of the package imports, wherever in the file, as absolute dotted names."""
    package = ["flashgen", *path.parent.parts]
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def violations(path: Path, text: str) -> list[str]:
    """The rules that a Python file of the package breaks."""
    layer = layer_of(path)
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    found = []
    for name in sorted(imports(path, text)):
        top, *rest = name.split(".")
        imported = rest[0] if rest and rest[0] in LAYERS[:3] else "flashgen"
        if top == "flashgen" and imported not in allowed:
            found.append(f"{path} imports {name}, which is of {imported}: {layer} may import only {', '.join(allowed)}")
        if top == "torch" and layer != "flashgen":
            found.append(f"{path} imports {name}: only flashgen/ may import torch")
        if top == "cuda" and layer not in ("build", "flashgen"):
            found.append(f"{path} imports {name}: only build/ and flashgen/ may import CUDA")
        if top in LAYERS[:3]:
            found.append(f"{path} imports {name}: it installs as flashgen.{name}")
    if layer in ("templates", "codegen"):
        tree = ast.walk(ast.parse(text))
        words = {n.attr if isinstance(n, ast.Attribute) else n.name for n in tree if isinstance(n, ast.Attribute | ast.alias)}
        found += [f"{path} reads the environment ({word}): its result must follow from the spec" for word in sorted(words & ENVIRONMENT)]
    return found


def modules() -> dict[str, tuple[Path, str]]:
    """Path and text of each module of the package, by its name without 'flashgen.'; a package by its own."""
    return {".".join(p.with_suffix("").parts).removesuffix(".__init__"): (p, text) for p, text in python_files().items()}


def graph(files: dict[str, tuple[Path, str]]) -> dict[str, set[str]]:
    """The modules that each module imports, wherever in its text."""
    found = {}
    for name, (path, text) in files.items():
        imported = (dotted.removeprefix("flashgen.") for dotted in imports(path, text))
        found[name] = {dotted if dotted in files else dotted.rpartition(".")[0] for dotted in imported} & files.keys() - {name}
    return found


def circles(imported: dict[str, set[str]]) -> set[str]:
    """The modules that import themselves in the end."""
    reached = {name: set(direct) for name, direct in imported.items()}
    for middle in imported:
        for name in imported:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return {name for name in imported if name in reached[name]}


def wrong_steps(imported: dict[str, set[str]]) -> list[str]:
    """The imports, within a layer, of what stands on a higher step or, in another place, on the same one."""
    found = []
    for name, direct in imported.items():
        for other in direct:
            (layer, place), (their_layer, their_place) = ((_layer_and_place(module)) for module in (name, other))
            if layer != their_layer or place == their_place or layer not in STEPS or "__init__" in (place, their_place):
                continue
            step, theirs = ([i for i, places in enumerate(STEPS[layer]) if each in places] for each in (place, their_place))
            if not step or not theirs or step <= theirs:
                found.append(f"{name} imports {other}")
    return sorted(found)


def _layer_and_place(module: str) -> tuple[str, str]:
    parts = module.split(".")
    return (parts[0], parts[1] if len(parts) > 1 else "__init__") if parts[0] in LAYERS[:3] else ("flashgen", parts[0])


def cuda_files() -> dict[Path, str]:
    root = PACKAGE / "templates"
    return {p.relative_to(root): p.read_text(encoding="utf-8") for p in sorted(root.rglob("*")) if p.suffix in (".cuh", ".j2", ".cu")}


def cuda_violations(path: Path, text: str) -> list[str]:
    """The rules that a CUDA text breaks, given its path in templates/."""
    found = []
    if not re.match(r"//+ ?\S", text):
        found.append(f"{path} must begin with a comment that says what belongs there")
    code = re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", " ", text)
    if path.parts[0] != "emulator" and re.search(r"^\s*#\s*include", code, re.MULTILINE):
        found.append(f"{path} includes a file: the rendered text stands alone")
    for word in ("asm", "__asm__", "__shared__"):
        if path.parts[0] != "atoms" and re.search(rf"\b{word}\b", code):
            found.append(f"{path} uses {word}: that is for atoms alone")
    return found


def test_python_files_keep_to_their_layer() -> None:
    files = python_files()
    assert {layer_of(p) for p in files} == set(LAYERS), "the walk reaches every layer"
    assert [v for path, text in files.items() for v in violations(path, text)] == []


def test_no_module_imports_itself_in_the_end() -> None:
    imported = graph(modules())
    assert len(imported) > 100, "the walk reaches the package"
    assert (
        circles({name: {other for other in direct if other.rpartition(".")[2] not in DISCOVERED} for name, direct in imported.items()})
        == set()
    )


def test_places_keep_to_their_step() -> None:
    imported = graph(modules())
    places = {_layer_and_place(name) for name in imported} - {(layer, "__init__") for layer in LAYERS}
    missing = {(layer, place) for layer, place in places if layer in STEPS and not any(place in step for step in STEPS[layer])}
    assert missing == set(), "these stand on no step"
    assert wrong_steps(imported) == []


def test_modules_are_short() -> None:
    lengths = {str(path): len(text.splitlines()) for path, text in modules().values()}
    assert {path: length for path, length in lengths.items() if length > LONGEST} == {}


def test_a_public_name_means_one_thing() -> None:
    homes: dict[str, set[str]] = {}
    own = {name: text for name, (_, text) in modules().items() if not name.startswith("integrations.")}  # others' names are theirs
    for name, text in own.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(name)
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    assert shared.keys() == SHARED_NAMES, shared


@pytest.mark.parametrize(
    ("name", "text", "circle", "steps"),
    [
        ("records.a", "def f() -> None:\n    from ..selection import loaded", set(), ["records.a imports selection.loaded"]),
        ("numerics.a", "from ..records.store import Records", set(), ["numerics.a imports records.store"]),
        ("build.a", "from .gpu import driver", set(), ["build.a imports build.gpu.driver"]),
        ("tuning.a", "from ..api import attention\nfrom . import b", {"tuning.a", "tuning.b"}, ["tuning.a imports api"]),
        ("tuning.a", "from ..records.store import Records\nfrom .c import d", set(), []),
    ],
)
def test_a_breach_between_modules_is_seen(name: str, text: str, circle: set[str], steps: list[str]) -> None:
    others = {"tuning.b": "from . import a", "tuning.c": "d = 1"}
    others |= dict.fromkeys(("selection.loaded", "records.store", "build.gpu.driver", "api"), "")
    files = {module: (Path(*module.split(".")).with_suffix(".py"), code) for module, code in {**others, name: text}.items()}
    found = graph(files)
    assert circles(found) == circle
    assert [step for step in wrong_steps(found) if step.startswith(name)] == steps


def test_cuda_texts_keep_to_their_layer() -> None:
    files = cuda_files()
    assert {p.parts[0] for p in files} >= {"atoms", "emulator", "tile", "kernels"}, "the walk reaches every folder"
    assert [v for path, text in files.items() for v in cuda_violations(path, text)] == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("codegen/a.py", "from flashgen.build.compiler import compile_source"),
        ("codegen/a.py", "from flashgen import api"),
        ("codegen/families/a.py", "from ...build import store"),
        ("codegen/a.py", "from .. import selection"),
        ("codegen/a.py", "def f():\n    import torch.cuda"),
        ("codegen/a.py", "from cuda.bindings import nvrtc"),
        ("codegen/a.py", "import os\nx = os.environ.get('X')"),
        ("codegen/a.py", "from os import getenv"),
        ("codegen/a.py", "from templates import read"),
        ("templates/__init__.py", "from flashgen.codegen import errors"),
        ("build/a.py", "from torch import Tensor"),
        ("build/a.py", "if TYPE_CHECKING:\n    from flashgen.records import Records"),
        ("build/a.py", "import flashgen.records"),
    ],
)
def test_a_breach_in_python_is_seen(path: str, text: str) -> None:
    assert len(violations(Path(path), text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("codegen/a.py", "from flashgen import templates"),
        ("codegen/families/a.py", "from ..target import Target"),
        ("build/a.py", "import os\nfrom cuda.bindings import driver\nfrom flashgen.codegen import spec\nx = os.environ"),
        ("tuning/a.py", "import torch\nfrom ..build import driver\nfrom flashgen import records"),
    ],
)
def test_what_is_allowed_in_python_passes(path: str, text: str) -> None:
    assert violations(Path(path), text) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("tile/a.cuh", "#pragma once\n// Late.\n"),
        ("tile/a.cuh", "// Text.\n/* several\nlines */ int x; // end\n  # include <a>\n"),
        ("tile/a.cuh", '// Text.\nasm volatile("bar.sync 0;");\n'),
        ("kernels/a.cu.j2", "// Text.\n__shared__ float x[4];\n"),
        ("atoms/ptx/a.cuh", "// Text.\n#include <cuda_fp16.h>\n"),
    ],
)
def test_a_breach_in_cuda_is_seen(path: str, text: str) -> None:
    assert len(cuda_violations(Path(path), text)) == 1


def test_comments_and_atoms_are_free() -> None:
    assert cuda_violations(Path("tile/a.cuh"), "// No __shared__ and no asm here.\nint x;  // #include nothing\n") == []
    assert cuda_violations(Path("emulator/a.cuh"), "// Text.\n#include <vector>\n") == []  # a C++ compiler has headers
    assert cuda_violations(Path("atoms/ptx/a.cuh"), '// Text.\nextern __shared__ int x[];\nvoid f() { asm(""); }\n') == []
