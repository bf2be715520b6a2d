"""What a call on a KV cache asks before it goes to plans and operators: lengths as kernels take them, and that nobody wants gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.errors import ArgumentError
from flashgen.codegen.typed import require_type

from ..launch.arguments import require_dense
from ..launch.built_in import CallOf
from ..launch.cached_arguments import check_length, require_countable, require_dimensions
from ..launch.filled_lengths import filled_lengths
from .autograd import is_differentiated, is_transformed
from .cached import NO_DERIVATIVE
from .gradients import NoDerivativeError
from .plans import nobody_listens


def lengths_in_memory(q: Any, k_cache: Any, block_table: Any, length: Any, k: Any) -> Any:
    """As kernels take them, of one that all sequences have: None for all keys that there is room for. What is no length stays as it is."""
    if isinstance(length, bool) or not isinstance(length, (int, torch.SymInt, type(None))):
        return length
    for name, tensor in (("q", q), ("k_cache", k_cache)):
        if not isinstance(tensor, torch.Tensor):
            require_type(name, tensor, torch.Tensor)
        require_dense(name, tensor)
        require_dimensions(name, tensor, block_table is not None)
    in_pages = isinstance(block_table, torch.Tensor) and block_table.ndim == 2
    keys = require_countable(block_table.shape[1] if in_pages else 1, k_cache.shape[1])
    wanted: Any = keys if length is None else length
    if length is not None:
        added = k.shape[1] if isinstance(k, torch.Tensor) and k.ndim == 4 else 0
        if isinstance(length, int) and not is_dynamo_compiling():
            check_length(length, keys, added)
        else:
            _check_traced_length(length, keys, added)
    if not is_dynamo_compiling() and type(q) is torch.Tensor and nobody_listens():
        return filled_lengths(q, wanted)
    return q.new_full((q.shape[0],), wanted, dtype=torch.int32)


def _check_traced_length(length: Any, keys: Any, added: Any) -> None:
    """As `check_length`, where a tracer's symbols may stand for these: it asks about each that is known before a run.

    torch.compile then leaves the call to Python, which says what was given.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # where nobody traces it need not be loaded

    if guard_or_false(length < 0) or guard_or_false(length > keys - added):
        raise ArgumentError("cache_seqlens must be an integer from 0 to the keys that a sequence has room for beside those that are added")


def call_on_cache(q: Any, k_cache: Any, block_table: Any, scale: Any) -> CallOf | None:
    """What functions are asked for: len_kv is how many keys a sequence has room for. None for tensors that checks will speak of."""
    try:
        (batch, len_q, heads_q, _), (_, page_size, _, _) = q.shape, k_cache.shape
        return (batch, heads_q, len_q, page_size if block_table is None else block_table.shape[1] * page_size), q, scale
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None


def require_inference(named: dict[str, torch.Tensor | None], of_modifiers: Sequence[torch.Tensor]) -> None:
    """Raises ArgumentError for a tensor of which a gradient may be asked, and NoDerivativeError under the transforms of torch.func.

    of_modifiers: all of theirs, of which functions may capture some that have no name
    """
    q, k_cache, v_cache, *others = [tensor for tensor in named.values() if tensor is not None]
    if is_differentiated(q, k_cache, v_cache, *others, *of_modifiers):
        captured = [("what score_mod and mask_mod capture", tensor) for tensor in of_modifiers]
        for name, tensor in [] if is_transformed() else [*named.items(), *captured]:
            if tensor is not None and tensor.requires_grad:
                rule = "must not require grad, as attention_with_kvcache has no gradients: use torch.no_grad(), or detach it"
                raise ArgumentError(f"{name} {rule}; got requires_grad=True")
        raise NoDerivativeError(NO_DERIVATIVE)
