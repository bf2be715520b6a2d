"""Odd arguments to the public functions, hundreds of them by a fixed seed: an error of ours that names the argument, or a right result."""

from __future__ import annotations

import copy
import decimal
import enum
import fractions
import math
import pickle
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import flashgen
from flashgen import ahead
from flashgen.build.emulator.compiler import CxxCompilerMissingError
from flashgen.build.gpu.driver import DriverError
from flashgen.cells import cells_of
from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.family import families, require_possible
from flashgen.tuning import Request

D = 16  # of all calls that are right: one kernel to compile


class Text(str):
    pass


class Number(int):
    pass


class Word(enum.Enum):
    A = "a"


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 10**400, 0.0, -0.0, 0.5, 1e-46, 3e38, 1e308, math.inf, -math.inf, math.nan, 1j,
    "", "yes", "bshd", "bhsd", "BSHD", "cpu", "sm_90a", "\ud800", "\x00", "x" * 10**5, Text("bshd"), b"bshd",
    Number(64), Word.A, Mute(), Mute,
    np.True_, np.int64(64), np.float32(0.5), np.float64(0.5), np.zeros((1, 4, 2, D)), np.array(0.5), torch.tensor(0.5), torch.bfloat16,
    torch.device("cpu"), fractions.Fraction(1, 2), decimal.Decimal("0.5"), [], (), {}, {1: 2}, [1, "a"], range(3), object(), len, Path("x"),
    flashgen.Dtype.BF16, flashgen.Mask.CAUSAL, flashgen.Problem(flashgen.Dtype.BF16, 7),
]  # fmt: skip


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape or (1, 4, 2, D), dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(dtype)


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return tensor(4096).as_strided(shape, strides)


def resized(size: int) -> torch.Tensor:
    """A tensor whose storage no longer holds all of it: nothing but a refusal may come of that."""
    made = tensor()
    made.untyped_storage().resize_(size)
    return made


TENSORS: list[Callable[[], Any]] = [
    *(lambda dtype=dtype: torch.zeros(1, 4, 2, D, dtype=dtype) for dtype in (
        torch.float32, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)),
    *(lambda shape=shape: torch.zeros(shape, dtype=torch.bfloat16) for shape in (
        (), (D,), (4, 2, D), (1, 4, 2, D, 1), (0, 4, 2, D),
        (1, 0, 2, D), (1, 4, 0, D), (1, 4, 2, 0), (2, 4, 2, D), (1, 5, 2, D), (1, 4, 3, D),
        (1, 4, 1, D), (1, 4, 2, 12), (1, 4, 2, 264), (0, 0, 0, 0), (1, 1, 1, 1), (1, 4, 4, D))),
    lambda: tensor().to_sparse(),
    lambda: tensor(8, D).to_sparse_csr(),
    lambda: tensor().float().to_mkldnn(),
    lambda: torch.quantize_per_tensor(tensor().float(), 0.1, 0, torch.qint8),
    lambda: tensor().to("meta"),
    lambda: tensor().requires_grad_(),
    lambda: torch.nn.Parameter(tensor()),
    lambda: torch.nested.nested_tensor([tensor(4, 2, D), tensor(3, 2, D)], layout=torch.jagged),
    lambda: tensor(1, 4, 2, 2 * D)[..., ::2],
    lambda: tensor(1, 4, 2, D + 4)[..., :D],
    lambda: tensor(1, 2, 4, D).transpose(1, 2),
    lambda: tensor(1, 4, D, 2).transpose(2, 3),
    lambda: tensor(1, 4, 1, D).expand(1, 4, 2, D),
    lambda: tensor(1, 1, 1, 1).expand(1, 4, 2, D),
    lambda: tensor(4096)[1 : 1 + 8 * D].view(1, 4, 2, D),
    lambda: strided((1, 4, 2, D), (0, 32, 16, 1)),
    lambda: strided((1, 4, 2, D), (3, 32, 16, 1)),
    lambda: tensor().flip(1),
    lambda: torch.full((1, 4, 2, D), math.nan, dtype=torch.bfloat16),
    lambda: tensor().conj(),
    lambda: torch._neg_view(tensor()),
    torch.nn.UninitializedParameter,
    torch.nn.UninitializedBuffer,
    lambda: resized(0),
    lambda: resized(8 * D * 2 - 1),
    lambda: tensor().as_subclass(type("Sub", (torch.Tensor,), {})),
]  # fmt: skip

NAMES = "q|k|v|head_dim|head_dim_v|causal|scale|layout|return_lse"


def right(out: torch.Tensor, arguments: Mapping[str, Any]) -> bool:
    """Whether `out` is what plain PyTorch gives, as far as these arguments say what that is."""
    q, k, v = (arguments[name] for name in "qkv")
    if arguments.get("layout", "bshd") == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = out.transpose(1, 2)
    if out.shape != (*q.shape[:3], v.shape[3]) or out.dtype != q.dtype:
        return False
    if out.is_meta or not out.numel() or float(arguments.get("scale") or 1) > 100:
        return True
    q, k, v = (t.detach().as_subclass(torch.Tensor).float() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scale = float(arguments.get("scale") or D**-0.5)
    expected = torch.softmax(scale * q @ k.transpose(-1, -2), -1) @ v if k.shape[2] else torch.zeros(out.shape)
    return torch.allclose(out.float(), expected, atol=0.03, rtol=0.03, equal_nan=True)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
def test_attention(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_CPU", "1")
    rng, refused = random.Random(14), 0
    cases: list[dict[str, Any]] = [{name: make()} for name in "qkv" for make in TENSORS]
    cases += [dict.fromkeys("qkv", make()) for make in TENSORS]
    cases += [{name: value} for name in ("q", "k", "v", "scale", "layout", "return_lse") for value in ODD]
    cases += [{"causal": value} for value in ODD if value is not True]
    cases += [
        {rng.choice("qkv"): rng.choice(TENSORS)(), "scale": rng.choice(ODD), "layout": rng.choice(["bshd", "bhsd"])} for _ in range(30)
    ]
    cases = cases[part::3]
    for case in cases:
        arguments = {**dict.fromkeys("qkv", tensor()), **case}
        about = {name: type(value).__name__ for name, value in case.items()}
        complaint = None
        try:
            given = flashgen.attention(**arguments)
        except CxxCompilerMissingError:
            continue
        except FlashgenError as error:
            refused += 1
            complaint = str(error)
        else:
            out = given[0] if isinstance(given, tuple) else given
            assert right(out, arguments), (about, case)
        if complaint is not None:
            assert re.match(rf"({NAMES}) must ", complaint), (about, complaint)
            assert len(complaint) < 500
    assert 0.5 * len(cases) < refused < len(cases)


def faces(config: Any) -> list[tuple[str, Callable[..., Any], dict[str, Any]]]:
    problem, target = flashgen.Problem(flashgen.Dtype.BF16, 64), flashgen.find_target("sm_90a")
    device, workload = flashgen.find_device("h200"), flashgen.Workload(1, 4, 2, 8, 8)
    spec = flashgen.KernelSpec(families()["attention_forward_sm90"], problem, config, target)
    return [
        ("Problem", flashgen.Problem, {"dtype": flashgen.Dtype.BF16, "head_dim": 64, "head_dim_v": None, "mask": flashgen.Mask.FULL}),
        ("Workload", flashgen.Workload, {"batch": 1, "heads_q": 4, "heads_kv": 2, "len_q": 8, "len_kv": 8}),
        ("Request", Request, {f.name: getattr(Request(cells_of(64)), f.name) for f in fields(Request)}),
        ("cells_of", cells_of, {"head_dim": 64, "head_dim_v": None, "dtype": "bf16", "causal": None, "seqlens": (512,), "seqlen_kv": None,
                                "batch": None, "heads": None, "kv_heads": None}),
        ("KernelSpec", flashgen.KernelSpec, {"family": families()["attention_forward_sm90"], "problem": problem,
                                             "config": config, "target": target}),
        ("config", type(config), {f.name: getattr(config, f.name) for f in fields(config)}),
        ("compile", flashgen.compile, {"problem": problem, "config": config, "target": target, "device": 0}),
        ("verify", flashgen.verify, {"problem": problem, "config": config, "target": target, "device": 0}),
        ("load", flashgen.load, {"folder": "nowhere", "device": None}),
        ("warm", flashgen.warm, {"head_dim": 64, "dtype": "bf16", "causal": False, "batch": 1, "heads": 4, "kv_heads": 2, "len_q": 8,
                                 "len_kv": None, "head_dim_v": None, "device": None}),
        ("find_target", flashgen.find_target, {"text": "sm_80"}),
        ("Dtype", flashgen.Dtype, {"value": "bf16"}),
        ("Mask", flashgen.Mask, {"value": "full"}),
        ("Pass", flashgen.Pass, {"value": "forward"}),
        ("visible_pairs", workload.visible_pairs, {"mask": flashgen.Mask.FULL}),
        ("replace_from_text", config.replace_from_text, {"settings": {}}),
        ("from_json", partial(flashgen.KernelSpec.from_json, spec.to_json()), {"target": target}),
        ("find_device", flashgen.find_device, {"text": "h200"}),
        ("Target", flashgen.Target, {f.name: getattr(target, f.name) for f in fields(target)}),
        ("Device", flashgen.Device, {f.name: getattr(device, f.name) for f in fields(device)}),
    ]  # fmt: skip


def require_all_possible(**options: Any) -> None:
    for cell in cells_of(64, **options):
        require_possible(cell.problem)


def test_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu(device: object) -> Any:
        raise DriverError("no GPU takes part")

    monkeypatch.setattr(ahead, "_gpu", no_gpu)
    config = families()["attention_forward_sm90"].default(flashgen.Problem(flashgen.Dtype.BF16, 64), flashgen.find_target("sm_90a"))
    for face, function, sound in faces(config):
        for name, value in ((name, value) for name in sound for value in ODD):
            if face == "verify" and isinstance(value, str) and value == "cpu":
                continue
            if isinstance(value, (Mute, np.ndarray)) and name == "value":
                continue  # Python's enum compares the value, and writes it, before it asks
            complaint = f"{name}: taken"
            try:
                function(**{**sound, name: value})
            except FlashgenError as error:
                complaint = str(error)
            # A choice is told by the name that the command line has for it; a config is refused with all reasons.
            named = rf"(config field )?{name}|dtype|mask|pass|no GPU|config|arch|device|target|seqlen|heads_q"
            assert re.match(rf"({named})\b", complaint), (face, name, complaint)
            assert len(complaint) < 3000
    for options in ({"heads": 3, "kv_heads": 2}, {"dtype": "\ud800"}, {"head_dim_v": 2**70}):
        with pytest.raises(FlashgenError, match=r"^(heads_q|dtype|head_dim_v) must "):
            require_all_possible(**options)


@pytest.mark.parametrize("folder", ["", ".", "a\0b", "\udcff", "x" * 5000, "a/" * 3000, "loop", "file/x", "/dev/null", "/dev/full/x"])
def test_folders_that_no_kernels_can_be_in(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    monkeypatch.setattr(ahead, "_gpu", lambda device: SimpleNamespace(device=flashgen.find_device("h200")))
    with pytest.raises(flashgen.ArgumentError, match=r"^folder "):
        flashgen.load(folder)


def test_seqlens_without_end_are_refused_at_once() -> None:
    for seqlens in (range(10**12), range(2**24, 10**12)):
        with pytest.raises(flashgen.ArgumentError, match=r"^seqlen must be an integer from 1 to 16777216; got (0|16777217)$"):
            cells_of(64, seqlens=seqlens)


@pytest.mark.parametrize(
    ("of", "change", "message"),
    [
        ("target", {"threads_per_sm": -1}, r"^threads_per_sm must be an integer from 0 to 2147483647; got -1$"),
        ("target", {"shared_memory_per_block": 2**70}, r"^shared_memory_per_block must be an integer from 0 to 2147483647; got "),
        ("target", {"capability": (9,)}, r"^capability must be two integers, such as \(9, 0\); got \(9,\)$"),
        ("device", {"sm_count": 0}, r"^sm_count must be an integer >= 1; got 0$"),
        ("device", {"l2_bytes": -1}, r"^l2_bytes must be an integer >= 0; got -1$"),
        ("device", {"clock_hz": -1}, r"^clock_hz must be finite and > 0; got -1$"),
        ("device", {"memory_bandwidth": math.nan}, r"^memory_bandwidth must be finite and > 0; got nan$"),
        ("device", {"mma_rate": math.inf}, r"^mma_rate must be finite and > 0; got inf$"),
    ],
)
def test_figures_that_no_gpu_has(of: str, change: dict[str, Any], message: str) -> None:
    sound: Any = {"target": flashgen.find_target("sm_90a"), "device": flashgen.find_device("h200")}[of]
    with pytest.raises(flashgen.ArgumentError, match=message):
        replace(sound, **change)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_specs_and_errors_can_be_copied_and_sent_to_other_processes(copied: Callable[[Any], Any]) -> None:
    problem, target = flashgen.Problem(flashgen.Dtype.BF16, 64), flashgen.find_target("sm_90a")
    family = families()["attention_forward_sm90"]
    spec = flashgen.KernelSpec(family, problem, family.default(problem, target), target)
    assert copied(spec) == spec
    with pytest.raises(flashgen.IllegalConfigError) as raised:
        flashgen.KernelSpec(family, flashgen.Problem(flashgen.Dtype.BF16, 256), spec.config, target)
    made = copied(raised.value)
    assert (type(made), str(made), made.reasons) == (type(raised.value), str(raised.value), raised.value.reasons)
