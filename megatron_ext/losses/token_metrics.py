"""What is reported of every token beside its losses. Measured in the same pass, never trained."""

from typing import Literal

import torch

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.teacher import TeacherTopK


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


class NegativeLogLikelihood(TokenLoss):
    """-log softmax(z)_y, whatever the configured losses are: what perplexity is made of."""

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return -tokens.label_log_probability


class TeacherEntropy(TokenLoss):
    """Of the teacher's distribution at temperature 1, in nats."""

    statistics = frozenset({"teacher_entropy"})
    needs_teacher = True

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.measured["teacher_entropy"]


class TeacherAgreement(TokenLoss):
    """1 where student and teacher find the same token most likely, else 0."""

    statistics = frozenset({"teacher_agreement"})
    needs_teacher = True

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.measured["teacher_agreement"]


class CachedTeacherAgreement(TokenLoss):
    """The same with a teacher that is known by its most likely tokens only."""

    statistics = frozenset({"logits", "argmax"})
    needs_teacher = True

    def check_top_k(self, teacher: TeacherTopK) -> None:
        """The first of them suffices."""

    def second_pass(self, tokens: TokenStatistics, top_k: TeacherTopK | None) -> dict[str, torch.Tensor]:
        assert top_k is not None
        return {"teacher_agreement": (tokens.argmax == top_k.ids[:, 0]).float()}

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.measured["teacher_agreement"]


_TEACHER_METRICS = {"teacher_entropy": TeacherEntropy, "teacher_agreement": TeacherAgreement}
_CACHED_TEACHER_METRICS = {"teacher_agreement": CachedTeacherAgreement}
_TOKEN_METRICS = {"token_accuracy": TokenAccuracy, "entropy": Entropy}
_EVALUATION_METRICS = _TOKEN_METRICS | {"negative_log_likelihood": NegativeLogLikelihood}


def chosen_metrics(
    *, token_metrics: bool, evaluates: bool, teacher: Literal["model", "cached"] | None
) -> dict[str, type[TokenLoss]]:
    """The metrics of a run, by name.

    Args:
        token_metrics: those that are asked for in the configuration.
        evaluates: those of an evaluation run.
        teacher: whom the losses compare with, if any do.
    """
    chosen = _EVALUATION_METRICS if evaluates else _TOKEN_METRICS if token_metrics else {}
    if teacher is not None:
        chosen = chosen | (_TEACHER_METRICS if teacher == "model" else _CACHED_TEACHER_METRICS)
    return dict(chosen)
