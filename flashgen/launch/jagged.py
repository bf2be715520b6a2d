"""Nested tensors of layout torch.jagged as packed sequences: their values are packed, and their offsets are boundaries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from flashgen.codegen.errors import ArgumentError

from .packed_arguments import PackedTokens


class JaggedCall(NamedTuple):
    """A call of nested tensors. values: packed q, k and v; tokens: where their sequences are; q: the nested one, which out is like."""

    values: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    tokens: PackedTokens
    q: torch.Tensor

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, tokens: PackedTokens) -> JaggedCall:
        """tokens: of which only the expected lengths may be given. Raises ArgumentError.

        Offsets of 64 bits become boundaries of 32 on the device, and nobody waits for that.
        """
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            _require_jagged(name, tensor)
        for name, given in zip(PackedTokens._fields[:4], tokens[:4], strict=True):
            if given is not None:
                raise ArgumentError(f"{name} must be left out for nested tensors, which know where their sequences are; got one")
        # Tensors with gaps have the same jagged size if they share lengths, wherever their sequences begin.
        if v.shape[1] != k.shape[1] or (k.lengths() is not None and v.offsets() is not k.offsets()):
            raise ArgumentError(
                "v must have k's lengths by the same offsets, as torch.nested.nested_tensor_from_jagged(values, k.offsets()) has"
            )
        of_q = q.offsets().to(torch.int32)
        of_k = of_q if k.offsets() is q.offsets() else k.offsets().to(torch.int32)
        used_q, used_kv = (None if lengths is None else lengths.to(torch.int32) for lengths in (q.lengths(), k.lengths()))
        longest = [_longest(tensor) if most is None else most for tensor, most in ((q, tokens[4]), (k, tokens[5]))]
        return cls((q.values(), k.values(), v.values()), PackedTokens(of_q, of_k, used_q, used_kv, *longest), q)

    def nested(self, found: Any) -> Any:
        """Out, or out and lse, of which out becomes a nested tensor with q's offsets."""
        if isinstance(found, tuple):
            return (self.nested(found[0]), *found[1:])
        return torch.nested.nested_tensor_from_jagged(found, offsets=self.q.offsets(), lengths=self.q.lengths())  # type: ignore[attr-defined]


def _require_jagged(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_nested or tensor.layout is not torch.jagged:
        got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        nested = "a nested one of " if isinstance(tensor, torch.Tensor) and tensor.is_nested else ""
        raise ArgumentError(f"{name} must be a nested tensor of layout torch.jagged, as q, k and v all are, or none; got {nested}{got}")
    if tensor.dim() != 4 or getattr(tensor, "_ragged_idx", 1) != 1:
        raise ArgumentError(f"{name} must have the dimensions (batch, lengths, heads, head_dim), lengths being jagged; got {tensor.dim()}")


def _longest(tensor: Any) -> int | None:
    """The length of the longest sequence, if the tensor knows it already: asking would wait for the device."""
    return None if is_dynamo_compiling() else getattr(tensor, "_maybe_max_seqlen", None)
