"""`KernelSpec`: name, digest and JSON. A digest must change with everything that decides the text, and with nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashgen
from flashgen.codegen.errors import ArgumentError, IllegalConfigError
from flashgen.codegen.families.attention_forward.config import AttentionForwardConfig, FirstProduct, QueryPlace
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.spec import KernelSpec, problem_from_json, problem_to_json
from flashgen.codegen.target import find_target, targets
from flashgen.selection.families import default_spec

FAMILY = find_family("attention_forward")
CONFIG = AttentionForwardConfig(block_q=64, block_kv=32, step_kv=16, warps=4, stages=2, query=QueryPlace.SHARED)
SPEC = KernelSpec(FAMILY, Problem(Dtype.BF16, 64), CONFIG, find_target("sm_80"))


def variants() -> dict[str, KernelSpec]:
    """SPEC, and one spec for each field changed alone."""
    problem, config = SPEC.problem, CONFIG
    return {
        "none": SPEC,
        "dtype": dataclasses.replace(SPEC, problem=dataclasses.replace(problem, dtype=Dtype.FP16)),
        "head_dim": dataclasses.replace(SPEC, problem=dataclasses.replace(problem, head_dim=72)),
        "head_dim_v": dataclasses.replace(SPEC, problem=dataclasses.replace(problem, head_dim_v=72)),
        "mask": dataclasses.replace(SPEC, problem=dataclasses.replace(problem, mask=Mask.CAUSAL)),
        "modifiers": dataclasses.replace(SPEC, problem=dataclasses.replace(problem, modifiers=("window",))),
        "sequences": dataclasses.replace(SPEC, problem=dataclasses.replace(problem, sequences=Sequences.PACKED)),
        "block_q": dataclasses.replace(SPEC, config=dataclasses.replace(config, block_q=128)),
        "block_kv": dataclasses.replace(SPEC, config=dataclasses.replace(config, block_kv=48)),
        "step_kv": dataclasses.replace(SPEC, config=dataclasses.replace(config, step_kv=32)),
        "warps": dataclasses.replace(SPEC, config=dataclasses.replace(config, warps=2)),
        "stages": dataclasses.replace(SPEC, config=dataclasses.replace(config, stages=3)),
        "query": dataclasses.replace(SPEC, config=dataclasses.replace(config, query=QueryPlace.REGISTERS)),
        "first_product": dataclasses.replace(SPEC, config=dataclasses.replace(config, first_product=FirstProduct.PV)),
        "blocks_per_sm": dataclasses.replace(SPEC, config=dataclasses.replace(config, blocks_per_sm=2)),
        "target": dataclasses.replace(SPEC, target=find_target("sm_86")),
    }


def test_every_field_has_a_variant() -> None:
    fields = {f.name for f in dataclasses.fields(Problem)} | {f.name for f in dataclasses.fields(CONFIG)}
    assert fields - set(variants()) == {"operation", "deterministic", "batch_invariant", "dtype_kv"}, (
        "which have one value only in this family"
    )


def test_names_and_digests_tell_specs_apart() -> None:
    names, digests = ({getattr(s, kind) for s in variants().values()} for kind in ("name", "digest"))
    assert len(names) == len(digests) == len(variants())
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", n) for n in names), "names are C identifiers"
    assert all(re.fullmatch(r"[0-9a-f]{64}", d) for d in digests)


def test_the_name_for_people() -> None:
    assert SPEC.name == "attention_forward_bf16_d64_full_bq64_bk32_sk16_w4_s2_qshared_fqk_bps1_sm_80"


def test_the_digest_changes_with_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    before, name = SPEC.digest, SPEC.name
    monkeypatch.setattr(type(FAMILY), "revision", FAMILY.revision + 1)
    assert SPEC.digest != before
    assert SPEC.name == name


def test_the_digest_is_the_same_in_another_process(tmp_path: Path) -> None:
    """Nothing of it hangs on hash seeds, on addresses or on where the package lies."""
    code = (
        f"import sys, json; sys.path.insert(0, {str(Path(flashgen.__file__).parent.parent)!r})\n"
        "from flashgen.codegen.spec import KernelSpec\n"
        "print(KernelSpec.from_json(json.load(sys.stdin)).digest)"
    )
    text = json.dumps(SPEC.to_json())
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], input=text, cwd=tmp_path, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == SPEC.digest


@pytest.mark.parametrize("changed", variants())
def test_json_round_trip(changed: str) -> None:
    spec = variants()[changed]
    again = KernelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.digest == spec.digest


def test_problem_json_round_trip() -> None:
    for dtype, head_dims, mask in itertools.product(Dtype, ((8, 8), (192, 128)), Mask):
        problem = Problem(dtype, *head_dims, mask)
        assert problem_from_json(json.loads(json.dumps(problem_to_json(problem)))) == problem


def test_deterministic_gradients_are_another_problem() -> None:
    usual = Problem(Dtype.BF16, 64, operation="backward")
    problem = dataclasses.replace(usual, deterministic=True)
    assert "deterministic" not in problem_to_json(usual), "as before the field was added"
    assert problem_from_json(json.loads(json.dumps(problem_to_json(problem)))) == problem
    assert problem.name == "backward_bf16_d64_full_deterministic"
    specs = [default_spec(one, find_target("sm_90a")) for one in (usual, problem)]
    assert len({spec.name for spec in specs}) == len({spec.digest for spec in specs}) == 2


def test_a_forward_pass_is_deterministic_whatever_is_asked_for() -> None:
    assert Problem(Dtype.BF16, 64, deterministic=True) == SPEC.problem
    with pytest.raises(ArgumentError, match=r"^deterministic must be of type bool; got 1$"):
        Problem(Dtype.BF16, 64, deterministic=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"revision": FAMILY.revision + 1}, rf"^revision of attention_forward must be {FAMILY.revision}; got {FAMILY.revision + 1}"),
        ({"revision": FAMILY.revision - 1}, rf"^revision of attention_forward must be {FAMILY.revision}; got {FAMILY.revision - 1}"),
        ({"family": "nonsense"}, r"^family must be one of .*; got 'nonsense'$"),
        ({"target": "sm_75"}, r"^arch must be one of .*; got 'sm_75'$"),
        ({"target": None}, r"^spec field target must be of type str; got None$"),
        (
            {"problem": {}},
            r"^problem must have the fields pass, dtype, head_dim, head_dim_v, mask, deterministic, modifiers, sequences, batch_invariant, "
            r"dtype_kv; "
            r"got none$",
        ),
        (
            {"problem": {**problem_to_json(SPEC.problem), "dtype": "fp8"}},
            r"^problem field dtype must be one of bf16, fp16, fp32; got 'fp8'$",
        ),
        ({"problem": {**problem_to_json(SPEC.problem), "head_dim": "64"}}, r"^problem field head_dim must be of type int; got '64'$"),
        ({"problem": {**problem_to_json(SPEC.problem), "head_dim": True}}, r"^problem field head_dim must be of type int; got True$"),
        (
            {"problem": {**problem_to_json(SPEC.problem), "window": 128}},
            r"^problem must have the fields pass, .*; got .*, window$",
        ),
        ({"softcap": 30.0}, r"^spec must have the fields family, .*, target; got .*, softcap$"),
        ({"config": {}}, r"^config must have the fields .*; got none$"),
        ({"config": {**CONFIG.to_json(), "block_kv": 40}}, r"^config .* is illegal: block_kv must be a multiple of step_kv 16"),
        ({"config": None}, r"^spec field config must be of type dict; got None$"),
        ({"problem": None}, r"^problem must have the fields .*; got None$"),
    ],
)
def test_from_json_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        KernelSpec.from_json({**SPEC.to_json(), **change})


@pytest.mark.parametrize("missing", ["family", "revision", "problem", "config", "target"])
def test_from_json_refuses_what_is_incomplete(missing: str) -> None:
    values = {k: v for k, v in SPEC.to_json().items() if k != missing}
    with pytest.raises(ArgumentError, match=r"^spec must have the fields family, revision, problem, config, target; got "):
        KernelSpec.from_json(values)


def test_an_illegal_combination_has_no_spec() -> None:
    with pytest.raises(IllegalConfigError, match=r"needs .* B of shared memory, sm_80 has 166912 B a block"):
        dataclasses.replace(SPEC, problem=Problem(Dtype.BF16, 256), config=dataclasses.replace(CONFIG, block_q=128, block_kv=128, warps=8))


def test_specs_are_values() -> None:
    assert len(set(variants().values())) == len(variants())
    assert hash(SPEC) == hash(KernelSpec(FAMILY, Problem(Dtype.BF16, 64), dataclasses.replace(CONFIG), targets()["sm_80"]))


def test_a_spec_for_an_architecture_without_a_file_comes_back_with_its_target() -> None:
    target = dataclasses.replace(find_target("sm_90a"), name="sm_99", capability=(9, 9))
    spec = default_spec(Problem(Dtype.BF16, 64), target)
    assert KernelSpec.from_json(spec.to_json(), target) == spec
    with pytest.raises(ArgumentError, match=r"^arch must be one of"):
        KernelSpec.from_json(spec.to_json())
