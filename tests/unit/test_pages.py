"""Pages lead somewhere: the files and headings that README and docs name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)#:]+)\)")  # a file, not an address
PLACE = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")  # a heading of a file, or of the page itself
HEADING = re.compile(r"\b([\w-]+\.md)(?:\]\([^)]*\))?, \"([^\"]+)\"")  # page.md, "Heading"; [page.md](page.md), "Heading"


def headings(page: Path) -> set[str]:
    return set(re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8")))


def places(page: Path) -> set[str]:
    """What links to a page's headings end in, as GitHub makes it of them."""
    if not page.is_file():
        return set()
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings(page)}


def lost(page: Path) -> list[str]:
    """Links and headings of a page that lead nowhere."""
    text = page.read_text(encoding="utf-8")
    files = [link for link in LINK.findall(text) if not (page.parent / link).is_file()]
    files += [f"{name}#{place}" for name, place in PLACE.findall(text) if place not in places(page.parent / name if name else page)]
    return files + [f"{name}, {heading!r}" for name, heading in HEADING.findall(text) if heading not in headings(ROOT / "docs" / name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_headings_are_there(page: Path) -> None:
    assert not lost(page)


def test_what_is_lost_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = '[a](nothing.md), see [architecture.md](docs/architecture.md), "Nowhere", or architecture.md, "Layers"'
    text += ", [b](#b), [c](nothing.md#c), [d](#d)\n# D"
    page.write_text(text, encoding="utf-8")
    assert lost(page) == ["nothing.md", "docs/architecture.md", "#b", "nothing.md#c", "architecture.md, 'Nowhere'"]


def test_files_of_code_name_headings_that_are_there() -> None:
    folders = ("templates", "codegen", "build", "flashgen", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in {".py", ".cuh", ".j2"}]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    named = {(path, name, heading) for path, text in texts.items() for name, heading in HEADING.findall(text)}
    assert [one for one in named if one[2] not in headings(ROOT / "docs" / one[1])] == []
