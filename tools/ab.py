"""Times candidates against one kernel, interleaved: patched texts of it, other configs, and writing lse.

    python tools/ab.py --head-dim 64 --seqlen 4096 --patch no-guard 'find this' 'put that'
    python tools/ab.py --head-dim 128 --seqlen 512 --seqlen 16384 --lse
    python tools/ab.py --head-dim 128 --seqlen 16384 --config exact row_max=exact --logits x16 --logits rising400
    python tools/ab.py --head-dim 128 --seqlen 64 --seqlen-kv 8192 --heads 32 --kv-heads 4 --config packed pack_gqa=8

    python tools/ab.py --head-dim 128 --seqlen 512 --text before old.cu
    python tools/ab.py --pass backward --family flash2_backward --head-dim 64 --config queries warp_split=queries,block_q=64,block_kv=32

Every --patch NAME FIND REPLACE is a candidate, or one more change to the candidate of that name; FIND must occur. `--set field=value` gives
the config, --family another family than the preferred one, --config NAME FIELD=VALUE,... another config that differs in these.
--text NAME FILE: another text of the same spec, with the same parameters, as `flashgen show` of another version wrote it.
--lse: each once more, writing lse. --logits: xN multiplies q by N, risingN lets the logits of each row rise by N from the last key to the
first. Prints TFLOP/s, the median over the rounds of the kernel's time over the candidate's, with its spread, registers and spills.
Results are not checked here.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from flashgen.build.artifact import Report
from flashgen.build.gpu.driver import gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.cli.options import parse_settings, problems, spec_for
from flashgen.codegen.errors import ArgumentError, FlashgenError
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Problem
from flashgen.codegen.render import Source, render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation
from flashgen.timing.kernels import Bench
from flashgen.timing.spread import Spread

BASE = "unchanged"


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    options = arguments(argv)
    try:
        compare(options)
    except FlashgenError as error:
        sys.exit(f"error: {error}")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--head-dim-v", type=int, default=0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--pass", dest="operation", default="forward")
    parser.add_argument("--seqlen", type=int, action="append")
    for name in ("seqlen-kv", "batch", "heads", "kv-heads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--family")
    parser.add_argument("--set", action="append", dest="settings")
    parser.add_argument("--patch", nargs=3, action="append", default=[], metavar=("NAME", "FIND", "REPLACE"))
    parser.add_argument("--config", nargs=2, action="append", default=[], metavar=("NAME", "FIELD=VALUE,..."))
    parser.add_argument("--text", nargs=2, action="append", default=[], metavar=("NAME", "FILE"))
    parser.add_argument("--lse", action="store_true")
    parser.add_argument("--logits", action="append")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args(argv)


def compare(options: argparse.Namespace) -> None:
    """Compiles the candidates, times them in each workload with each kind of logits, and prints a line for each."""
    on = gpu(0)
    (problem,) = problems(options.head_dim, options.head_dim_v, options.dtype, options.causal, options.operation)
    sources = candidates(problem, on.device.target, options)
    artifacts = {name: compilation.store().get_or_compile(source, of.target.name) for name, (of, source) in sources.items()}
    kernels = {name: Kernel(of, artifacts[name], on) for name, (of, _) in sources.items()}
    with_lse = {f"{name}, lse": name for name in kernels} if options.lse else {}
    kernels |= {key: kernels[name] for key, name in with_lse.items()}
    print(f"{on.device.name}, {sources[BASE][0].name}")
    for workload in workloads(problem, options):
        for logits in options.logits or ("x1",):
            bench = Bench(problem, workload, on.ordinal)
            for tensors in bench.sets:
                change_logits(tensors, logits)
                tensors.derive()
            rounds = bench.seconds(kernels, options.rounds, with_all=with_lse)
            for name, seconds in rounds.items():
                result = line(
                    operation_of(problem).flops(problem, workload), rounds[BASE], seconds, artifacts[with_lse.get(name, name)].report
                )
                print(f"S {workload.len_q:6} {logits:10} {name:24} {result}")


def candidates(problem: Problem, target: Target, options: argparse.Namespace) -> dict[str, tuple[KernelSpec, Source]]:
    """Every candidate's spec and text by its name, the unpatched kernel first.

    Raises ArgumentError for a patch that finds nothing, or the text of another kernel.
    """
    settings = parse_settings(options.settings)
    spec = spec_for(problem, target, settings, options.family)
    sources = {BASE: (spec, render(spec))}
    for name, find, replace in options.patch:
        text = sources.get(name, sources[BASE])[1].text
        if find not in text:
            raise ArgumentError(f"patch {name} must find its text in the kernel; got {find!r}")
        sources[name] = (spec, Source(spec.name, text.replace(find, replace)))
    for name, file in options.text:
        text = Path(file).read_text(encoding="utf-8")
        if f"{spec.name}(" not in text:
            raise ArgumentError(f"text {name} must be one of {spec.name}; got {file}, which does not define it")
        sources[name] = (spec, Source(spec.name, text))
    for name, fields in options.config:
        other = spec_for(problem, target, {**settings, **parse_settings(fields.split(","))}, options.family)
        sources[name] = (other, render(other))
    return sources


def workloads(problem: Problem, options: argparse.Namespace) -> list[Workload]:
    """One for each length; by default 16384 tokens in all, and heads * head_dim = 2048."""
    heads = options.heads or max(1, 2048 // problem.head_dim)
    return [
        Workload(options.batch or max(1, 16384 // seqlen), heads, options.kv_heads or heads, seqlen, options.seqlen_kv or seqlen)
        for seqlen in options.seqlen or (512, 4096, 16384)
    ]


def line(flops: float, base: Sequence[float], seconds: Sequence[float], report: Report) -> str:
    """A candidate's speed, the ratio to the unpatched kernel of the same rounds, and what the compiler says."""
    ratio = Spread.of([a / b for a, b in zip(base, seconds, strict=True)])
    speed = f"{flops / Spread.of(seconds).median / 1e12:6.1f} TFLOP/s  x {ratio.median:.3f} [{ratio.low:.3f}..{ratio.high:.3f}]"
    return f"{speed}  {report.registers} registers, {report.spill_bytes} B spilled"


def change_logits(tensors: Tensors, how: str) -> None:
    """'x16' multiplies q; 'rising400' lets the logits of each row rise by so much, natural, from the last key to the first."""
    if how.startswith("rising"):
        root = math.sqrt(float(how.removeprefix("rising")) * tensors["q"].shape[3] ** 0.5)
        tensors["q"][..., -1] = root
        tensors["k"][..., -1] = torch.linspace(root, 0, tensors["k"].shape[1], device=tensors["k"].device)[None, :, None]
    else:
        tensors["q"].mul_(float(how.removeprefix("x")))


if __name__ == "__main__":
    main()
