"""One tune or benchmark at a time on one GPU: two would spoil each other's timings."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from flashgen.build.cache_dir import UnsafeCacheError, cache_dir, make_safe_dir

from .request import Progress


@contextlib.contextmanager
def exclusive(uuid: str, progress: Progress) -> Iterator[None]:
    """Holds the lock of the GPU with that UUID; waits for another run, and says so. The system frees it if the process dies.

    Where the cache folder cannot be written, it says that nothing keeps a second run away, and goes on.
    """
    try:
        folder = cache_dir() / "locks"
        make_safe_dir(cache_dir())
        make_safe_dir(folder)
        handle = os.open(folder / f"{uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (OSError, UnsafeCacheError) as error:
        progress.say(f"no lock against a second run on this GPU: {error}")
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another tune or benchmark is running on this GPU: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
