"""CUDA text: atoms (one function per instruction), tile operations, and one kernel template per family.

The only Python here: reading the text. `.cuh` files are plain CUDA, inserted byte for byte; `kernels/*.cu.j2` are Jinja.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent


@cache  # a text has dozens of files, and a tuner renders hundreds of texts
def read(path: str) -> str:
    """The text of one file, for example 'atoms/ptx/mma_sync.cuh'. Raises FileNotFoundError for a path that is not here."""
    file = (ROOT / path).resolve()
    if not file.is_relative_to(ROOT) or not file.is_file():
        raise FileNotFoundError(f"no template text {path!r} under {ROOT.name}/")
    return file.read_text(encoding="utf-8")


def paths() -> list[str]:
    """Every CUDA text, sorted, as `read` takes it."""
    return sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.suffix in (".cuh", ".j2"))
