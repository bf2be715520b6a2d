"""Sinks for kernels whose q is multiplied by something."""

from __future__ import annotations

import torch


def put_near_scores(sinks: torch.Tensor, magnitude: float, few_keys: bool = False) -> None:
    """Moves sinks, as verification draws them, to about the highest scores of rows whose q is `magnitude` times N(0, 1).

    few_keys: whether rows see so few that their highest score is about as high as any, as with the slopes of ALiBi

    Far above them out would be too small for fp16, and far below nothing would be left of their gradients.
    """
    sinks.sub_(4).mul_(0.7).add_(0.0 if few_keys else 4 * magnitude if magnitude < 100 else 3 * magnitude)
