"""Seeds of dropout from tables, with a generator that is made up: what PyTorch's own is asked on a GPU, without one."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flashgen.launch import seeds

DEVICE = torch.device("cuda", 0)


class Philox:
    """A generator of a GPU, as far as seeds ask for it."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert offset % 4 == 0
        self.offset = offset


def made_up(device: torch.device, seed: int, number: int) -> torch.Tensor:
    """A table of main memory."""
    return torch.randint(2**63 - 1, (seeds._SEEDS,), generator=torch.Generator().manual_seed(seed * 1000 + number))


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which tables are made."""
    made: list[tuple[int, int]] = []

    def table(device: torch.device, seed: int, number: int) -> torch.Tensor:
        made.append((seed, number))
        return made_up(device, seed, number)

    monkeypatch.setattr(seeds, "_table", table)
    monkeypatch.setattr(seeds, "_tables", {})
    return made


def draw(generator: Philox, count: int = 1, stream: int = 0) -> list[int]:
    """What lies in memory where seeds are said to be."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "default_generators", (generator,))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for _ in range(count):
            table, place, address = seeds.next_seed(0, stream)
            found.append(ctypes.c_int64.from_address(address).value)
            assert int(table[place]) == found[-1]
    return found


def test_each_call_has_another_seed_and_states_repeat_theirs(tables: list[tuple[int, int]]) -> None:
    generator = Philox(7)
    first = draw(generator, 3 * seeds._SEEDS)
    assert len(set(first)) == len(first)
    assert generator.offset == 4 * len(first)
    assert tables == [(7, 0), (7, 1), (7, 2)]
    assert draw(Philox(7), 5) == first[:5]
    assert draw(Philox(7, 4 * 1500), 5) == first[1500:1505]
    assert not set(draw(Philox(8), 100)) & set(first)


def test_a_table_is_of_one_seed_of_the_generator() -> None:
    generator = Philox(7)
    first = draw(generator, 2)
    generator.seed, generator.offset = 8, 0
    others = draw(generator, 2)
    assert not set(others) & set(first)
    generator.seed = 7
    generator.offset = 0
    assert draw(generator, 2) == first


def test_no_two_threads_draw_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Philox):
        """Whose state another thread may read before it is written."""

        def set_offset(self, offset: int) -> None:
            time.sleep(1e-4)
            super().set_offset(offset)

    monkeypatch.setattr(torch.cuda, "default_generators", (Slow(7),))
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: seeds.next_seed(0, 0)[1], range(100))]
    assert sorted(found) == [*range(100)]


def test_what_others_draw_in_between_changes_seeds() -> None:
    generator = Philox(3)
    alone = draw(generator, 2)
    generator.offset = 0
    first = draw(generator)
    generator.offset += 12
    assert draw(generator)[0] not in alone
    assert first == alone[:1]


def test_each_stream_has_its_own_table(tables: list[tuple[int, int]]) -> None:
    assert draw(Philox(5), 1, stream=1) == draw(Philox(5), 1, stream=2) == draw(Philox(5), 1, stream=1)
    assert tables == [(5, 0), (5, 0)]


def test_seeds_have_no_dimensions_and_can_be_kept_for_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (Philox(1),))
    with torch.inference_mode():
        seed = seeds.drawn_seed(DEVICE)
    assert (seed.shape, seed.dtype) == ((), torch.int64)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_other_devices_draw_as_pytorch_does(device: torch.device | None) -> None:
    torch.manual_seed(11)
    first = seeds.drawn_seed(device)
    torch.manual_seed(11)
    assert torch.equal(first, torch.randint(2**63 - 1, ()))


def test_what_is_traced_draws_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "nobody_traces", lambda: False)
    monkeypatch.setattr(torch, "randint", lambda most, shape, device: (most, shape, device))
    assert seeds.drawn_seed(DEVICE) == (2**63 - 1, (), DEVICE)


def test_captured_graphs_draw_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed of a table would be the same in each replay."""
    drawn = torch.tensor([11])
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(seeds, "_raw_stream", lambda index: 5)
    monkeypatch.setattr(torch, "randint", lambda most, shape, device: drawn if (most, shape, device) == (2**63 - 1, (1,), DEVICE) else None)
    seed = seeds.drawn_seed(DEVICE)
    assert (int(seed), seed.shape) == (11, ())
    assert seeds.next_seed(0, 5) == (drawn, 0, drawn.data_ptr())


def test_the_default_stream_is_not_asked_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA captures none, and asking costs a call."""
    monkeypatch.setattr(torch.cuda, "default_generators", (Philox(2),))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    assert seeds.next_seed(0, 0)[1] == 0


def test_a_call_takes_its_seed_from_the_generator_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Philox(2)
    monkeypatch.setattr(seeds, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    assert int(seeds.drawn_seed(torch.device("cuda", 1))) == int(made_up(DEVICE, 2, 0)[0])
    assert generator.offset == 4
