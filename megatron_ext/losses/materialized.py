"""The same losses from logits that exist all at once: simpler, dearer, and a check on the chunked head."""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.checks import check_losses, check_tokens, check_top_k, check_types
from megatron_ext.losses.cross_entropy import CrossEntropy
from megatron_ext.losses.kernel import ChunkKernel
from megatron_ext.losses.logits import LogitTransform
from megatron_ext.losses.teacher import TeacherTopK
from megatron_ext.losses.vocab_parallel import VocabShard, check_width


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        kernel: ChunkKernel,
        teacher_logits: torch.Tensor | None,
        top_k: TeacherTopK | None,
    ) -> torch.Tensor:
        teacher = None if teacher_logits is None else teacher_logits[:, : kernel.num_columns]
        products = kernel.products(logits[:, : kernel.num_columns], teacher)
        gathered, _ = kernel.shard.all_gather(kernel.measure(products, labels)[0])
        statistics = kernel.combine(gathered, labels, products if kernel.values_need_logits else None, top_k)
        ctx.kernel, ctx.names, ctx.teacher = kernel, list(statistics.measured), teacher
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
        statistics = kernel.statistics(labels, dict(zip(ctx.names, measured, strict=True)))
        upstream = upstream * upstream.new_tensor(kernel.trained)[:, None]
        ignored = (upstream == 0).all(dim=0)
        kernel.replace_by_gradient(kernel.products(columns, ctx.teacher), statistics, upstream, ignored=ignored)
        return gradient, None, None, None, None


def logits_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    losses: Mapping[str, TokenLoss],
    *,
    shard: VocabShard,
    loss_weights: Mapping[str, float] | None = None,
    transform: LogitTransform | None = None,
    teacher: torch.Tensor | TeacherTopK | None = None,
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
        teacher: whom the distillation losses compare with: logits like the student's, or its most likely tokens.
        validate: check the labels, which waits for the device once, and the number of columns.

    Returns:
        [losses, tokens] fp32, the same on every rank, differentiable with any upstream gradient. The gradient of a
        token whose upstream is 0 for every loss is exactly 0, whatever its logits are.

    Raises:
        ValueError: labels outside the vocabulary, logits that are not this rank's shard.
    """
    weights = dict.fromkeys(losses, 1.0) | dict(loss_weights or {})
    check_losses(losses, weights)
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels have the shape {tuple(labels.shape)} and logits {tuple(logits.shape)}; "
            "use [tokens] and [tokens, vocab/tp]"
        )
    check_types(labels, None, logits=logits)
    if validate:
        check_width(logits.size(-1), shard, "logits")
        check_tokens(labels, None, shard.vocab_size)
    trained = [weights[name] != 0 for name in losses]
    kernel = ChunkKernel(list(losses.values()), trained, shard, logits.size(-1), transform or LogitTransform())
    comparing = {name: loss for name, loss in losses.items() if loss.needs_teacher}
    if comparing and teacher is None:
        raise ValueError(f"losses: {list(comparing)} compare with a teacher, but teacher is None; pass logits or top k")
    if comparing and isinstance(teacher, TeacherTopK):
        check_top_k(teacher, comparing.values(), labels)
    elif comparing and teacher.shape != logits.shape:
        raise ValueError(
            f"teacher: logits have the shape {tuple(teacher.shape)}, the student's {tuple(logits.shape)}; "
            "both need the same tokens and columns"
        )
    if isinstance(teacher, TeacherTopK):
        return _FromLogits.apply(logits, labels, kernel, None, teacher.flatten())
    return _FromLogits.apply(logits, labels, kernel, teacher, None)


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """-log softmax(logits)[label] of each token, [tokens] fp32; see `logits_losses`."""
    return logits_losses(logits, labels, {"cross_entropy": CrossEntropy()}, shard=shard)[0]
