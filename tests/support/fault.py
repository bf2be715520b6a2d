"""What a planted fault is: a patch on the rendered text of a kernel, and the settings in which it is launched."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.config import Config
from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.family import families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import Atoms, Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload
from tests.support.cases import Case, Layout


class FaultError(FlashgenError):
    """A patch does not apply."""


@dataclass(frozen=True)
class Setting:
    """A kernel, and the inputs that it is launched on."""

    config: Config
    cases: tuple[Case, ...]

    def spec(self, target: Target) -> KernelSpec:
        """The kernel without a fault."""
        (family,) = [family for family in families().values() if isinstance(self.config, family.config_type)]
        return KernelSpec(family, self.cases[0].problem, self.config, target)


@dataclass(frozen=True)
class Fault:
    """Replaces `find`, which must occur exactly once, by `replace`. A `race` need not show at each launch.

    `also` holds further replacements, harmless by themselves, that give a race time to show. `on_cpu`: (find, replace) for emulated
    atoms, where those of a GPU are PTX; there a race needs no time to show.
    """

    name: str
    find: str
    replace: str
    setting: Setting
    race: bool = False
    also: tuple[tuple[str, str], ...] = ()
    on_cpu: tuple[str, str] | None = None

    def apply(self, source: Source, atoms: Atoms = Atoms.PTX) -> Source:
        """The faulty text. Raises FaultError if a text to replace does not occur exactly once."""
        text = source.text
        patches = [(self.find, self.replace), *self.also] if atoms is Atoms.PTX else [self.on_cpu or (self.find, self.replace)]
        for find, replace in patches:
            found = text.count(find)
            if found != 1:
                raise FaultError(f"fault {self.name} must find its text once in {source.entry}; found it {found} times: {find!r}")
            text = text.replace(find, replace)
        return Source(source.entry, text)


def setting(
    *sizes: tuple[int, int],
    mask: Mask = Mask.FULL,
    dtype: Dtype = Dtype.FP16,
    width: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    magnitude: float = 2.0,
    layout: Layout = Layout.DENSE,
    offset: float = 0.0,
    rising: float = 0.0,
    config: tuple[int, int, int, int, int] | Config = (64, 64, 32, 4, 2),
    query: QueryPlace = QueryPlace.SHARED,
    first_product: FirstProduct = FirstProduct.QK,
) -> Setting:
    """Sizes are (len_q, len_kv), one a case; `config` is (block_q, block_kv, step_kv, warps, stages), or one of another family."""
    problem = Problem(dtype, *width, mask)
    workloads = [Workload(batch, *heads, *lengths) for lengths in sizes]
    scale, layouts = width[0] ** -0.5, (layout,) * 4
    cases = (Case(w.name, problem, w, scale, magnitude, layouts, seed=11, offset=offset, rising=rising) for w in workloads)
    return Setting(config if isinstance(config, Config) else AttentionForwardConfig(*config, query, first_product), tuple(cases))
