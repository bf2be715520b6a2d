"""Takes out of a rendered text what its kernels do not use: functions, structs and constants of atoms and tile operations.

So a file of templates may hold what belongs together, and a text still has nothing that its reader could skip. Declarations begin in the
first column, as the templates are written, and end where their braces and parentheses are closed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

MARK = "// ==== "  # begins the line before a part, which names its file
END = "\0"  # ends a part: what follows is the template's own
_PRUNED = ("atoms/ptx/", "tile/")
_NAME = re.compile(
    r"\n(?:template <[^\n]*>\n)?"
    r"(?:(?:struct(?: alignas\(\d+\))?|using) (\w+)|constexpr [\w:]+ (\w+)|[^(\n=]*?[ &*](\w+)(?:<[^(\n]*>)?\()"
)


@dataclass(frozen=True)
class _Piece:
    """Lines of a text: a declaration with the comment above it, or what is kept whatever is used. `name`: of the declaration, or empty."""

    text: str
    name: str = ""

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(re.findall(r"\b[A-Za-z_]\w*", _code(self.text)))


def parts(text: str) -> list[str]:
    """The files of templates that a rendered text has parts of, in their order."""
    return re.findall(rf"(?m)^{MARK}(\S+) =+$", text)


def pruned(text: str) -> str:
    """The text without declarations of atoms and tile operations that nothing uses, and without parts of which nothing is left."""
    files = [_pieces(part) for part in re.split(rf"(?m)^(?={MARK})|{END}", text)]
    by_name: dict[str, list[_Piece]] = defaultdict(list)
    wanted: set[str] = set()
    for piece in (piece for pieces in files for piece in pieces):
        if piece.name:
            by_name[piece.name].append(piece)
        elif not piece.text.startswith(MARK):  # a part that is kept is what others are written in, and uses none of them
            wanted |= piece.words
    used: set[str] = set()
    while fresh := (wanted & by_name.keys()) - used:
        used |= fresh
        wanted |= {word for name in fresh for piece in by_name[name] for word in piece.words}
    return re.sub(r"\n{3,}", "\n\n", "".join(_kept(pieces, used) for pieces in files))


def _kept(pieces: tuple[_Piece, ...], used: set[str]) -> str:
    left = [piece for piece in pieces if not piece.name or piece.name in used]
    declares = any(piece.name for piece in pieces)
    return "".join(piece.text for piece in left) if not declares or any(piece.name for piece in left) else ""


def _pieces(part: str) -> tuple[_Piece, ...]:
    return _declared(part) if part.removeprefix(MARK).startswith(_PRUNED) else (_Piece(part),)


@lru_cache(maxsize=512)  # most parts are the same in all texts
def _declared(part: str) -> tuple[_Piece, ...]:
    found = []
    for text in _declarations(part):
        match = _NAME.search("\n" + _code(text).strip("\n"))
        found.append(_Piece(text, next(filter(None, match.groups())) if match else ""))
    return tuple(found)


def _declarations(part: str) -> Iterator[str]:
    """Groups of lines that end where a declaration does. A comment with a blank line below is a group of its own."""
    group, depth = "", 0
    for line in part.splitlines(keepends=True):
        group += line
        code = _code(line)
        depth += sum(map(code.count, "{([")) - sum(map(code.count, "})]"))
        is_comment = not _code(group).strip()
        if depth == 0 and ((is_comment and not line.strip()) or code.rstrip().endswith((";", "}"))):
            yield group
            group = ""
    if group:
        yield group


def _code(text: str) -> str:
    """Without comments and strings."""
    return re.sub(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"', "", text)
