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

OLDEST = (5, 17)  # of transformers, as pyproject.toml has it


def register() -> str:
    """Registers flashgen's attention with transformers, and returns the name for attn_implementation. A second call changes nothing.

    Raises ImportError without transformers, or with a version before 5.17.
    """
    import transformers
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from .calls import flashgen_attention
    from .masks import flashgen_mask

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"flashgen.integrations.transformers needs transformers {oldest} or newer; this is {transformers.__version__}")
    AttentionInterface.register(NAME, flashgen_attention)
    AttentionMaskInterface.register(NAME, flashgen_mask)
    return NAME
