"""What modifiers add to the CPU's time of a call of `flashgen.attention` whose signature the thread knows.

    python -m tools.modifier_overhead --gpu
    python -m tools.modifier_overhead --kinds softcap,traced-softcap --rounds 31 --count

With --gpu on the machine's GPU, which is waited for between turns; without, on a made-up driver, as in rounds.py. Batch 1, 8 heads, 128
queries and keys, head_dim 64, bf16, gradients off. In each round every call runs in turn: microseconds, the median of rounds and the least,
and what each has more than the plain call.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashgen.api import attention
from flashgen.launch.made_block_masks import BlockMask

from .rounds import device_for_calls, measured, median_difference, parser

HEADS, LENGTH, HEAD_DIM = 8, 128, 64
SHAPE = (1, LENGTH, HEADS, HEAD_DIM)
CAP, WINDOW = 50.0, 64

Options = Callable[[], dict[str, Any]]


def fixed(**options: Any) -> Options:
    """The same objects in each call."""
    return lambda: options


def kinds(device: str) -> dict[str, Options]:
    """The keywords of each call by its name."""
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, device=device, dtype=torch.float32))
    table = torch.zeros(HEADS, 2 * LENGTH, device=device)
    ids = torch.zeros(LENGTH, device=device, dtype=torch.int32)

    def softcap(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    def alibi(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score - slopes[head] * (query - key).abs()

    def relative(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return score + table[head, query - key + LENGTH]

    def window(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key <= WINDOW)

    def documents(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (ids[query] == ids[key])

    block_mask = BlockMask(torch.ones(1, 1, 1, 1, device=device, dtype=torch.uint8), documents, (LENGTH, LENGTH), (LENGTH, LENGTH))
    return {
        "plain": fixed(),
        "window": fixed(causal=True, window=(WINDOW, None)),
        "softcap": fixed(softcap=CAP),
        "alibi": fixed(alibi_slopes=slopes),
        "key-padding": fixed(key_padding_mask=torch.ones(1, LENGTH, device=device, dtype=torch.bool)),
        "dropout": fixed(dropout_p=0.1),
        "traced-window": fixed(mask_mod=window),
        "traced-softcap": fixed(score_mod=softcap),
        "traced-alibi": fixed(score_mod=alibi),
        "traced-relative": fixed(score_mod=relative),
        "traced-documents": fixed(mask_mod=documents),
        "block-mask": fixed(block_mask=block_mask),
        "fresh-softcap": lambda: {"score_mod": lambda score, batch, head, query, key: CAP * torch.tanh(score / CAP)},
        "fresh-alibi": lambda: {"score_mod": lambda score, batch, head, query, key: score - slopes[head] * (query - key).abs()},
    }


def call_of(tensors: tuple[torch.Tensor, ...], options: Options) -> Callable[[], object]:
    """A user's call."""
    q, k, v = tensors
    return lambda: attention(q, k, v, **options())


# What gives a launch a tensor map: memory of out may be new in each call, and only then are these entered
_OF_NEW_ADDRESSES = ("TensorMapField.fill", "TensorMaps.at", "fake_driver.<locals>.<lambda>")


def python_calls(call: Callable[[], object]) -> list[str]:
    """The Python functions that it enters, of a call like the one before, but for those of memory that is new: the fewest of some calls."""
    found: list[list[str]] = []

    def profile(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            found[-1].append(frame.f_code.co_qualname)

    for _ in range(8):
        found.append([])
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    return min(([name for name in one if name not in _OF_NEW_ADDRESSES] for one in found), key=len)


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    made = parser(__doc__, calls=400)
    made.add_argument("--kinds", type=lambda text: text.split(","), help="those beside the plain call; all unless given")
    made.add_argument("--count", action="store_true", help="name the Python functions that a call of each kind enters, too")
    options = made.parse_args(argv)
    with device_for_calls(options.gpu) as device:
        known, (q, k, v) = kinds(device), (torch.randn(SHAPE, device=device).bfloat16() for _ in "qkv")
        if unknown := [name for name in options.kinds or () if name not in known]:
            made.error(f"kinds must be of {', '.join(known)}; got {', '.join(unknown)}")
        wanted = dict.fromkeys(("plain", *(options.kinds or known)))
        calls = {name: call_of((q, k, v), known[name]) for name in wanted}
        found = measured(calls, options)
        for name, call in calls.items():
            more, least = median_difference(found[name], found["plain"]), min(found[name]) - min(found["plain"])
            functions = python_calls(call)
            median, fastest = statistics.median(found[name]), min(found[name])
            print(
                f"{name:16} median {median:6.2f} ({more:+6.2f})  least {fastest:6.2f} ({least:+6.2f})  {len(functions) - 1:3} Python calls"
            )
            if options.count:
                print("   ", ", ".join(functions[1:]))


if __name__ == "__main__":
    main()
