"""The Python face of a call: `attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from flashgen.codegen.modifier import NO_MODIFIERS, Given
from flashgen.codegen.seen import Causal, Ends
from flashgen.codegen.typed import require_type

from .launch.arguments import LAYOUTS, check_types, require_together
from .launch.asked import asked
from .launch.autocast import cast_by_autocast
from .launch.call_of import call_of
from .launch.gpu import CaptureError
from .launch.keywords import complete, modified_of_call, seed_of
from .launch.made_block_masks import BlockMask
from .launch.padding_mask import require_padding_mask
from .numerics.modifiers.dropout import dropout_mask
from .operators.autograd import differentiable_attention, is_differentiated
from .operators.plans import nobody_listens, run_at_hand
from .operators.registration import attention_forward, attention_output
from .traced.modifier import CompiledModifier

ScoreMod = Callable[..., Any] | CompiledModifier | None
MaskMod = Callable[..., Any] | None
DocumentIds = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None

__all__ = ["CaptureError", "attention"]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    layout: str = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    window: Ends | None = ...,
    chunk: int | None = ...,
    prefix_len: torch.Tensor | None = ...,
    document_ids: DocumentIds = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    key_padding_mask: torch.Tensor | None = ...,
    dropout_p: float = ...,
    score_mod: ScoreMod = ...,
    mask_mod: MaskMod = ...,
    block_mask: BlockMask | FlexBlockMask | None = ...,
    return_dropout_mask: Literal[False] = ...,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    layout: str = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    window: Ends | None = ...,
    chunk: int | None = ...,
    prefix_len: torch.Tensor | None = ...,
    document_ids: DocumentIds = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    key_padding_mask: torch.Tensor | None = ...,
    dropout_p: float = ...,
    score_mod: ScoreMod = ...,
    mask_mod: MaskMod = ...,
    block_mask: BlockMask | FlexBlockMask | None = ...,
    return_dropout_mask: Literal[False] = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = ...,
    scale: float | None = ...,
    layout: str = ...,
    return_lse: bool = ...,
    deterministic: bool | None = ...,
    window: Ends | None = ...,
    chunk: int | None = ...,
    prefix_len: torch.Tensor | None = ...,
    document_ids: DocumentIds = ...,
    softcap: float | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
    sinks: torch.Tensor | None = ...,
    bias: torch.Tensor | None = ...,
    mask: torch.Tensor | None = ...,
    key_padding_mask: torch.Tensor | None = ...,
    dropout_p: float = ...,
    score_mod: ScoreMod = ...,
    mask_mod: MaskMod = ...,
    block_mask: BlockMask | FlexBlockMask | None = ...,
    return_dropout_mask: Literal[True],
) -> tuple[torch.Tensor, ...]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    window: Ends | None = None,
    chunk: int | None = None,
    prefix_len: torch.Tensor | None = None,
    document_ids: DocumentIds = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    score_mod: ScoreMod = None,
    mask_mod: MaskMod = None,
    block_mask: BlockMask | FlexBlockMask | None = None,
    return_dropout_mask: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(scale * q k^T) v, on the GPU that holds the tensors and in its current stream.

    q: [batch, len_q, heads_q, head_dim] for layout "bshd", [batch, heads_q, len_q, head_dim] for "bhsd"; bf16 or fp16
    k: the same with len_kv and heads_kv; v: as k, with head_dim_v. heads_q is a multiple of heads_kv.
       Any strides with a contiguous last dimension and rows aligned to 16 bytes; head dims are multiples of 8 up to 256.
    causal: query i sees keys j <= i + len_kv - len_q (aligned bottom-right), or with "top_left" keys j <= i
    scale: from 1.1755e-38 to 2.3587e+38, what fp32 can multiply by; None stands for head_dim ** -0.5
    deterministic: whether gradients must be the same to the bit in every run, which takes some time; None for what
       torch.are_deterministic_algorithms_enabled() says when they are computed. Out and lse always are the same.
    window: (left, right): query i sees keys from i + len_kv - len_q - left to i + len_kv - len_q + right, both included; None opens a
       side. Ends may be negative. Where a causal mask ends earlier, it counts. Tiles of keys that no query of a tile sees cost no time.
       len_q + len_kv must be below 2^29 then.
    chunk: query i sees keys of its own chunk alone, those j with j // chunk == (i + len_kv - len_q) // chunk, of those that the causal mask
       and the window let it see. A query before the first key sees none. Tiles and lengths as with a window.
    prefix_len: int32, [batch], on the device: all queries see the keys j < prefix_len[b] (prefix-LM), whatever the causal mask, the window
       and chunk hide; masks still hide some. What is below 0 or beyond len_kv counts as 0 or len_kv.
    document_ids: int32 or int64, [batch, len]: a query sees the keys of its own document, of those that other masks and a prefix let it
       see. Or a pair of one dtype: of queries, [batch, len_q], and of keys, [batch, len_kv]. Ids need not be in order, but where they are,
       tiles of keys of other documents cost no time. The batch may be 1 or missing: then its entries are alike.
    softcap: a scaled score s becomes softcap * tanh(s / softcap)
    alibi_slopes: fp32, [heads_q] or [batch, heads_q]: a score loses slope * |i + len_kv - len_q - j|, after the softcap. No gradient.
    sinks: [heads_q], fp32 or 16 bits: a score of each query head that joins the softmax of its rows, unscaled, with a value of 0. So P of
       a row has a sum below 1, and lse includes the sink: it is the sink where a row sees no key. They have gradients, which
       `deterministic` need not ask for, and which err by up to |lse| * 2^-24 of themselves. Finite, or -inf for none.
    bias: q's dtype or fp32, of a shape that broadcasts to [batch, heads_q, len_q, len_kv], any strides: added to scaled scores, after the
       softcap and ALiBi; -inf hides a key. It has a gradient, in its dtype, summed up in fp32; with `deterministic` only
       where no element is that of several scores.
    mask: bool, of a shape that broadcasts to [batch, heads_q, len_q, len_kv], any strides: a query sees keys where it is True, of those
       that all other masks let it see. Tiles of keys that nobody sees take as long as others.
    key_padding_mask: bool, [batch, len_kv], True where a key is none of padding: the same as mask=key_padding_mask[:, None, None].
    score_mod: a function (score, batch, head, query, key) of FlexAttention's signature, in PyTorch: what takes the place of a scaled score,
       behind softcap, ALiBi and bias. Beside alibi_slopes it must only add to it. It is traced (docs/traced-modifiers.md), and so are its
       captured tensors and numbers, which are read anew in each call: other values compile nothing. A softcap, ALiBi or a bias in it
       is the call's where it is the same thing. Captured tensors of floating-point numbers that require grad get their gradients, but not
       with deterministic=True. Or what `flashgen.compile_modifier` gives.
    mask_mod: a function (batch, head, query, key): whether a query sees a key, among those that all other masks let it see. A causal mask,
       a window or a mask in memory in it is one of the call. A kernel finds tiles of keys that no query of a tile sees, and these are not
       visited. torch.compile traces both.
    block_mask: what `flashgen.block_mask` gives, or FlexAttention's BlockMask, for len_q and len_kv, of blocks of any multiple of 16: a
       query sees the keys of its full blocks, and those of its other blocks that the block mask's own mask_mod lets it see. Other masks
       hide some of these. What FlexAttention's lists is read once, and anew when its tensors have changed.
    dropout_p: probability, from 0 to 1 and met to 2^-16, of each element of P to be dropped; the others are divided by 1 - dropout_p. Lse
       is what it is without. A seed comes from PyTorch's generator of the device, so that torch.manual_seed repeats a call, each replay of
       a CUDA graph drops other elements, and gradients know the same ones. What is dropped depends on no kernel, nor on other modifiers.
    return_dropout_mask: also return which elements are kept: bool, [batch, heads_q, len_q, len_kv]. For tests: PyTorch computes it, in time
       and memory that grow with len_q * len_kv.
    Returns out [.., head_dim_v] in q's layout, dense; with return_lse also the natural log-sum-exp of the scaled scores,
    fp32 [batch, heads_q, len_q]; then the dropout mask, if asked for. Under "bhsd" out lies in memory as q does, as that of PyTorch's
    attention: of a q that is a transposed view of [batch, len_q, heads_q, head_dim] (q.stride(1) < q.stride(2)), out is one, too, so that
    to transpose it back and to reshape that copies nothing. Gradients of q, k and v are dense, each as its tensor lies by the same rule.

    Under torch.autocast q, k and v are cast to its dtype, as those of PyTorch's attention are, unless all have one dtype of 16 bits.

    Every row whose scores, scaled and unscaled, are finite in fp32 is right; beyond that rows are NaN, and a NaN score gives NaN. A row
    that sees no key, or whose scores are all -inf, gives 0 and an lse of -inf, where plain PyTorch gives NaN. Probabilities are
    divided by their sum at the end, and until then may be 2^12 times as large: so much times the sum of |v| over the keys that a row sees
    must be finite in fp32.
    With `alibi_slopes` and causal=True Hopper's kernels may leave out a row's farthest keys, where these together can have no more than
    2^-26 of the probability of its own key, whatever their v is, be it NaN or 2^26 times as large as others (docs/kernels.md,
    "Softcap and ALiBi").

    The first call for a problem and length bucket may compile (about two seconds on Hopper); `warm` does that ahead of time.
    Raises ArgumentError for bad arguments, DriverError and CompileError for the machine's faults, CaptureError for a first
    call while a CUDA graph is captured. Out and lse have gradients (Dao 2023, algorithm 2), which autograd and torch.func give; those of k
    and v are the same to the bit in every run, deterministic or not. Asking for a second derivative, or a forward-mode one, raises
    FlashgenError.
    """
    if return_dropout_mask is not False:
        require_type("return_dropout_mask", return_dropout_mask, bool)
    modified: tuple[Any, ...] = ()  # what operators are told of modifiers
    known: Given | None = None
    is_compiled = is_dynamo_compiling()
    if (  # written out: each call asks
        window is not None
        or chunk is not None
        or prefix_len is not None
        or document_ids is not None
        or softcap is not None
        or alibi_slopes is not None
        or sinks is not None
        or bias is not None
        or mask is not None
        or key_padding_mask is not None
        or type(dropout_p) is not float
        or dropout_p != 0.0
        or score_mod is not None
        or mask_mod is not None
        or block_mask is not None
        or isinstance(causal, str)
    ):
        has_functions = score_mod is not None or mask_mod is not None or block_mask is not None
        has_padding = key_padding_mask is not None and is_compiled  # what operators raise there reaches no `except`
        of_sizes = has_functions or has_padding or document_ids is not None or isinstance(causal, str)
        call = call_of(q, k, layout, scale) if of_sizes else None
        causal, modified, known = modified_of_call(
            causal,
            window,
            softcap,
            alibi_slopes,
            sinks,
            bias,
            mask,
            key_padding_mask,
            chunk,
            prefix_len,
            document_ids,
            dropout_p,
            score_mod,
            mask_mod,
            block_mask,
            top_left=0 if call is None else call[0][2] - call[0][3],
            q=q,
            call=call,
            seed_waits=not return_dropout_mask,
        )
    try:
        if not is_compiled and (deterministic is None or isinstance(deterministic, bool)):
            if modified and known is not None:
                modifiers, tensors = known, tuple(modified[3])
            else:
                modifiers, tensors = asked(*modified) if modified else (NO_MODIFIERS, ())
            run = run_at_hand(q, k, v, causal, scale, layout, return_lse, deterministic, modifiers, tensors)
            if run is not None:
                both = run(q, k, v, return_lse, *tensors)
                only = both if return_lse else both[0]
                return _beside_mask(only, q, k, layout, dropout_p, modified) if return_dropout_mask else only  # type: ignore[return-value]  # lse is there if it is wanted
        q, k, v = cast_by_autocast(q, k, v)
        check_types(q, k, v, causal, scale, layout, return_lse, deterministic)
        if modified and known is not None:
            modified = complete(modified, known, q)
        differentiated = is_differentiated(q, k, v, *(modified[3] if modified else ()))
        if differentiated:
            found = differentiable_attention(q, k, v, causal, scale, layout, deterministic, *modified)
        else:
            found = (attention_forward if return_lse else attention_output)(q, k, v, causal, scale, layout, *modified)
    except Exception as error:
        if not is_compiling():
            if key_padding_mask is not None and str(error).startswith("mask "):
                require_padding_mask(key_padding_mask, call_of(q, k, layout, scale))
            require_together(q, k, v, error, in_mode=not nobody_listens())
        raise
    wanted = found[0] if differentiated and not return_lse else found
    return _beside_mask(wanted, q, k, layout, dropout_p, modified) if return_dropout_mask else wanted


def _beside_mask(
    found: Any, q: torch.Tensor, k: torch.Tensor, layout: str, dropout_p: float, modified: tuple[Any, ...]
) -> tuple[torch.Tensor, ...]:
    """What a call gives, and which elements of P it keeps."""
    row, head, *_ = LAYOUTS[layout]
    mask = dropout_mask(seed_of(*modified), dropout_p, q.shape[0], q.shape[head], q.shape[row], k.shape[row], q.device)
    return (*(found if isinstance(found, tuple) else (found,)), mask)
