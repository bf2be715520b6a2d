"""The kernel of block masks: what it takes and refuses, machine code for every architecture, and how its launch finds its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.build.nvrtc import compile_source
from flashgen.codegen.block_states import BLOCK_STATES, STATES, BlockStatesConfig, states_call, states_problem, states_shape, states_spec
from flashgen.codegen.errors import ArgumentError, IllegalConfigError
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.operands import Call
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import Target, find_target, targets
from flashgen.launch import gpu as launch_gpu
from flashgen.launch import made_block_masks
from flashgen.launch.gpu import CaptureError
from flashgen.traced.modifier import modifier_in_call
from tools import call_overhead

TABLE = torch.zeros(64, dtype=torch.int32)


def name_of(**functions: Any) -> str:
    return name_of_functions(modifier_in_call(**functions).modifier)


BY_HEAD = states_problem(name_of(mask_mod=lambda b, h, q, k: (TABLE[q] == TABLE[k]) | (h == 1)))
NUMBERS = {"traced_t0_size0": 64, "traced_t0_step0": 1}


def call(batch: int = 2, heads: int = 3, lengths: tuple[int, int] = (300, 200), block_size: tuple[int, int] = (64, 32)) -> Call:
    return states_call(BY_HEAD, batch, heads, lengths, block_size, NUMBERS)


@pytest.mark.parametrize("target", targets().values(), ids=targets())
def test_it_compiles_without_defects(target: Target) -> None:
    report = compile_source(render(states_spec(BY_HEAD, target)), target.name).report
    assert not report.defects
    assert not report.warnings


def test_shapes() -> None:
    assert states_shape(call()) == (1, 3, 5, 7)
    assert states_shape(call(lengths=(0, 0))) == (1, 3, 1, 1)
    assert states_shape(call(lengths=(1, 33), block_size=(512, 16))) == (1, 3, 1, 3)


def test_a_warp_has_a_block() -> None:
    (launch,) = BLOCK_STATES.program(BlockStatesConfig(4), call(), None).launches  # type: ignore[arg-type]  # it does not look at a device
    assert launch.grid == -(-3 * 5 * 7 // 4)
    assert {name: launch.values[name] for name in ("mask_blocks", "mask_heads", "mask_rows", "mask_columns")} == {
        **{"mask_blocks": 105, "mask_heads": 3},
        **{"mask_rows": 5, "mask_columns": 7},
    }


@pytest.mark.parametrize(
    "modifiers", [(), ("softcap",), (name_of(score_mod=lambda s, b, h, q, k: s + h),), ("document_ids", *BY_HEAD.modifiers)], ids=str
)
def test_other_problems_are_refused(modifiers: tuple[str, ...]) -> None:
    problem, target = Problem(Dtype.BF16, 8, modifiers=modifiers), find_target("sm_90a")
    with pytest.raises(IllegalConfigError, match="modifiers must be a mask_mod alone; got "):
        states_spec(problem, target)


def test_other_configs_are_refused() -> None:
    with pytest.raises(IllegalConfigError, match="warps must be from 1 to 32; got 33"):
        KernelSpec(BLOCK_STATES, BY_HEAD, BlockStatesConfig(33), find_target("sm_90a"))


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """An H200 that is made up; whether a graph is captured."""
    seen = SimpleNamespace(captures=False)
    call_overhead.pretend("h200", tmp_path, monkeypatch.setattr)

    class Device:
        def __init__(self, index: int) -> None:
            assert index == 0

        def __enter__(self) -> None: ...
        def __exit__(self, *raised: object) -> None: ...

    for name in ("gpu", "require_context", "current_stream"):
        monkeypatch.setattr(made_block_masks, name, getattr(launch_gpu, name))
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: seen.captures)
    made_block_masks._kernel.cache_clear()
    yield seen
    made_block_masks._kernel.cache_clear()


def tensor_at(address: int) -> Any:
    return SimpleNamespace(data_ptr=lambda: address, device=call_overhead.ON)


def test_a_launch_is_given_the_addresses_of_its_tensors(on_a_gpu: SimpleNamespace) -> None:
    made_block_masks._on_gpu(call(), tensor_at(4096), [tensor_at(512)])
    kernel = made_block_masks._kernel(BY_HEAD, 0)
    (memory,) = kernel._of_thread.memories.values()
    words = {field.name: memory.words[field.offset // 8] for field in kernel.parameters[""].pointers}
    assert words == {STATES: 4096, "traced_t0": 512}


def test_no_kernel_is_made_while_a_graph_is_captured(on_a_gpu: SimpleNamespace) -> None:
    on_a_gpu.captures = True
    with pytest.raises(CaptureError, match=r"^flashgen\.block_mask has no kernel yet for this mask_mod, .*: call it once before$"):
        made_block_masks._on_gpu(call(), tensor_at(4096), [tensor_at(512)])
    on_a_gpu.captures = False
    made_block_masks._on_gpu(call(), tensor_at(4096), [tensor_at(512)])
    on_a_gpu.captures = True
    made_block_masks._on_gpu(call(), tensor_at(4096), [tensor_at(512)])


@pytest.mark.parametrize(("index", "message"), [(0, "got cuda:0"), (5, "got cuda:5")])
def test_a_gpu_that_is_not_there_is_refused(index: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: index > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: index)
    with pytest.raises(ArgumentError, match=f"^device must be a CUDA device that PyTorch finds, one of {index}; {message}$"):
        made_block_masks.block_mask(lambda b, h, q, k: q >= k, len_q=8, len_kv=8, device=f"cuda:{index}")
