"""Configs whose fields have earlier names: from `--set`, and from what records, manifests and bench files of earlier versions hold."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.families.attention_forward_sm90.config import AttentionForwardSm90Config, RowMax, Scheduler
from flashgen.codegen.family import find_family
from flashgen.codegen.former_names import FIELDS, VALUES, renamed
from flashgen.codegen.spec import PlainSpec

# As the version before wrote them.
GENERIC = {
    "block_kv": 64, "block_q": 128, "blocks_per_sm": 1, "first": "output", "query": "shared", "stages": 2, "step_kv": 32, "warps": 4,
}  # fmt: skip
HOPPER = {
    "block_kv": 128, "out_panels": 1, "packed_heads": 4, "query_stages": 2, "reference": "maximum", "scheduler": "dynamic", "stages": 2,
    "turns": False, "warpgroups": 2,
}  # fmt: skip
PROBLEM = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "mask": "full", "pass": "forward"}


def test_a_spec_of_the_version_before_gives_its_config() -> None:
    generic, hopper = (
        PlainSpec.from_json({"family": family, "revision": 1, "problem": PROBLEM, "config": config, "target": "sm_90a"}).as_of_now().config
        for family, config in (("attention_forward", GENERIC), ("attention_forward_sm90", HOPPER))
    )
    assert generic == AttentionForwardConfig(128, 64, 32, 4, 2, QueryPlace.SHARED, FirstProduct.PV)
    assert hopper == AttentionForwardSm90Config(2, 128, 2, 2, 1, RowMax.EXACT, False, Scheduler.DYNAMIC, 4)


def test_settings_take_both_names() -> None:
    config = AttentionForwardSm90Config(2, 64)
    wanted = dataclasses.replace(config, row_max=RowMax.EXACT, ping_pong=False, pack_gqa=2)
    assert config.replace_from_text({"reference": "maximum", "turns": "false", "packed_heads": "2"}) == wanted
    assert config.replace_from_text({"row_max": "exact", "ping_pong": "false", "pack_gqa": "2"}) == wanted
    assert config.replace_from_text({"row_max": "maximum"}).row_max is RowMax.EXACT


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ArgumentError, match="turns"):
        AttentionForwardSm90Config.from_json({**HOPPER, "ping_pong": True})


@pytest.mark.parametrize("nothing", [None, 3, "turns", ["turns"]])
def test_what_is_no_mapping_is_left_to_the_reader(nothing: object) -> None:
    assert renamed(nothing) == nothing


def test_every_present_name_is_a_field() -> None:
    fields = {
        field.name
        for family in ("attention_forward", "attention_forward_sm90")
        for field in dataclasses.fields(find_family(family).config_type)
    }
    assert set(FIELDS.values()) <= fields
    assert not set(FIELDS) & fields
    assert set(VALUES) <= set(FIELDS.values())


def test_settings_say_what_differs() -> None:
    config = AttentionForwardSm90Config(2, 64)
    assert config.settings(config) == ""
    assert dataclasses.replace(config, ping_pong=False, row_max=RowMax.EXACT).settings(config) == "row_max=exact ping_pong=false"
