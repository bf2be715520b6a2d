"""PyTorch's Inductor in tests."""

from __future__ import annotations

import pytest
import torch._inductor.config


def without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in processes that the test starts, no code for this CPU's vector instructions.

    Inductor has the C++ compiler try on each kind of them first, and again where a package is loaded: a minute each on a busy machine.
    """
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
