"""From a `KernelSpec` to its `Source`: fills the family's template, and leaves out what its kernels do not use."""

from __future__ import annotations

import enum
import hashlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from flashgen import templates

from .errors import ArgumentError, FlashgenError
from .modifier import Modifier, collects_gradients, modifiers_of
from .problem import CacheDtype
from .prune import END, MARK, parts, pruned
from .score_chain import chain_text, conditions, shares_distances
from .score_tensors import fetches, loads_ahead
from .seen_tiles import hiding, scatters
from .spec import KernelSpec

if TYPE_CHECKING:
    import jinja2


class Atoms(enum.Enum):
    """What a text's atoms are made of: PTX for NVRTC, or C++ for a C++ compiler."""

    PTX = "ptx"
    EMULATED = "emulated"


# Files of templates/emulator that come before all atoms; `entry` comes after the kernels.
_BEFORE_ATOMS = ("language", "shared", "fiber", "schedule", "report", "extent", "launch", "block", "cluster")
# Atoms with bodies in templates/emulator/runtime, as those files have, and what these atoms need: each comes after what it uses.
_WITH_BODIES = (
    *("types", "index", "shared_memory", "cp_async", "mma_sync", "cluster", "mbarrier", "mbarrier_cluster"),
    *("cp_async_bulk", "cp_async_bulk_tensor", "cp_async_bulk_store", "cp_async_bulk_send", "wgmma"),
)
_RUNNING = ("isolate", "residents")  # what runs the kernels, of the same folder
_CHAIN = "common/score_chain"  # of the tile operations: every link comes after it
_BEHIND_CHAIN = "common/lse"  # after which modifiers without a link come
# That lines of tile operations depend on: see `conditions`.
_CONDITIONS = (
    *("links", "maps", "folds", "adds", "changes", "heads", "joins", "drops", "tensors", "collects", "opens", "by_key", "fetches"),
    *("scatters", "traced", "traced_score", "traced_mask", "bends", "traced_slope", "learns", "traced_gradients"),
    *("traced_tiles", "traced_distances", "ahead", "linear", "hides", "overwrites", "packed", "cached", "invariant", "e4m3", "early"),
    *("at_once", "offsets", "fronts", "looks", "far", "zeroes", "renews"),
)
_FETCHING = ("cp_async", "ldmatrix")  # atoms of common/fetched_tensor
_COLUMNS = 120
_CONTENTS = "// (parts)"  # stands in the header until it is known which parts the kernels use
_LABELLED = "//" + " " * 12  # what stands below a header's label


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
def jinja_environment() -> jinja2.Environment:
    """The one Jinja environment. `source(path)` inserts a file of `templates`, after a line that names it; it is no template itself.

    Raises FlashgenError without Jinja, which only rendering needs.
    """
    try:
        import jinja2
    except ImportError as error:
        raise FlashgenError(f"jinja2 cannot be imported ({error}): pip install jinja2") from error

    env = jinja2.Environment(
        loader=jinja2.FunctionLoader(templates.read),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        line_statement_prefix="//%",
        autoescape=False,
    )
    env.globals["source"] = jinja2.pass_context(_part)
    env.filters["wrapped"] = _wrapped
    env.filters["each"] = lambda words, before: "".join(before + word for word in words)
    return env


@cache
def _tile_environment() -> jinja2.Environment:
    """Of files that `source` inserts: they are C++ but for lines that begin with //%."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(templates.read),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        variable_start_string="<%=",  # nothing of C++
        variable_end_string="%>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<%#",
        comment_end_string="%>",
        line_statement_prefix="//%",
        autoescape=False,
    )


def _part(context: jinja2.runtime.Context | None, path: str) -> str:
    """A file of `templates`, after a line that names it. Where it speaks of modifiers it says what holds for those of the context."""
    text = templates.read(path)
    if context is not None and path.startswith("tile/") and "//%" in text:
        text = _tile_environment().get_template(path).render({name: context[name] for name in _CONDITIONS})
    return f"{MARK}{path} ".ljust(_COLUMNS, "=") + f"\n\n{text}{END}"


def _wrapped(text: str) -> str:
    """Text for a header, behind a label: further lines are indented like the first."""
    return textwrap.fill(text, _COLUMNS - len(_LABELLED)).replace("\n", f"\n{_LABELLED}")


def _contents(paths: Sequence[str]) -> str:
    """Names the parts of a text, folder by folder, for its header."""
    folders: dict[str, list[str]] = {}
    for path in paths:
        folder, name = path.removesuffix(".cuh").rsplit("/", 1)
        folders.setdefault(folder, []).append(name)
    each = (f"{folder}: {', '.join(names)}" for folder, names in folders.items())
    lines = [textwrap.fill(one, _COLUMNS, initial_indent=_LABELLED, subsequent_indent=f"{_LABELLED}  ") for one in each]
    return "\n".join(lines).replace(_LABELLED, "//   parts    ", 1)


def atom_files(names: Sequence[str], atoms: Atoms) -> list[str]:
    """The files of these atoms, in their order, after what emulated ones stand on."""
    if atoms is Atoms.PTX:
        return [f"atoms/ptx/{name}.cuh" for name in names]
    return [*(f"emulator/{name}.cuh" for name in _BEFORE_ATOMS), *(f"atoms/emulated/{name}.cuh" for name in names)]


def render_program(spec: KernelSpec) -> Source:
    """The text with emulated atoms as a program of its own: what it reads and writes is said in templates/emulator/program.cuh."""
    source = render(spec, Atoms.EMULATED)
    used, _ = _files(spec)
    return Source(source.entry, f"{source.text}\n{_inserted([*_runtime_files(used), 'emulator/program.cuh'])}")


def traced(source: Source) -> Source:
    """A text with emulated atoms with templates/emulator/trace.cuh behind it: its lines stay where they are."""
    return Source(source.entry, f"{source.text}\n{_inserted(['emulator/trace.cuh'])}")


@cache
def emulator_runtime() -> Source:
    """What runs the kernels of a text with emulated atoms: the same for all texts, and compiled once for all of them."""
    return Source("emulator_runtime", _inserted([*atom_files(_WITH_BODIES, Atoms.EMULATED), *_runtime_files(_WITH_BODIES)]))


def _runtime_files(atoms: Sequence[str]) -> list[str]:
    """Bodies of what every text with emulated atoms declares, of these atoms, and what runs the kernels."""
    with_bodies = [name for name in _WITH_BODIES if name in atoms]
    known = set(templates.paths())
    names = dict.fromkeys(f"emulator/runtime/{name}.cuh" for name in (*_BEFORE_ATOMS, *with_bodies, *_RUNNING))  # one is in both
    return [path for path in names if path in known]


def _inserted(paths: Iterable[str]) -> str:
    return "".join(_part(None, path).removesuffix(END) for path in paths)


def render(spec: KernelSpec, atoms: Atoms = Atoms.PTX) -> Source:
    """The text of one spec. The same spec gives the same text, byte for byte.

    With emulated atoms it is C++17 with the entry `flashgen_emulator_run` (templates/emulator/entry.cuh): the same kernels and tile
    operations, of which that entry has the one run that it is told to, by `emulator_runtime`.
    """
    template = jinja_environment().get_template(spec.family.template)
    context = spec.family.context(spec.problem, spec.config, spec.target)
    used_atoms, used_tiles = _files(spec)
    modifiers = modifiers_of(spec.problem)
    tiles = [f"tile/{name}.cuh" for name in _with_modifiers(used_tiles, modifiers, collects_gradients(spec.problem))]
    written = spec.family.instructions(spec.problem, spec.config) if atoms is Atoms.PTX else ""
    if written:
        written = "// ---- shapes of instructions that these kernels use ".ljust(_COLUMNS, "-") + f"\n\n{written}"
    kernels = spec.kernels
    changes = conditions(
        modifiers,
        spec.problem.operation,
        may_fetch=spec.family.fetches_scores and fetches(spec.problem),
        may_share=shares_distances(spec.problem),
        packed=spec.problem.is_packed,
        cached=spec.problem.is_cached,
        invariant=spec.problem.batch_invariant,
        e4m3=spec.problem.dtype_kv is CacheDtype.E4M3,
        early=spec.family.loads_scores_ahead and loads_ahead(spec.problem),
        at_once=spec.family.changes_at_once,
        linear=bool(context.get("linear")),
    )
    text = template.render(
        spec=spec,
        config=spec.config,
        parameters=kernels[""].parameters.fields,
        kernels=kernels,
        tensor_gradients=[one.gradient for one in modifiers if one.gradient and one.gradient.suffix in kernels],
        chain=partial(chain_text, modifiers),
        seen_chain=partial(chain_text, modifiers_of(hiding(spec.problem))),
        masks=[*["causal mask"] * bool(context.get("causal")), *(modifier.words for modifier in modifiers if modifier.link)],
        atoms=atom_files(used_atoms, atoms),
        tiles=tiles,
        contents=_CONTENTS,
        instructions=written,
        **(changes | context),
    )
    text = pruned(text)
    if atoms is Atoms.EMULATED:
        text += f"\n{_kernel_table(spec, text)}\n\n{_inserted(['emulator/entry.cuh'])}"
    return Source(spec.name, text.replace(_CONTENTS, _contents(parts(text)), 1))


def _files(spec: KernelSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of atoms and tile operations: `Family.files`, and atoms of modifiers."""
    atoms, tiles = spec.family.files(spec.problem)
    added = ("bits", "popc") * scatters(spec.problem) + _FETCHING * (spec.family.fetches_scores and fetches(spec.problem))
    return (*atoms, *(name for name in added if name not in atoms)), tiles


def _with_modifiers(tiles: Sequence[str], modifiers: Sequence[Modifier], collects: bool) -> list[str]:
    """Files of tile operations, and those of these modifiers: behind the chain's those that are links of it."""
    files, with_links = list(tiles), [modifier for modifier in modifiers if modifier.link]
    if others := [modifier.tile_file for modifier in modifiers if not modifier.link]:
        files[files.index(_BEHIND_CHAIN) + 1 :] = [*others, *files[files.index(_BEHIND_CHAIN) + 1 :]]
    if with_links:
        after = files.index(_CHAIN) + 1
        needed = dict.fromkeys(name for modifier in with_links for name in (*modifier.tiles, *(modifier.sum_tiles if collects else ())))
        links, opening = ([one.tile_file for one in with_links if one.opens is opens] for opens in (False, True))
        of_tiles = [f"common/{name}" for name in ("seen_tiles", "tile_looks", "tile_order")]
        scattered = of_tiles if any(one.scattered_by is not None for one in with_links) else []
        bent = ["common/bent_scores"] if any(one.bends_scores for one in with_links) else []
        files[after:] = ["common/score_changes", *bent, *scattered, *needed, *links, "common/modified_chain", *opening, *files[after:]]
    return files


def _kernel_table(spec: KernelSpec, text: str) -> str:
    """What entry.cuh is told of the kernels of a text, in the spec's order: names, parameter structs, launch bounds and clusters."""
    rows = []
    for suffix, kernel in spec.kernels.items():
        entry = spec.name + suffix
        found = re.findall(rf"__launch_bounds__\((\w+, \w+)\)(?:\s+__cluster_dims__\((\w+), 1, 1\))?\s+{entry}\(", text)
        if len(found) != 1:
            rule = "must be declared once, right after __launch_bounds__(threads, blocks) with two names in it"
            raise ArgumentError(f"kernel {entry} {rule}; found {len(found)} of the kind")
        ((bounds, cluster),) = found
        rows.append(f"kernel({entry}, {kernel.struct}, {bounds}, {cluster or 1})")
    return f"#define FLASHGEN_KERNELS(kernel) {' '.join(rows)}"
