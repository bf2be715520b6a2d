"""`install` and `uninstall`: flash_attn as Python's import system and package metadata see it, made of this package's modules.

A finder at the front of sys.meta_path answers for the modules of flash_attn that others import, and for its distribution. So `import`,
`importlib.util.find_spec`, `importlib.metadata.version` and what libraries make of them say that it is there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, packages_distributions
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.typed import checked

VERSION, VERSION_3 = "2.8.3", "3.0.0"  # of the interfaces
_OURS = __name__.rpartition(".")[0]
# Their modules and ours; None for a package that holds other modules alone.
_MODULES = {
    "flash_attn": "flash_attn_interface",
    "flash_attn.bert_padding": "bert_padding",
    "flash_attn.flash_attn_interface": "flash_attn_interface",
    "flash_attn.layers": None,
    "flash_attn.layers.rotary": "rotary",
    "flash_attn.ops": None,
    "flash_attn.ops.triton": None,
    "flash_attn.ops.triton.rotary": "rotary",
}
_MODULES_3 = {
    "flash_attn_3": None,
    "flash_attn_3.flash_attn_interface": "flash_attn_3_interface",
    "flash_attn_interface": "flash_attn_3_interface",
}
_finder: _Finder | None = None  # what is installed


@checked
def install(*, flash_attn_3: bool = False, force: bool = False) -> None:
    """Makes flashgen what this process finds as flash_attn, version 2.8.3: import it, or ask for its version, before or after libraries.

    flash_attn_3: whether it is found as flash-attn-3, too, by its modules flash_attn_interface and flash_attn_3
    force: whether it may take the place of what is importable by these names already, in this process alone

    Modules of flash_attn that flashgen does not have raise ModuleNotFoundError, which names this. What has been imported from another
    flash_attn before, or asked for by a library once and for all, as diffusers does when it is imported, stays as it was. transformers asks
    anew. FlashAttention-4 (flash_attn.cute) can still be imported where it is installed alone. Raises ArgumentError without force, and then
    what was installed here before stays.
    """
    global _finder
    modules = _MODULES | (_MODULES_3 if flash_attn_3 else {})
    beside: list[str] = []
    for name in {name.partition(".")[0] for name in modules}:
        found = _found_beside_ours(name)
        if found is not None and found.origin is None and found.submodule_search_locations:
            beside += found.submodule_search_locations  # of a package without a file of its own, as FlashAttention-4's is
        elif found is not None and not force:
            rule = f"must be True for flashgen to take the place of {name}, which is importable from {found.origin or 'sys.modules'}"
            raise ArgumentError(f"force {rule}, in this process; got False")
    uninstall()  # now that nothing is refused
    _finder = _Finder(modules, beside)
    sys.meta_path.insert(0, _finder)
    for name in modules:
        import_module(name)
    for name, module in list(sys.modules.items()):  # what was imported of FlashAttention-4 before
        package, _, inner = name.partition(".")
        if package in _finder.packages and inner and "." not in inner:
            setattr(sys.modules[package], inner, module)
    _ask_anew(modules)


def uninstall() -> None:
    """Undoes `install`: imports, and what libraries find, are as they were before. Functions that others have imported stay flashgen's."""
    global _finder
    if _finder is not None:
        sys.meta_path.remove(_finder)
        for name in _finder.modules:
            sys.modules.pop(name, None)
        sys.modules.update(_finder.replaced)
        modules, _finder = _finder.modules, None
        _ask_anew(modules)


def _found_beside_ours(name: str) -> ModuleSpec | None:
    """What an import of this name would find if nothing were installed here: `importlib.util.find_spec` for a package, without our finder.

    A module that somebody has put into sys.modules may have no __spec__, for which that one raises ValueError.
    """
    imported = _finder.replaced if _finder is not None and name in _finder.packages else sys.modules
    if name in imported:
        module = imported[name]
        spec: ModuleSpec | None = getattr(module, "__spec__", None)
        return spec if spec is not None or module is None else ModuleSpec(name, None, origin=getattr(module, "__file__", None))
    for finder in sys.meta_path:
        if finder is not _finder and hasattr(finder, "find_spec") and (found := finder.find_spec(name, None)) is not None:
            return found
    return None


class _Finder(MetaPathFinder):
    """Finds `modules`, and their distributions.

    beside: folders in which other modules of flash_attn are; replaced: what had been imported by these names
    """

    def __init__(self, modules: dict[str, str | None], beside: list[str]) -> None:
        self.modules, self.beside = modules, beside
        self.replaced: dict[str, ModuleType] = {}
        self.packages = {name.partition(".")[0] for name in modules}
        for name in [name for name in sys.modules if name.partition(".")[0] in self.packages]:
            if name in modules or not beside:
                self.replaced[name] = sys.modules.pop(name)
        self.distributions = [_Distribution("flash_attn", VERSION, ("flash_attn",))]
        if "flash_attn_3" in modules:
            self.distributions.append(_Distribution("flash_attn_3", VERSION_3, ("flash_attn_3", "flash_attn_interface")))

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See MetaPathFinder. Raises ModuleNotFoundError for the import of a module that is not there."""
        package = fullname.partition(".")[0]
        if package not in self.packages:
            return None
        if fullname in self.modules:
            ours = self.modules[fullname]
            origin = Path(__file__).with_name(f"{ours or '__init__'}.py")
            is_package = ours is None or fullname == "flash_attn"
            spec = ModuleSpec(fullname, _Loader(ours), origin=str(origin), is_package=is_package)
            spec.has_location = True
            if fullname == "flash_attn":
                spec.submodule_search_locations = [*self.beside]
            return spec
        found = PathFinder.find_spec(fullname, path)
        if found is None and not _is_only_asked_for():
            raise ModuleNotFoundError(f"{fullname} is no module that flashgen has: {_EXPLAINED}", name=fullname)
        return found

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """See DistributionFinder."""
        wanted = getattr(context or DistributionFinder.Context(), "name", None)
        for distribution in self.distributions:
            if wanted is None or wanted.lower().replace("-", "_").replace(".", "_") == distribution.metadata["Name"]:
                yield distribution


_EXPLAINED = (
    f"{_OURS}.install() has put its own modules in the place of flash_attn, for attention alone; {_OURS}.uninstall() takes them away"
)


class _Loader(Loader):
    """Fills a module with what one of ours has."""

    def __init__(self, ours: str | None) -> None:
        self.ours = ours

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""
        if self.ours is not None:
            source = vars(import_module(f"{_OURS}.{self.ours}"))
            vars(module).update({name: value for name, value in source.items() if not name.startswith("__")})
        if "." not in module.__name__:
            vars(module)["__version__"] = VERSION_3 if module.__name__ in _MODULES_3 else VERSION

        def not_there(name: str) -> NoReturn:
            raise AttributeError(f"{module.__name__}.{name} is nothing that flashgen has: {_EXPLAINED}")

        vars(module)["__getattr__"] = not_there


class _Distribution(Distribution):
    """The metadata of an installed package of that name and version, with these packages to import."""

    def __init__(self, name: str, version: str, top_level: tuple[str, ...]) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: FlashAttention's interface, by flashgen\n",
            "top_level.txt": "\n".join(top_level) + "\n",
            "INSTALLER": "flashgen\n",
        }

    def read_text(self, filename: str) -> str | None:
        """See Distribution."""
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        """See Distribution. There are no files."""
        return Path(__file__).parent / path


def _is_only_asked_for() -> bool:
    """Whether it is not an import that looks for a module, but `importlib.util.find_spec`, which gives None for one that is not there."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_code is importlib.util.find_spec.__code__:
            return True
        frame = frame.f_back
    return False


def _ask_anew(modules: dict[str, str | None]) -> None:
    """Lets transformers forget what it found, if it has been imported."""
    known = vars(sys.modules.get("transformers.utils.import_utils", ModuleType("")))
    for name, value in list(known.items()):
        if (name.startswith("is_flash_attn") or name == "_package_distribution_mapping") and hasattr(value, "cache_clear"):
            value.cache_clear()
    mapping = known.get("PACKAGE_DISTRIBUTION_MAPPING")  # of versions before 5.2x, read once
    if isinstance(mapping, dict):
        found = packages_distributions()
        for name in {name.partition(".")[0] for name in modules}:
            mapping.pop(name, None)
            mapping.update({name: found[name]} if name in found else {})
