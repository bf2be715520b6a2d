"""transformers' models with flashgen's attention: `register()` adds the attention and the mask interface of the name that it returns.

    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, attn_implementation=register())

What belongs here: the adapters to transformers' interfaces. transformers itself is imported by `register`.
"""

from __future__ import annotations

from .counts import AttentionReport, report

__all__ = ["NAME", "AttentionReport", "register", "report"]

NAME = "fgen_attention"
"""The name for attn_implementation. transformers takes any that has "flash" in it for FlashAttention's kernels: it refuses long chunks, and
gives some models other kernels instead, of a hub."""

OLDEST, TOO_NEW = (5, 17), (6,)  # versions of transformers: from the first on, before the second, as pyproject.toml has it


def register() -> str:
    """Registers flashgen's attention with transformers, and returns the name for attn_implementation. A second call changes nothing.

    Raises ImportError without transformers, or with a version before 5.17 or from 6 on.
    """
    import transformers

    if not OLDEST <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) < TOO_NEW:
        oldest, too_new = (".".join(map(str, version)) for version in (OLDEST, TOO_NEW))
        found = transformers.__version__
        raise ImportError(f"flashgen.integrations.transformers needs transformers {oldest} or newer, below {too_new}; this is {found}")

    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from .calls import flashgen_attention
    from .masks import flashgen_mask

    AttentionInterface.register(NAME, flashgen_attention)
    AttentionMaskInterface.register(NAME, flashgen_mask)
    return NAME
