"""That importing flashgen.integrations loads no library and costs nothing."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_no_library() -> None:
    libraries = ("torch", "cuda", "transformers", "diffusers", "xformers")
    code = f"import sys, flashgen.integrations; print([name for name in {libraries} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
