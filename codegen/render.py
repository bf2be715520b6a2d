"""From a `KernelSpec` to its `Source`: fills the family's template."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from flashgen import templates

from .spec import KernelSpec

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class Source:
    """Rendered CUDA text: one self-contained file. `entry` is its extern "C" kernel."""

    entry: str
    text: str

    @property
    def digest(self) -> str:
        """sha256 of the text, as hex digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@cache
def environment() -> jinja2.Environment:
    """The one Jinja environment. `source(path)` inserts a file of `templates` byte for byte, never parsed as a template."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FunctionLoader(templates.read),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        line_statement_prefix="//%",
        autoescape=False,
    )
    env.globals["source"] = templates.read
    return env


def render(spec: KernelSpec) -> Source:
    """The text of one kernel. The same spec gives the same text, byte for byte."""
    template = environment().get_template(spec.family.template)
    context = spec.family.context(spec.problem, spec.config, spec.target)
    text = template.render(spec=spec, config=spec.config, parameters=spec.family.parameters.fields, **context)
    return Source(spec.name, text)
