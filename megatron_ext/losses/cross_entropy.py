"""Next-token cross-entropy."""

import torch

from megatron_ext.losses.base import TokenLoss, register_loss
from megatron_ext.losses.statistics import TokenStatistics


@register_loss("cross_entropy")
class CrossEntropy(TokenLoss):
    """lse(z) - (1 - s) z_y - s mean(z): the cross-entropy against (1 - s) onehot(y) + s uniform, s label_smoothing.

    The mean is over the true vocabulary, whatever the tensor-parallel layout and its padding.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing: {label_smoothing} is not a share; use a number of at least 0 below 1")
        self.label_smoothing = label_smoothing
        if label_smoothing:
            self.statistics = self.statistics | {"mean_logits"}

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        if not self.label_smoothing:
            return tokens.logsumexp - tokens.label_logits
        target = torch.lerp(tokens.label_logits, tokens.mean_logits, self.label_smoothing)
        return tokens.logsumexp - target
