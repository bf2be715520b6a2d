"""PyTorch's scaled_dot_product_attention on flashgen's kernels: one call by name, or all calls of a process while it is activated.

    from flashgen.integrations import sdpa
    out = sdpa.scaled_dot_product_attention(query, key, value, is_causal=True)

    with sdpa.enabled():  # or sdpa.activate()
        model(inputs)     # unmodified
    print(sdpa.report())

docs/integrations.md says which way each argument takes. Calls that flashgen cannot take go where they went before, and are counted.
"""

from __future__ import annotations

from .activation import activate, deactivate, enabled
from .counted import CallCounts, report
from .face import scaled_dot_product_attention

__all__ = ["CallCounts", "activate", "deactivate", "enabled", "report", "scaled_dot_product_attention"]
