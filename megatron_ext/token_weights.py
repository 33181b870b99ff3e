"""What each token of a mini-batch weighs, and the totals over the global batch that make losses layout-invariant.

A loss is sum(weight * loss) / denominator, both sums over all micro-batches on all data-parallel ranks:
- token_mean: the weight is the token's loss_mask, the denominator the sum of all of them;
- sequence_mean: the weight is its share of its sequence's loss_mask, the denominator the number of sequences that
  have any.
"""

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.data import MicroBatch
from megatron_ext.parallel import ParallelContext

Reduction = Literal["token_mean", "sequence_mean"]


class GlobalCounts(NamedTuple):
    """Of the global batch; [] float64 each, on the device."""

    denominator: torch.Tensor  # of the losses
    mask_sum: torch.Tensor  # of token metrics
    num_tokens: torch.Tensor  # that are trained
    num_input_tokens: torch.Tensor  # that are not padding


def token_weights(batch: MicroBatch, reduction: Reduction) -> torch.Tensor:
    """[b, s] fp32, before the division by the denominator. Of whole rows, not of a CP rank's part of them."""
    mask = batch.loss_mask.float()
    if reduction == "token_mean":
        return mask
    sums = _sequence_sums(batch)[batch.sequence_of_position()]
    return torch.where(sums > 0, mask / sums, 0.0).float()


def _sequence_sums(batch: MicroBatch) -> torch.Tensor:
    """[n] float64: the sum of each sequence's loss_mask, where several may share a row."""
    sums = torch.zeros(batch.lengths.numel(), dtype=torch.float64, device=batch.loss_mask.device)
    return sums.index_add(0, batch.sequence_of_position().flatten(), batch.loss_mask.double().flatten())


def count_globally(
    micro_batches: list[MicroBatch], reduction: Reduction, parallel: ParallelContext, vocab_size: int
) -> GlobalCounts:
    """The totals, known before the first forward: one small all-reduce over data-parallel ranks.

    Counted on whole rows, so that CP ranks do not count twice. Waits for the device once.

    Raises:
        ValueError: labels outside the vocabulary where they count, or masks that are negative or not finite, on this
            or another data-parallel rank; every rank raises.
    """
    problem = _problem(micro_batches, vocab_size)
    masks = torch.stack([batch.loss_mask for batch in micro_batches]).double()
    inputs = sum(batch.lengths.sum() for batch in micro_batches)
    mask_sum = masks.sum()
    sequences = sum((_sequence_sums(batch) > 0).sum() for batch in micro_batches)
    denominator = mask_sum if reduction == "token_mean" else sequences
    numbers = [denominator, mask_sum, (masks != 0).sum(), inputs, torch.tensor(float(problem is not None))]
    counts = torch.stack([torch.as_tensor(number, dtype=torch.float64) for number in numbers]).to(parallel.device)
    if parallel.dp_size > 1:
        dist.all_reduce(counts, group=parallel.pg.dp)
    if counts[-1].item():
        raise ValueError(problem or "micro_batches of another data-parallel rank have impossible labels or masks")
    return GlobalCounts(*counts[:-1])


def _problem(micro_batches: list[MicroBatch], vocab_size: int) -> str | None:
    """What is wrong with this rank's own rows."""
    for index, batch in enumerate(micro_batches):
        mask, labels = batch.loss_mask, batch.labels
        wrong = ~((mask >= 0) & (mask < float("inf")))  # NaN compares false
        outside = ((labels < 0) | (labels >= vocab_size)) & (mask != 0)
        for found, what in ((wrong, "loss_mask"), (outside, "labels")):
            rows = found.any(dim=1).nonzero()
            if not len(rows):
                continue
            row = int(rows[0])
            value = getattr(batch, what)[row][found[row]][0].item()
            reason = (
                "a weight has to be a finite number of at least 0"
                if what == "loss_mask"
                else f"the vocabulary has {vocab_size} tokens; give tokens that are not trained a loss_mask of 0"
            )
            position = int(found[row].nonzero()[0])
            sample = int(batch.sample_ids[batch.sequence_of_position()[row, position]])
            return f"micro-batch {index}, row {row} (sample {sample}): {what} holds {value}; {reason}"
    return None
