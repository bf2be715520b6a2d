"""Files that a test adds to the package, as somebody who extends it would: found there while the test runs, and forgotten behind it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashgen import templates


@contextmanager
def added_files(
    folder: Path,
    files: Mapping[str, str],
    packages: Mapping[str, ModuleType],
    template: tuple[str, str],
    caches: Sequence[Callable[..., Any]],
) -> Iterator[pytest.MonkeyPatch]:
    """Writes the files to `folder`, and lets packages and templates be found there.

    files: texts by path; packages: by the folder of theirs among the files; template: as it is read, and which of the files that is;
    caches: functions that remember what is there. Gives what undoes everything, for more.
    """
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text).lstrip())
    read, (path, name) = templates.read, template
    with pytest.MonkeyPatch.context() as patch:
        for own, package in packages.items():
            patch.setattr(package, "__path__", [*package.__path__, str(folder / own)])
        patch.setattr(templates, "read", lambda asked: (folder / name).read_text() if asked == path else read(asked))
        for found in caches:
            found.cache_clear()  # type: ignore[attr-defined]
        yield patch
    for found in caches:
        found.cache_clear()  # type: ignore[attr-defined]
