"""Losses over a tensor-parallel vocabulary. Knows nothing of models and data.

For a loss function of your own: `linear_cross_entropy`, or `linear_losses` for several losses at once; the functions
named vocab_parallel_* where there are logits. For the training loop: LossHead.
"""

from megatron_ext.losses.base import TokenLoss, build_loss, register_loss
from megatron_ext.losses.cross_entropy import CrossEntropy
from megatron_ext.losses.distillation import JSD, ForwardKL, ReverseKL
from megatron_ext.losses.head import HeadInputs, LossHead, TokenLosses
from megatron_ext.losses.linear import LinearLosses, linear_cross_entropy, linear_losses
from megatron_ext.losses.logits import LogitTransform
from megatron_ext.losses.materialized import logits_losses, vocab_parallel_cross_entropy
from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.teacher import TeacherHidden, TeacherTopK
from megatron_ext.losses.vocab_parallel import (
    VocabShard,
    vocab_parallel_argmax,
    vocab_parallel_entropy,
    vocab_parallel_expectation,
    vocab_parallel_label_logits,
    vocab_parallel_logsumexp,
)
from megatron_ext.losses.z_loss import ZLoss

__all__ = [
    "JSD",
    "CrossEntropy",
    "ForwardKL",
    "HeadInputs",
    "LinearLosses",
    "LogitTransform",
    "LossHead",
    "ReverseKL",
    "TeacherHidden",
    "TeacherTopK",
    "TokenLoss",
    "TokenLosses",
    "TokenStatistics",
    "VocabShard",
    "ZLoss",
    "build_loss",
    "linear_cross_entropy",
    "linear_losses",
    "logits_losses",
    "register_loss",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_expectation",
    "vocab_parallel_label_logits",
    "vocab_parallel_logsumexp",
]
