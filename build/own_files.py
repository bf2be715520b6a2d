"""Files that a command writes into a folder of the user's: what it wrote itself may be replaced, and nothing else.

A list beside them, `.flashgen-files.json`, has the checksums of what was written. A file that is not on it was made by somebody else, and
one with another checksum was altered: either stays, and the command is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.plain import from_plain, parse, to_plain

from .files import checksum, make_folders, require_writable, write_file

LIST = ".flashgen-files.json"


@dataclass(frozen=True)
class _Written:
    """The sha256 of each file by name: those that were there last, and those of what was about to be written."""

    files: dict[str, list[str]]


def require_own(folder: Path, patterns: Iterable[str], same: Mapping[str, bytes] | None = None) -> None:
    """Raises ArgumentError, which starts with `out`, if a file whose name matches a pattern may not be replaced. Changes nothing.

    same: what is about to be written by name, as far as that is known: a file that holds it already does not stand in the way
    """
    listed, wanted = _listed(folder), list(patterns)
    for name in sorted(name for name in {*os.listdir(folder)} - {LIST} if any(fnmatchcase(name, pattern) for pattern in wanted)):
        path, found = folder / name, checksum(folder / name)
        expected = hashlib.sha256(same[name]).hexdigest() if same is not None and name in same else None
        if found is None or found not in (*listed.get(name, ()), expected):
            raise ArgumentError(
                f"out must be a folder in which flashgen replaces its own files only; got {folder}, in which {path} is of somebody else, "
                "or was altered: move that away"
            )


def write_own(folder: Path, files: Mapping[str, bytes], mode: int = 0o666) -> list[Path]:
    """Writes the files, each whole or not at all; returns their paths. One that holds the same already stays, and stays whose it is.

    Raises ArgumentError as `require_own`, and FlashgenError if a file cannot be written.
    """
    require_own(folder, files, files)
    sums = {name: (checksum(folder / name), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    changed = {name: [one for one in sums[name] if one is not None] for name in files if len({*sums[name]}) > 1}
    _list(folder, changed)  # before anything is written: whenever this ends, each file is one of those on the list
    for name in changed:
        write_file(folder / name, files[name], mode)
    return [folder / name for name in files]


def make_own_folder(folder: Path, patterns: Iterable[str], same: Mapping[str, bytes] | None = None) -> None:
    """Makes the folder, and finds out now rather than after an hour whether everything can be written. `same`: see `require_own`.

    Raises ArgumentError, also where a file of somebody else's, or an altered one, would be replaced.
    """
    try:
        make_folders(folder)
        require_writable(folder)
        require_own(folder, patterns, same)
    except OSError as error:
        raise ArgumentError(f"out must be a folder that can be written; got {folder}: {error.strerror}") from error


def replace_own(folder: Path, pattern: str, files: Mapping[str, bytes]) -> list[Path]:
    """As `write_own`; what was written before and matches the pattern is removed unless it is written now."""
    written = write_own(folder, files)
    remove_own(folder, own_names(folder, pattern) - files.keys())
    return written


def own_names(folder: Path, pattern: str) -> set[str]:
    """The names of files that were written before, and match a pattern."""
    return {name for name in _listed(folder) if fnmatchcase(name, pattern)}


def remove_own(folder: Path, names: Iterable[str]) -> None:
    """Removes files that are there. Raises ArgumentError as `require_own`."""
    names = list(names)
    require_own(folder, names)
    for name in names:
        with suppress(FileNotFoundError):
            (folder / name).unlink()
    _list(folder, {name: [] for name in names})


def adopt(folder: Path, name: str) -> None:
    """Puts a file on the list that a program of ours has written."""
    found = checksum(folder / name)
    _list(folder, {name: [] if found is None else [found]})


def _listed(folder: Path) -> dict[str, list[str]]:
    path = folder / LIST
    try:
        if path.is_symlink():
            raise ArgumentError("it is a link")
        return from_plain(_Written, parse(path.read_bytes(), "text"), "list").files
    except FileNotFoundError:
        return {}
    except (ArgumentError, OSError) as error:
        raise ArgumentError(f"out must be a folder whose list of files can be read; got {path} ({error}): move that away") from error


def _list(folder: Path, changes: Mapping[str, list[str]]) -> None:
    before = _listed(folder)
    files = {name: sums for name, sums in {**before, **changes}.items() if sums}
    if files == before:
        return
    write_file(folder / LIST, (json.dumps(to_plain(_Written(files)), indent=2) + "\n").encode())
