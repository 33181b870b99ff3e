"""Softmax arithmetic over a vocabulary that is sharded over tensor-parallel ranks, differentiable.

Rank r of the group holds columns [r * v, (r + 1) * v) of a vocabulary padded to tp * v. Columns at or behind the true
vocabulary size are padding: they belong to no softmax and get no gradient. Logits are read, never written.

Results have one value per token and are the same on every rank. The contract of their gradients: the loss is computed
alike on every rank, so the gradient that arrives here is the whole one, equal on every rank, and each rank keeps what
concerns its own columns. A replicated value that is used among a rank's columns again goes through `copy_to_shards`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Stands for "no logit here". Finite, so that multiplying it by a sum of no exponentials gives 0 and not NaN.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary this rank holds."""

    group: dist.ProcessGroup | None  # the ranks that share the vocabulary; None: this process alone
    vocab_size: int  # of the model, without padding

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def num_local_columns(self, width: int) -> int:
        """How many of this rank's `width` columns are real tokens (0 for a rank that holds only padding)."""
        return max(0, min(width, self.vocab_size - self.rank * width))

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """In place, over the ranks that share the vocabulary."""
        if self.size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, *, async_op: bool = False) -> tuple[torch.Tensor, Any]:
        """[tp, ...] of every rank's tensor, in the order of ranks, and the work to wait for (None: it is done)."""
        if self.size == 1:
            return tensor[None], None
        gathered = tensor.new_empty(self.size, *tensor.shape)
        work = dist.all_gather_into_tensor(gathered.flatten(0, 1), tensor, group=self.group, async_op=async_op)
        return gathered, work

    def locate(self, labels: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Column of each label on this rank (0 where another rank holds it), and whether this rank holds it."""
        local = labels - self.rank * width
        held = (local >= 0) & (local < self.num_local_columns(width))
        return local.masked_fill(~held, 0), held


def real_columns(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[tokens, columns] fp32: this rank's logits without padding.

    Raises:
        ValueError: the logits are those of the whole vocabulary although the group has several ranks, or too few.
    """
    check_width(logits.size(-1), shard, "logits")
    return logits[:, : shard.num_local_columns(logits.size(-1))].float()


def check_width(width: int, shard: VocabShard, name: str) -> None:
    """Raises ValueError unless `width` columns on each rank can be one shard of the vocabulary."""
    if width * shard.size < shard.vocab_size:
        raise ValueError(
            f"{name}: {width} columns on each of {shard.size} ranks are fewer than the vocabulary of "
            f"{shard.vocab_size}; pass every rank its own shard, and the vocabulary's true size"
        )
    if shard.size > 1 and width >= shard.vocab_size:
        raise ValueError(
            f"{name}: {width} columns hold the whole vocabulary of {shard.vocab_size}, but the group has "
            f"{shard.size} ranks; pass each rank its own shard, not gathered, or no group"
        )


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        ctx.shard = shard
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor):
        return ctx.shard.all_reduce(upstream.clone()), None


class _SumOverShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        return shard.all_reduce(values.clone())

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor):
        return upstream, None


class _LogSumExp(torch.autograd.Function):
    """From each rank's own logsumexp to that of all."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        gathered, _ = shard.all_gather(local)
        total = gathered.logsumexp(dim=0)
        ctx.save_for_backward(local, total)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor):
        local, total = ctx.saved_tensors
        return upstream * (local - total).exp(), None


class _Expectation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
        gathered, _ = shard.all_gather(local_logsumexp(logits))
        probabilities = (logits - gathered.logsumexp(dim=0)[:, None]).exp_()
        # a value that is infinite where the probability is 0 counts nothing: not left to 0 * inf
        products = torch.where(probabilities > 0, probabilities * values, 0.0)
        expectation = shard.all_reduce(products.sum(dim=-1))
        ctx.save_for_backward(values, probabilities, expectation)
        return expectation

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor):
        values, probabilities, expectation = ctx.saved_tensors
        of_values = upstream[:, None] * probabilities
        centred = torch.where(probabilities > 0, values - expectation[:, None], 0.0)
        return of_values, of_values * centred, None


def local_logsumexp(columns: torch.Tensor) -> torch.Tensor:
    """[tokens] of this rank's columns alone; LOWEST for a rank that has none."""
    if columns.size(-1) == 0:
        return columns.sum(dim=-1) + LOWEST  # a sum of nothing: stays attached to the columns
    return columns.logsumexp(dim=-1)


def copy_to_shards(values: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """A replicated value for use among each rank's own columns. Backward sums what the ranks' columns want of it."""
    return _CopyToShards.apply(values, shard)


def sum_over_shards(values: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """The sum over ranks of values made from each rank's own columns. One collective."""
    return _SumOverShards.apply(values, shard)


# ------------------------------------------------------- on real columns, [tokens, columns] fp32 without padding


def logsumexp(columns: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    return _LogSumExp.apply(local_logsumexp(columns), shard)


def label_logits(columns: torch.Tensor, local: torch.Tensor, held: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """`local` and `held` as VocabShard.locate gives them."""
    if columns.size(-1) == 0:
        return sum_over_shards(columns.sum(dim=-1), shard)
    return sum_over_shards(torch.where(held, columns.gather(1, local[:, None]).squeeze(1), 0.0), shard)


def expectation(values: torch.Tensor, columns: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    return _Expectation.apply(values, columns, shard)


def entropy(columns: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """-E[log q], and not lse - E[z], whose terms cancel if the logits are far from 0."""
    log_probabilities = columns - copy_to_shards(logsumexp(columns, shard), shard)[:, None]
    return -expectation(log_probabilities, columns, shard)


# ----------------------------------------------------------- on shards with padding, [tokens, vocab/tp] any float


def vocab_parallel_logsumexp(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """log sum exp over the whole vocabulary: [tokens, vocab/tp] -> [tokens] fp32. One collective."""
    return logsumexp(real_columns(logits, shard), shard)


def vocab_parallel_label_logits(logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """The logit of each token's label: [tokens, vocab/tp], [tokens] int64 -> [tokens] fp32. One collective."""
    return label_logits(real_columns(logits, shard), *shard.locate(labels, logits.size(-1)), shard)


def vocab_parallel_expectation(values: torch.Tensor, logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """sum_j softmax(logits)_j * values_j over the whole vocabulary. Two collectives forward, none backward.

    Args:
        values: [tokens, vocab/tp] what is averaged; differentiable too.
        logits: [tokens, vocab/tp] of the distribution to average under: the model's own, or a teacher's.

    Returns:
        [tokens] fp32.
    """
    return expectation(real_columns(values, shard), real_columns(logits, shard), shard)


def vocab_parallel_entropy(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Entropy of softmax(logits) in nats: [tokens, vocab/tp] -> [tokens] fp32. Three collectives."""
    return entropy(real_columns(logits, shard), shard)


@torch.no_grad()
def vocab_parallel_argmax(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """The most likely token's id, the lowest of several: [tokens, vocab/tp] -> [tokens] int64. One collective."""
    columns = real_columns(logits, shard)
    if columns.size(-1):
        maximum, index = columns.max(dim=-1)
        index = index.float() + shard.rank * logits.size(-1)  # ids below 2**24 are exact in fp32
    else:
        maximum = columns.sum(dim=-1) + LOWEST
        index = torch.zeros_like(maximum)
    gathered, _ = shard.all_gather(torch.stack((maximum, index)))  # [tp, 2, tokens]
    best_rank = gathered[:, 0].argmax(dim=0, keepdim=True)
    return gathered[:, 1].gather(0, best_rank).squeeze(0).long()
