"""One tune or benchmark at a time on one GPU: two would spoil each other's timings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flashgen.build.cache_dir import UnsafeCacheError, cache_dir, make_safe_dir
from flashgen.build.lock import locked
from flashgen.codegen.errors import FlashgenError

from ..progress import Progress

WAIT_SECONDS = 24 * 3600.0  # longer than any tune: what holds the lock then hangs


@contextlib.contextmanager
def exclusive(uuid: str, progress: Progress) -> Iterator[None]:
    """Holds the lock of the GPU with that UUID; waits for another run, and says so. The system frees it if the process dies.

    Where the cache folder cannot be written, it says that nothing keeps a second run away, and goes on. Raises FlashgenError if another
    run holds the lock for a day.
    """
    with contextlib.ExitStack() as held:
        try:
            folder = cache_dir() / "locks"
            make_safe_dir(cache_dir())
            make_safe_dir(folder)
            held.enter_context(locked(folder / f"{uuid}.lock", "this GPU, for another tune or benchmark,", WAIT_SECONDS, progress.say))
        except TimeoutError as error:
            raise FlashgenError(str(error)) from error
        except (OSError, UnsafeCacheError) as error:
            progress.say(f"no lock against a second run on this GPU: {error}")
        yield
