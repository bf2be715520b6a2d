"""Odd command lines, by the hundred: each ends with exit code 2 and a sentence that names the option, before anything is done."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from flashgen import cli
from tests.support.misuse import misuse

NUMBERS = ("1_28", "\u0661\u0662\u0668", "\uff11\uff12\uff18", " 128", "12.5", "1e3", "0x80", "", "many", "nan", "9" * 5000, "--help")
INTEGERS = {
    "tune": ["--head-dim", "--head-dim-v", "--seqlen", "--seqlen-kv", "--batch", "--heads", "--kv-heads", "--jobs"],
    "bench": ["--head-dim", "--seqlen", "--rounds", "--device"],
    "debug": ["--block", "--blocks", "--seed", "--seqlen"],
}


def lines() -> Iterator[tuple[list[str], str]]:
    for command, options in INTEGERS.items():
        needed = ["--head-dim", "64", *(["--dry-run"] if command != "debug" else [])]
        for i, option in enumerate(options):
            for text in NUMBERS if not i else NUMBERS[:2]:
                yield [command, *needed, option, text], option
    for text in ("1_0", "\u0661", "nan", "inf", "1e", "", "0", "-1", "1.5.2"):
        yield ["tune", "--head-dim", "64", "--dry-run", "--budget-seconds", text], "budget"
    for text in ("0", "-8", "7", "12", "264", "99999999999999999"):
        for more in ([], ["--dtype", "fp16"]):
            yield ["compile", "--head-dim", text, *more], "head_dim"
            yield ["bench", "--head-dim", text, "--dry-run", *more], "head_dim"
        yield ["tune", "--head-dim", text, "--dry-run"], "head_dim"
        yield ["bench", "--head-dim", "64", "--head-dim-v", text.replace("0", "4"), "--dry-run"], "head_dim_v"
    shared = {
        "seqlen": ("0", "-1", "99999999999"),
        "heads": ("0",),
        "kv-heads": ("3",),
        "batch": ("0",),
        "jobs": ("257",),
        "device": ("\u00b2", "\u0660", "gtx", "-1"),
        "arch": ("sm_\u06690", "90A", ""),
        "family": ("", "x"),
        "dtype": ("fp8",),
        "set": ("=", "block_kv", "block_kv="),
    }
    for option, texts in shared.items():
        for text in texts:
            yield ["tune", "--head-dim", "64", "--dry-run", f"--{option}", text], option.split("-")[0]
    for text in ("block_kv=6_4", "x=1"):
        yield ["tune", "--head-dim", "64", "--dry-run", "--set", text], "config field"
    for device in ("gpu", "-1", "\u0660", "0.5", "cuda:0"):
        yield ["verify", "--head-dim", "64", "--device", device], "device"
    yield ["debug", "--head-dim", "64", "--schedule", "x"], "schedule"
    yield ["generate", "--head-dim", "64", "--arch", "sm_80,", "--out", "/nowhere/x"], "arch"
    yield ["bench", "--grid", "x"], "grid"
    yield ["bench", "--grid", "gqa", "--head-dim", "64"], "grid"
    yield ["bench", "--peers", "x", "--dry-run"], "peers"
    yield ["bench", "--rounds", "0", "--dry-run"], "rounds"
    yield ["bench", "--baseline", "x", "--dry-run"], "baseline"
    yield ["bench", "--batch", "3"], "head_dim"
    yield ["bench", "--device", "-1", "--dry-run"], "device"
    yield ["bench", "--from", "/nowhere"], "from"
    yield ["cache", "import", "/nowhere"], "file"
    yield ["tune", "--head-dim"], "--head-dim"
    yield ["tune"], "head_dim must be given for forward"
    yield ["tune", "--head-dim", "64", "--html", "page.txt"], "html"
    yield ["tune", "--head-dim", "64", "--nonsense"], "--nonsense"
    yield ["nonsense"], "nonsense"


@pytest.mark.parametrize(("arguments", "named"), list(lines()), ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None)
def test_an_odd_command_line_is_misuse(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in misuse(monkeypatch, capsys, *arguments)
    assert not list(tmp_path.iterdir())


def options(function: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and description of each option of a command."""
    hints = get_type_hints(function, include_extras=True)
    for name in inspect.signature(function).parameters:
        kind, *described = get_args(hints[name])
        yield name, kind, described[0]


def test_every_option_that_is_a_number_takes_plain_digits_only() -> None:
    found = []
    for app in (cli.app, *(group.typer_instance for group in cli.app.registered_groups)):
        for command in app.registered_commands if app is not None else ():
            for name, kind, described in options(command.callback):
                kinds = {kind, *get_args(kind)} if get_origin(kind) is not list else {*get_args(kind)}
                if kinds & {int, float, list[int]}:
                    found.append(name)
                    assert described.parser is not None, f"{name} takes whatever Python's int takes"
    assert len(found) >= 30
