"""The z-loss."""

import torch

from megatron_ext.losses.base import TokenLoss, register_loss
from megatron_ext.losses.statistics import TokenStatistics


@register_loss("z_loss")
class ZLoss(TokenLoss):
    """lse(z)^2, which keeps the softmax's denominator near 1 (PaLM, Chowdhery et al. 2022, section 5)."""

    statistics = frozenset({"logsumexp"})

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.logsumexp.square()
