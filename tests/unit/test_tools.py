"""The tools for performance work on a made-up GPU: their command lines, texts, tables and fits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from flashgen.build.artifact import Artifact, EntryReport, Report
from flashgen.build.gpu import driver, kernel
from flashgen.build.gpu.driver import Gpu, gpu_count
from flashgen.codegen.devices import find_device
from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.families.attention_forward.family import FAMILY
from flashgen.codegen.families.attention_forward.model import FITTED
from flashgen.codegen.family import find_family
from flashgen.codegen.problem import Dtype, Problem
from flashgen.codegen.render import Source
from flashgen.codegen.spec import KernelSpec
from flashgen.codegen.workload import Workload
from flashgen.launch.tensors import Tensors
from flashgen.selection import compilation, loaded
from flashgen.selection.families import default_spec
from flashgen.selection.picks import model_picks
from flashgen.timing import kernels as timing_kernels
from flashgen.timing import protocol as timing
from flashgen.timing.kernels import Bench
from tests.support.fake_gpu import FakeGpu
from tools import ab, before_after, graph_gaps, instruction_mix, lse_cost, model, modifier_overhead

TOOLS = (ab, before_after, graph_gaps, instruction_mix, lse_cost, model, modifier_overhead)
MAINS: dict[str, Callable[[list[str]], None]] = {m.__name__: m.main for m in TOOLS}
H200, ROOT = find_device("h200"), Path(__file__).parents[2]
LOG = (
    "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
    "ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 128 registers"
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """An H200 on which a call takes a microsecond for each stage of its config, and half as much again with lse. Nothing is compiled."""
    clock, here = FakeGpu(), Gpu(0, H200, "uuid", "580.1")

    class FakeKernel:
        def __init__(self, spec: KernelSpec, artifact: Artifact, gpu: Gpu) -> None:
            assert artifact.arch == gpu.device.target.name
            self.spec, self.artifact = spec, artifact

    class FakeBench(Bench):
        def __init__(self, problem: Problem, workload: Workload, device: int, seed: int = 0) -> None:
            self.problem, self.workload, self.seed = problem, workload, seed
            small = Workload(1, 2, 2, 3, 5)
            self.sets = [Tensors.random(problem, small, torch.Generator().manual_seed(i)) for i in range(2)]

        def _timer(self, kernel: Any, round_seconds: float, with_lse: bool) -> timing.Timer:
            seconds = 1e-6 * getattr(kernel.spec.config, "stages", 2) * (1.5 if with_lse else 1)
            return timing.Timer(clock.call(seconds), len(self.sets), round_seconds, stopwatch=clock)

    def compiled(source: Source, arch: str) -> Artifact:
        return Artifact(source.entry, arch, source.text, b"", LOG, "13.0")

    def choose(problem: Problem, workload: Workload, gpu: Gpu) -> FakeKernel:
        spec = default_spec(problem, gpu.device.target)
        return FakeKernel(spec, compiled(Source(spec.name, ""), spec.target.name), gpu)

    monkeypatch.setattr(compilation, "store", lambda: SimpleNamespace(get_or_compile=compiled))
    monkeypatch.setattr(loaded, "kernels", SimpleNamespace(choose=choose))
    monkeypatch.setattr(
        before_after, "Kernels", lambda: SimpleNamespace(choose=lambda problem, workload, gpu, _: choose(problem, workload, gpu))
    )
    for module in (ab, before_after, lse_cost, driver):
        monkeypatch.setattr(module, "gpu", lambda ordinal: here)
    for module in (ab, before_after, lse_cost, timing_kernels):
        monkeypatch.setattr(module, "Bench", FakeBench)
    for module in (ab, before_after, kernel):
        monkeypatch.setattr(module, "Kernel", FakeKernel)
    return clock


@pytest.mark.parametrize("main", MAINS.values(), ids=MAINS)
def test_help_shows_how_to_call_it(main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert re.search(r"    python (tools/|-m tools\.)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("tool", "line", "message"),
    [
        ("ab", "", "required: --head-dim"),
        ("before_after", "--grid gqa", "required: --old"),
        ("ab", "--head-dim 64 --patch name find", "--patch: expected 3 arguments"),
        ("instruction_mix", "", "required: mix"),
        ("instruction_mix", "mma=32,add=x", "argument mix: must be like mma=32,fma=16, of mma, ldmatrix, ex2, fma, max, add; got 'add=x'"),
        ("instruction_mix", "div=2", "got 'div=2'"),
        ("lse_cost", "--rounds many", "argument --rounds: invalid int value"),
        ("model", "judge times.json", "required: --head-dim"),
        ("model", "guess times.json --head-dim 64", "invalid choice: 'guess'"),
    ],
)
def test_a_command_line_that_means_nothing_is_misuse(tool: str, line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        MAINS[f"tools.{tool}"](line.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "line", "message"),
    [
        ("lse_cost", "--grid enormous", "error: grid must be one of standard, "),
        ("before_after", "--old . --grid enormous", "error: grid must be one of standard, "),
        ("instruction_mix", "--arch sm_70 mma=1", "error: arch must be one of sm_80, "),
        ("model", "judge nowhere.json --head-dim 64", "error: [Errno 2] No such file or directory: 'nowhere.json'"),
    ],
)
def test_a_wrong_value_is_said_in_a_sentence(tool: str, line: str, message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        MAINS[f"tools.{tool}"](line.split())
    assert str(stopped.value.code).startswith(message)


@pytest.mark.skipif(gpu_count() > 0, reason="needs a machine without a GPU: there is one")
@pytest.mark.parametrize(
    "line",
    ["ab --head-dim 64", "before_after --old .", "instruction_mix mma=1", "lse_cost", "model measure times.json --head-dim 64"],
    ids=lambda line: line.split()[0],
)
def test_without_a_gpu_that_is_what_is_missing(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tool, *arguments = line.split()
    with pytest.raises(SystemExit, match=r"^error: driver must be 580 or newer"):
        MAINS[f"tools.{tool}"](arguments)
    assert list(tmp_path.iterdir()) == []


# before_after


def test_a_checkout_is_as_fast_as_itself(fake: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    before_after.main(["--old", str(ROOT), "--grid", "mixed,gqa"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert lines[0] == "mixed      bf16_d192x128_full B1 H16 S16384: x 1.0000 [1.000..1.000], 128 -> 128 registers"
    assert lines[-1] == "gqa: geometric mean 1.0000, from 1.0000 to 1.0000, 6 cells"


def test_a_checkout_that_launches_otherwise_is_refused(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_after, "rendered_here", lambda spec: SimpleNamespace(launch={"": (1, 2, "none")}))
    with pytest.raises(
        SystemExit, match=r"^error: old must launch attention_forward_sm90_\S+ as this checkout does; got: launched with other"
    ):
        before_after.main(["--old", str(ROOT), "--grid", "mixed"])


# ab


def candidates(line: list[str], target: str = "h200") -> dict[str, tuple[KernelSpec, Source]]:
    options = ab.arguments(["--head-dim", "64", *line])
    return ab.candidates(Problem(Dtype.BF16, 64), find_device(target).target, options)


def test_ab_takes_a_text_of_the_same_spec_only(tmp_path: Path) -> None:
    spec, source = candidates([])[ab.BASE]
    (tmp_path / "old.cu").write_text(source.text + "// older\n", encoding="utf-8")
    assert candidates(["--text", "old", str(tmp_path / "old.cu")])["old"] == (spec, Source(spec.name, source.text + "// older\n"))
    (tmp_path / "other.cu").write_text("void other();", encoding="utf-8")
    with pytest.raises(ArgumentError, match=rf"^text other must be one of {spec.name}; got .*other\.cu, which does not define it$"):
        candidates(["--text", "other", str(tmp_path / "other.cu")])


def test_patches_of_one_name_are_one_candidate_and_configs_differ_in_their_fields() -> None:
    patch = ["--patch", "both", "kBlockQ", "kRows", "--patch", "both", "kBlockKv", "kKeys", "--patch", "one", "kBlockQ", "kRows"]
    made = candidates([*patch, "--config", "deep", "stages=3,block_kv=96", "--set", "block_q=128"], "a100")
    spec, base = made["unchanged"]
    assert list(made) == ["unchanged", "both", "one", "deep"]
    assert made["one"][1].text == base.text.replace("kBlockQ", "kRows") != base.text
    assert made["both"][1].text == made["one"][1].text.replace("kBlockKv", "kKeys") != made["one"][1].text
    assert made["both"][0] is made["one"][0] is spec
    assert spec.config.to_json()["block_q"] == 128
    assert made["deep"][0].config.to_json() == {**spec.config.to_json(), "stages": 3, "block_kv": 96}
    with pytest.raises(ArgumentError, match=r"^patch none must find its text in the kernel; got 'nothing of this kind'$"):
        candidates(["--patch", "none", "nothing of this kind", ""])


def test_the_workloads_of_a_comparison() -> None:
    def workloads(line: str) -> list[Workload]:
        return ab.workloads(Problem(Dtype.BF16, 64), ab.arguments(["--head-dim", "64", *line.split()]))

    assert workloads("") == [Workload(32, 32, 32, 512, 512), Workload(4, 32, 32, 4096, 4096), Workload(1, 32, 32, 16384, 16384)]
    assert workloads("--seqlen 64 --seqlen-kv 8192 --batch 3 --heads 8 --kv-heads 2") == [Workload(3, 8, 2, 64, 8192)]


def test_a_line_has_the_median_of_the_ratios_of_the_rounds() -> None:
    line = ab.line(4e9, [2e-3, 4e-3, 6e-3], [1e-3, 4e-3, 4e-3], Report({"kernel": EntryReport(168, 12)}))
    assert line == "   1.0 TFLOP/s  x 1.500 [1.000..2.000]  168 registers, 12 B spilled"


def test_logits_are_changed_as_said() -> None:
    tensors = Tensors.random(Problem(Dtype.FP16, 64), Workload(1, 2, 1, 3, 101), torch.Generator().manual_seed(0))
    before = tensors["q"].clone()
    ab.change_logits(tensors, "x4")
    assert torch.equal(tensors["q"], before * 4)
    tensors["q"].zero_()
    ab.change_logits(tensors, "rising400")
    logits = torch.einsum("bihd,bjd->bhij", tensors["q"].double(), tensors["k"][:, :, 0].double()) / 64**0.5
    assert torch.allclose(logits, torch.linspace(400, 0, 101, dtype=torch.float64).expand_as(logits), atol=1)


def test_a_comparison_is_printed_line_by_line(fake: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--head-dim 64 --seqlen 512 --rounds 3 --set stages=3 --config two stages=2 --lse --logits x1 --logits x16"
    ab.main(line.split())
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("NVIDIA H200, attention_forward_sm90_bf16_d64_full_")
    names = ["unchanged", "two", "unchanged, lse", "two, lse"]
    assert [(line[9:19].strip(), line[20:44].strip()) for line in rest] == [(logits, name) for logits in ("x1", "x16") for name in names]
    assert [line[line.index(" x ") : line.index(" [")] for line in rest[:4]] == [" x 1.000", " x 1.500", " x 0.667", " x 1.000"]
    assert all(line.startswith("S    512") and line.endswith("128 registers, 0 B spilled") for line in rest)


# lse_cost


def test_what_lse_costs_is_the_ratio_of_the_times(fake: FakeGpu, capsys: pytest.CaptureFixture[str]) -> None:
    lse_cost.main(["--grid", "tutorial", "--rounds", "2"])
    *cells, last = capsys.readouterr().out.splitlines()
    assert len(cells) == 3
    assert all("  x 0.6667 [0.6667..0.6667]  " in cell for cell in cells)
    assert cells[0].startswith("fp16_d32_full          B64 H32 S256")
    assert last == "geometric mean x 0.6667, least 0.6667, 3 cells"


# instruction_mix


def test_a_mixture_is_spread_evenly_and_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    text = instruction_mix.Mix.parse("mma=4,ex2=2").source().text
    at = sorted(
        (text.index(call), kind)
        for kind, calls in (("mma", "d[{} % 16], a"), ("ex2", "e[{} % 8] ="))
        for call in map(calls.format, range(2))
    )
    assert [kind for _, kind in at] == ["mma", "ex2", "mma", "ex2"]
    everything = ",".join(f"{kind}=3" for kind in instruction_mix.KINDS)
    instruction_mix.main(["--arch", "90", everything, "add=1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [everything, "add=1"]
    assert all(line.endswith(" registers, 0 B spilled") for line in lines)


# model


def measured(cell: model.Cell, seconds: Callable[[float], float], count: int = 12, family: Any = FAMILY) -> list[model.Measured]:
    """Configs of a cell whose times are what the model says, changed by `seconds`."""
    problem, workload = model.cell_of(cell)
    specs = [KernelSpec(family, problem, config, H200.target) for config in model.tuned(family, cell, H200)[:count]]
    return [model.Measured(s, 128, seconds(family.predict(problem, s.config, workload, H200, 128).seconds)) for s in specs]


def test_what_is_measured_can_be_judged(fake: FakeGpu, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.json"
    model.main(["measure", str(file), "--head-dim", "64", "--mask", "full", "--seqlen", "512", "--seqlen", "1024", "--configs", "6"])
    device, cells = model.read(file, [64])
    assert device == H200
    assert sorted(cells) == [(64, False, 512), (64, False, 1024)]
    for rows in cells.values():
        assert [row.seconds for row in rows] == pytest.approx([cast(Any, row.spec.config).stages * 1e-6 for row in rows])
        assert {row.registers for row in rows} == {128}
        assert {row.spec.family.name for row in rows} == set(model.FITTED)
        assert len(rows) > 12, "those of a tune, too"
    for family in model.FITTED:
        model.main(["judge", str(file), "--family", family, "--head-dim", "64"])
        assert capsys.readouterr().out.endswith("of 2 cells\n")
        assert {row.spec.family.name for rows in model.read(file, [64], [family])[1].values() for row in rows} == {family}
    model.main(["picks", str(file), "--head-dim", "64"])
    assert "within 5 % in 2 of 2 cells" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^error: head-dim must be one that .*times.json holds; got 72$"):
        model.main(["judge", str(file), "--head-dim", "72"])
    assert {row["spec"]["problem"]["head_dim"] for row in json.loads(file.read_text())["rows"]} == {64}


def test_a_sample_is_legal_repeatable_and_half_of_the_space() -> None:
    problem, _ = model.cell_of((72, True, 512))
    for family in map(find_family, model.FITTED):
        sample = model.sample(family, problem, H200.target, 20)
        legal = family.legal_configs(problem, H200.target)
        assert len(set(sample)) == min(20, len(legal))
        assert sample == model.sample(family, problem, H200.target, 20)
        assert all(family.check(problem, config, H200.target) == [] for config in sample)
        assert {family.group_unit(config) for config in sample} == {1}
        assert len(set(sample) & set(legal)) >= 10


def test_a_score_tells_order_and_what_is_missed() -> None:
    times = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    right = model.Score.of(times, times, times > 1)
    assert (right.spearman, right.first_gap, right.gap, right.tune_gap) == pytest.approx((1, 0, 0, 1))
    wrong = model.Score.of(-times, times, times > 9)
    assert (wrong.spearman, wrong.first_gap, wrong.gap, wrong.tune_gap) == pytest.approx((-1, 6, 2, float("inf")))


def test_the_model_is_judged_right_where_its_times_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    cells = {cell: measured(cell, lambda s: 2 * s) for cell in ((64, False, 512), (128, True, 4096))}
    scores = model.judge(H200, cells, FITTED)
    assert [score.gap for score in scores] == [score.tune_gap for score in scores] == [0, 0]
    assert all(score.spearman > 0.99 for score in scores)
    out = capsys.readouterr().out
    assert "d  64 full   S   512    12 configs  1.000" in out
    assert "d 128 causal S  4096    12 configs  1.000" in out
    assert out.endswith("best five within 3 % in 2 of 2 cells\n")
    upside_down = {cell: measured(cell, lambda s: 1 / s) for cell in cells}
    assert all(score.spearman < -0.99 for score in model.judge(H200, upside_down, FITTED))
    exact, scaled = (model.loss(H200, {c: measured(c, f) for c in cells}, FITTED) for f in (lambda s: s, lambda s: 2 * s))
    assert 0 <= exact < scaled < model.loss(H200, upside_down, FITTED)


@pytest.mark.parametrize("family", model.FITTED)
def test_a_fit_takes_the_best_weights_that_the_search_finds(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search that is made up: it tries all weights halved, and those first that make what was measured."""
    start: Any = model.FITTED[family]
    cells = {(64, False, 512): measured((64, False, 512), lambda s: s, family=find_family(family))}
    asked: list[float] = []

    def minimize(cost: Callable[[np.ndarray], float], start: np.ndarray, **options: Any) -> Any:
        tried = [start * factor for factor in (0.5, 1.0, -1.0)]
        asked.extend(map(cost, tried))
        best = min(tried, key=cost)
        return SimpleNamespace(x=best, fun=cost(best))

    monkeypatch.setitem(sys.modules, "scipy.optimize", SimpleNamespace(minimize=minimize))
    assert model.fit(H200, cells, start, 60) == start
    assert asked[1] < asked[0] < asked[2] == float("inf"), "weights are positive"
    out = capsys.readouterr().out
    assert all(f"    {name}={weight:.4g}," in out for name, weight in vars(start).items())
    assert out.count("=") == len(start.__dataclass_fields__)


def test_a_pick_is_held_against_the_fastest_of_any_family(capsys: pytest.CaptureFixture[str]) -> None:
    cell = (64, True, 1024)
    taken = next(model_picks(*model.cell_of(cell), H200))
    other = next(row.spec for row in measured(cell, lambda s: s))
    rows = [model.Measured(taken, 128, 1.2e-3), model.Measured(other, 128, 1e-3)]
    assert model.picks(H200, {cell: rows, (64, True, 512): rows[1:]}) == {cell: pytest.approx(0.2)}
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("none of the model's picks was measured")
    assert out[1].endswith(f"20.0%  {taken.config.name}, best {other.config.name}")
    assert out[2] == "within 5 % in 0 of 2 cells, worst 20.0%"


@pytest.mark.slow
def test_calls_with_modifiers_enter_few_functions_more_than_a_plain_call() -> None:
    """Of Python, in a process of its own: times depend on the machine, this does not."""
    most = {"window": 4, "softcap": 4, "alibi": 7, "key-padding": 7, "dropout": 10, "traced-window": 13, "traced-softcap": 16}
    most |= {"traced-alibi": 19, "traced-relative": 21, "traced-documents": 22, "block-mask": 39, "fresh-softcap": 16, "fresh-alibi": 19}
    command = [sys.executable, "-m", "tools.modifier_overhead", "--rounds", "1", "--calls", "2"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    lines = re.findall(r"^([\w-]+) +median +[\d.]+ \( *[+-][\d.]+\)  least .* (\d+) Python calls$", done.stdout, re.MULTILINE)
    found = {name: int(count) for name, count in lines}
    assert {name: count - found["plain"] for name, count in found.items() if count - found["plain"] > most.get(name, 0)} == {}
    assert found.keys() == {"plain", *most}, done.stdout
