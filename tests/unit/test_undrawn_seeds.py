"""Seeds of dropout that are drawn where a call is launched, as addresses: which calls do so, what they launch, and that all draw alike.

The GPU is made up, and its kernels are functions that read the seed in main memory.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen import api
from flashgen.api import attention
from flashgen.codegen.modifier import Given, given_modifiers
from flashgen.launch import gpu as launch_gpu
from flashgen.launch import seeds
from flashgen.launch.asked import OF_KEYS, UNDRAWN, asked, seed_position, with_seed
from flashgen.launch.keywords import complete, modified_of_call
from flashgen.operators import plans
from tools import call_overhead
from tools.rounds import Philox

BATCH, LENGTH, HEADS = 2, 4, 2
Q, K, V = (torch.zeros(BATCH, LENGTH, HEADS, 64, dtype=torch.bfloat16) for _ in "qkv")
SLOPES, SINKS, PADDING = torch.ones(HEADS), torch.zeros(HEADS), torch.ones(BATCH, LENGTH, dtype=torch.bool)
FIRST_TENSOR = 6  # of what a launch is given: a stream, q, k, v, out and lse come before


def table(device: torch.device, seed: int, number: int) -> torch.Tensor:
    return torch.arange(1000 * seed, 1000 * seed + 2**10)


class Launches:
    """What was launched, and the seeds that kernels read, at `place` among the modifiers' tensors."""

    def __init__(self) -> None:
        self.addresses: list[tuple[int, ...]] = []
        self.seeds: list[int] = []
        self.place = 0

    def enqueue(self, _: None, *addresses: int) -> None:
        self.addresses.append(addresses)
        self.seeds.append(ctypes.c_int64.from_address(addresses[FIRST_TENSOR + self.place]).value)


@pytest.fixture
def philox(monkeypatch: pytest.MonkeyPatch) -> Philox:
    """The generator of the GPU."""
    generator = Philox()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    return generator


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, philox: Philox) -> Launches:
    found = Launches()
    call_overhead.pretend("h200", tmp_path, monkeypatch.setattr)
    for owner, name, value in (
        (torch.Tensor, "device", call_overhead.ON),
        (torch.Tensor, "is_cuda", True),
        (seeds, "_raw_stream", lambda index: 0),
        (seeds, "_table", table),
        (seeds, "_tables", {}),
        (plans, "_LOCAL", plans._OfThread()),
        (launch_gpu, "bind_chosen", lambda call, on: SimpleNamespace(numbers=None, enqueue=found.enqueue, enqueue_kept=None)),
    ):
        monkeypatch.setattr(owner, name, value)
    return found


def told(**keywords: Any) -> Any:
    """What operators are told, and the same as `asked` gives it."""
    given = {**dict.fromkeys(("window", "softcap", "alibi_slopes", "sinks")), "seed_waits": True, **keywords}
    _, modified, known = modified_of_call(False, **given, top_left=0, q=Q)
    return modified, known


BESIDE: tuple[tuple[dict[str, Any], int], ...] = (  # what a call has beside dropout, and the place of the seed among its tensors
    ({}, 0),
    ({"softcap": 5.0, "window": (3, None), "causal": True}, 0),
    ({"alibi_slopes": SLOPES, "sinks": SINKS}, 1),
    ({"alibi_slopes": SLOPES, "mask": PADDING[:, None, None], "chunk": 3}, 2),
    ({"key_padding_mask": PADDING, "sinks": SINKS}, 1),
)


@torch.no_grad()
@pytest.mark.parametrize(("beside", "place"), BESIDE)
def test_each_call_draws_where_it_is_launched(beside: dict[str, Any], place: int, launches: Launches, philox: Philox) -> None:
    launches.place = place
    for _ in range(3):
        attention(Q, K, V, dropout_p=0.5, **beside)
    assert launches.seeds == [7000, 7001, 7002]
    assert philox.get_offset() == 12
    others = [tensor.data_ptr() for tensor in (SLOPES, PADDING, SINKS) if any(tensor is given for given in beside.values())]
    for addresses in launches.addresses:
        tensors = [*addresses[FIRST_TENSOR:]]
        assert tensors.pop(place)
        assert tensors[: len(others)] == others or "mask" in beside


@pytest.mark.parametrize(("beside", "place"), BESIDE)
def test_calls_that_keep_their_seed_draw_the_same(beside: dict[str, Any], place: int, launches: Launches, philox: Philox) -> None:
    launches.place = place
    for _ in range(2):
        attention(Q, K, V, dropout_p=0.5, **beside)
        with torch.no_grad():
            attention(Q, K, V, dropout_p=0.5, **beside)
    assert launches.seeds == [7000, 7001, 7002, 7003]
    philox.set_offset(4)
    with torch.no_grad():
        attention(Q, K, V, dropout_p=0.5, **beside)
    assert launches.seeds[-1] == 7001


@torch.no_grad()
def test_calls_of_other_lengths_and_probabilities_draw_too(launches: Launches) -> None:
    for length in (2, 3, 4, 3):
        attention(Q, K[:, :length], V[:, :length], dropout_p=0.5)
        attention(Q, K, V, dropout_p=0.25)
    assert launches.seeds == [7000 + i for i in range(8)]


@torch.no_grad()
def test_a_call_of_no_rows_moves_the_generator_on(launches: Launches, philox: Philox) -> None:
    """As it does with gradients: where a checkpoint runs it again with these, later calls have the seeds that they had."""
    for _ in range(2):
        attention(Q[:, :0], K, V, dropout_p=0.5)
    assert philox.get_offset() == 8
    with torch.enable_grad():
        attention(Q[:, :0], K, V, dropout_p=0.5)
    assert philox.get_offset() == 12
    assert not launches.addresses


@torch.no_grad()
def test_each_replay_of_a_graph_draws_anew(launches: Launches, philox: Philox, monkeypatch: pytest.MonkeyPatch) -> None:
    attention(Q, K, V, dropout_p=0.5)
    drawn: list[weakref.ref[torch.Tensor]] = []

    def randint(most: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        seed = torch.full(shape, 42)
        drawn.append(weakref.ref(seed))
        return seed

    monkeypatch.setattr(torch, "randint", randint)
    monkeypatch.setattr(launch_gpu, "current_stream", lambda index: 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attention(Q, K, V, dropout_p=0.5)
    assert launches.seeds == [7000, 42]
    assert philox.get_offset() == 4
    assert [seed() for seed in drawn] == [None], "memory of a capture is PyTorch's again"


@torch.no_grad()
def test_a_table_stays_until_its_call_is_launched(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may draw the next table between."""
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(*given: Any) -> torch.Tensor:
        one = table(*given)
        made.append(weakref.ref(one))
        return one

    def enqueue(_: None, *addresses: int) -> None:
        seeds._tables.clear()
        assert made[-1]() is not None
        launches.enqueue(_, *addresses)

    monkeypatch.setattr(seeds, "_table", watched)
    monkeypatch.setattr(launch_gpu, "bind_chosen", lambda call, on: SimpleNamespace(numbers=None, enqueue=enqueue, enqueue_kept=None))
    for _ in range(2):
        attention(Q, K, V, dropout_p=0.5)
    assert launches.seeds == [7000, 7001]
    assert [one() for one in made] == [None, None]


@torch.no_grad()
@pytest.mark.parametrize(("beside", "place"), BESIDE)
def test_operators_are_given_a_seed(
    beside: dict[str, Any], place: int, launches: Launches, philox: Philox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody listens, calls go by the dispatcher."""
    given: list[Any] = []
    monkeypatch.setattr(api, "run_at_hand", lambda *arguments: None)
    monkeypatch.setattr(api, "attention_output", lambda *arguments: given.append(arguments[6:]))
    attention(Q, K, V, dropout_p=0.5, **beside)
    ((names, sizes, numbers, tensors),) = given
    known, _ = asked(names, sizes, numbers, tensors)
    assert "dropout" in known.names
    assert (int(tensors[place]), tensors[place].shape) == (7000, ())
    assert philox.get_offset() == 4
    assert all(tensor.ndim == 4 for tensor in tensors if tensor.dtype == torch.bool)


@torch.no_grad()
@pytest.mark.usefixtures("launches")
def test_only_a_seed_that_nobody_keeps_waits() -> None:
    (text, _, _, tensors), known = told(dropout_p=0.5)
    assert (text, tensors, known.names) == ("dropout", [], (UNDRAWN,))
    with torch.enable_grad():
        kept, other = told(dropout_p=0.5)
    for (text, _, _, tensors), names in (
        (kept, other.names),
        (told(dropout_p=0.5, seed_waits=False)[0], ("dropout",)),
        (told(dropout_p=0.5, score_mod=lambda s, b, h, q, k: s * 2, call=((BATCH, HEADS, LENGTH, LENGTH), Q, None))[0], ("dropout",)),
    ):
        assert "dropout" in text
        assert names == ("dropout",)
        assert [tensor.dtype for tensor in tensors] == [torch.int64]


@torch.no_grad()
def test_a_mask_of_what_is_kept_is_of_the_seed_that_is_launched(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = []
    monkeypatch.setattr(api, "dropout_mask", lambda seed, *given: asked_for.append(int(seed)))
    attention(Q, K, V, dropout_p=0.5)
    attention(Q, K, V, dropout_p=0.5, return_dropout_mask=True)
    assert launches.seeds == [7000, 7001]
    assert asked_for == [7001]


@torch.no_grad()
@pytest.mark.usefixtures("launches")
def test_a_mask_and_a_seed_may_both_wait() -> None:
    modified, known = told(dropout_p=0.5, key_padding_mask=PADDING, alibi_slopes=SLOPES, sinks=SINKS)
    assert known.names == ("alibi", OF_KEYS, UNDRAWN, "sinks")
    slopes, mask, seed, sinks = complete(modified, known, Q)[3]
    assert (slopes is SLOPES, sinks is SINKS) == (True, True)
    assert (mask.shape, seed.shape) == ((BATCH, 1, 1, LENGTH), ())
    assert complete((*modified[:3], (SLOPES,)), given_modifiers("alibi"), Q)[3] == (SLOPES,)


def test_the_place_of_a_seed_is_behind_the_tensors_of_the_names_before_it() -> None:
    names = ("alibi", "boolean_mask", "document_ids", UNDRAWN, "sinks")
    assert seed_position(names) == 4
    assert seed_position(("alibi", "dropout")) is None
    seed = torch.tensor(3)
    given, tensors = with_seed(Given(names), (SLOPES, PADDING, K, V, SINKS), seed)
    assert given.names == ("alibi", "boolean_mask", "document_ids", "dropout", "sinks")
    assert tensors[4] is seed
