"""`EmulatorFaultError`: what a kernel on the CPU did wrong."""

from __future__ import annotations

from flashgen.codegen.errors import FlashgenError


class EmulatorFaultError(FlashgenError):
    """A check of the emulator failed, or a sanitizer's, or the kernel crashed.

    `check` names it; `message` says which thread did what; `report` is all that a sanitizer said.
    """

    def __init__(self, check: str, message: str, report: str = "") -> None:
        super().__init__(f"{check}: {message}")
        self.check, self.message, self.report = check, message, report
