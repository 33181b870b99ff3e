"""What a loss sees of some tokens: a few numbers per token that say all about the softmax of their logits.

The kernel measures them for a chunk of tokens in one pass over its logits, exchanges them between the ranks that share
the vocabulary in one collective, and hands them to every loss. What a loss wants beyond them is computed from the
logits, by the differentiable functions of `vocab_parallel`.
"""

from functools import cached_property

import torch

from megatron_ext.losses import vocab_parallel
from megatron_ext.losses.vocab_parallel import VocabShard


class TokenStatistics:
    """Statistics of some tokens. Each attribute is [tokens] fp32 and the same on every rank, unless it says otherwise.

    Args:
        labels: [tokens] int64.
        columns: the labels' columns on this rank and whether it holds them, see VocabShard.locate.
        shard: where this rank's columns lie.
        logits: [tokens, columns] fp32 of this rank, padding left out; None where no loss needs them.
        measured: statistics that are known already, by name.
    """

    def __init__(
        self,
        labels: torch.Tensor,
        columns: tuple[torch.Tensor, torch.Tensor],
        shard: VocabShard,
        logits: torch.Tensor | None = None,
        measured: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.labels = labels
        self.columns = columns
        self.shard = shard
        self._logits = logits
        self.measured = measured or {}
        self.__dict__.update(self.measured)  # where cached_property looks first

    def with_logits(self, logits: torch.Tensor, *, remeasure: bool = False) -> "TokenStatistics":
        """The same tokens, for losses that read the logits; `remeasure` makes everything a function of them."""
        return TokenStatistics(self.labels, self.columns, self.shard, logits, {} if remeasure else self.measured)

    def rows(self, rows: slice) -> "TokenStatistics":
        """Some of the tokens."""
        local, held = self.columns
        logits = None if self._logits is None else self._logits[rows]
        measured = {name: value[rows] for name, value in self.measured.items()}
        return TokenStatistics(self.labels[rows], (local[rows], held[rows]), self.shard, logits, measured)

    @property
    def logits(self) -> torch.Tensor:
        """[tokens, columns] fp32, this rank's. A loss that reads them has "logits" among its statistics."""
        assert self._logits is not None, 'a loss that reads logits has "logits" among its statistics'
        return self._logits

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
        return self.logsumexp - self.expectation(self.logits)

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
