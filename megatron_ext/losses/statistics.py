"""What a loss sees of some tokens: a few numbers per token that say all about the softmax of their logits.

The kernel measures them for a chunk of tokens in one pass over its logits, exchanges them between the ranks that share
the vocabulary in one collective, and hands them to every loss. What a loss wants beyond them is computed from the
logits, by the differentiable functions of `vocab_parallel`.
"""

from collections.abc import Iterator
from functools import cached_property

import torch

from megatron_ext.losses import vocab_parallel
from megatron_ext.losses.logits import ChunkProducts, LogitTransform
from megatron_ext.losses.vocab_parallel import VocabShard

# fp32 numbers that stay in a CPU's caches between the steps of a pass
_CACHED_ELEMENTS = 2**19


def rows_at_once(logits: torch.Tensor, *, times: int = 1) -> int:
    """Rows of [rows, columns] to go through together: as many as a CPU's caches hold, all of them on a GPU.

    Args:
        times: as much as that; for one operation over a row, which needs the caches for that row alone.
    """
    num_rows, num_columns = logits.shape
    if logits.device.type != "cpu":
        return max(1, num_rows)
    return max(1, min(num_rows, times * _CACHED_ELEMENTS // max(1, num_columns)))


def row_blocks(logits: torch.Tensor, step: int | None = None) -> Iterator[slice]:
    """Slices of `step` rows, of `rows_at_once` if it is None."""
    step = rows_at_once(logits) if step is None else step
    for start in range(0, len(logits), step):
        yield slice(start, min(start + step, len(logits)))


class TokenStatistics:
    """Statistics of some tokens. Each attribute is [tokens] fp32 and the same on every rank, unless it says otherwise.

    Args:
        labels: [tokens] int64.
        columns: the labels' columns on this rank and whether it holds them, see VocabShard.locate.
        shard: where this rank's columns lie.
        first_column: the token id of this rank's first column.
        products: where logits come from; None where no loss needs them.
        measured: statistics that are known already, by name: [tokens, ...] each.
    """

    def __init__(
        self,
        labels: torch.Tensor,
        columns: tuple[torch.Tensor, torch.Tensor],
        shard: VocabShard,
        first_column: int,
        products: ChunkProducts | None = None,
        measured: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.labels = labels
        self.columns = columns
        self.shard = shard
        self.first_column = first_column
        self._products = products
        self.measured = measured or {}
        self.__dict__.update(self.measured)  # where cached_property looks first

    def with_products(self, products: ChunkProducts) -> "TokenStatistics":
        """The same tokens, for losses that read the logits."""
        return TokenStatistics(self.labels, self.columns, self.shard, self.first_column, products, self.measured)

    def with_measured(self, measured: dict[str, torch.Tensor]) -> "TokenStatistics":
        """The same tokens with these statistics in place of the known ones."""
        return TokenStatistics(self.labels, self.columns, self.shard, self.first_column, self._products, measured)

    def as_function_of(self, logits: torch.Tensor) -> "TokenStatistics":
        """The same tokens, everything computed from `logits` [tokens, columns] fp32, for autograd."""
        products = ChunkProducts(logits, LogitTransform())
        return TokenStatistics(self.labels, self.columns, self.shard, self.first_column, products)

    def rows(self, rows: slice) -> "TokenStatistics":
        """Some of the tokens."""
        local, held = self.columns
        products = None if self._products is None else self._products.rows(rows)
        measured = {name: value[rows] for name, value in self.measured.items()}
        columns = (local[rows], held[rows])
        return TokenStatistics(self.labels[rows], columns, self.shard, self.first_column, products, measured)

    def blocks(self) -> Iterator[tuple[slice, "TokenStatistics"]]:
        """All tokens, so few at a time that what is computed of their logits stays in a CPU's caches."""
        assert self._products is not None
        for rows in row_blocks(self._products.student):
            yield rows, self.rows(rows)

    @cached_property
    def logits(self) -> torch.Tensor:
        """[tokens, columns] fp32, this rank's. A loss that reads them has "logits" among its statistics."""
        assert self._products is not None, 'a loss that reads logits has "logits" among its statistics'
        return self._products.logits()

    @cached_property
    def teacher_logits(self) -> torch.Tensor:
        """[tokens, columns] fp32, this rank's columns of the teacher."""
        assert self._products is not None, 'a loss that reads logits has "logits" among its statistics'
        return self._products.teacher_logits()

    @cached_property
    def logsumexp(self) -> torch.Tensor:
        """Logarithm of the softmax's denominator."""
        return vocab_parallel.logsumexp(self.logits, self.shard)

    @cached_property
    def label_logits(self) -> torch.Tensor:
        """The label's logit."""
        return vocab_parallel.label_logits(self.logits, *self.columns, self.shard)

    @cached_property
    def mean_logits(self) -> torch.Tensor:
        """Mean of the logits over the true vocabulary."""
        return self.sum_over_vocabulary(self.logits) / self.shard.vocab_size

    @cached_property
    def entropy(self) -> torch.Tensor:
        """Of the softmax, in nats."""
        return vocab_parallel.entropy(self.logits, self.shard)

    @cached_property
    def argmax(self) -> torch.Tensor:
        """[tokens] int64, the most likely token's id. Measured where it is asked for; it has no gradient."""
        raise AttributeError("argmax was not measured; name it among the loss's statistics")

    @property
    def label_log_probability(self) -> torch.Tensor:
        return self.label_logits - self.logsumexp

    @property
    def log_probabilities(self) -> torch.Tensor:
        """[tokens, columns], of this rank's part of the vocabulary."""
        return self.logits - vocab_parallel.copy_to_shards(self.logsumexp, self.shard)[:, None]

    def expectation(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values` [tokens, columns] under the softmax."""
        return vocab_parallel.expectation(values, self.logits, self.shard)

    def sum_over_vocabulary(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` [tokens, columns] over the whole vocabulary."""
        return vocab_parallel.sum_over_shards(values.sum(dim=-1), self.shard)
