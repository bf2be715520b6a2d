"""What a prefix is to problems, kernels' texts, families, and oracles."""

from __future__ import annotations

import dataclasses

import torch

from flashgen.cells import cells_of
from flashgen.cli.options import named_modifiers
from flashgen.codegen.attention import attention_call
from flashgen.codegen.devices import find_device
from flashgen.codegen.family import families, find_family
from flashgen.codegen.modifier import modifiers, modifiers_of, opens_keys
from flashgen.codegen.operation import operation_of
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.score_chain import conditions
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from flashgen.codegen.workload import Workload
from flashgen.launch.keywords import modified_of_call
from flashgen.numerics.link import Rows, hidden_keys
from flashgen.numerics.modifiers.chunk import ChunkLink
from flashgen.numerics.modifiers.prefix_len import PrefixLink
from tests.support.examples import is_of_attention

PROBLEM = Problem(Dtype.BF16, 64, mask=Mask.CAUSAL, modifiers=("prefix_len",))
LENGTHS = torch.tensor([3, 0], dtype=torch.int32)


def test_what_operators_are_told() -> None:
    slopes, sinks, mask = torch.ones(4), torch.ones(4), torch.ones(1, dtype=torch.bool)
    causal, told, _ = modified_of_call(True, (8, None), None, slopes, sinks, None, mask, None, 16, LENGTHS, top_left=0)
    assert not causal
    names, sizes, numbers, tensors = told  # type: ignore[misc]  # there are some
    assert (sorted(names.split(",")), sizes, numbers) == (
        ["alibi", "boolean_mask", "chunk", "prefix_len", "sinks", "window"],
        (16, 8, 0),
        (),
    )
    assert all(one is other for one, other in zip(tensors, (slopes, mask, LENGTHS, sinks), strict=True)), "in the order of the names"


def test_its_link_holds_those_that_hide_keys() -> None:
    def links(*names: str) -> object:
        problem = dataclasses.replace(PROBLEM, modifiers=names)
        return conditions(modifiers_of(problem), "forward")["links"]

    assert links("prefix_len") == "false, Prefix<kCausal>"
    assert links("prefix_len", "window", "alibi", "sinks", "chunk") == "false, Alibi, Prefix<kCausal, Chunk, Window>"
    assert links("window", "alibi", "chunk") == "kCausal, Alibi, Chunk, Window"
    assert links("sinks") == links() == ""
    assert [name for name, modifier in modifiers().items() if modifier.opens] == ["prefix_len"]
    assert opens_keys(PROBLEM)


def test_families_take_it_or_say_why_not() -> None:
    target = find_target("sm_90a")
    problems = [dataclasses.replace(PROBLEM, head_dim=width, head_dim_v=width) for width in (64, 256)]
    takes = {
        family.name
        for family in families().values()
        if is_of_attention(family)
        and not all(family.refusals(dataclasses.replace(problem, operation=family.operation), target) for problem in problems)
    }
    backward = {f"attention_backward{kind}" for kind in ("", "_sm90", "_persistent_sm90", "_wide_sm90")}
    assert takes == {"attention_forward", "attention_forward_sm90", "attention_decode", *backward}
    with_dropout = dataclasses.replace(PROBLEM, operation="backward", modifiers=("dropout", "prefix_len"))
    (reason,) = find_family("attention_backward_persistent_sm90").refusals(with_dropout, target)
    assert reason.endswith("in these kernels; got dropout")


def test_a_launch_is_given_its_lengths_and_no_values() -> None:
    family, device, workload = find_family("attention_forward"), find_device("h200"), Workload(2, 4, 2, 100, 100)
    config = family.default(PROBLEM, device.target)
    (kernel,) = family.kernels(PROBLEM, config)
    assert [field.c_type for field in kernel.parameters.fields if field.name == "prefix_len"] == ["const int*"]
    call = attention_call(PROBLEM, workload)
    assert "prefix_len" not in family.program(config, call, device).launches[0].values
    assert call.views["prefix_len"] == ((2,), (1,))
    text = render(KernelSpec(family, PROBLEM, config, device.target)).text
    assert "S = Q K^T, causal mask, prefix," in text
    plain = dataclasses.replace(PROBLEM, modifiers=())
    assert operation_of(PROBLEM).flops(PROBLEM, workload) == operation_of(plain).flops(plain, workload)
    assert "prefix" not in render(KernelSpec(family, plain, config, device.target)).text


def test_the_command_line_and_cells_know_its_name() -> None:
    assert named_modifiers(None, "prefix_len") == ("prefix_len",)
    (cell,) = cells_of(64, causal=True, seqlens=[512], modifiers=("prefix_len",))
    assert cell.problem == PROBLEM


def test_an_oracle_opens_what_others_hide() -> None:
    links = [PrefixLink(LENGTHS), ChunkLink(4)]
    for batch, prefix in enumerate(LENGTHS.tolist()):
        rows = Rows(torch.arange(6), 6, 8, batch)
        hidden = hidden_keys(rows, True, links)
        for query in range(6):
            seen = [key < prefix or (key <= query + 2 and key // 4 == (query + 2) // 4) for key in range(8)]
            assert (~hidden[query]).tolist() == seen
