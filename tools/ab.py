"""Times patched texts of one kernel against the unpatched one, interleaved: for trying an idea before it becomes a template.

    python tools/ab.py --head-dim 64 --seqlen 4096 --patch no-guard 'find this' 'put that'

Every --patch NAME FIND REPLACE is a candidate; FIND must occur. `--set field=value` gives the config. Prints TFLOP/s, the median over the
rounds of the unpatched text's time over the candidate's, with its spread, registers and spills. Results are not checked here.
"""

from __future__ import annotations

import argparse
import sys

from flashgen import selection
from flashgen.build.driver import gpu
from flashgen.build.kernel import Kernel
from flashgen.cli.options import parse_settings, problems, spec_for
from flashgen.codegen.problem import Workload
from flashgen.codegen.render import Source, render
from flashgen.measure import Bench
from flashgen.spread import Spread


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--head-dim-v", type=int, default=0)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--seqlen", type=int, action="append")
    parser.add_argument("--set", action="append", dest="settings")
    parser.add_argument("--patch", nargs=3, action="append", default=[], metavar=("NAME", "FIND", "REPLACE"))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    on = gpu(0)
    (problem,) = problems(options.head_dim, options.head_dim_v, options.dtype, options.causal)
    spec = spec_for(problem, on.device.target, parse_settings(options.settings))
    text = render(spec).text
    texts = {"unpatched": text}
    for name, find, replace in options.patch:
        if find not in text:
            sys.exit(f"patch {name} must find its text in the kernel: {find!r}")
        texts[name] = text.replace(find, replace)
    artifacts = {name: selection.store().get_or_compile(Source(spec.name, text), spec.target.name) for name, text in texts.items()}
    kernels = {name: Kernel(spec, artifact, on) for name, artifact in artifacts.items()}
    heads = max(1, 2048 // options.head_dim)
    print(f"{on.device.name}, {spec.name}")
    for seqlen in options.seqlen or (512, 4096, 16384):
        workload = Workload(max(1, 16384 // seqlen), heads, heads, seqlen, seqlen)
        rounds = Bench(problem, workload, on.ordinal).seconds(kernels, options.rounds)
        for name, seconds in rounds.items():
            report, ratio = artifacts[name].report, Spread.of([a / b for a, b in zip(rounds["unpatched"], seconds, strict=True)])
            tflops = workload.flops(problem) / Spread.of(seconds).median / 1e12
            facts = f"{report.registers} registers, {report.spill_bytes} B spilled"
            print(f"S {seqlen:6} {name:24} {tflops:6.1f} TFLOP/s  x {ratio.median:.3f} [{ratio.low:.3f}..{ratio.high:.3f}]  {facts}")


if __name__ == "__main__":
    main()
