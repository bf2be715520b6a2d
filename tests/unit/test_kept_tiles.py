"""Lists of tiles that are kept with a block mask: which calls find theirs, and which ones take what another call has found."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashgen
from flashgen.build.gpu.parameter_memory import LaunchNumbers
from flashgen.codegen.program import Buffer, BufferKind
from flashgen.launch import bound, kept_tiles
from flashgen.launch.block_masks import with_block_mask
from flashgen.launch.kept_tiles import keeping_tiles
from flashgen.launch.kept_tiles import kept_tiles as kept_of
from flashgen.traced.modifier import functions_read

BUFFERS = (Buffer("seen_tiles", 40, BufferKind.KEPT), Buffer("tile_counter", 4, BufferKind.STREAM_COUNTER))


class Launches:
    """A program of two launches, whose first one finds tiles: the addresses of those that were launched."""

    def __init__(self) -> None:
        self.kernel, self.finding, self.numbers = object(), (0,), self.of(b"numbers")
        self.both: list[tuple[int, ...]] = []
        self.second: list[tuple[int, ...]] = []

    @staticmethod
    def of(first: bytes) -> tuple[LaunchNumbers, ...]:
        return LaunchNumbers(4, first, ()), LaunchNumbers(2, b"", ())

    def enqueue(self, _: Any, *given: int) -> None:
        self.both.append(given)

    def enqueue_others(self, _: Any, *given: int) -> None:
        self.second.append(given)

    @property
    def count(self) -> tuple[int, int]:
        return len(self.both), len(self.second)


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a CUDA graph is captured."""
    now = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[-1])
    return now


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(bound, "tile_counters", SimpleNamespace(address=lambda device, stream, count: 77))
    monkeypatch.setattr(bound, "empty_strided", lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype))
    return Launches()


def call(launches: Any, tensors: tuple[torch.Tensor, ...], stream: int = 5, first: bytes = b"numbers") -> None:
    numbers, enqueue = bound._with_memory(launches, launches.of(first), 0, BUFFERS)
    kept = kept_of(tensors)
    if kept is None:
        return enqueue(numbers, stream, 1, 2)
    return bound._with_kept(launches, enqueue)(kept, tensors, numbers, stream, 1, 2)


def test_the_second_call_takes_what_the_first_found(launches: Launches) -> None:
    tensors = torch.ones(3), keeping_tiles(torch.zeros(4, dtype=torch.uint8))
    for _ in range(3):
        call(launches, tensors)
    assert launches.count == (1, 2)
    (first,) = launches.both
    assert launches.second == [first, first]
    assert first[:3] == (5, 1, 2)
    assert first[4] == 77


def test_calls_that_differ_find_their_own(launches: Launches) -> None:
    captured, states = torch.ones(3), torch.zeros(4, dtype=torch.uint8)
    alias = keeping_tiles(states)
    call(launches, (captured, alias))
    call(launches, (captured, alias), stream=6)
    call(launches, (captured, alias), first=b"of other lengths")
    assert launches.count == (3, 0)
    states[0] = 1  # counts as the alias's, too
    call(launches, (captured, alias))
    assert launches.count == (4, 0)
    captured += 1
    call(launches, (captured, alias))
    call(launches, (captured.clone(), alias))
    assert launches.count == (6, 0)
    call(launches, (captured, alias), stream=6)
    assert launches.count == (7, 0)
    call(launches, (captured, alias), stream=6)
    assert launches.count == (7, 1)
    captured.data = torch.zeros(3)  # which PyTorch does not count as a write
    call(launches, (captured, alias), stream=6)
    assert launches.count == (8, 1)


def test_nothing_is_kept_without_a_block_mask_or_in_a_capture(launches: Launches, capturing: list[bool]) -> None:
    states = torch.zeros(4, dtype=torch.uint8)
    tensors = (keeping_tiles(states),)
    for _ in range(2):
        call(launches, (states,))
    with torch.inference_mode():
        inferred = torch.ones(3)
    for _ in range(2):
        call(launches, (*tensors, inferred))
    capturing.append(True)
    for _ in range(2):
        call(launches, tensors)
    assert launches.count == (6, 0)


def test_lists_go_with_their_mask(launches: Launches) -> None:
    before = len(kept_tiles._of_states)
    alias = keeping_tiles(torch.zeros(4, dtype=torch.uint8))
    for i in range(100):
        call(launches, (alias,), first=bytes([i]))
    assert len(kept_tiles._of_states) == before + 1
    assert len(kept_tiles._of_states[id(alias)]._lists) <= kept_tiles._MOST_LISTS
    del alias
    gc.collect()
    assert len(kept_tiles._of_states) == before


def test_only_a_call_of_the_mask_alone_keeps_lists() -> None:
    mask = flashgen.BlockMask(torch.ones(1, 1, 2, 2, dtype=torch.uint8), lambda b, h, q, k: q >= k, (128, 128), (256, 256))

    def captured(mask_mod: Any) -> tuple[torch.Tensor, ...]:
        _, _, tensors, _ = functions_read(*with_block_mask(None, mask_mod, mask, None))
        return tensors

    assert kept_of(captured(None)) is not None
    assert kept_of(captured(None)) is kept_of(captured(None))
    assert kept_of(captured(lambda b, h, q, k: q != k)) is None
