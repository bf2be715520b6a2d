"""One lock between processes: of a file or a folder, held by one process at a time. The system frees it when that process ends."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_SECONDS = 0.5  # a shorter wait is not worth a word
_POLL_SECONDS = 0.02
_SHOWN = 100  # characters of a command

_log = logging.getLogger("flashgen")


@contextmanager
def locked(path: Path, what: str, seconds: float, say: Callable[[str], object] = _log.warning) -> Iterator[None]:
    """Holds the lock of `path`, a folder or else a file, which is made if it is missing. `what` names in messages what is locked.

    Waits for another process at most `seconds`; `say` hears once what is waited for, and who holds it. Raises TimeoutError, which says
    that, too, and OSError for a path that cannot be locked or is a link.
    """
    kind = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    handle = os.open(path, kind | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _acquire(handle, what, seconds, say)
        yield
    finally:
        with suppress(OSError):  # a child that was forked meanwhile has the handle, too: it would keep what is only closed here
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _acquire(handle: int, what: str, seconds: float, say: Callable[[str], object]) -> None:
    begun, told = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited = time.monotonic() - begun
        if waited >= seconds:
            raise TimeoutError(f"{_holder(handle)} still holds {what} after {seconds:g} s")
        if waited >= PATIENCE_SECONDS and not told:
            say(f"{_holder(handle)} holds {what}: waiting for it, {seconds:g} s at most")
            told = True
        time.sleep(_POLL_SECONDS)


def _holder(handle: int) -> str:
    """The process that holds the lock, with its command: 'process 123 (flashgen tune)'; as far as this process may know of it."""
    found = os.fstat(handle)
    inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError, StopIteration):
        locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
        pid = next(int(fields[4]) for fields in locks if fields[1] == "FLOCK" and fields[5] == inode)
        if pid > 0:  # else it is of another container
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"process {pid} ({' '.join(command.split())[:_SHOWN]})"
    return "another process"
