"""Elements of caches, which may be e4m3 numbers, and descales: fp32 numbers of key/value heads that such elements are multiplied by."""

from __future__ import annotations

from typing import Any

import torch

from flashgen.codegen.errors import ArgumentError

from .arguments import DTYPES, E4M3, require_dense, require_initialized


def broadcast_descales(q: Any, k_cache: Any, k_descale: Any, v_descale: Any) -> tuple[Any, Any]:
    """Both as operators take them, [batch, heads_kv], without copies. What does not broadcast stays as it is, and is refused later.

    Raises ArgumentError for what has no shape or no strides.
    """
    if not isinstance(q, torch.Tensor) or not isinstance(k_cache, torch.Tensor) or not q.ndim == k_cache.ndim == 4:
        return k_descale, v_descale
    shape = q.shape[0], k_cache.shape[2]
    return _broadcast("k_descale", k_descale, shape), _broadcast("v_descale", v_descale, shape)


def _broadcast(name: str, descale: Any, shape: tuple[int, int]) -> Any:
    if not isinstance(descale, torch.Tensor):
        return descale
    require_initialized(name, descale)
    require_dense(name, descale)
    if descale.shape == shape:
        return descale
    own = descale.shape
    fits = len(own) <= len(shape) and all(one in (1, size) for one, size in zip(own[::-1], shape[::-1], strict=False))
    return descale.expand(shape) if fits else descale


def descales_fit(k_descale: torch.Tensor | None, v_descale: torch.Tensor | None, batch: int, k_cache: torch.Tensor) -> bool:
    """The rules of `check_descales` in short."""
    if k_descale is None and v_descale is None:
        return True
    if k_cache.dtype is not E4M3:
        return False
    both = [one for one in (k_descale, v_descale) if one is not None]
    return all(one.dtype is torch.float32 and one.shape == (batch, k_cache.shape[2]) for one in both)


def descale_strides(k_descale: torch.Tensor | None, v_descale: torch.Tensor | None) -> dict[str, tuple[int, ...]]:
    """Of those that are there, in elements: 0 where the size is 1."""
    return {
        name: tuple(step if size > 1 else 0 for size, step in zip(descale.shape, descale.stride(), strict=True))
        for name, descale in (("k_descale", k_descale), ("v_descale", v_descale))
        if descale is not None
    }


def check_dtype(name: str, dtype: torch.dtype, of_q: torch.dtype, of_k_cache: torch.dtype) -> None:
    """Raises ArgumentError unless q, or k_cache or v_cache, has a type that kernels compute with those of the other two."""
    allowed = [*DTYPES] if name == "q" else [*DTYPES, E4M3]
    if dtype not in allowed:
        raise ArgumentError(f"{name} must be {', '.join(map(str, allowed[:-1]))} or {allowed[-1]}; got {dtype}")
    if name != "q" and dtype not in (of_q, E4M3):
        raise ArgumentError(f"{name} must have q's dtype {of_q}; got {dtype}")
    if name == "v_cache" and dtype != of_k_cache:
        raise ArgumentError(f"v_cache must have k_cache's dtype {of_k_cache}; got {dtype}")


def check_descales(k_descale: torch.Tensor | None, v_descale: torch.Tensor | None, q: torch.Tensor, k_cache: torch.Tensor) -> None:
    """Raises ArgumentError unless these are numbers of the heads of an e4m3 cache, on its device."""
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is None:
            continue
        if k_cache.dtype != E4M3:
            raise ArgumentError(f"{name} must be left out where the cache is not {E4M3}; got a cache of {k_cache.dtype}")
        if descale.dtype != torch.float32:
            raise ArgumentError(f"{name} must be torch.float32; got {descale.dtype}")
        if descale.device != q.device:
            raise ArgumentError(f"{name} must be on q's device {q.device}; got {descale.device}")
        if tuple(descale.shape) != (q.shape[0], k_cache.shape[2]):
            wanted = f"({q.shape[0]}, {k_cache.shape[2]})"
            raise ArgumentError(f"{name} must be of shape (batch, heads_kv) = {wanted}, or broadcast to it; got {tuple(descale.shape)}")
