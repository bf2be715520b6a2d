"""How far a command is: live bars on a terminal, lines elsewhere."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from flashgen.tuning import Progress

from .options import stderr
from .terminal import printable


class Bars(Progress):
    """Live progress bars on a terminal, a line a stage elsewhere, both on stderr."""

    def __init__(self, quiet: bool) -> None:
        self._bars = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=stderr,
            disable=quiet or not stderr.is_terminal,
        )
        self._quiet = quiet
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def begin(self, stage: str, total: int) -> None:
        """See Progress."""
        stage = printable(stage)
        self._task = self._bars.add_task(stage, total=total)
        if not self._quiet and not stderr.is_terminal:
            stderr.print(f"{stage}: {total}", highlight=False)

    def advance(self, steps: int = 1) -> None:
        """See Progress."""
        if self._task is not None:
            self._bars.advance(self._task, steps)

    def say(self, text: str) -> None:
        """See Progress."""
        if not self._quiet:
            stderr.print(printable(text), highlight=False, markup=False)
