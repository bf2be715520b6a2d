"""`Progress`: what hears how far a long run is."""

from __future__ import annotations


class Progress:
    """Hears what the tuner is doing. This one says nothing; the command line draws bars."""

    def begin(self, stage: str, total: int) -> None:
        """A stage of `total` steps begins."""

    def advance(self, steps: int = 1) -> None:
        """Steps of the current stage are done."""

    def say(self, text: str) -> None:
        """Something a person should know at once."""
