"""What a profiler watches: `python -m flashgen.compare.profiled GPU < requests.json` makes one call for each request, and nothing else.

Requests are a list of [participant, problem, workload] as JSON. Only the calls are profiled, between cudaProfilerStart and
cudaProfilerStop; a kernel of PyTorch's that does nothing, `MARK`, follows each of them. A call that fails has no kernel before its mark.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from flashgen.bench.peers import make_peers
from flashgen.bench.runner import Runner
from flashgen.bench.sdpa import sdpa_settings_kept
from flashgen.bench.session import torch_device
from flashgen.build.gpu.driver import gpu
from flashgen.codegen.spec import problem_from_json
from flashgen.codegen.workload import Workload

from ..cells import Cell
from .with_backward import with_backward

MARK = "spin_kernel"  # of torch.cuda._sleep


def make_calls(ordinal: int, requests: list[tuple[str, dict[str, object], dict[str, int]]]) -> None:
    """See the module's docstring."""
    on = gpu(ordinal)
    device = torch_device(on)
    with torch.no_grad(), torch.cuda.device(device), sdpa_settings_kept():
        for name, problem, workload in requests:
            cell = Cell(problem_from_json(problem), Workload(**workload))
            run: Callable[[], object] | None = None
            try:
                run = _prepared(name, cell, device, on.device.l2_bytes)
            except Exception as error:
                print(f"{name}: {error}", file=sys.stderr)
            torch.cuda.profiler.start()
            if run is not None:
                run()
            torch.cuda._sleep(0)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            run = None
            torch.cuda.empty_cache()


def _prepared(name: str, cell: Cell, device: torch.device, l2_bytes: int) -> Callable[[], object]:
    """A participant's call, with its backward pass in a cell of gradients. It has been made once: what compiles and allocates has."""
    peers, absent = make_peers([name])
    if name in absent:
        raise ImportError(absent[name])
    peer = with_backward(peers[name]) if cell.problem.operation == "backward" else peers[name]
    peer.select()
    run = peer.prepare(cell, device)(Runner(peers, device, l2_bytes, 1).inputs(cell, peer.layout))
    run()
    torch.cuda.synchronize()
    return run


if __name__ == "__main__":
    make_calls(int(sys.argv[1]), json.load(sys.stdin))
