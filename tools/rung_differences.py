"""By how many lines neighbouring rungs of the ladder differ, as docs/ladder.md has it: each step is an idea, and little else.

    python tools/rung_differences.py

Texts are rendered for sm_90a, head dim 64, fp16, without a mask, with the same tiles; their headers and the kernels' names are left out.
Counted are the lines that one text has and the other has not, of the text that has more of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target

TILES = {"block_q": "64", "block_kv": "64", "warps": "4", "stages": "2", "blocks_per_sm": "2"}
_OTHER_ORDER = {"grid_order": "batch_head_tile"}
_KEYS = {**TILES, "block_q": "16", "warp_split": "keys"}
_QUERIES = {**TILES, "block_kv": "32", "warp_split": "queries"}
# (name, family, settings) of both texts of each pair.
PAIRS: tuple[tuple[tuple[str, str, Mapping[str, str]], tuple[str, str, Mapping[str, str]]], ...] = (
    (("softmax_safe", "softmax_safe", {}), ("softmax_online", "softmax_online", {})),
    (("softmax_online", "softmax_online", {}), ("softmax_tilewise", "softmax_tilewise", {})),
    (("softmax_safe", "softmax_safe", {}), ("softmax_tilewise", "softmax_tilewise", {})),
    (("memory_efficient_attention", "memory_efficient_attention", TILES), ("flash1_forward", "flash1_forward", TILES)),
    (("flash1_forward", "flash1_forward", TILES), ("flash2_forward", "flash2_forward", TILES)),
    (("memory_efficient_attention", "memory_efficient_attention", TILES), ("flash2_forward", "flash2_forward", TILES)),
    (("flash2_forward", "flash2_forward", TILES), ("flash2_forward, warps split keys", "flash2_forward", _KEYS)),
    (
        ("flash2_forward", "flash2_forward", TILES),
        ("flash2_forward, other grid order", "flash2_forward", {**TILES, **_OTHER_ORDER}),
    ),
    (("flash1_backward", "flash1_backward", TILES), ("flash2_backward", "flash2_backward", TILES)),
    (("flash2_backward", "flash2_backward", TILES), ("flash2_backward, warps split queries", "flash2_backward", _QUERIES)),
    (("flash2_backward", "flash2_backward", TILES), ("flash2_backward, other grid order", "flash2_backward", {**TILES, **_OTHER_ORDER})),
)


def lines_of(family: str, settings: Mapping[str, str], mask: Mask = Mask.FULL) -> list[str]:
    """A text without its header and its entry's name."""
    found, target = find_family(family), find_target("sm_90a")
    softmax = found.operation == "softmax"
    problem = Problem(Dtype.FP16, operation="softmax") if softmax else Problem(Dtype.FP16, 64, mask=mask, operation=found.operation)
    spec = KernelSpec(found, problem, found.default(problem, target).replace_from_text(settings), target)
    text = render(spec).text.replace(spec.name, "kernel")
    return text[text.index("// ==== ") :].splitlines()


def differing(one: list[str], other: list[str]) -> int:
    """Lines that one text has and the other has not, of the text that has more of them."""
    changes = [line[0] for line in difflib.unified_diff(one, other, n=0, lineterm="") if line[:3] not in ("---", "+++", "@@ ")]
    return max(changes.count("-"), changes.count("+"))


def main() -> None:
    """Prints the table."""
    print("| from | to | lines |\n|---|---|---|")
    for (name, *one), (other_name, *other) in PAIRS:
        print(f"| `{name}` | `{other_name}` | {differing(lines_of(*one), lines_of(*other))} |")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
