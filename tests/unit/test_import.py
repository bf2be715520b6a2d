"""`import flashgen` alone: what it loads, writes and costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashgen

PARENT = Path(flashgen.__file__).parent.parent
HEAVY = ("torch", "cuda", "numpy", "jinja2", "typer", "rich", "sqlite3")
LIMIT_SECONDS = 0.060


def run(code: str, home: Path) -> str:
    """Runs `code` in a Python of its own, in an empty home with no environment of ours, and returns what it prints."""
    code = f"import sys; sys.path.insert(0, {str(PARENT)!r})\n{code}"
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_loads_nothing_heavy(tmp_path: Path) -> None:
    code = f"before = set(sys.modules); import flashgen, json; print(json.dumps([m for m in {HEAVY!r} if m in set(sys.modules) - before]))"
    assert json.loads(run(code, tmp_path)) == []
    # The names are the right ones: what needs them does load them.
    used = run("from flashgen.codegen.render import jinja_environment; jinja_environment(); print('jinja2' in sys.modules)", tmp_path)
    assert used.strip() == "True"


def test_calls_load_no_compiler_of_pytorchs(tmp_path: Path) -> None:
    """SymPy and Dynamo take a second to import, which only traced calls need."""
    loaded = "print([m for m in ('sympy', 'torch._dynamo') if m in sys.modules])"
    code = f"import sys, torch; import flashgen.api, flashgen.varlen, flashgen.kvcache; {loaded}"
    assert run(code, tmp_path).strip() == "[]"


def test_it_writes_nothing(tmp_path: Path) -> None:
    run("import flashgen", tmp_path)
    assert list(tmp_path.rglob("*")) == []


def test_it_is_the_package_of_this_checkout_and_says_its_version(tmp_path: Path) -> None:
    file, version = run("import flashgen; print(flashgen.__file__); print(flashgen.__version__)", tmp_path).split()
    assert Path(file) == Path(flashgen.__file__)
    assert version == flashgen.__version__


def test_it_is_quick(tmp_path: Path) -> None:
    """The CPU time that it takes, the least of a few runs: other processes can lengthen some of them, but none makes it shorter."""
    code = "import time; begin = time.process_time(); import flashgen; print(time.process_time() - begin)"
    costs = [float(run(code, tmp_path)) for _ in range(10)]
    assert min(costs) <= LIMIT_SECONDS, f"import flashgen costs {[round(c * 1e3) for c in costs]} ms of the CPU"


def test_every_public_name_is_there(tmp_path: Path) -> None:
    missing = run("import flashgen; print([n for n in flashgen.__all__ if not hasattr(flashgen, n)])", tmp_path)
    assert missing.strip() == "[]"
    unknown = run("import flashgen\ntry: flashgen.nonsense\nexcept AttributeError as error: print(error)", tmp_path)
    assert unknown.strip() == "module 'flashgen' has no attribute 'nonsense'"


def test_everything_in_the_faces_list_is_at_the_top() -> None:
    from flashgen import ahead, api

    for home in (ahead, api):
        assert set(home.__all__) <= set(flashgen.__all__)
        for name in home.__all__:
            assert getattr(flashgen, name) is getattr(home, name)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an exported program, whose making takes seconds."""
    import torch

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return flashgen.attention(q, q, q, causal=True)

    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    file = tmp_path_factory.mktemp("exported") / "program.pt2"
    torch.export.save(torch.export.export(Attention(), (q,)), file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("order", ["import torch, flashgen", "import flashgen, torch"])
def test_a_fresh_process_finds_the_operators_and_loads_exported_programs(order: str, program: Path, tmp_path: Path) -> None:
    code = f"""{order}
schemas = [str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("flashgen::")]
graph = torch.export.load({str(program)!r}).graph
print([name in str(schemas) for name in ("attention_output", "attention_forward", "flashgen::attention(")])
print(torch.ops.flashgen.attention_output.default in [node.target for node in graph.nodes])
print(type(torch.__spec__.loader).__name__, torch.cuda.is_initialized())
"""
    assert run(code, tmp_path).splitlines() == ["[True, True, True]", "True", "SourceFileLoader False"]


PARTS = ("operators.registration", "launch.arguments", "launch.tile_counters", "launch.gpu", "operators.plans")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_operators_may_come_first(part: str, tmp_path: Path) -> None:
    code = f"""import logging
logging.getLogger("flashgen").addHandler(logging.StreamHandler(sys.stdout))
import flashgen.{part}, torch
print(flashgen.attention(*3 * [torch.empty(1, 4, 2, 64, dtype=torch.bfloat16, device="meta")]).shape)
"""
    assert run(code, tmp_path) == "torch.Size([1, 4, 2, 64])\n"


def test_a_pytorch_that_cannot_be_imported_is_tried_again(tmp_path: Path) -> None:
    """And one that lacks what the operators need is imported all the same."""
    (tmp_path / "torch.py").write_text("import os\nif os.environ.get('BROKEN'): raise ImportError('broken')\n")
    code = f"""sys.path.insert(0, {str(tmp_path)!r})
import flashgen, os
for broken in ("1", ""):
    os.environ["BROKEN"] = broken
    try:
        import torch
    except ImportError as error:
        print(error)
print(torch.__name__, "flashgen.operators.registration" in sys.modules)
print(len([finder for finder in sys.meta_path if type(finder).__module__ == "flashgen.operators.import_hook"]))
"""
    assert run(code, tmp_path).splitlines() == ["broken", "torch False", "0"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise ImportError('no such symbol')", "ImportError: no such symbol"),
        ("raise OSError('no such library')", "OSError: no such library"),
        ("", "ImportError: cannot import name 'forward_ad'"),
    ],
)
@pytest.mark.parametrize("order", ["import torch, flashgen", "import flashgen, torch"])
def test_a_pytorch_that_does_not_suit_is_told_and_no_more(order: str, fault: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/autograd.py").write_text(fault)
    code = f"""import logging
logging.getLogger("flashgen").addHandler(logging.StreamHandler(sys.stdout))
sys.path.insert(0, {str(tmp_path)!r})
{order}
print(torch.__name__)
"""
    warning, end = run(code, tmp_path).splitlines()
    assert warning.startswith(f"torch.ops.flashgen is not there: {said}")
    assert end == "torch"
