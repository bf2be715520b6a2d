"""`flashgen.integrations.flash_attn.install`: what Python and libraries find then, in fresh processes, and that it is undone."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from flashgen.codegen.errors import ArgumentError
from flashgen.integrations import flash_attn as fa

_BEGIN = "import importlib.metadata as metadata, importlib.util as util, sys\nimport flashgen.integrations.flash_attn as fa\n"


def run(code: str, *path: Path) -> str:
    """What a fresh process prints."""
    inserted = "".join(f"import sys; sys.path.insert(0, {str(folder)!r})\n" for folder in path)
    done = subprocess.run([sys.executable, "-c", inserted + _BEGIN + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(folder: Path, text: str | None) -> Path:
    """A folder with another flash_attn; text: of its __init__, None for a package without one, as FlashAttention-4's is."""
    (folder / "flash_attn" / "cute").mkdir(parents=True)
    (folder / "flash_attn" / "cute" / "__init__.py").write_text("NAME = 'cute'\n")
    if text is not None:
        (folder / "flash_attn" / "__init__.py").write_text(text)
    return folder


def test_python_finds_it_and_no_longer() -> None:
    found = run("""
def seen():
    names = [name for name in sys.modules if name.partition('.')[0] in ('flash_attn', 'flash_attn_interface', 'flash_attn_3')]
    return util.find_spec('flash_attn') is not None, util.find_spec('flash_attn_interface') is not None, sorted(names)
print(seen())
fa.install()
import flash_attn, flash_attn.flash_attn_interface
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn.flash_attn_interface import _flash_attn_forward, _wrapped_flash_attn_backward, flash_attn_gpu
print(flash_attn_func is fa.flash_attn_func, flash_attn.__version__, metadata.version('flash-attn'), metadata.version('flash_attn'))
print(flash_attn.__spec__.name, flash_attn.__name__, metadata.packages_distributions()['flash_attn'], *seen()[:2])
print(flash_attn.flash_attn_interface.flash_attn_func is fa.flash_attn_func, util.find_spec('flash_attn.bert_padding').name)
print(hasattr(flash_attn.flash_attn_interface, 'flash_attn_cuda'), util.find_spec('flash_attn.cute'))
fa.install(flash_attn_3=True)
import flash_attn_interface
print(flash_attn_interface.flash_attn_func is fa.flash_attn_func, metadata.version('flash-attn-3'), util.find_spec('flash_attn_3._C'))
print([dist.name for dist in metadata.distributions() if 'flash_attn' in dist.name])
fa.uninstall()
fa.uninstall()
print(seen())
try:
    metadata.version('flash_attn')
except metadata.PackageNotFoundError:
    print('gone')
""")
    assert found.splitlines() == [
        "(False, False, [])",
        "True 2.8.3 2.8.3 2.8.3",
        "flash_attn flash_attn ['flash_attn'] True False",
        "True flash_attn.bert_padding",
        "False None",
        "False 3.0.0 None",
        "['flash_attn', 'flash_attn_3']",
        "(False, False, [])",
        "gone",
    ]


@pytest.mark.parametrize("has_spec", [False, True], ids=["no __spec__", "__spec__ of None"])
def test_a_module_made_by_hand_is_another_one(has_spec: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("flash_attn")
    if not has_spec:
        del made.__spec__
    monkeypatch.setitem(sys.modules, "flash_attn", made)
    with pytest.raises(ArgumentError, match=r"take the place of flash_attn, which is importable from sys\.modules, in this process"):
        fa.install()
    assert sys.modules["flash_attn"] is made
    fa.install(force=True)
    assert sys.modules["flash_attn"].flash_attn_func is fa.flash_attn_func
    fa.uninstall()
    assert sys.modules["flash_attn"] is made


def test_what_is_installed_stays_where_another_call_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fa.install()
    try:
        ours, finders = sys.modules["flash_attn"], list(sys.meta_path)
        monkeypatch.syspath_prepend(installed(tmp_path, ""))
        for flash_attn_3 in (False, True):
            with pytest.raises(ArgumentError, match=r"which is importable from .*__init__\.py, in this process; got False$"):
                fa.install(flash_attn_3=flash_attn_3)
            assert sys.modules["flash_attn"] is ours
            assert sys.meta_path == finders
            assert "flash_attn_interface" not in sys.modules
    finally:
        fa.uninstall()


@pytest.mark.slow
def test_modules_that_are_not_there_say_who_is_in_their_place() -> None:
    found = run("""
fa.install()
for line in ('import flash_attn.losses.cross_entropy', 'from flash_attn.ops.rms_norm import rms_norm', 'import flash_attn.modules'):
    try:
        exec(line)
    except ImportError as error:
        print(type(error).__name__, error.name, 'flashgen.integrations.flash_attn.install()' in str(error))
try:
    from flash_attn.layers.rotary import RotaryEmbedding
except ImportError as error:
    print(error.path.endswith('integrations/flash_attn/rotary.py'))
try:
    fa_module = sys.modules['flash_attn']
    fa_module.flash_attn_triton
except AttributeError as error:
    print(str(error)[:60])
""")
    assert found.splitlines() == [
        "ModuleNotFoundError flash_attn.losses True",
        "ModuleNotFoundError flash_attn.ops.rms_norm True",
        "ModuleNotFoundError flash_attn.modules True",
        "True",
        "flash_attn.flash_attn_triton is nothing that flashgen has: f",
    ]


@pytest.mark.slow
def test_another_flash_attn_is_not_replaced_without_a_word(tmp_path: Path) -> None:
    other = installed(tmp_path, "__version__ = '1.0'\n")
    found = run(
        """
import flash_attn
from flash_attn import cute
try:
    fa.install()
except ValueError as error:
    print(str(error).replace(flash_attn.__file__, 'FILE'))
print(flash_attn.__version__, sys.modules['flash_attn'] is flash_attn, len([f for f in sys.meta_path if 'flashgen' in type(f).__module__]))
fa.install(force=True)
import flash_attn as ours
print(ours.__version__, ours is flash_attn, 'flash_attn.cute' in sys.modules)
fa.uninstall()
import flash_attn as theirs
print(theirs is flash_attn, sys.modules['flash_attn.cute'] is cute)
""",
        other,
    )
    assert found.splitlines() == [
        "force must be True for flashgen to take the place of flash_attn, which is importable from FILE, in this process; got False",
        "1.0 True 0",
        "2.8.3 False False",
        "True True",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import flash_attn.cute\n"])
def test_version_4_stays_beside_it(tmp_path: Path, first: str) -> None:
    code = "fa.install()\nimport flash_attn.cute, flash_attn\nprint(flash_attn.__version__, flash_attn.cute.NAME)\n"
    assert run(first + code, installed(tmp_path, None)) == "2.8.3 cute\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_imported", [False, True], ids=["before", "after"])
def test_transformers_finds_it(is_imported: bool) -> None:
    pytest.importorskip("transformers")
    begin = "import torch\ntorch.cuda.is_available = lambda: True\n"
    imported = "import transformers.utils as utils\nprint(utils.is_flash_attn_2_available())\n" if is_imported else ""
    found = run(
        begin
        + imported
        + """
fa.install(flash_attn_3=True)
from transformers import utils
print(utils.is_flash_attn_2_available(), utils.is_flash_attn_3_available(), utils.is_flash_attn_greater_or_equal('2.4.1'))
fa.uninstall()
print(utils.is_flash_attn_2_available(), utils.is_flash_attn_3_available())
"""
    )
    assert found.splitlines() == [*(["False"] if is_imported else []), "True True True", "False False"]


@pytest.mark.slow
def test_xformers_and_diffusers_import_with_it() -> None:
    for library in ("xformers", "diffusers"):
        pytest.importorskip(library)
    found = run("""
fa.install()
import xformers.ops.fmha.flash as flash
print(flash.FLASH_VERSION, flash._flash_attn_cuda.fwd.__module__)
from diffusers.models import attention_dispatch
print(attention_dispatch._CAN_USE_FLASH_ATTN, attention_dispatch.flash_attn_func is fa.flash_attn_func)
""")
    assert found.splitlines() == ["2.8.3 flashgen.integrations.flash_attn.primitives", "True True"]
