"""Views that a call makes are those that PyTorch's dispatcher makes, where it may do without that; and its own where it may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashgen.launch import views

MASKS = {
    "dense": torch.rand(3, 5) < 0.5,
    "part": (torch.rand(4, 9) < 0.5)[1:, 2:7],
    "every other": (torch.rand(6, 10) < 0.5)[::2, ::2],
    "transposed": (torch.rand(5, 3) < 0.5).t(),
    "expanded": (torch.rand(1, 5) < 0.5).expand(3, 5),
    "empty": torch.zeros(3, 0, dtype=torch.bool),
}


@pytest.fixture(params=["with", "without"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's private function and without it."""
    if request.param == "without":
        monkeypatch.setattr(views, "make_view", None)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_axes_are_those_that_unsqueeze_gives(name: str, grad: bool) -> None:
    mask = MASKS[name]
    with torch.set_grad_enabled(grad):
        found, wanted = views.with_axes(mask), mask.unsqueeze(1).unsqueeze(1)
    assert (found.shape, found.stride(), found.storage_offset()) == (wanted.shape, wanted.stride(), wanted.storage_offset())
    assert found.data_ptr() == wanted.data_ptr()
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("_both_ways")
def test_elements_are_where_they_lie() -> None:
    table = torch.arange(20)[4:]
    for i in (0, 3, 15):
        found = views.element(table, i)
        assert (int(found), found.shape, found.data_ptr()) == (4 + i, (), table.data_ptr() + 8 * i)
        with torch.inference_mode():
            assert not views.element(table, i).is_inference()


def test_a_view_outlives_what_it_is_of() -> None:
    found = views.element(torch.arange(1000), 7)
    with torch.no_grad():
        mask = views.with_axes(torch.ones(50, 70, dtype=torch.bool))
    torch.full((1000,), 3), torch.zeros(50, 70, dtype=torch.bool)
    assert int(found) == 7
    assert bool(mask.all())


def test_where_gradients_may_be_asked_for_changes_of_a_mask_are_seen() -> None:
    mask = MASKS["dense"].clone()
    found, before = views.with_axes(mask), mask._version
    mask.logical_not_()
    assert found._version == before + 1


def test_who_traces_sees_the_view() -> None:
    class Subclass(torch.Tensor):
        pass

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with torch.no_grad():
        with Mode():  # type: ignore[no-untyped-call]
            views.with_axes(MASKS["dense"])
        assert seen == ["aten.unsqueeze.default"] * 2
        assert type(views.with_axes(MASKS["dense"].as_subclass(Subclass))) is Subclass
        mapped = torch.vmap(lambda mask: views.with_axes(mask).expand(3, 2, 2, 5))(MASKS["dense"].expand(4, 3, 5))
        assert mapped.shape == (4, 3, 2, 2, 5)


def test_torch_compile_traces_it() -> None:
    compiled = torch.compile(views.with_axes, fullgraph=True, backend="eager")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.equal(compiled(MASKS["dense"]), MASKS["dense"].unsqueeze(1).unsqueeze(1))
