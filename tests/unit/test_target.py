"""`Target`: names and aliases, discovery, what fits on one SM."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flashgen.codegen import targets as package
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.target import Target, find_target, target_for_capability, targets


def made_up(name: str = "sm_80", registers_per_sm: int = 65536) -> Target:
    return Target(
        name=name,
        capability=(8, 0),
        shared_memory_per_block=163 * 1024,
        shared_memory_per_sm=164 * 1024,
        threads_per_sm=2048,
        blocks_per_sm=32,
        mma_flops_per_cycle=2048,
        registers_per_sm=registers_per_sm,
    )


@pytest.mark.parametrize("text", ["sm_90a", "sm_90", "90a", "90", "9.0", "9.0a"])
def test_one_architecture_has_many_names(text: str) -> None:
    assert find_target(text).name == "sm_90a"


@pytest.mark.parametrize(("text", "name"), [("8.6", "sm_86"), ("10.0", "sm_100a"), ("120", "sm_120a"), ("sm_121a", "sm_121a")])
def test_architectures_with_two_and_three_digits(text: str, name: str) -> None:
    assert find_target(text).name == name


@pytest.mark.parametrize("text", ["sm_80a", "sm_75", "hopper", "", "sm_90b", "90 ", "sm_9000", None, 90])
def test_an_unknown_architecture_lists_the_known(text: object) -> None:
    with pytest.raises(ArgumentError, match=rf"^arch must be one of sm_80, .*sm_90a.*; got {re.escape(repr(text))}$"):
        find_target(text)  # type: ignore[arg-type]


def test_every_target_is_found_by_its_name_and_its_capability() -> None:
    assert {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"} <= set(targets())
    assert list(targets()) == [t.name for t in sorted(targets().values(), key=lambda t: t.capability)]
    for name, target in targets().items():
        major, minor = target.capability
        assert re.fullmatch(rf"sm_{major}{minor}[af]?", name), "name and capability agree"
        assert find_target(name) is target
        assert find_target(f"{major}.{minor}") is target
        assert target_for_capability(target.capability) is target
    assert target_for_capability((7, 5)) is None


def test_a_name_of_another_capability_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^name must be that of the compute capability \(8, 0\); got 'sm_86'$"):
        made_up("sm_86")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("from flashgen.codegen.targets.sm_80 import TARGET", "targets must have a compute capability each; got sm_80 and sm_80a"),
        ("", r"flashgen\.codegen\.targets\.sm_80b must define TARGET, of type Target; got None"),
    ],
)
def test_a_target_file_that_cannot_be_taken_is_named(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text:
        text += "\nfrom dataclasses import replace\nTARGET = replace(TARGET, name='sm_80a')\n"
    (tmp_path / "sm_80b.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{package.__name__}.sm_80b", raising=False)
    with pytest.raises(ArgumentError, match=f"^{says}$"):
        targets.__wrapped__()


def test_the_figures_of_a_target_go_together() -> None:
    for target in targets().values():
        reserved = target.shared_memory_reserved
        assert target.shared_memory_per_block + reserved == target.shared_memory_per_sm, target.name
        assert target.threads_per_sm % 32 == 0
        assert target.registers_per_sm == 65536


@pytest.mark.parametrize("name", ["sm80", "90a", "sm_90A", "compute_90", "sm_90a ", ""])
def test_a_target_refuses_a_name_that_the_compiler_would(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"^name must look like sm_80 or sm_90a; got "):
        made_up(name)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "limit"),
    [
        (128, 255, 0, 2, "registers: 4 warps of 8192 twice"),
        (128, 128, 0, 4, "registers"),
        (128, 129, 0, 3, "registers, given out in units of 256 a warp: 129 cost as much as 136"),
        (128, 73, 0, 6, "registers, as if 80 a thread: 73 would be 7 blocks"),
        (1024, 32, 0, 2, "threads"),
        (32, 8, 0, 32, "blocks"),
        (128, 32, 81 * 1024, 2, "shared memory with what each block reserves"),
        (128, 32, 81 * 1024 + 1, 1, "shared memory, one byte more"),
        (128, 32, 164 * 1024, 0, "too much for one block"),
    ],
)
def test_blocks_that_fit_on_one_sm(threads: int, registers: int, shared: int, blocks: int, limit: str) -> None:
    assert made_up().blocks_resident(threads, registers, shared) == blocks, limit
