"""`flashgen doctor`: the table of findings, and what to do about those that are not ok."""

from __future__ import annotations

import typer

from .options import Json, print_json, print_table, stderr
from .terminal import printable


def doctor(json: Json = False) -> None:
    """Check driver, GPUs, compiler, PyTorch, caches and one kernel from end to end. Exit code 1 if something is wrong."""
    from flashgen.doctor import Status, checks

    findings = []
    with stderr.status("looking") as status:  # drawn on terminals only
        for check in checks():
            status.update(printable(f"checking {check.name}"))
            findings.append(check.run())
    wrong, notes = (sum(finding.status is kind for finding in findings) for kind in (Status.WRONG, Status.NOTE))
    if json:
        print_json({"ok": not wrong, "wrong": wrong, "notes": notes, "findings": [finding.to_json() for finding in findings]})
    else:
        columns = (("status", False), ("check", False), ("found", False))
        print_table(columns, [(finding.status.value, finding.name, finding.found) for finding in findings])
        for finding in findings:
            if finding.status is not Status.OK:
                print(f"\n{finding.status.value}: {finding.name}: {finding.meaning}\n  {finding.cure}")
        print(f"\n{wrong} wrong, {notes} to note")
    if wrong:
        raise typer.Exit(1)
