"""A new modifier, its link and its oracle are a file each, and a name in the families that have it: an example to copy from.

`first_key` hides the keys before a number that each call brings, as padding in front would be hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from flashgen.build.nvrtc import compile_source
from flashgen.codegen import family as family_module
from flashgen.codegen import modifier as modifier_module
from flashgen.codegen import modifiers as modifier_folder
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.numerics import modifiers as link_folder
from flashgen.selection.families import default_spec
from tests.support.added_files import added_files
from tests.support.planted import Planted, rejected
from tests.support.runs import emulated_kernel

FILES = {
    # What it is: its values, what kernels are told of them, and the struct that is its link.
    "modifiers/first_key.py": '''
        """Keys before a number are hidden."""
        from flashgen.codegen.modifier import Modifier
        from flashgen.codegen.parameters import Parameter


        class FirstKey(Modifier):
            name = "first_key"
            rank = 20  # beside the window and chunks
            link = "FirstKey"
            words = "first key"
            parameters = (Parameter("int", "first_key"),)
            numbers = ("first_key",)
            usual = 3.0  # where a caller says nothing, as in verification

            def scalars(self, problem, workload):
                return {"first_key": self.usual}

            def values(self, call):
                return {"first_key": int(call.scalars["first_key"])}

            def call_refusals(self, call):
                first = call.scalars["first_key"]
                return [] if 0 <= first < 2**30 else [f"first_key must be from 0 to {2**30 - 1}; got {first:.0f}"]


        MODIFIER = FirstKey()
        ''',
    # What kernels do: which keys a query sees, and which queries see the keys of a tile. A tile that nobody sees is not visited.
    "templates/first_key.cuh": """
        // Keys before a number are hidden.

        struct FirstKey {
            static constexpr bool kHidesFirstKeys = true;
            int first;

            template <class Parameters>
            __device__ __forceinline__ static FirstKey of(const Parameters& p, int, int) {
                return {p.first_key};
            }
            __device__ __forceinline__ bool visible(int, int key) const { return key >= first; }
            __device__ __forceinline__ KeyRange keys(int) const { return {first, 0x7fffffff}; }
            __device__ __forceinline__ QueryRange queries(int first_key, int end_key) const {
                return {0, 0, first_key >= first ? 0x7fffffff : 0, end_key > first ? 0x7fffffff : 0};
            }
        };
        """,
    # What it means, in plain PyTorch.
    "links/first_key.py": '''
        """Keys before a number are hidden."""
        from flashgen.numerics.link import Link


        class FirstKeyLink(Link):
            def __init__(self, first):
                self.first = first

            @classmethod
            def of(cls, tensors, scalars):
                return cls(int(scalars["first_key"]))

            def hidden(self, rows):
                return rows.keys < self.first


        LINK = FirstKeyLink
        ''',
}
FAMILIES = ("attention_forward", "attention_backward")
CACHES = (modifier_module.modifiers, modifier_module.modifier_named, modifier_module.modifiers_of, family_module._refusals_everywhere)


@pytest.fixture
def added(tmp_path: Path) -> Iterator[None]:
    """The files, and the name in the families."""
    packages: dict[str, ModuleType] = {"modifiers": modifier_folder, "links": link_folder}
    template = ("tile/modifiers/first_key.cuh", "templates/first_key.cuh")
    with added_files(tmp_path, FILES, packages, template, CACHES) as patch:
        for family in map(find_family, FAMILIES):
            patch.setattr(type(family), "modifiers", (*family.modifiers, "first_key"))
        yield


def problem_of(family: str) -> Problem:
    return Problem(Dtype.BF16, 32, mask=Mask.CAUSAL, operation=find_family(family).operation, modifiers=("first_key",))


def drawn(family: str, len_q: int, len_kv: int) -> Tensors:
    """Two query heads on one key/value head."""
    return Tensors.random(problem_of(family), Workload(1, 2, 1, len_q, len_kv), torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_modifier_is_files_of_its_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the numbers: none hidden, whole tiles hidden, all hidden."""
    spec = default_spec(problem_of(family), find_target("sm_80"), family=family)
    assert compile_source(render(spec), "sm_80").report.defects == []
    kernel = emulated_kernel(spec)
    for first in (0, 1, 37, 200, 300, 5000):
        monkeypatch.setattr(type(modifier_module.modifier_named("first_key")), "usual", float(first))
        assert not rejected(kernel, drawn(family, 150, 300)), first
        assert not rejected(kernel, drawn(family, 70, 20)), first  # some queries are before the first key


@pytest.mark.slow
@pytest.mark.usefixtures("added")
def test_one_hidden_key_too_few_is_seen() -> None:
    family = "attention_forward"
    spec = default_spec(problem_of(family), find_target("sm_80"), family=family)
    fault = Planted("first", spec, "return {p.first_key};", "return {p.first_key - 1};", lambda: drawn(family, 40, 70))
    assert "max error" in fault.caught_by()


@pytest.mark.usefixtures("added")
def test_families_without_it_refuse_it_by_name() -> None:
    reasons = find_family("flash2_forward").refusals(problem_of("flash2_forward"), find_target("sm_80"))
    assert any("got first_key" in reason for reason in reasons)
