"""Models of transformers with flashgen's kernels, beside eager fp32 and PyTorch's attention in bf16: on a GPU, or in the emulator.

What PyTorch's own attention errs by in bf16 is what the numerics rule allows flashgen. Tokens are those of fp32 as long as PyTorch's are,
up to a step at which two tokens are closer than what its logits err by.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashgen.integrations.transformers import NAME, register, report
from flashgen.numerics.rule import Verdict, judge

from .tiny_models import Architecture, Sizes, as_dtype, model_of, of_dtype

KEYS = ("exact", "plain", "given")


class Compared(NamedTuple):
    """An architecture and its models by KEYS, of the same weights."""

    architecture: Architecture
    sizes: Sizes
    device: str
    models: dict[str, Any]

    def inputs(self, key: str, batch: int, length: int) -> dict[str, Tensor]:
        """The same numbers for each model, in its dtype."""
        torch.manual_seed(5)
        rounded = of_dtype(self.architecture.inputs(self.sizes, batch, length), torch.bfloat16)
        return of_dtype(rounded, torch.float32 if key == "exact" else torch.bfloat16, self.device)


def compared(architecture: Architecture, sizes: Sizes, device: str) -> Compared:
    register()
    model = model_of(architecture, sizes)
    exact, plain, given = torch.float32, torch.bfloat16, torch.bfloat16
    ways = {"exact": (exact, "eager"), "plain": (plain, architecture.plain), "given": (given, NAME)}
    return Compared(architecture, sizes, device, {key: as_dtype(model, *ways[key], device) for key in KEYS})


def judged(found: dict[str, dict[str, Tensor]]) -> Verdict:
    exact = {name: each.double() for name, each in found["exact"].items()}
    return judge(found["given"], exact, found["plain"])


def judged_pass(each: Compared, batch: int, length: int) -> Verdict:
    """Of logits, and of gradients of a random sum of them, each over the root mean square of its exact one."""
    found: dict[str, dict[str, Tensor]] = {}
    scales: dict[str, float] = {}
    report(reset=True)
    for key, model in each.models.items():
        model.zero_grad()
        logits = model(**each.inputs(key, batch, length)).logits
        torch.manual_seed(6)
        weights = torch.randn(logits.shape).bfloat16().to(logits)
        (logits * weights).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        if key == "exact":
            most = max(float(gradient.abs().max()) for gradient in gradients.values())
            rms = {name: float(gradient.square().mean().sqrt()) for name, gradient in gradients.items()}
            scales = {name: value for name, value in rms.items() if value > 1e-4 * most}  # of a key's bias it is 0 but for rounding
        parts = [(gradients[name].float() / scale).flatten() for name, scale in scales.items()]
        found[key] = {"logits": logits.detach(), "gradients": torch.cat(parts).to(logits.dtype)}
    assert sum(report().run.values()) >= each.sizes.layers
    assert not report().refused
    return judged(found)


def judged_padding(each: Compared, batch: int, length: int, padding: list[int], side: str, grad: bool) -> Verdict:
    """Of logits of tokens that are none of padding, `padding` of each sequence."""
    rows = torch.ones(batch, length, dtype=torch.int64, device=each.device)
    for b, count in enumerate(padding):
        rows[b, :count] = 0
    rows = rows.flip(1) if side == "right" else rows
    found: dict[str, dict[str, Tensor]] = {}
    for key, model in each.models.items():
        with torch.set_grad_enabled(grad):
            logits = model(**each.inputs(key, batch, length), attention_mask=rows).logits.detach()
        found[key] = {"logits": logits if logits.shape[1] != length else logits[rows.bool()]}
    return judged(found)


def compared_tokens(each: Compared, cache: str, batch: int, length: int, count: int) -> int:
    """How many of `count` greedy tokens of each sequence were compared. Raises AssertionError for one that is another."""
    tokens: dict[str, Tensor] = {}
    logits: dict[str, Tensor] = {}
    more = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    report(reset=True)
    for key, model in each.models.items():
        inputs = {name: given for name, given in each.inputs(key, batch, length).items() if "decoder" not in name}
        made = model.generate(**inputs, **more, cache_implementation=cache, disable_compile=True)
        tokens[key], logits[key] = made.sequences[:, -count:], torch.stack(made.logits, 1).float()
    assert sum(report().run.values()) >= count * each.sizes.layers
    assert not report().refused
    error = float((logits["plain"][:, 0] - logits["exact"][:, 0]).abs().max())  # of what the same tokens give
    agreed = 0
    for b in range(batch):
        for step in range(count):
            exact, plain, given = (int(tokens[key][b, step]) for key in KEYS)
            row = logits["exact"][b, step]
            if plain != exact or (given != exact and float(row[exact] - row[given]) <= 2 * error):
                break
            assert given == exact, f"token {step} of sequence {b} is {given}, and with fp32 {exact}"
            agreed += 1
    return agreed
