"""A command line that is refused before anything is done: tried in this process, since one for each would take most of the time."""

from __future__ import annotations

import logging
import sys
import warnings
from functools import cache

import pytest
import typer.main

from flashgen import cli

_commands = cache(typer.main.get_command)  # reading the signatures of all commands anew for each line would take most of the time


def misuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """stderr of a command that must be refused as misuse, in this process."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main replaces these for its process
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(typer.main, "get_command", _commands)
    monkeypatch.setattr(sys, "argv", ["flashgen", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, ""), err
    return err
