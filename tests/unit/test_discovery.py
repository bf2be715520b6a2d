"""What is found by itself: files of a package that define one object, and what is said of those that do not."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen import numerics
from flashgen.codegen import operation as operation_module
from flashgen.codegen import operations as package
from flashgen.codegen.discovery import defined, discovered
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import automatic_families, families
from flashgen.codegen.operation import Operation, operations
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.target import Target, find_target
from flashgen.numerics.oracle import oracle_of
from flashgen.selection.families import families_for

FORWARD = "from flashgen.codegen.operations.forward import Forward\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Beside the package of operations; what was found is forgotten."""
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    operation_module.operations.cache_clear()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(f"{package.__name__}.added")]:
        del sys.modules[name]
    operation_module.operations.cache_clear()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "flashgen.codegen.operations.added must define OPERATION, of type Operation; got None"),
        ("OPERATION = 3\n", "flashgen.codegen.operations.added must define OPERATION, of type Operation; got 3"),
        (
            f"{FORWARD}class Other(Forward):\n    name = 'other'\nOPERATION = Other()\n",
            "name of the operation in codegen/operations/added.py must be added; got other",
        ),
    ],
)
def test_a_file_that_cannot_be_taken_is_named(text: str, says: str, folder: Path) -> None:
    (folder / "added.py").write_text(text, encoding="utf-8")
    with pytest.raises(ArgumentError, match=f"^{re.escape(says)}$"):
        operations()


def test_an_operation_without_an_oracle_or_a_family_is_told_so(folder: Path) -> None:
    (folder / "added.py").write_text(f"{FORWARD}class Added(Forward):\n    name = 'added'\nOPERATION = Added()\n", encoding="utf-8")
    problem = Problem(Dtype.BF16, 64, operation="added")
    with pytest.raises(ArgumentError, match=r"^flashgen\.numerics\.added must be there and define ORACLE, of type Oracle; "):
        oracle_of(problem)
    with pytest.raises(ArgumentError, match=r"^pass must be one that a family computes; got added, which none does$"):
        families_for(problem, find_target("sm_90a"))


def test_families_by_name_alone_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in families().values():
        if family.operation == "backward":
            monkeypatch.setattr(type(family), "automatic", False)
    with pytest.raises(ArgumentError, match=r"^family must be given for backward: one of attention_backward, "):
        automatic_families(Problem(Dtype.BF16, 64, operation="backward"))


def test_a_module_that_misses_another_is_not_taken_for_missing(folder: Path) -> None:
    (folder / "added.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        defined(package, "added", "OPERATION", Operation)  # type: ignore[type-abstract]


def test_each_module_gives_its_object() -> None:
    from flashgen.codegen import targets

    found = discovered(targets, "TARGET", Target)
    assert found["sm_80"] is find_target("sm_80")
    with pytest.raises(ArgumentError, match="rule must define ORACLE"):
        defined(numerics, "rule", "ORACLE", Target)
