"""What a check of `flashgen doctor` says: `Finding`; and running one so that nothing it meets ends the doctor."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from flashgen.codegen.errors import FlashgenError

_REPORT = "report it, with the output of flashgen doctor"


class Status(enum.Enum):
    """OK; NOTE: works, but a person should know; WRONG: something that should work does not."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True)
class Finding:
    """What one check found. Of anything but OK also what it means and what to do, with a command where there is one."""

    name: str
    status: Status
    found: str
    meaning: str = ""
    cure: str = ""

    def to_json(self) -> dict[str, str]:
        """The finding as JSON values."""
        return {**asdict(self), "status": self.status.value}


@dataclass(frozen=True)
class Check:
    """One check, by the name that its finding has."""

    name: str
    look: Callable[[str], Finding]

    def run(self) -> Finding:
        """The finding. An exception or a warning on the way becomes part of it."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")  # of a library to its developers
            for kind in (RuntimeWarning, UserWarning):
                warnings.simplefilter("always", kind)
            try:
                finding = self.look(self.name)
            except FlashgenError as error:
                cure = f"do what the message says; if that is nothing: {_REPORT}"
                finding = Finding(self.name, Status.WRONG, str(error), "this part of flashgen does not work here", cure)
            except Exception as error:
                finding = Finding(self.name, Status.WRONG, f"{type(error).__name__}: {error}", "the check itself failed", _REPORT)
        if caught and finding.status is Status.OK:
            first = str(caught[0].message)
            return replace(finding, status=Status.NOTE, meaning=f"there was a warning: {first}", cure="see the warning")
        return finding
