"""Rendered kernels, compared byte for byte with the files beside this one: one text of each family, and how the others differ from it.

A text that changes without its family's `revision` would let times measured of the old one speak for the new one. So
`pytest --update-golden` refuses to rewrite a file until the revision is raised. The specs are recorded with the texts and
stay the same within a revision: a change of defaults cannot hide a change of text, and is none.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.family import Family, families
from flashgen.codegen.problem import Dtype, Mask, Problem
from flashgen.codegen.render import render
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.target import find_target, targets
from tests.support.examples import example_problems, is_of_attention

FOLDER = Path(__file__).parent
UPDATE = "run pytest --update-golden"
CURE = f"raise the family's revision, then {UPDATE}"
NOT_RENDERED = "// not rendered"
CASES = (
    (Problem(Dtype.BF16, 64), "sm_80"),
    (Problem(Dtype.BF16, 64, mask=Mask.CAUSAL), "sm_90a"),
    (Problem(Dtype.FP16, 192, 128, Mask.CAUSAL), "sm_90a"),
)


@dataclass(frozen=True)
class Golden:
    """What is recorded of one family: its revision, its specs as JSON values and their texts, both by the spec's name."""

    family: str
    revision: int
    specs: Mapping[str, Mapping[str, Any]]
    texts: Mapping[str, str]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.texts), sort_keys=True).encode()).hexdigest()


def read_entries(root: Path) -> dict[str, dict[str, Any]]:
    path = root / "revisions.json"
    entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return entries


def read(family: str, root: Path) -> Golden | None:
    """What the files say, or None if there is nothing of this family. Fails if they are not the ones that were written."""
    entry = read_entries(root).get(family)
    if entry is None:
        return None
    texts = {p.stem: p.read_text(encoding="utf-8") for p in (root / family).glob("*.cu")}
    base = next(iter(texts.values()), "")
    texts |= {p.stem: patched(base, p.read_text(encoding="utf-8")) for p in (root / family).glob("*.diff")}
    golden = Golden(family, entry["revision"], entry["specs"], texts)
    if golden.sha256 != entry["sha256"] or set(texts) != set(entry["specs"]):
        pytest.fail(f"files of {family} are not the ones recorded for revision {golden.revision}: restore them", pytrace=False)
    return golden


def write(golden: Golden, root: Path) -> None:
    folder = root / golden.family
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    first, *others = sorted(golden.texts)
    (folder / f"{first}.cu").write_text(golden.texts[first], encoding="utf-8")
    for name in others:
        old, new = (golden.texts[n].splitlines(keepends=True) for n in (first, name))
        (folder / f"{name}.diff").write_text("".join(difflib.unified_diff(old, new, first, name, n=0)), encoding="utf-8")
    entry = {"revision": golden.revision, "sha256": golden.sha256, "specs": golden.specs}
    text = json.dumps(read_entries(root) | {golden.family: entry}, indent=2, sort_keys=True)
    (root / "revisions.json").write_text(text + "\n", encoding="utf-8")


def patched(text: str, diff: str) -> str:
    """`text` with the changes of a unified diff without context."""
    old, new, at = text.splitlines(keepends=True), [], 0
    for line in diff.splitlines(keepends=True)[2:]:
        if hunk := re.match(r"@@ -(\d+)(,0)?", line):
            upto = int(hunk[1]) - (0 if hunk[2] else 1)  # where nothing goes, the line named is the one before
            new += old[at:upto]
            at = upto
        elif line.startswith("-"):
            at += 1
        else:
            new.append(line[1:])
    return "".join(new + old[at:])


def specs_of(family: Family) -> list[KernelSpec]:
    """The default of every case the family can do, and of the first one each other value that an enum of its config has."""
    cases = [(dataclasses.replace(p, operation=family.operation), find_target(t)) for p, t in CASES]
    instead = (cases[0][0], dataclasses.replace(cases[0][0], head_dim=256, head_dim_v=256))  # for a family that can do none of the cases
    cases += [(other, t) for other in instead for t in reversed(targets().values())]
    if not is_of_attention(family):
        cases = [(problem, find_target("sm_80")) for problem in example_problems(family)]
    possible = [(p, t) for p, t in cases if not family.refusals(p, t)][: len(CASES)]
    specs = [KernelSpec(family, p, family.default(p, t), t) for p, t in possible]
    for problem, target in possible[:2]:
        default = family.default(problem, target)
        for field in dataclasses.fields(default):
            value = getattr(default, field.name)
            others = [v for v in type(value) if v is not value] if isinstance(value, enum.Enum) else []
            configs = [dataclasses.replace(default, **{field.name: v}) for v in others]
            specs += [KernelSpec(family, problem, c, target) for c in configs if not family.check(problem, c, target)]
    return specs


def render_anew(family: Family) -> Golden:
    """Texts of the specs that `specs_of` gives today: what a new revision records."""
    specs = specs_of(family)
    return Golden(family.name, family.revision, {s.name: s.to_json() for s in specs}, {s.name: render(s).text for s in specs})


def render_again(family: Family, recorded: Golden) -> Golden:
    """Texts of the recorded specs. One that is legal no longer gives the reason in place of its text."""

    def text(values: Mapping[str, Any]) -> str:
        try:
            return render(KernelSpec.from_json(values)).text
        except ArgumentError as error:
            return f"{NOT_RENDERED}: {error}"

    return dataclasses.replace(recorded, revision=family.revision, texts={n: text(s) for n, s in recorded.specs.items()})


def differences(golden: Golden, recorded: Golden | None) -> list[str]:
    """What is not as recorded, with the cure; empty if all is."""
    if recorded is None:
        return [f"{golden.family} is not recorded: {UPDATE}"]
    if golden.revision < recorded.revision:
        return [f"revision of {golden.family} must not fall: {recorded.revision} is recorded, got {golden.revision}"]
    if golden.revision > recorded.revision:
        return [f"revision {golden.revision} of {golden.family} is not recorded, {recorded.revision} is: {UPDATE}"]
    found = []
    for name, text in golden.texts.items():
        if text != recorded.texts[name]:
            lines = difflib.unified_diff(recorded.texts[name].splitlines(), text.splitlines(), "recorded", "rendered", lineterm="", n=1)
            shown = [text] if text.startswith(NOT_RENDERED) else list(lines)[:40]
            found.append("\n".join([f"{name} has changed, revision is still {golden.revision}: {CURE}", *shown]))
    return found


@pytest.mark.parametrize("family", families().values(), ids=lambda f: f.name)
def test_rendered_text_is_as_recorded(family: Family, request: pytest.FixtureRequest) -> None:
    recorded = read(family.name, FOLDER)
    if request.config.getoption("--update-golden") and (recorded is None or recorded.revision < family.revision):
        write(render_anew(family), FOLDER)
        recorded = read(family.name, FOLDER)
    golden = render_again(family, recorded) if recorded and recorded.revision == family.revision else render_anew(family)
    assert golden.texts
    if found := differences(golden, recorded):
        pytest.fail("\n".join(found), pytrace=False)


def test_families_that_are_gone_leave_nothing_behind() -> None:
    folders = {p.name for p in FOLDER.iterdir() if list(p.glob("*.cu"))}
    assert folders == set(read_entries(FOLDER)) == set(families())


class TestRules:
    """The rules above, seen to refuse."""

    family = families()["attention_forward"]

    def test_what_was_written_is_read(self, tmp_path: Path) -> None:
        assert read(self.family.name, tmp_path) is None
        golden = render_anew(self.family)
        assert differences(golden, None) == [f"attention_forward is not recorded: {UPDATE}"]
        write(golden, tmp_path)
        assert read(self.family.name, tmp_path) == golden
        assert differences(render_again(self.family, golden), golden) == []
        write(dataclasses.replace(golden, revision=golden.revision + 1), tmp_path)
        assert read(self.family.name, tmp_path) == dataclasses.replace(golden, revision=golden.revision + 1)

    def test_a_changed_text_needs_another_revision(self) -> None:
        recorded = render_anew(self.family)
        name, text = next(iter(recorded.texts.items()))
        changed = dataclasses.replace(recorded, texts={**recorded.texts, name: text + "// one more line\n"})
        (found,) = differences(changed, recorded)
        assert found.startswith(f"{name} has changed, revision is still {recorded.revision}: {CURE}\n")
        assert "+// one more line" in found
        raised = dataclasses.replace(changed, revision=recorded.revision + 1)
        assert differences(raised, recorded)[0].endswith(UPDATE)
        assert "must not fall" in differences(recorded, raised)[0]

    def test_a_recorded_spec_that_is_illegal_now_is_a_change(self) -> None:
        recorded = render_anew(self.family)
        name, spec = next(iter(recorded.specs.items()))
        recorded = dataclasses.replace(recorded, specs={**recorded.specs, name: {**spec, "config": {}}})
        (found,) = differences(render_again(self.family, recorded), recorded)
        assert f"\n{NOT_RENDERED}: config must have the fields" in found

    def test_files_changed_by_hand_are_not_taken_for_recorded_ones(self, tmp_path: Path) -> None:
        write(render_anew(self.family), tmp_path)
        file = next(tmp_path.rglob("*.cu"))
        file.write_text(file.read_text() + "\n")
        with pytest.raises(pytest.fail.Exception, match="restore them"):
            read(self.family.name, tmp_path)
        file.unlink()
        with pytest.raises(pytest.fail.Exception, match="restore them"):
            read(self.family.name, tmp_path)
