"""Options that several commands share, and what they turn into."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashgen.cells import problems_of
from flashgen.codegen.errors import ArgumentError, choice_error, shown
from flashgen.codegen.modifier import modifiers as known_modifiers
from flashgen.codegen.modifiers.softcap import checked_softcap
from flashgen.codegen.operations import BOTH, operation_names
from flashgen.codegen.problem import Problem
from flashgen.codegen.seen import Ends
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, find_target
from flashgen.codegen.typed import parse_int


def integer(text: str | int) -> int:
    """What the command line takes for an integer: plain digits."""
    try:
        return text if isinstance(text, int) else parse_int("value", text)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from None


def number(text: str | float) -> float:
    """What the command line takes for a number: plain digits, with a point or an exponent."""
    if isinstance(text, str) and not re.fullmatch(r"[+-]?[0-9]*\.?[0-9]+(e[+-]?[0-9]{1,3})?", text):
        raise typer.BadParameter(f"value must be a number in plain digits, such as 1.5; got {text!r}")
    return float(text)


INTEGER: dict[str, Any] = {"parser": integer, "metavar": "INTEGER"}  # of an option
NUMBER: dict[str, Any] = {"parser": number, "metavar": "NUMBER"}

HeadDim = Annotated[
    int | None,
    typer.Option("--head-dim", **INTEGER, help="Width of q and k, in elements: a multiple of 8 up to 256. For attention."),
]
HeadDimV = Annotated[int, typer.Option("--head-dim-v", **INTEGER, help="Width of v and out, in elements; 0 for the same.")]
DtypeName = Annotated[str, typer.Option("--dtype", help="bf16 or fp16; of operations but attention fp32, too.")]
CausalOrBoth = Annotated[bool | None, typer.Option("--causal/--no-causal", help="Causal mask, or none; both if not given.")]
Causal = Annotated[bool, typer.Option("--causal/--no-causal", help="Causal mask, or none.")]
Seqlen = Annotated[
    list[int] | None,
    typer.Option("--seqlen", **INTEGER, help="Length of q, and of k/v unless given; may be repeated. Default: 512, 1024, 4096, 16384."),
]
SeqlenKv = Annotated[int | None, typer.Option("--seqlen-kv", **INTEGER, help="Length of k/v; default: that of q.")]
Batch = Annotated[int | None, typer.Option("--batch", **INTEGER, help="Batch size; default: 16384 tokens in all.")]
Heads = Annotated[int | None, typer.Option("--heads", **INTEGER, help="Query heads; default: 2048 / head_dim.")]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", **INTEGER, help="Key/value heads; default: as many as query heads.")]
Arch = Annotated[str | None, typer.Option("--arch", help="Architecture, for example sm_90a; default: this GPU's, or sm_90a without one.")]
Passes = Annotated[str, typer.Option("--pass", help="forward, backward, both, or another operation, such as softmax.")]
OnePass = Annotated[str, typer.Option("--pass", help="forward, backward, or another operation, such as softmax.")]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic/--no-deterministic", help="Gradients that are the same in every run, for --pass backward."),
]
Window = Annotated[
    str | None,
    typer.Option(
        "--window",
        metavar="LEFT:RIGHT",
        help="Keys that a query sees before and after its own; 1024: is open on the right, 1024 alone stands for both.",
    ),
]
Chunk = Annotated[int | None, typer.Option("--chunk", **INTEGER, help="Keys of a chunk: a query sees those of its own alone.")]
Softcap = Annotated[
    float | None,
    typer.Option("--softcap", **NUMBER, help="A cap of scores, as in softcap * tanh(s / softcap). Kernels are the same for every cap."),
]
Modifiers = Annotated[
    str | None,
    typer.Option(
        "--modifiers",
        metavar="NAMES",
        help="Others, with commas between them: alibi, bias, bias_fp32, boolean_mask, document_ids, document_ids_int64, dropout, "
        "prefix_len, sinks, tree_mask. Kernels are the same for all their values.",
    ),
]
Packed = Annotated[
    bool, typer.Option("--packed/--dense", help="Packed sequences of any lengths, one behind the other: flashgen.attention_varlen.")
]
PageSize = Annotated[
    int | None,
    typer.Option(
        "--page-size", **INTEGER, help="Sequences in a cache, in pages of so many keys: flashgen.attention_with_kvcache. Kernels take any."
    ),
]
FamilyName = Annotated[
    str | None, typer.Option("--family", help="Kernel family, for example attention_forward; default: the preferred one that can.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A config field by hand, for example --set block_q=128; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

stderr = Console(stderr=True)


def parse_settings(settings: list[str] | None) -> dict[str, str]:
    """'field=value' texts as a dict. Raises ArgumentError for one of another form, or a field given twice."""
    parsed: dict[str, str] = {}
    for text in settings or []:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ArgumentError(f"set must look like field=value; got {text!r}")
        if name in parsed:
            raise ArgumentError(f"set must give each field once; got {name} twice")
        parsed[name] = value
    return parsed


def parse_window(text: str | None) -> Ends | None:
    """'LEFT:RIGHT' as a window, of which an end that is left out is open; one number stands for both ends. Raises ArgumentError."""
    if text is None:
        return None
    ends = text.split(":") if ":" in text else [text, text]
    if len(ends) != 2 or not all(re.fullmatch(r"-?[0-9]{1,10}|", end) for end in ends) or text == "":
        raise ArgumentError(f"window must look like LEFT:RIGHT, in keys, such as 1024:0; got {shown(text)}")
    left, right = (int(end) if end else None for end in ends)
    return left, right


def named_modifiers(softcap: float | None, others: str | None) -> tuple[str, ...]:
    """Names of the modifiers that these options stand for. Raises ArgumentError for a cap that no call could have, and unknown names."""
    if softcap is not None:
        checked_softcap(softcap)
    names = [name.strip() for name in others.split(",")] if others is not None else []
    allowed = [name for name, modifier in known_modifiers().items() if not modifier.sizes]  # sizes have options of their own
    for name in names:
        if name not in allowed:
            raise choice_error("modifiers", name, allowed)
    return (*["softcap"] * (softcap is not None), *names)


def problems(
    head_dim: int | None,
    head_dim_v: int,
    dtype: str,
    causal: bool | None,
    passes: str = "forward",
    deterministic: bool = False,
    window: str | None = None,
    modifiers: Sequence[str] = (),
    chunk: int | None = None,
    packed: bool = False,
    page_size: int | None = None,
) -> list[Problem]:
    """Those of `problems_of`, where a `head_dim_v` of 0 is that of the same width."""
    options = (dtype, causal, passes, deterministic, parse_window(window), modifiers, chunk, packed, page_size)
    found = problems_of(head_dim, head_dim_v or None, *options)
    return list(dict.fromkeys(problem for problem, _ in found))


def problem(
    head_dim: int | None,
    head_dim_v: int,
    dtype: str,
    causal: bool,
    operation: str,
    deterministic: bool,
    window: str | None = None,
    modifiers: Sequence[str] = (),
    chunk: int | None = None,
    packed: bool = False,
    page_size: int | None = None,
) -> Problem:
    """One problem. Raises ArgumentError for both passes, of which a kernel computes one."""
    if operation == BOTH:
        raise choice_error("pass", operation, operation_names())
    (only,) = problems(head_dim, head_dim_v, dtype, causal, operation, deterministic, window, modifiers, chunk, packed, page_size)
    return only


def target_or_here(arch: str | None) -> Target:
    """The named architecture, else that of the first GPU of this machine, else sm_90a."""
    from flashgen.build.gpu.driver import gpu, gpu_count

    if arch is not None:
        return find_target(arch)
    return gpu(0).device.target if gpu_count() else find_target("sm_90a")


def spec_for(problem: Problem, target: Target, settings: dict[str, str], family: str | None = None) -> KernelSpec:
    """The default spec, with the fields that were given by hand. Raises IllegalConfigError with all reasons."""
    from flashgen.selection.families import default_spec

    default = default_spec(problem, target, family=family)
    return KernelSpec(default.family, problem, default.config.replace_from_text(settings), target) if settings else default


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, indent=2))


def print_table(columns: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str]]) -> None:
    """A table on stdout. Columns are (heading with its unit, whether it holds numbers)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, numeric in columns:
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: brackets are no markup
    console = Console(width=10_000, color_system=None)  # as wide as it needs to be: a value cut short would be worse than a line that wraps
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def microseconds(seconds: float | None) -> str:
    """For a column headed 'us'."""
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"
