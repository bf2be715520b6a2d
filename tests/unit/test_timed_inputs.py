"""What kernels are timed on: inputs whose FLOPs are those that a workload counts, and the operands that they cannot do without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.codegen.operations.forward import BLOCK_TABLE
from flashgen.codegen.problem import Dtype, Problem, Sequences
from flashgen.codegen.workload import Workload
from flashgen.timing import kernels
from flashgen.timing.kernels import Bench, usual_inputs

CACHED = Problem(Dtype.BF16, 16, sequences=Sequences.CACHED)
WORKLOAD = Workload(9, 2, 2, 3, 32, pages=40, page_size=8, table_pages=4)


def test_sequences_of_a_cache_have_all_keys() -> None:
    tensors = usual_inputs(CACHED, WORKLOAD, torch.Generator().manual_seed(1))
    assert tensors["cache_seqlens"].tolist() == [32] * 9
    assert "cache_leftpad" not in tensors
    assert tensors[BLOCK_TABLE].shape == (9, 4)


def test_other_inputs_are_as_drawn() -> None:
    packed = Problem(Dtype.BF16, 16, sequences=Sequences.PACKED)
    tensors = usual_inputs(packed, Workload(3, 2, 2, 8, 8, tokens_q=20, tokens_kv=30), torch.Generator().manual_seed(1))
    assert "seqused_kv" in tensors


@pytest.mark.parametrize("with_all", [False, True])
def test_the_table_is_given(monkeypatch: pytest.MonkeyPatch, with_all: bool) -> None:
    """Without one a sequence would have the keys of a single page."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(kernels, "BoundCall", lambda *_: lambda _, *addresses: given.append(addresses))
    monkeypatch.setattr(kernels, "Timer", lambda launch, *_: launch(0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    bench: Any = object.__new__(Bench)
    bench.sets = [usual_inputs(CACHED, WORKLOAD, torch.Generator().manual_seed(1))]
    names = ("lse", BLOCK_TABLE, "cache_leftpad")
    bench._timer(SimpleNamespace(operands=names), 1.0, with_all)
    ((lse, table, padding),) = given
    assert (lse != 0) == with_all
    assert table == bench.sets[0][BLOCK_TABLE].data_ptr()
    assert padding == 0
