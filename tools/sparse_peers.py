"""Attention whose masks leave few tiles, side by side: flashgen and FlexAttention with both of its backends, in random order.

    python -m tools.sparse_peers
    python -m tools.sparse_peers --head-dim 128 --pass forward --kinds blocks

Needs a GPU. bf16, batch * length = 16384, heads * head_dim = 2048, inputs from N(0, 1); gradients are those of q, k and v. The kinds:

    documents  causal, of documents with 1024 tokens in the mean, at lengths 4096 and 16384
    blocks     random blocks of 128 x 128, one of ten seen, at length 16384: all of them whole; and of every second one a half

FlexAttention's block masks are made beforehand, and flashgen is given the same ones. `made` is flashgen with the block mask that it makes
itself, `mask_mod` with the function that these are made of, whose tiles it finds in each call. A peer whose results differ from flashgen's
by more than 2 % of their norm gets no time. Milliseconds, medians of 7 rounds; the last column is the best peer's time over flashgen's. Of
blocks also the share of the time without a mask that they would have if each took as long as there, over flashgen's time, and how long it
takes to find tiles. Of each kind, how long it takes to make a block mask: FlexAttention's by a compiled function (with --alone by a call),
flashgen's by a call, and the kernel of that alone, which is also a share of the time that flashgen's forward pass takes with it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import flashgen

from .modifier_cost import milliseconds

TOKENS, MODEL_DIM, MEAN_LENGTH, BLOCK, SEEN = 16384, 2048, 1024, 128, 0.1
ROUNDS, CALLS, TOLERANCE = 7, 40, 0.02
OURS, MADE, DENSE, TILES = "flashgen", "made", "without", "tiles"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """What queries see.

    mask_mod: all of it, as FlexAttention wants it; by_batch: whether that looks at the entry of the batch
    ours: the options of flashgen's calls, by what they are called; a block mask is that of FlexAttention, or flashgen's own if it is MADE
    """

    name: str
    length: int
    mask_mod: MaskMod
    by_batch: bool
    ours: dict[str, dict[str, Any]]


def documents(length: int) -> Case:
    """Of random lengths."""
    ids = (torch.rand(TOKENS // length, length, device="cuda") < 1 / MEAN_LENGTH).cumsum(1).int()

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ids[b, i] == ids[b, j]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (ids[b, i] == ids[b, j])

    ours: dict[str, dict[str, Any]] = {OURS: {"causal": True, "document_ids": ids}, MADE: {"block_mask": None}}
    ours["mask_mod"] = {"causal": True, "mask_mod": same}
    return Case("documents", length, seen, True, ours)


def blocks(part: bool) -> Case:
    """Random blocks; `part`: of every second one a half is seen."""
    length = TOKENS
    seen = torch.rand(length // BLOCK, length // BLOCK, device="cuda") < SEEN
    seen.fill_diagonal_(True)
    whole = torch.rand(seen.shape, device="cuda") < (0.5 if part else 2)

    def of_whole(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[i // BLOCK, j // BLOCK]

    def of_parts(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[i // BLOCK, j // BLOCK] & (whole[i // BLOCK, j // BLOCK] | ((i + j) % 2 == 0))

    mask_mod = of_parts if part else of_whole
    ours: dict[str, dict[str, Any]] = {OURS: {"block_mask": None}, MADE: {"block_mask": None}, "mask_mod": {"mask_mod": mask_mod}}
    return Case(f"blocks-{'parts' if part else 'whole'}", length, mask_mod, False, ours)


KINDS: dict[str, list[Callable[[], Case]]] = {
    "documents": [partial(documents, 4096), partial(documents, 16384)],
    "blocks": [partial(blocks, False), partial(blocks, True)],
}


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", choices=[*KINDS], nargs="+", default=[*KINDS])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--pass", dest="operation", choices=("forward", "backward"), nargs="+", default=["forward", "backward"])
    parser.add_argument("--alone", action="store_true", help="flashgen without the others, whose compilation takes minutes")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("error: a GPU is needed; got none")
    torch._dynamo.config.recompile_limit = 64
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bf16; ms")
    for make in (make for kind in options.kinds for make in KINDS[kind]):
        case = make()
        mask, built = flex_block_mask(case, not options.alone)
        told = f"{case.name} length {case.length}: a block mask is made in {built:.3f} ms, {mask.sparsity():.1f} % of it empty;"
        print(told, end=" ", flush=True)
        own, called, in_kernel = own_block_mask(case)
        print(f"flashgen's in {called:.3f} ms, {in_kernel:.3f} of them the kernel, {own.sparsity():.1f} % empty", flush=True)
        for operation in options.operation:
            for head_dim in options.head_dim:
                times, failed = measured(operation, head_dim, case, (mask, own), options.alone)
                told = "  ".join(f"{name} {time:.3f}" for name, time in times.items())
                best = min((time for name, time in times.items() if name.startswith("flex")), default=float("nan"))
                print(f"  {operation:8} head_dim {head_dim:3}  {told}  {best / times[OURS]:.3f}", flush=True)
                if operation == "forward" and MADE in times:
                    print(f"    the kernel that makes the mask takes {in_kernel / times[MADE]:.1%} of {MADE}", flush=True)
                if DENSE in times:
                    share = times[DENSE] * (1 - mask.sparsity() / 100)
                    speeds = "  ".join(f"{name} {share / times[name]:.3f}" for name in case.ours)
                    print(f"    of the speed without a mask: {speeds}; tiles found in {times[TILES]:.3f} ms", flush=True)
                for name, why in failed.items():
                    print(f"    {name}: {why}")


def flex_block_mask(case: Case, compiled: bool) -> tuple[flex.BlockMask, float]:
    """FlexAttention's, and the milliseconds that it takes to make one, by a function that has run before. compiled: which takes minutes."""
    batch = TOKENS // case.length if case.by_batch else None
    called = partial(flex.create_block_mask, case.mask_mod, batch, None, case.length, case.length, device="cuda")
    make = torch.compile(called, dynamic=False) if compiled else called
    mask = make()
    return mask, milliseconds(make, CALLS)


def own_block_mask(case: Case) -> tuple[flashgen.BlockMask, float, float]:
    """The one that flashgen makes, and the milliseconds that it takes to make one: a call, and its kernel."""
    batch = TOKENS // case.length if case.by_batch else None
    make = partial(flashgen.block_mask, case.mask_mod, batch=batch, len_q=case.length, len_kv=case.length)
    return make(), milliseconds(make, CALLS), milliseconds_of_kernels(make, lambda name: name.startswith("block_states"))


def measured(
    operation: str, head_dim: int, case: Case, masks: tuple[flex.BlockMask, flashgen.BlockMask], alone: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """Times of those that can do it, and why the others cannot."""
    shape = (TOKENS // case.length, MODEL_DIM // head_dim, case.length, head_dim)
    given = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    peers: dict[str, Attention] = {}
    mask, made = masks
    for name, options in case.ours.items():
        own = {"block_mask": made if name == MADE else mask} if "block_mask" in options else options
        peers[name] = partial(flashgen.attention, layout="bhsd", **own)
    for name, kernels in () if alone else (("flex", None), ("flex_flash", {"BACKEND": "FLASH"})):
        peers[name] = torch.compile(partial(flex.flex_attention, block_mask=mask, kernel_options=kernels), dynamic=False)
    runs: dict[str, Callable[[], Any]] = {}
    failed: dict[str, str] = {}
    wanted: list[Tensor] = []
    for name, attention in peers.items():
        try:
            run = call(operation, attention, given)
            found = run()
            if fault := fault_of(found, wanted or found):
                failed[name] = fault
                continue
            wanted, runs[name] = wanted or found, run
        except Exception as error:  # each fails in its own ways
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if case.name.startswith("blocks"):
        runs[DENSE] = call(operation, partial(flashgen.attention, layout="bhsd"), given)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in random.sample([*runs.items()], len(runs)):  # behind a call that takes much power the clock is lower
            times[name].append(milliseconds(run, CALLS))
    if DENSE in runs:
        times[TILES] = [milliseconds_of_kernels(runs[OURS], lambda name: name.endswith("_tiles"))]
    return {name: statistics.median(each) for name, each in times.items()}, failed


def milliseconds_of_kernels(run: Callable[[], Any], are_meant: Callable[[str], bool]) -> float:
    """Of some of the kernels in a call, by their names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    return sum(float(event.device_time_total) for event in profile.key_averages() if are_meant(event.key)) / CALLS / 1000


def fault_of(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """How far results are apart, if that is too far."""
    for one, other in zip(found, wanted, strict=True):
        apart = float((one.float() - other.float()).norm() / other.float().norm())
        if not apart < TOLERANCE:
            return f"differs by {apart:.3f} of the norm"
    return ""


def call(operation: str, attention: Attention, given: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """What is timed: for gradients after a forward pass."""
    q, k, v, d_out = given
    if operation == "forward":
        return lambda: [attention(q, k, v)]
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attention(leaves[0], leaves[1], leaves[2])
    return lambda: list(torch.autograd.grad(out, leaves, d_out, retain_graph=True))


if __name__ == "__main__":
    main()
