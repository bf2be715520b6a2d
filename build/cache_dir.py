"""Where caches live on disk, and whether a folder there may be trusted: it holds machine code that this process will run."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from flashgen.codegen.errors import FlashgenError

from .files import make_folders


class UnsafeCacheError(FlashgenError):
    """Somebody else could have written what a cache folder or entry holds. The message names the path and the cure."""


def cache_dir() -> Path:
    """The cache folder: $FLASHGEN_CACHE_DIR, else $XDG_CACHE_HOME/flashgen, else ~/.cache/flashgen. Does not create it.

    A relative XDG_CACHE_HOME is ignored, as the XDG base directory specification asks.
    """
    if chosen_by() == "FLASHGEN_CACHE_DIR":
        return Path(os.path.expanduser(os.environ["FLASHGEN_CACHE_DIR"])).absolute()
    base = os.environ["XDG_CACHE_HOME"] if chosen_by() == "XDG_CACHE_HOME" else os.path.expanduser("~/.cache")
    if not os.path.isabs(base):  # a user without a home: a path that can hold nothing, so that all is kept in memory
        base = os.devnull
    return Path(base) / "flashgen"


def chosen_by() -> str:
    """The environment variable that decides where the cache folder is: FLASHGEN_CACHE_DIR, XDG_CACHE_HOME or HOME."""
    if os.environ.get("FLASHGEN_CACHE_DIR"):
        return "FLASHGEN_CACHE_DIR"
    return "XDG_CACHE_HOME" if os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")) else "HOME"


def require_safe(path: Path) -> None:
    """Raises UnsafeCacheError if `path` is no file or folder, belongs to another user or is writable by group or others.

    Raises OSError if it is not there or cannot be looked at.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise UnsafeCacheError(f"{path} is a symbolic link: set FLASHGEN_CACHE_DIR to the folder that is meant, or remove the link")
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise UnsafeCacheError(f"{path} is neither a folder nor a file: set FLASHGEN_CACHE_DIR to a folder of your own")
    if found.st_uid != os.geteuid():
        owner = f"{path} belongs to user {found.st_uid}, this process runs as {os.geteuid()}"
        raise UnsafeCacheError(f"{owner}: remove it, or set FLASHGEN_CACHE_DIR to a folder of your own")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{path} is writable by its group or by others (mode {stat.S_IMODE(found.st_mode):04o})"
        raise UnsafeCacheError(f"{mode}: run chmod go-w {path} if you trust what is in it, else remove it")


def make_safe_dir(path: Path) -> Path:
    """Creates the folder with mode 0700 unless it is there, and returns it. Raises UnsafeCacheError, as `require_safe`, or OSError."""
    with suppress(FileExistsError):
        make_folders(path.parent)
        path.mkdir(mode=0o700)
    if path.is_file():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    require_safe(path)
    return path
