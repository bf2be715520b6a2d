"""A page made of its frame, style, data and scripts; and a table for data that repeats itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SHARED = Path(__file__).parent


class ValueTable:
    """Values that come often, each once; the data has their numbers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        """The place of a value, which is added if it is new."""
        key = json.dumps(value)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def self_contained_page(folder: Path, scripts: Sequence[str], data: Any) -> str:
    """The text of `page.html` in `folder`, in the frame, with the theme, `page.css`, the scripts in their order and the data put in."""
    import jinja2  # loaded only where a page is written

    loader = jinja2.FileSystemLoader([folder, _SHARED])
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    style = _read(_SHARED / "theme.css") + _read(folder / "page.css")
    script = "\n".join([_read(_SHARED / "elements.js"), *(_read(folder / name) for name in scripts)])
    # Nothing is escaped: style and scripts are flashgen's own, and data has been through `script_json`.
    return environment.get_template("page.html").render(style=style, script=script, data=script_json(data))


def script_json(data: Any) -> str:
    """JSON that no text in it can lead out of its script element: neither `</script>` nor `<!--` is left."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
