"""Launches ten configs of a family on awkward workloads, once each: what `test_sanitizer.py` runs under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.support.sanitized FAMILY

With the name of a planted fault in place of a family it launches that kernel, to show that the tool would have found something.
"""

from __future__ import annotations

import itertools
import random
import sys

import torch

from flashgen.build.gpu.driver import gpu
from flashgen.build.gpu.kernel import Kernel
from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.family import families
from flashgen.codegen.problem import Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.once import run_once
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation, loaded
from tests.support import configs
from tests.support.faults import FAULTS

CONFIGS = 10
WORKLOADS = (Workload(1, 2, 1, 131, 197), Workload(2, 4, 2, 33, 300), Workload(1, 2, 1, 130, 33))
WIDTHS = ((64, 64), (128, 128), (72, 40), (96, 96), (16, 256), (256, 256), (192, 128), (8, 8), (112, 112), (64, 64))


def launch_fault(name: str) -> None:
    """One launch of a faulty kernel, on a workload that is not a multiple of its tiles."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    on = gpu(0)
    spec = fault.setting.spec(on.device.target)
    kernel = Kernel(spec, compilation.store().get_or_compile(fault.apply(render(spec)), on.device.target.name), on)
    tensors = Tensors.random(spec.problem, Workload(1, 2, 1, 131, 297), torch.Generator("cuda").manual_seed(0))
    run_once(kernel, tensors)


def main() -> None:
    """Launches all of the family, or the fault, that is named."""
    (name,) = sys.argv[1:]
    if name not in families():
        launch_fault(name)
        return
    draw, on, family = random.Random(0), gpu(0), families()[name]
    drawn = (Problem(draw.choice(list(ELEMENTS)), *width, draw.choice(list(Mask)), family.operation) for width in itertools.cycle(WIDTHS))
    able = (problem for problem in drawn if not family.refusals(problem, on.device.target))
    for index, problem in enumerate(itertools.islice(able, CONFIGS)):
        config = configs.draw(family, problem, on.device.target, index, WORKLOADS)
        kernel = loaded.kernels.load(KernelSpec(family, problem, config, on.device.target), on)
        for workload in WORKLOADS:
            tensors = Tensors.random(problem, workload, torch.Generator("cuda").manual_seed(index))
            run_once(kernel, tensors)
            assert not any(written.isnan().any() for written in tensors.outputs.values())
        print(f"{kernel.spec.name}: launched on {len(WORKLOADS)} workloads", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
