"""What is reported of every token beside its losses. Measured in the same pass, never trained."""

import torch

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.statistics import TokenStatistics


class LogProbability(TokenLoss):
    """log softmax(z)_y."""

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.label_log_probability


class TokenAccuracy(TokenLoss):
    """1 where the label is the most likely token, else 0."""

    statistics = frozenset({"argmax"})

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return (tokens.argmax == tokens.labels).float()


class Entropy(TokenLoss):
    """Of the model's distribution, in nats."""

    statistics = frozenset({"entropy"})

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.entropy


TOKEN_METRICS = {"token_accuracy": TokenAccuracy, "entropy": Entropy}
