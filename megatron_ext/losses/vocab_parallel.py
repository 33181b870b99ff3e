"""Softmax arithmetic over a vocabulary that is sharded over tensor-parallel ranks.

Rank r of the group holds columns [r * v, (r + 1) * v) of a vocabulary padded to tp * v. Columns at or behind the true
vocabulary size are padding: they belong to no softmax and get no gradient. Logits are read, never written.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary this rank holds."""

    group: dist.ProcessGroup
    vocab_size: int  # of the model, without padding

    def num_local_columns(self, width: int) -> int:
        """How many of this rank's `width` columns are real tokens (0 for a rank that holds only padding)."""
        return max(0, min(width, self.vocab_size - self.group.rank() * width))

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """In place, over the ranks that share the vocabulary."""
        if self.group.size() > 1:
            dist.all_reduce(tensor, op=op, group=self.group)


def _local_labels(labels: torch.Tensor, start: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column index of each label on this rank, and whether this rank holds it; both [tokens]."""
    local = labels - start
    held = (local >= 0) & (local < num_columns)
    return local.masked_fill(~held, 0), held


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        width = logits.size(-1)
        num_columns = shard.num_local_columns(width)
        real = logits[:, :num_columns]  # [tokens, real columns]
        # a rank that holds only padding contributes the neutral element of each reduction
        if num_columns:
            maximum = real.amax(dim=-1).float()
        else:
            maximum = torch.full_like(logits[:, 0], float("-inf"), dtype=torch.float32)
        shard.all_reduce(maximum, dist.ReduceOp.MAX)

        exponentials = real.float().sub(maximum[:, None]).exp_()  # fp32, a copy of its own
        local, held = _local_labels(labels, shard.group.rank() * width, num_columns)
        sums = torch.zeros(2, logits.size(0), dtype=torch.float32, device=logits.device)
        if num_columns:
            sums[0] = exponentials.sum(dim=-1)
            label_logits = real.gather(1, local[:, None]).squeeze(1).float() - maximum
            sums[1] = torch.where(held, label_logits, 0.0)
        shard.all_reduce(sums)
        denominator, label_logits = sums

        ctx.save_for_backward(exponentials, denominator, local, held)
        ctx.logits_width, ctx.logits_dtype = width, logits.dtype
        return denominator.log() - label_logits

    @staticmethod
    def backward(ctx, upstream: torch.Tensor):
        # in place: a second backward finds a changed saved tensor and raises, as autograd does for its own functions
        exponentials, denominator, local, held = ctx.saved_tensors
        ignored = upstream == 0
        gradient = exponentials.mul_((upstream / denominator)[:, None])
        if gradient.size(1):
            subtracted = torch.where(held, upstream, 0.0)
            gradient.scatter_add_(1, local[:, None], -subtracted[:, None])
            # not left to 0 * x: an overflow at a masked position must not reach the weights
            gradient.masked_fill_(ignored[:, None], 0.0)
        padding = ctx.logits_width - gradient.size(1)
        if padding:
            gradient = torch.nn.functional.pad(gradient, (0, padding))
        return gradient.to(ctx.logits_dtype), None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Cross-entropy of each token, -log softmax(logits)[label].

    Two collectives over the group: the maximum, then the denominator and the label's logit together.

    Args:
        logits: [tokens, vocab/tp] this rank's columns, any float type; the arithmetic is fp32.
        labels: [tokens] int64 token ids of the whole vocabulary, the same on every rank.
        shard: where this rank's columns lie.

    Returns:
        [tokens] fp32, the same on every rank. The gradient with respect to the logits is
        upstream * (softmax - onehot), exactly 0 where upstream is 0, in the type of the logits.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, shard)
