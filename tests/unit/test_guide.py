"""The guide's tables say what the code does, and its numbers are those of the tables that they are taken from."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flashgen
from flashgen import Dtype, Mask, Problem, find_target
from flashgen.codegen.modifiers import kind_of, modifier_names
from flashgen.codegen.packed import MODIFIERS
from flashgen.selection.families import families_for

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
MODIFIERS_OF = {  # arguments that are called otherwise than the modifier
    "none": (),
    "mask": ("boolean_mask",),
    "alibi_slopes": ("alibi",),
    "dropout_p": ("dropout",),
    "score_mod": ("traced",),
}


def table(beginning: str) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table that begins so."""
    text = GUIDE.read_text(encoding="utf-8")
    lines = text[text.index(beginning) :].partition("\n\n")[0].splitlines()
    headings, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return headings, rows


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def functions() -> Iterator[tuple[int, Callable[..., object]]]:
    headings, _ = table("| argument | `attention` |")
    for column, heading in enumerate(headings):
        for name in quoted(heading):
            yield column, getattr(flashgen, name)


def has(function: Callable[..., object], argument: str) -> bool:
    """Whether it is among the function's parameters, and takes the value, if one is named."""
    name, _, value = argument.partition("=")
    return name in inspect.signature(function).parameters and (not value or function is flashgen.attention)


@pytest.mark.parametrize(("column", "function"), list(functions()), ids=lambda each: getattr(each, "__name__", ""))
def test_arguments(column: int, function: Callable[..., object]) -> None:
    _, rows = table("| argument | `attention` |")
    assert {row[column] for row in rows} == {"yes", "no"}
    said = {name: row[column] == "yes" for row in rows for name in quoted(row[0])}
    assert {name: has(function, name) for name in said} == said


def test_no_argument_is_missing() -> None:
    _, rows = table("| argument | `attention` |")
    said = {name.partition("=")[0] for row in rows for name in quoted(row[0])}
    assert set(inspect.signature(flashgen.attention).parameters) - said == {"q", "k", "v", "scale", "return_lse"}


@pytest.mark.slow
def test_all_pairs_of_arguments_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the one that the guide names. Nothing is computed."""
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    length, factors = 32, torch.randn(2)
    of_blocks = flashgen.block_mask(lambda b, h, q, k: q >= k - 3, len_q=length, len_kv=length, device="cpu", block_size=16)
    ones = torch.ones(1, length, dtype=torch.int32)
    values: list[tuple[str, Any]] = [
        *(
            ("causal", True),
            ("causal", "top_left"),
            ("window", (7, None)),
            ("chunk", 8),
            ("prefix_len", ones[:, 0]),
            ("document_ids", ones),
        ),
        *(("softcap", 30.0), ("alibi_slopes", factors.abs()), ("sinks", factors), ("bias", torch.zeros(length, length))),
        *(("mask", ones.bool()), ("key_padding_mask", ones.bool()), ("block_mask", of_blocks), ("dropout_p", 0.5), ("deterministic", True)),
        ("score_mod", lambda s, b, h, q, k: s + factors[h]),
        ("score_mod", lambda s, b, h, q, k: s * factors[h]),
        ("mask_mod", lambda b, h, q, k: q >= k - 3),
        *(("layout", "bhsd"), ("return_dropout_mask", True)),
    ]
    _, rows = table("| argument | `attention` |")
    assert {name for name, _ in values} == {name.partition("=")[0] for row in rows if row[1] == "yes" for name in quoted(row[0])}
    refused = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, length, 2, 64, dtype=torch.bfloat16)
        for (name, value), (other, beside) in itertools.combinations(values, 2):
            layout = {name: value, other: beside}.get("layout")
            x = q if layout is None else q.transpose(1, 2)
            try:
                if name != other:
                    flashgen.attention(x, x, x, **{name: value, other: beside})
            except flashgen.ArgumentError as error:
                refused.append((name, other, str(error)))
    assert [pair[:2] for pair in refused] == [("alibi_slopes", "score_mod")]
    assert "score_mod must only add to the score beside alibi_slopes" in refused[0][2]


def test_packed_sequences() -> None:
    _, rows = table("| argument | `attention` |")
    said = {modifier for row in rows if row[2] == "no" for name in quoted(row[0]) for modifier in MODIFIERS_OF.get(name, (name,))}
    missing = {kind_of(name) for name in modifier_names()} - set(MODIFIERS)
    assert missing - {"document_ids_int64"} <= said


def test_gradients_on_hopper() -> None:
    headings, rows = table("| argument | d 128 |")
    widths = [tuple(map(int, re.findall(r"\d+", heading))) for heading in headings[1:]]
    assert widths == [(128,), (192, 128), (256,)]
    for row in rows:
        for argument in ["none"] * row[0].startswith("none") + quoted(row[0]):
            for (head_dim, *of_v), cell in zip(widths, row[1:], strict=True):
                modifiers = MODIFIERS_OF.get(argument, (argument,))
                head_dim_v = of_v[0] if of_v else head_dim
                problem = Problem(Dtype.BF16, head_dim, head_dim_v, Mask.CAUSAL, operation="backward", modifiers=modifiers)
                preferred = families_for(problem, find_target("sm_90a"))[0]
                assert preferred.name == f"attention_{quoted(cell)[0]}", (argument, head_dim)


@pytest.mark.parametrize(("beginning", "page"), [("| forward |", "benchmarks.md"), ("| backward |", "performance-log.md")])
def test_numbers(beginning: str, page: str) -> None:
    text = (GUIDE.parent / page).read_text(encoding="utf-8").replace("_", " ")
    _, rows = table(beginning)
    for cell, *figures, ratio in rows[:-1]:
        head_dim, workload, mask = cell.split(", ")
        measured = f"| bf16 {head_dim.replace(' ', '')} {mask} | {workload} | {' | '.join(figures)} |"
        line = next((line for line in text.splitlines() if line.startswith(measured)), "")
        assert re.search(rf"\b{re.escape(ratio)} \[", line), cell
    assert all(figure in text for figure in rows[-1][-1].split("; "))
