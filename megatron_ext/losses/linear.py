"""The public functions of the chunked head: several losses, or cross-entropy, of hidden states times the output weight.

[tokens, vocab/tp] never exists; how that is done is `chunked`'s.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.checks import check_arguments, check_teacher
from megatron_ext.losses.chunked import ChunkTokens, LinearProblem, MadeInForward, Recomputed, measure, measure_weighted
from megatron_ext.losses.cross_entropy import CrossEntropy
from megatron_ext.losses.logits import LogitTransform
from megatron_ext.losses.teacher import Teacher
from megatron_ext.losses.vocab_parallel import VocabShard


class LinearLosses(NamedTuple):
    """What `linear_losses` returns."""

    total: torch.Tensor | None  # [] fp32; None without token weights
    values: torch.Tensor  # [losses, *labels' shape] fp32


def linear_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    losses: Mapping[str, TokenLoss],
    *,
    shard: VocabShard,
    token_weights: torch.Tensor | None = None,
    loss_weights: Mapping[str, float] | None = None,
    tokens: torch.Tensor | None = None,
    transform: LogitTransform | None = None,
    chunk_tokens: ChunkTokens = "auto",
    sequence_parallel: bool = False,
    gradient_scale: torch.Tensor | float = 1.0,
    teacher: Teacher | None = None,
    validate: bool = True,
) -> LinearLosses:
    """Several losses of each token, from one pass over the logits hidden @ weight.T.

    The product is made in the hidden's type (a weight of another type is cast once), everything after it in fp32.
    Gradients of the hidden states have their type; those of the weight are summed over chunks in fp32 (of only two
    16-bit chunks by the product itself) and go to `weight.main_grad` where Megatron's DDP has made one.

    Collectives over `shard.group`, by call: with token weights and a gradient, one small one a chunk ([3 to 6, chunk]
    numbers, hidden behind the next chunk's product) and one for the hidden's gradient; otherwise one small one in
    all, and one for the hidden's gradient in backward; with sequence_parallel one more to gather the hidden states
    (twice without token weights). Losses that compute with the logits themselves add their own, once a chunk.

    Args:
        hidden: [tokens, h] or [s, b, h], any float type; [s/tp, b, h] with sequence_parallel.
        weight: [vocab/tp, h] this rank's rows of the output weight, padding included.
        labels: [tokens] or [s, b] int64 token ids of the whole vocabulary, the same on every rank.
        losses: what to compute, by name.
        shard: the group that shares the vocabulary, and the vocabulary's true size.
        token_weights: like labels, float, not negative. Given, `total` = sum of weight * loss over tokens and losses
            is returned and differentiable, and its gradient is made in forward: backward can be called once. Tokens
            of weight 0 are not computed (their values are 0), whatever their hidden states and labels are. They
            have no gradient of their own.
            Not given, `values` are differentiable, with any upstream gradient.
        loss_weights: weight of each loss in the total; default 1. A loss of weight 0 has a value and no gradient.
        tokens: int64 indices of the tokens to compute, for callers that know where token_weights is not 0 without
            asking the device.
        transform: scale and softcap of the logits; None for neither.
        chunk_tokens: tokens in a chunk; "auto" bounds the logits in memory to 512 MiB, on a CPU to the size of the
            weight's fp32 gradient where that is less, but not to less than 96 MiB; without a gradient twice that. On a
            CPU the memory is kept for the next call.
        sequence_parallel: the hidden states are divided over the group along the sequence.
        gradient_scale: the upstream gradient that `total` will get, such as a loss scale of fp16. Any other upstream
            is exact too; knowing it keeps gradients in the range of a 16-bit type.
        teacher: whom the distillation losses compare with.
        validate: check labels and token weights, which waits for the device once, and the number of rows.

    Returns:
        total, and the values of each loss, in the order of `losses`.

    Raises:
        ValueError: shapes that do not fit, labels outside the vocabulary or token weights that are negative or not
            numbers, a weight that is not this rank's shard. Alike on every rank that was given the same tokens.
        RuntimeError: in backward, when gradients made in forward are asked for a second time.
    """
    loss_weights = dict.fromkeys(losses, 1.0) | dict(loss_weights or {})
    check_arguments(
        hidden, weight, labels, token_weights, losses, loss_weights, shard, chunk_tokens, sequence_parallel, validate
    )
    check_teacher(teacher, losses.values(), hidden, weight, labels)
    problem = LinearProblem(
        losses=list(losses.values()),
        loss_weights=[loss_weights[name] for name in losses],
        shard=shard,
        transform=transform or LogitTransform(),
        chunk_tokens=chunk_tokens,
        sequence_parallel=sequence_parallel,
        gradient_scale=gradient_scale,
        teacher=teacher,
    )
    with torch.autocast(hidden.device.type, enabled=False):  # the types are chosen here
        weights = None if token_weights is None else token_weights.flatten().float()
        total, values = _compute(problem, hidden, weight, labels.flatten(), weights, tokens)
    return LinearLosses(total, values.view(len(losses), *labels.shape))


def _compute(
    problem: LinearProblem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,  # [tokens], as the next two
    token_weights: torch.Tensor | None,
    tokens: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Choose between the ways to a gradient, and none."""
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad) and any(problem.loss_weights)
    if token_weights is None:
        if trains:
            return None, Recomputed.apply(hidden, weight, labels, problem)
        return None, measure(problem, hidden, weight, labels)[0]
    if tokens is None:
        tokens = token_weights.nonzero().squeeze(1)
    if len(tokens) == len(labels):
        tokens = None  # all of them, in whatever order they were named
    if trains:
        return MadeInForward.apply(hidden, weight, labels, token_weights, tokens, problem)
    return measure_weighted(problem, hidden, weight, labels, token_weights, tokens)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    chunk_tokens: ChunkTokens = "auto",
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """Cross-entropy of softmax(hidden @ weight.T), without the logits ever being there at once.

    For a loss function of your own; see `linear_losses` for the arguments, several losses and what is communicated.

    Args:
        group: the tensor-parallel group; None for a weight that is not sharded.
        vocab_size: the vocabulary's size without padding; None if it has none.

    Returns:
        Without token_weights the loss of each token, [tokens] or [s, b] fp32, differentiable with any upstream.
        With them their weighted sum, [] fp32, at a quarter less work: for a mean, divide the weights beforehand.
    """
    size = 1 if group is None else group.size()
    shard = VocabShard(group, weight.size(0) * size if vocab_size is None else vocab_size)
    result = linear_losses(
        hidden,
        weight,
        labels,
        {"cross_entropy": CrossEntropy(label_smoothing)},
        shard=shard,
        token_weights=token_weights,
        transform=LogitTransform(logit_scale, logit_softcap),
        chunk_tokens=chunk_tokens,
        sequence_parallel=sequence_parallel,
    )
    return result.values[0] if result.total is None else result.total
