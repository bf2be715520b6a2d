"""Where machine code for the CPU can be loaded and run from: not from a file system that is mounted noexec."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from flashgen.codegen.errors import FlashgenError

from ..cache_dir import cache_dir, make_safe_dir
from ..files import nearest


def allows_programs(folder: Path) -> bool:
    """Whether programs in a folder may be run, or would be, were it there."""
    return not os.statvfs(nearest(folder)).f_flag & os.ST_NOEXEC


def program_folder() -> Path:
    """The folder for temporary files, else the cache folder. Raises FlashgenError, with the cure, if programs may be run in neither."""
    temporary = Path(tempfile.gettempdir())
    if allows_programs(temporary):
        return temporary
    if not allows_programs(cache_dir()):
        raise FlashgenError(
            f"kernels on the CPU are programs, and none may be run in {temporary} or {cache_dir()}, which are mounted noexec: "
            "set TMPDIR to another folder"
        )
    return make_safe_dir(cache_dir())
