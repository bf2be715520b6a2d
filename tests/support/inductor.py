"""PyTorch's Inductor in tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch._inductor.config


def without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in processes that the test starts, no code for this CPU's vector instructions.

    Inductor has the C++ compiler try on each kind of them first, and again where a package is loaded: a minute each on a busy machine.
    """
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")


def with_shared_libstdcpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of AOTInductor are linked to the libstdc++ that PyTorch has, not to a copy of their own.

    Some images name a compiler by CXX that has libstdc++.a alone. A package with its own copy ends the process that loads it by a
    segmentation fault, in the std::regex that reads the name of a device: whatever the model does.
    """
    for compiler in (os.environ.get("CXX"), "g++"):
        if compiler is not None and has_shared_libstdcpp(compiler):
            if compiler != torch._inductor.config.cpp.cxx[-1]:
                monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, compiler))
            return
    pytest.fail("neither $CXX nor g++ has a shared libstdc++: AOTInductor's packages cannot be loaded on this machine")


def has_shared_libstdcpp(compiler: str) -> bool:
    """Asks the compiler for its libstdc++.so: of a file that it has it says the path, of another one the name alone."""
    command = [compiler, "-print-file-name=libstdc++.so"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).is_absolute()
