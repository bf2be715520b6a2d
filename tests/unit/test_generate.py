"""What `flashgen generate` writes, and that it writes nothing that is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashgen.build.artifact import Artifact, CompileError
from flashgen.cli.generate import generate
from flashgen.codegen.errors import FlashgenError
from flashgen.codegen.spec import KernelSpec
from flashgen.selection import compilation

CLEAN = (
    "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
    "ptxas info    : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 128 registers"
)
BROKEN = {
    "spills 24 B a thread": CLEAN.replace("0 bytes spill stores, 0", "8 bytes spill stores, 16"),
    "keeps 32 B a thread in local memory": CLEAN.replace("0 bytes stack", "32 bytes stack"),
    "C7508: setmaxnreg ignored": f"C7508: setmaxnreg ignored\n{CLEAN}",
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_kernel_that_the_compiler_broke_is_not_written(defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(spec: KernelSpec) -> Artifact:
        log = BROKEN[defect] if spec.target.name == "sm_90a" else CLEAN
        return Artifact(spec.name, spec.target.name, "text", b"code", log, "13.0")

    monkeypatch.setattr(compilation, "compile_spec", compiled)
    with pytest.raises(FlashgenError, match=rf"^attention_forward_sm90_bf16_d64_full_\w+_sm_90a is broken: .*{defect}"):
        generate(tmp_path / "out", "sm_80,sm_90a", 64, causal=False)
    assert list(tmp_path.iterdir()) == []
    generate(tmp_path / "out", "sm_80", 64, causal=False)
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_a_kernel_that_does_not_compile_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(spec: KernelSpec) -> Artifact:
        raise CompileError(f"{spec.name} does not compile")

    monkeypatch.setattr(compilation, "compile_spec", compiled)
    with pytest.raises(CompileError, match=r"does not compile$"):
        generate(tmp_path / "out", "sm_90a", 64)
    assert list(tmp_path.iterdir()) == []
