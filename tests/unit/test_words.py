"""Words of this project's own that the field's have replaced (docs/architecture.md, "Words of the field"): nothing is named so again.

Checked name by name: a comment may say that two rows have lost their place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashgen import templates

ROOT = Path(__file__).parents[2]
WORDS = {
    *("scores", "probabilities", "reference", "sum", "packed_heads", "kHeads", "turns", "kTurns", "order", "sections", "section_heads"),
    *("section_blocks", "place", "places", "StageOrder", "wait_empty", "announce", "hand_over", "wait_full", "lazy", "kLazy", "lean"),
    *("outgrown", "outgrown_by", "redone", "kNoReference", "lost", "natural", "natural_low", "diagonal", "Cover", "keep_in_register"),
    *(
        "keep_in_registers",
        "kEx2Lean",
        "host",
        "left_out",
        "without",
        "plan_at_hand",
        "misaligned",
        "counts_tiles",
        "worth_trying",
        "follow",
    ),
}
FOLDERS = ("codegen", "build", "flashgen", "tools", "templates")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def code_of(text: str) -> str:
    """A template's text without comments and strings. Lines of Jinja begin with `//%`."""
    lines = (line if line.lstrip().startswith("//%") else line.split("//")[0] for line in text.splitlines())
    return re.sub(r'"[^"\n]*"', "", "\n".join(lines))


def given_names(tree: ast.AST) -> Iterator[str]:
    """What a module names itself: variables, arguments, attributes that it sets, functions and classes. Not what others have named."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                yield name


@pytest.mark.parametrize("path", templates.paths())
def test_templates(path: str) -> None:
    assert set(re.findall(r"\b\w+\b", code_of(templates.read(path)))) & WORDS == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules(path: Path) -> None:
    assert set(given_names(ast.parse(path.read_text(encoding="utf-8")))) & WORDS == set()


def test_files() -> None:
    paths = [Path(path) for path in templates.paths()] + [path.relative_to(ROOT) for path in MODULES]
    paths += [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*")]
    assert {part for path in paths for part in path.with_suffix("").parts} & WORDS == set()
