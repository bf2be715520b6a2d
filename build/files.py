"""Files and folders that are there whole or not at all: a file written or replaced, and a folder put in the place of another."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from flashgen.codegen.errors import ArgumentError, FlashgenError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fcntl.h and linux/fs.h
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_TRIAL_BYTES = 64 * 1024


def nearest(path: Path) -> Path:
    """The path, or the first above it that is there."""
    return path if os.path.lexists(path) else next(parent for parent in path.parents if os.path.lexists(parent))


def require_writable(folder: Path) -> None:
    """Raises OSError unless a file can be written in `folder`. Permissions alone do not tell of a quota, a full disk or a read-only one."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_TRIAL_BYTES))
        file.flush()


def make_folders(path: Path) -> None:
    """Makes the folder and those above it that are missing, with mode 0755 less the umask: nobody else may write to them."""
    if not path.is_dir():
        make_folders(path.parent)
        with suppress(FileExistsError):
            path.mkdir(0o755)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Writes a file that must not be there yet, down to the disk. `mode` is that of the file, less the umask."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def checksum(path: Path) -> str | None:
    """The sha256 of a file, as hex digits; None if it is a link or no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else None


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a file beside its place and renames it; what was there stays until then. A link's file is written, not the link.

    Raises ArgumentError, which starts with `file`, for a path that holds anything but a file, or whose folder is missing; FlashgenError
    if it cannot be written.
    """
    staged = None
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise ArgumentError(f"file must be a new or an ordinary one; got {path}")
        if not target.parent.is_dir():
            raise ArgumentError(f"file must be in a folder that is there; got {path}")
        staged = target.with_name(f".flashgen-{secrets.token_hex(8)}")
        write_new(staged, data, mode)
        os.replace(staged, target)
        sync_folder(target.parent)
    except OSError as error:
        raise FlashgenError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if staged is not None:
            with suppress(OSError):
                staged.unlink()


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder down to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_folder(staging: Path, folder: Path, removable: Callable[[Path], Iterable[str]]) -> None:
    """Puts the folder `staging` in the place of `folder`, which may be missing, empty, or one that may be removed.

    `removable` gives the names of all files of a folder that may be removed, and raises an error for any other one. It looks at what was
    there after that was moved away, so that no other process can add to it in between; where it raises, all is as it was before. Processes
    that do this at once leave the folder of one of them. Where the file system can exchange two folders, `folder` is never missing.
    """
    made = staging.stat().st_ino
    try:
        while not _placed(staging, folder):
            with suppress(FileNotFoundError):  # another process has just moved it away
                if _taken_over(staging, folder, removable):
                    break
    except BaseException:
        if staging.stat().st_ino == made:  # else an interrupt met the exchange: this is what was there
            shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def _placed(staging: Path, folder: Path) -> bool:
    """Renames `staging` to `folder` if that is missing or empty."""
    try:
        os.rename(staging, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _taken_over(staging: Path, folder: Path, removable: Callable[[Path], Iterable[str]]) -> bool:
    """Removes `folder`, and puts `staging` there; False if another process was faster."""
    undo: Callable[[], object]
    if _exchange(staging, folder):
        old, undo = staging, partial(_exchange, staging, folder)
    else:
        old = Path(f"{staging}.old")
        os.rename(folder, old)
        undo = partial(os.rename, old, folder)
    try:
        names = list(removable(old))
        done = old == staging or _placed(staging, folder)
    except BaseException:
        try:
            undo()
        except OSError as error:
            raise FlashgenError(f"{folder} was replaced by another process meanwhile; what it held before is in {old}") from error
        raise
    try:
        for name in names:
            (old / name).unlink(missing_ok=True)
        old.rmdir()
    except OSError as error:
        warnings.warn(f"{old}, which {folder} replaces, cannot be removed: {error.strerror or error}", RuntimeWarning, stacklevel=5)
    return done


def _exchange(one: Path, other: Path) -> bool:
    """Gives each of two paths what the other one has, in one step. False where the file system or the C library cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))
