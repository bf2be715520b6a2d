"""In which order persistent blocks take key tiles under a mask in blocks: those first that the most query tiles see."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.codegen import key_order
from flashgen.codegen.devices import device_of_target
from flashgen.codegen.modifiers.traced import name_of_functions
from flashgen.codegen.operands import Role
from flashgen.codegen.problem import Mask
from flashgen.codegen.program import Program
from flashgen.codegen.workload import Workload
from flashgen.launch.cpu import view_of
from flashgen.launch.tensors import Tensors
from flashgen.traced.modifier import modifier_in_call
from tests.support.named_kernels import NamedKernel, judged
from tests.support.plan import few_of
from tests.support.runs import emulated_kernel, emulated_text

TABLE = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
BATCH, HEADS_Q, HEADS_KV, LENGTHS = 2, 4, 2, (700, 1900)
KEY_TILES, WORD_NUMBERS = 15, 2  # of 128 keys; numbers of 32 tiles: which are seen, and of which something is hidden


def of_all(b: Any, h: Any, q: Any, k: Any) -> Any:
    return TABLE[0, 0, q // 128, k // 128]


def of_each(b: Any, h: Any, q: Any, k: Any) -> Any:
    return TABLE[b, h, q // 128, k // 128]


KERNELS = {
    name: NamedKernel(family, 64, Mask.FULL, False, (name_of_functions(modifier_in_call(None, mask_mod).modifier),))
    for name, family, mask_mod in (
        ("persistent", "attention_backward_persistent_sm90", of_all),
        ("persistent-heads", "attention_backward_persistent_sm90", of_each),
        ("sm90-heads", "attention_backward_sm90", of_each),
    )
}


def test_more_key_tiles_than_a_block_should_rank_come_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_order, "MOST_RANKED", 2)
    spec = KERNELS["persistent-heads"].spec()
    tensors = Tensors.random(spec.problem, Workload(BATCH, HEADS_Q, HEADS_KV, 70, 300), torch.Generator().manual_seed(5))
    program = spec.family.program(spec.config, tensors.call(), device_of_target(spec.target))
    assert "key_order" not in {buffer.name for buffer in program.buffers}
    verdict = judged(spec, emulated_text(spec), tensors)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("name", few_of(KERNELS, "persistent-heads"))
def test_key_tiles_that_most_query_tiles_see_come_first(name: str) -> None:
    spec = KERNELS[name].spec()
    tensors = Tensors.random(spec.problem, Workload(BATCH, HEADS_Q, HEADS_KV, *LENGTHS), torch.Generator().manual_seed(5))
    program = spec.family.program(spec.config, tensors.call(), device_of_target(spec.target))
    tiles, preprocess = program.launches[:2]
    buffers = {buffer.name: torch.full((buffer.bytes // 4,), 77, dtype=torch.int32) for buffer in program.buffers}
    given = {operand.name: view_of(operand.name, tensors[operand.name], operand.role is not Role.IN) for operand in tensors.operands}
    given |= {of: view_of(of, memory, writable=True) for of, memory in buffers.items()}
    emulated_kernel(spec).launch(Program((tiles, preprocess)), given)

    words = buffers["seen_tiles"].view(-1, KEY_TILES, int(tiles.values["seen_words"]), WORD_NUMBERS)[..., 0].long() & 0xFFFFFFFF
    seen = sum((words >> tile & 1 for tile in range(32)), start=torch.zeros_like(words)).sum(-1)  # [rows of heads, key tiles]
    together = HEADS_Q // HEADS_KV if len(seen) > 1 else 1
    counts, orders = seen.view(-1, together, KEY_TILES).sum(1), buffers["key_order"].view(-1, together, KEY_TILES)[:, 0].long()
    assert len(counts.unique()) > 1
    assert len(counts) == (BATCH * HEADS_KV if "heads" in name else 1)
    for count, order in zip(counts, orders, strict=True):
        assert order.tolist() == sorted(range(KEY_TILES), key=lambda tile: (-count[tile], tile))
