"""A command line that is refused before anything is done: tried in this process, since one for each would take most of the time."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from flashgen import cli


def misuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """stderr of a command that must be refused as misuse, in this process."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces these for its process
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["flashgen", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, ""), err
    return err
