"""The loss head: from the last hidden states to the per-token values of every configured loss.

Plugs into Megatron-Core's GPTModel as its `output_processor`, so it works on hidden states before anything casts or
copies them. Masking, weighting and normalising are done once, by the model wrapper, not here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron_ext.config import LossConfig
from megatron_ext.losses.vocab_parallel import VocabShard, vocab_parallel_cross_entropy


class TokenLosses(NamedTuple):
    """What the head returns for one micro-batch. A tuple of tensors, because Megatron's wrappers pass those through."""

    values: torch.Tensor  # [losses, b, s] fp32, in the order of LossHead.names
    logprobs: torch.Tensor  # [b, s] fp32, log-probability of each label


class LossHead:
    """Computes the named losses of one micro-batch on the last pipeline stage.

    Args:
        losses: the configured losses by metric name.
        shard: the tensor-parallel group and the model's vocabulary size without padding.
    """

    def __init__(self, losses: Mapping[str, LossConfig], shard: VocabShard) -> None:
        self.names = list(losses)
        self.weights = [loss.weight for loss in losses.values()]
        self.shard = shard

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,  # [s, b, h]; [s/tp, b, h] under sequence parallelism
        output_layer: torch.nn.Module,
        output_weight: torch.Tensor | None,  # the tied embedding's weight, None for an untied output layer
        context: torch.Tensor,  # labels [b, s]
        **_: Any,
    ) -> TokenLosses:
        """Called by GPTModel on the last stage; the labels come as its `output_processor_context`."""
        labels = context.transpose(0, 1)  # [s, b], the order of the hidden states
        logits, _bias = output_layer(hidden_states, weight=output_weight)  # [s, b, vocab/tp]
        loss = vocab_parallel_cross_entropy(logits.flatten(0, 1), labels.flatten(), self.shard)
        cross_entropy = loss.view(labels.shape).transpose(0, 1)  # [b, s]
        values = cross_entropy.expand(len(self.names), -1, -1)  # every configured loss is cross_entropy so far
        return TokenLosses(values=values, logprobs=-cross_entropy.detach())
