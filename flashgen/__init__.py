"""flashgen: FlashAttention kernels, generated for your GPU and shapes, compiled at run time, called from PyTorch.

    import flashgen
    out = flashgen.attention(q, k, v, causal=True)

Importing this package alone loads neither PyTorch nor CUDA: every name is loaded on first use, and the operators of
`torch.ops.flashgen` once PyTorch is imported as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .operators.import_hook import register_operators
from .version import __version__

if TYPE_CHECKING:
    from flashgen.codegen.devices import Device, find_device
    from flashgen.codegen.problem import Dtype, Mask, Pass, Problem
    from flashgen.codegen.workload import Workload

    from .ahead import compile, load, register_kernels, tune, unload, verify, warm
    from .api import CaptureError, attention
    from .codegen.errors import ArgumentError, FlashgenError, IllegalConfigError
    from .codegen.spec import KernelSpec
    from .codegen.target import Target, find_target
    from .kvcache import attention_with_kvcache
    from .launch.made_block_masks import BlockMask, block_mask
    from .traced.modifier import compile_modifier
    from .varlen import attention_varlen

_HOMES = {
    **dict.fromkeys(("CaptureError", "attention"), ".api"),
    **dict.fromkeys(("compile", "load", "register_kernels", "tune", "unload", "verify", "warm"), ".ahead"),
    **dict.fromkeys(("Device", "find_device"), ".codegen.devices"),
    **dict.fromkeys(("ArgumentError", "FlashgenError", "IllegalConfigError"), ".codegen.errors"),
    **dict.fromkeys(("Dtype", "Mask", "Pass", "Problem"), ".codegen.problem"),
    **dict.fromkeys(("BlockMask", "block_mask"), ".launch.made_block_masks"),
    "Workload": ".codegen.workload",
    "attention_varlen": ".varlen",
    "attention_with_kvcache": ".kvcache",
    "compile_modifier": ".traced.modifier",
    "KernelSpec": ".codegen.spec",
    **dict.fromkeys(("Target", "find_target"), ".codegen.target"),
}

__all__ = [  # noqa: RUF022 (faces first, then types)
    "attention", "attention_varlen", "attention_with_kvcache", "block_mask", "compile", "compile_modifier", "load", "register_kernels",
    "tune", "unload", "verify", "warm",
    "ArgumentError", "BlockMask", "CaptureError", "Device", "Dtype", "FlashgenError", "IllegalConfigError", "KernelSpec", "Mask", "Pass",
    "Problem",
    "Target", "Workload", "find_device", "find_target", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_operators()
