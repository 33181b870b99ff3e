"""The same losses from logits that exist all at once: simpler, dearer, and a check on the chunked head."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.checks import check_losses, check_tokens
from megatron_ext.losses.cross_entropy import CrossEntropy
from megatron_ext.losses.kernel import ChunkKernel, LogitTransform
from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.vocab_parallel import VocabShard, check_width


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, kernel: ChunkKernel) -> torch.Tensor:
        columns = logits[:, : kernel.num_columns]
        partials = kernel.measure(columns, labels, overwrite=False)
        gathered, _ = kernel.shard.all_gather(partials)
        statistics = kernel.combine(gathered, labels, kernel.logits(columns) if kernel.values_need_logits else None)
        ctx.kernel, ctx.names = kernel, list(statistics.measured)
        ctx.save_for_backward(logits, labels, *statistics.measured.values())
        return kernel.values(statistics)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor):  # [losses, tokens]
        logits, labels, *measured = ctx.saved_tensors
        kernel: ChunkKernel = ctx.kernel
        gradient = torch.zeros_like(logits)
        columns = gradient[:, : kernel.num_columns]
        columns.copy_(logits[:, : kernel.num_columns])
        tokens = TokenStatistics(
            labels,
            kernel.shard.locate(labels, kernel.width),
            kernel.shard,
            kernel.logits(columns) if kernel.gradient_needs_logits else None,
            dict(zip(ctx.names, measured, strict=True)),
        )
        upstream = upstream * upstream.new_tensor(kernel.trained)[:, None]
        kernel.replace_by_gradient(columns, tokens, upstream, ignored=(upstream == 0).all(dim=0))
        return gradient, None, None


def logits_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    losses: Mapping[str, TokenLoss],
    *,
    shard: VocabShard,
    loss_weights: Mapping[str, float] | None = None,
    transform: LogitTransform | None = None,
    validate: bool = True,
) -> torch.Tensor:
    """Several losses of each token from its logits. One collective over `shard.group`.

    Args:
        logits: [tokens, vocab/tp] this rank's columns, padding included; any float type, fp32 arithmetic. Only read.
        labels: [tokens] int64 token ids of the whole vocabulary, the same on every rank.
        losses: what to compute, by name.
        shard: the group that shares the vocabulary, and the vocabulary's true size.
        loss_weights: losses of weight 0 get no gradient here; other weights are the caller's to apply.
        transform: scale and softcap of the logits; None for neither.
        validate: check the labels, which waits for the device once.

    Returns:
        [losses, tokens] fp32, the same on every rank, differentiable with any upstream gradient. The gradient of a
        token whose upstream is 0 for every loss is exactly 0, whatever its logits are.

    Raises:
        ValueError: labels outside the vocabulary, logits that are not this rank's shard.
    """
    weights = dict.fromkeys(losses, 1.0) | dict(loss_weights or {})
    check_losses(losses, weights)
    check_width(logits.size(-1), shard, "logits")
    if validate:
        check_tokens(labels, None, shard.vocab_size)
    trained = [weights[name] != 0 for name in losses]
    kernel = ChunkKernel(list(losses.values()), trained, shard, logits.size(-1), transform or LogitTransform())
    return _FromLogits.apply(logits, labels, kernel)


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """-log softmax(logits)[label] of each token, [tokens] fp32; see `logits_losses`."""
    return logits_losses(logits, labels, {"cross_entropy": CrossEntropy()}, shard=shard)[0]
