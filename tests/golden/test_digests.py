"""The digests of 20 recorded specs: they may change only together with a family's revision, or users' records would be lost.

`digests.json` holds each spec's JSON, with the revision it was recorded at, and its digest. The digest is checked with that revision in
place of today's, so raising a revision changes nothing here. Where a revision was raised and the JSON has another form, too,
`pytest --update-golden` records that family's specs anew; within a revision it does not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen.attention import ELEMENTS
from flashgen.codegen.config import Config
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import Family, families, find_family
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target
from tests.support.examples import example_problems, is_of_attention

FILE = Path(__file__).with_name("digests.json")
EACH = 10  # specs a family
TARGETS = ("sm_80", "sm_86", "sm_90a", "sm_120a")
WIDTHS = ((64, 64), (128, 128), (40, 40), (192, 128), (8, 256))
OTHER_WIDTHS = (
    (96, 96),
    (256, 256),
    (120, 72),
    (160, 160),
    (136, 200),
    (224, 72),
    (208, 208),
    (240, 136),
    (248, 256),
)  # for families that cannot do those
MORE_WIDTHS = tuple((width, width) for width in range(8, 264, 8))  # for those of few head dims


def recorded_specs() -> list[dict[str, Any]]:
    """As the file is now: --update-golden writes it anew before other tests read it."""
    return json.loads(FILE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def digest_at(spec: KernelSpec, revision: int) -> str:
    """The spec's digest, were its family of that revision: written out, so that it shares no code with the one that is tested."""
    text = json.dumps({**spec.to_json(), "revision": revision}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def widths_of(family: Family) -> list[tuple[int, int]]:
    """As many as there are WIDTHS, of head dims that the family computes on sm_90a."""
    target = find_target("sm_90a")
    widths = dict.fromkeys((*WIDTHS, *OTHER_WIDTHS, *MORE_WIDTHS))
    problems = [Problem(Dtype.BF16, *width, operation=family.operation) for width in widths]
    return [(p.head_dim, p.head_dim_v) for p in problems if not family.refusals(p, target)][: len(WIDTHS)]


def masks_of(family: Family) -> list[Mask]:
    """Those that the family computes."""
    target, width = find_target("sm_90a"), widths_of(family)[0]
    return [mask for mask in Mask if not family.refusals(Problem(Dtype.BF16, *width, mask, family.operation), target)]


def targets_of(family: Family) -> list[str]:
    """Those that the family has kernels for."""
    problem = Problem(Dtype.BF16, *widths_of(family)[0], operation=family.operation)
    return [name for name in TARGETS if not family.refusals(problem, find_target(name))]


def most_configs(family: Family) -> int:
    """Legal ones of any of its problems."""
    target, problems = find_target("sm_90a"), example_problems(family)
    if is_of_attention(family):
        problems = [Problem(Dtype.BF16, *width, operation=family.operation) for width in widths_of(family)]
    return max(len(family.legal_configs(problem, target)) for problem in problems)


def drawn(name: str) -> list[KernelSpec]:
    """Specs of one family over its problems, configs and targets."""
    family, found = find_family(name), []
    if not is_of_attention(family):
        return drawn_of_examples(family)
    widths, masks = widths_of(family), masks_of(family)
    for i in range(EACH):
        problem = Problem(list(ELEMENTS)[i % 2], *widths[i // 2 % len(widths)], masks[i // 3 % len(masks)], family.operation)
        able = targets_of(family)
        target = find_target(able[i % len(able)])
        legal = family.legal_configs(problem, target)
        found.append(KernelSpec(family, problem, legal[i * 7919 % len(legal)], target))
    return found


def drawn_of_examples(family: Family) -> list[KernelSpec]:
    """As `drawn`, of a family whose problems have no head dims."""
    problems, found = example_problems(family), []
    for i in range(EACH):
        problem, target = problems[i % len(problems)], find_target(TARGETS[i % len(TARGETS)])
        legal = family.legal_configs(problem, target)
        found.append(KernelSpec(family, problem, legal[i * 7919 % len(legal)], target))
    return found


def entry(spec: KernelSpec) -> dict[str, Any]:
    return {"spec": spec.to_json(), "digest": digest_at(spec, spec.family.revision)}


def fault(recorded: dict[str, Any]) -> str:
    """What is wrong with a recorded spec; empty if nothing is."""
    values, family = recorded["spec"], find_family(recorded["spec"]["family"])
    try:
        spec = KernelSpec.from_json({**values, "revision": family.revision})
    except ArgumentError as error:
        return f"cannot be read any more: {error}"
    if digest_at(spec, values["revision"]) != recorded["digest"]:
        return f"digest has changed: its JSON is {spec.to_json()}, recorded is {values}"
    if spec.digest != digest_at(spec, family.revision):
        return f"digest is none of its JSON: {spec.digest}"
    return ""


def renewed(recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries, those anew whose family has been given another revision since."""
    fresh = {name: map(entry, drawn(name)) for name in families()}
    kept = [e for e in recorded if e["spec"]["revision"] == find_family(e["spec"]["family"]).revision]
    done = {e["spec"]["family"] for e in kept}
    return kept + [e for name in families() if name not in done for e in fresh[name]]


def test_digests_are_as_recorded(request: pytest.FixtureRequest) -> None:
    recorded = recorded_specs()
    if request.config.getoption("--update-golden"):
        recorded = renewed(recorded)
        FILE.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    faults = [f"{e['spec']}: {why}" for e in recorded if (why := fault(e))]
    if faults:
        cure = "restore the JSON, or raise the family's revision and run pytest --update-golden"
        pytest.fail("\n".join([*faults, cure]), pytrace=False)


def test_the_recorded_specs_cover_the_families() -> None:
    recorded = recorded_specs()
    assert {e["spec"]["family"] for e in recorded} == set(families())
    assert len(recorded) == EACH * len(families()) == len({e["digest"] for e in recorded})
    for name, family in families().items():
        mine = [e["spec"] for e in recorded if e["spec"]["family"] == name]
        assert len({json.dumps(spec["config"]) for spec in mine}) >= min(EACH // 2 + 1, most_configs(family))
        if not is_of_attention(family):
            assert {spec["target"] for spec in mine} == set(TARGETS)
            assert {spec["problem"]["dtype"] for spec in mine} == {problem.dtype.value for problem in example_problems(family)}
            continue
        assert {spec["target"] for spec in mine} == set(targets_of(family))
        for field, values in (("dtype", 2), ("mask", len(masks_of(family))), ("head_dim", min(4, len(widths_of(family))))):
            assert len({spec["problem"][field] for spec in mine}) >= values


class TestRules:
    """The rule above, seen to refuse."""

    def test_a_change_of_the_json_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KernelSpec, "to_json", lambda self: {"family": self.family.name, "name": self.name})
        assert all("digest has changed" in fault(e) for e in recorded_specs())

    def test_a_change_of_a_config_s_json_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = Config.to_json
        monkeypatch.setattr(Config, "to_json", lambda self: {**plain(self), "added": 0})
        assert all("digest has changed" in fault(e) for e in recorded_specs())

    def test_a_raised_revision_changes_nothing_and_lets_the_form_change(self, monkeypatch: pytest.MonkeyPatch) -> None:
        family = find_family("attention_forward")
        assert renewed(recorded_specs()) == recorded_specs(), "within a revision nothing is recorded anew"
        monkeypatch.setattr(type(family), "revision", family.revision + 1)
        assert [fault(e) for e in recorded_specs()] == [""] * len(recorded_specs())
        assert {e["spec"]["revision"] for e in renewed(recorded_specs()) if e["spec"]["family"] == family.name} == {family.revision}
