"""Losses over a tensor-parallel vocabulary. Knows nothing of models and data."""

from megatron_ext.losses.head import LossHead, TokenLosses
from megatron_ext.losses.vocab_parallel import VocabShard, vocab_parallel_cross_entropy

__all__ = ["LossHead", "TokenLosses", "VocabShard", "vocab_parallel_cross_entropy"]
