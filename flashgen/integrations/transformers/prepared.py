"""The mask that transformers' models hand from their mask interface to each of their attention layers: `PreparedMask`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from . import counts
from .mask_functions import MaskFunction
from .no_tensor import NoTensor, refuse_use, refuse_uses

DocumentIds = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class PreparedMask(NoTensor, BlockMask):
    """Which keys queries see, as arguments of flashgen's calls: nothing in it grows with len_q * len_kv.

    A model that meets a mask that was made before, as `generate` makes them ahead of compiled steps, takes a tensor of four dimensions or a
    BlockMask for one: hence the base class, of which it has the shape alone. What else models ask of tensors it refuses.
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
        lacks_queries: bool = False,
    ) -> None:
        """What is seen.

        shape: (batch, 1, len_q, len_kv)
        causal, window, chunk, document_ids: as `flashgen.attention` has them, bottom-right aligned
        sequence_chunk: of packed sequences, the chunk counted from the first token of each, which document_ids have in them already
        keys: bool, [batch, len_kv], True where a key is none of padding; counted from `starts` where `cached` and these are there
        starts, lengths: int32, [batch]: the first key of each sequence that counts, and the number of the last one, plus 1
        cached: whether `flashgen.attention_with_kvcache` is asked, which knows of starts and lengths and has no gradients
        function: of batch, head, query and key, instead of all others
        lacks_queries: whether a model has left out queries in front
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
        self.lacks_queries = lacks_queries

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
            raise counts.refused_error("attention_mask must be made on the device of its layers: it is a function of tensors that stay")

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        ids = self.document_ids
        tensors = {"keys": moved(self.keys), "starts": moved(self.starts), "lengths": moved(self.lengths)}
        return self._changed(document_ids=(ids[0].to(device), ids[1].to(device)) if isinstance(ids, tuple) else moved(ids), **tensors)

    def __getitem__(self, index: Any) -> PreparedMask:
        """`[:, :, -n:, :]`: of the last n queries alone. Raises ArgumentError for any other index."""
        batch, _, len_q, len_kv = self.prepared_shape
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 and all(index[i] == slice(None) for i in (0, 1, 3)) else None
        first, stop, step = rows.indices(len_q) if isinstance(rows, slice) else (0, 0, 1)
        if stop != len_q or step != 1 or first >= stop:
            refuse_use(f"its elements {index!r}")
        ids, function = self.document_ids, self.function
        if ids is not None:
            of_queries, of_keys = ids if isinstance(ids, tuple) else (ids, ids)
            ids = (of_queries[..., first:], of_keys)

        def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
            assert function is not None
            return function(batch, head, query + first, key)

        return self._changed(
            prepared_shape=(batch, 1, len_q - first, len_kv),
            document_ids=ids,
            function=None if function is None else seen,
            lacks_queries=self.lacks_queries or first > 0,
        )

    def _changed(self, **changes: Any) -> PreparedMask:
        own = {**vars(self), **changes}
        return PreparedMask(own.pop("prepared_shape"), **own)

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name != "prepared_shape" and value is not None and value is not False}
        return f"PreparedMask({', '.join([str(self.prepared_shape), *given])})"

    __str__ = __repr__


_OWN = {*vars(PreparedMask), *vars(PreparedMask((1, 1, 1, 1)))}
_ASKED = {*dir(torch.Tensor), *dir(BlockMask), *BlockMask.__annotations__} - _OWN
refuse_uses(PreparedMask, (name for name in _ASKED if not name.startswith("_")))
