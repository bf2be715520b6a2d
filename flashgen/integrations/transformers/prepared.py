"""The mask that transformers' models hand from their mask interface to each of their attention layers: `PreparedMask`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.nn.attention.flex_attention import BlockMask

from flashgen.codegen.errors import ArgumentError

from .mask_functions import MaskFunction

DocumentIds = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class PreparedMask(BlockMask):
    """Which keys queries see, as arguments of flashgen's calls: nothing in it grows with len_q * len_kv.

    A model that meets a mask that was made before, as `generate` makes them ahead of compiled steps, takes a tensor of four dimensions or a
    BlockMask for one: hence the base class, of which it has the shape alone.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        chunk: int | None = None,
        sequence_chunk: int | None = None,
        document_ids: DocumentIds = None,
        keys: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        cached: bool = False,
        function: MaskFunction | None = None,
    ) -> None:
        """What is seen.

        shape: (batch, 1, len_q, len_kv)
        causal, window, chunk, document_ids: as `flashgen.attention` has them, bottom-right aligned
        sequence_chunk: of packed sequences, the chunk counted from the first token of each, which document_ids have in them already
        keys: bool, [batch, len_kv], True where a key is none of padding; counted from `starts` where `cached` and these are there
        starts, lengths: int32, [batch]: the first key of each sequence that counts, and the number of the last one, plus 1
        cached: whether `flashgen.attention_with_kvcache` is asked, which knows of starts and lengths and has no gradients
        function: of batch, head, query and key, instead of all others
        """
        self.prepared_shape = shape
        self.causal = causal
        self.window = window
        self.chunk = chunk
        self.sequence_chunk = sequence_chunk
        self.document_ids = document_ids
        self.keys = keys
        self.starts = starts
        self.lengths = lengths
        self.cached = cached
        self.function = function

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, 1, len_q, len_kv)."""
        return self.prepared_shape

    @property
    def ndim(self) -> int:
        """4, as some models ask."""
        return len(self.prepared_shape)

    def to(self, device: torch.device | str, *_: Any, **__: Any) -> PreparedMask:
        """The same on another device. Raises ArgumentError for a mask that is a function, whose tensors stay where they are."""
        if self.function is not None:
            raise ArgumentError("attention_mask must be made on the device of its layers: it is a function of tensors that stay")

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        ids = self.document_ids
        return PreparedMask(
            self.prepared_shape,
            causal=self.causal,
            window=self.window,
            chunk=self.chunk,
            sequence_chunk=self.sequence_chunk,
            document_ids=(ids[0].to(device), ids[1].to(device)) if isinstance(ids, tuple) else moved(ids),
            keys=moved(self.keys),
            starts=moved(self.starts),
            lengths=moved(self.lengths),
            cached=self.cached,
        )

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name != "prepared_shape" and value is not None and value is not False}
        return f"PreparedMask({', '.join([str(self.prepared_shape), *given])})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> NoReturn:
        raise ArgumentError(f"attention_mask is flashgen's PreparedMask, which has no elements to take: a model asked for {index!r}")
