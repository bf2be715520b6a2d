"""Words of this project's own that the field's have replaced (docs/architecture.md, "Words of the field"): no identifier has them again.

Checked word by word: a comment may say that two rows have lost their place.
"""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

from flashgen import templates

ROOT = Path(__file__).parents[2]
EVERYWHERE = {
    *("packed_heads", "kHeads", "StageOrder", "wait_empty", "hand_over", "wait_full", "outgrown", "outgrown_by", "redone", "kNoReference"),
    *("natural", "natural_low", "diagonal", "keep_in_register", "keep_in_registers", "kEx2Lean", "kTurns", "section_heads"),
    *("section_blocks", "left_out", "plan_at_hand", "counts_tiles", "worth_trying"),
}
IN_TEMPLATES = {*EVERYWHERE, "announce", "reference", "lost", "order", "turns", "lean", "sections", "Cover", "lazy", "kLazy", "follow"}
MODULES = sorted(path for folder in ("codegen", "build", "flashgen") for path in (ROOT / folder).rglob("*.py"))


def code_of(text: str) -> str:
    """A template's text without comments and strings. Lines of Jinja begin with `//%`."""
    lines = (line if line.lstrip().startswith("//%") else line.split("//")[0] for line in text.splitlines())
    return re.sub(r'"[^"\n]*"', "", "\n".join(lines))


@pytest.mark.parametrize("path", [path for path in templates.paths() if not path.startswith("emulator/")])
def test_templates(path: str) -> None:
    assert set(re.findall(r"\b\w+\b", code_of(templates.read(path)))) & IN_TEMPLATES == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules(path: Path) -> None:
    with tokenize.open(path) as file:
        names = {token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.NAME}
    assert names & EVERYWHERE == set()
