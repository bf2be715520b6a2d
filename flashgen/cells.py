"""`Cell`: one problem at one workload, what the tuner tunes and the benchmark measures; `cells_of` gives the usual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashgen.codegen.errors import ArgumentError, require_int, shown
from flashgen.codegen.operation import find_operation, operation_of
from flashgen.codegen.operations import operations_of
from flashgen.codegen.problem import Dtype, Mask, Problem, Sequences
from flashgen.codegen.seen import CHUNK, WINDOW, Ends, Seen
from flashgen.codegen.typed import checked
from flashgen.codegen.workload import OPEN, Workload

TOKENS = 16384  # of the default workloads: batch * seqlen
MODEL_DIM = 2048  # of the default workloads: heads * head_dim
SEQLENS = (512, 1024, 4096, 16384)
MAX_SEQLEN = 2**24
MAX_HEADS = 2**31 - 1  # and of a batch: what an int of a kernel holds
APPEND = "append"  # the operation that adds keys to a cache


@dataclass(frozen=True)
class Cell:
    """One problem at one workload: a row of the table."""

    problem: Problem
    workload: Workload

    @property
    def flops(self) -> float:
        """Floating-point operations of a call, by the field's convention."""
        return operation_of(self.problem).flops(self.problem, self.workload)

    @property
    def io_bytes(self) -> int:
        """Bytes that a call must move at least."""
        return operation_of(self.problem).io_bytes(self.problem, self.workload)


def problems_of(
    head_dim: int | None,
    head_dim_v: int | None,
    dtype: str,
    causal: bool | None,
    passes: str,
    deterministic: bool,
    window: Ends | None = None,
    modifiers: Sequence[str] = (),
    chunk: int | None = None,
    packed: bool = False,
    page_size: int | None = None,
) -> list[tuple[Problem, tuple[int, int, int]]]:
    """The problems that these options stand for: of each pass one, or one a mask if `causal` is None; and `Seen.sizes`.

    Head dims: None if not given. Raises ArgumentError where an operation needs a head dim and has none, or has one, or a mask, and needs
    none.
    """
    for name in (CHUNK, WINDOW):
        if name in modifiers:
            raise ArgumentError(f"modifiers must be without {name}, which has an option of its own; got {', '.join(modifiers)}")
    found, layout = [], sequences_of_options(packed, page_size)
    for operation in operations_of(passes):
        if find_operation(operation).is_attention:
            if head_dim is None:
                raise ArgumentError(f"head_dim must be given for {operation}; got none")
            masks = list(Mask) if causal is None else [Mask.CAUSAL if causal else Mask.FULL]
            width = head_dim if head_dim_v is None else head_dim_v
            for seen in (Seen.of(mask is Mask.CAUSAL, window, chunk) for mask in masks):
                named = *seen.modifiers, *modifiers
                problem = Problem(Dtype.parse(dtype), head_dim, width, seen.mask, operation, deterministic, named, layout)
                found.append((problem, seen.sizes))
        else:
            given: dict[str, object] = {"causal": causal or None, "window": window, "modifiers": tuple(modifiers) or None, "chunk": chunk}
            of_cache: dict[str, object] = {"head_dim": head_dim, "head_dim_v": head_dim_v, "page_size": page_size}
            given |= {**({} if operation == APPEND else of_cache), "packed": packed or None}
            for name, value in given.items():
                if value is not None:
                    raise ArgumentError(f"{name} must be left out for {operation}, which has none; got {shown(value)}")
            widths = _of_cache(head_dim, head_dim_v, page_size) if operation == APPEND else (0, 0)
            found.append((Problem(Dtype.parse(dtype), *widths, operation=operation, sequences=layout), (OPEN, OPEN, OPEN)))
    return list(dict.fromkeys(found))


def _of_cache(head_dim: int | None, head_dim_v: int | None, page_size: int | None) -> tuple[int, int]:
    """Both head dims of what appends to a cache. Raises ArgumentError where one is not given, or no cache."""
    for name, value in (("head_dim", head_dim), ("page_size", page_size)):
        if value is None:
            raise ArgumentError(f"{name} must be given for {APPEND}; got none")
    assert head_dim is not None
    return head_dim, head_dim if head_dim_v is None else head_dim_v


@checked
def cells_of(
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
    causal: bool | None = None,
    seqlens: Sequence[int] = SEQLENS,
    seqlen_kv: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    passes: str = "forward",
    deterministic: bool = False,
    window: Ends | None = None,
    modifiers: Sequence[str] = (),
    chunk: int | None = None,
    packed: bool = False,
    page_size: int | None = None,
) -> list[Cell]:
    """The cells of one head dim, or of an operation that has none: see `problems_of`.

    head_dim_v: None for head_dim; causal: None for both masks; seqlens: lengths of q; seqlen_kv: length of k and v, None for that of q;
    batch: None for 16384 tokens in all, of the longer ones; heads: None for 2048 / head_dim, or 1; kv_heads: None for as many.
    passes: an operation's name, or "both" for forward and backward.
    deterministic: whether the gradients of backward cells are the same to the bit in every run.
    window: (left, right) of a sliding window, as `flashgen.attention` has it.
    modifiers: names of others, whose values are known where `flashgen.attention` is called: softcap, alibi, bias, bias_fp32,
        boolean_mask, document_ids, document_ids_int64, prefix_len, sinks.
    chunk: keys of a chunk, as `flashgen.attention` has it.
    packed: whether sequences are packed, as `flashgen.attention_varlen` has them: as many tokens, in sequences of any lengths.
    page_size: keys of a page, where sequences are in a cache, as `flashgen.attention_with_kvcache` has them; None where they are not.
    Raises ArgumentError for sizes that no workload has.
    """
    if head_dim is not None:
        require_int("head_dim", head_dim, 1)
    for name, size in (("batch", batch), ("heads", heads), ("kv_heads", kv_heads)):
        if size is not None:
            require_int(name, size, 1, MAX_HEADS)
    if not seqlens:
        raise ArgumentError("seqlen must be given at least once; got none")
    for seqlen in seqlens:
        require_int("seqlen", seqlen, 1, MAX_SEQLEN)
    if seqlen_kv is not None:
        require_int("seqlen_kv", seqlen_kv, 1, MAX_SEQLEN)
    problems = problems_of(head_dim, head_dim_v, dtype, causal, passes, deterministic, window, modifiers, chunk, packed, page_size)
    heads = heads or (max(1, MODEL_DIM // head_dim) if head_dim else 1)
    pairs = [(seqlen, seqlen_kv or seqlen) for seqlen in dict.fromkeys(seqlens)]
    lengths = [(batch or max(1, TOKENS // max(pair)), *pair) for pair in pairs]
    return [
        Cell(problem, sized(problem, sequences, heads, kv_heads or heads, len_q, len_kv, *seen, page_size=page_size))
        for problem, seen in problems
        for sequences, len_q, len_kv in lengths
    ]


def sequences_of_options(packed: bool, page_size: int | None) -> Sequences:
    """How sequences lie. Raises ArgumentError for pages of no keys, and of packed sequences."""
    if page_size is None:
        return Sequences.PACKED if packed else Sequences.DENSE
    require_int("page_size", page_size, 1, MAX_SEQLEN)
    if packed:
        raise ArgumentError(f"page_size must be left out for packed sequences, which are in no cache; got {page_size}")
    return Sequences.CACHED


def sized(
    problem: Problem, batch: int, heads_q: int, heads_kv: int, len_q: int, len_kv: int, *seen: int, page_size: int | None = None
) -> Workload:
    """A workload of these sizes; where the problem's sequences are packed, of the tokens that they have. seen: see `Seen.sizes`.

    page_size: of a cache, in which each sequence has as many pages as so many keys need; what appends to it adds len_q keys to each
    """
    if problem.is_cached:
        size = page_size or max(1, len_kv)
        table_pages = -(-len_kv // size)
        added = len_q if problem.operation == APPEND else 0
        dense = Workload(batch, heads_q, heads_kv, len_q, table_pages * size, *seen)
        return replace(dense, pages=batch * table_pages, page_size=size, table_pages=table_pages, new_keys=added)
    workload = Workload(batch, heads_q, heads_kv, len_q, len_kv, *seen)
    return replace(workload, tokens_q=batch * len_q, tokens_kv=batch * len_kv) if problem.is_packed else workload
