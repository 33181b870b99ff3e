"""Micro-batches: padded tensors made from encoded samples. Owns the tensors' shapes and what padding holds;
which samples go where is the loader's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.data.chat import EncodedSample

FILLER_ID = -1
FILLER = EncodedSample(input_ids=[], labels=[], loss_mask=[])
"""A row of padding alone, for ranks and micro-batches that would otherwise be short."""


@dataclass(frozen=True)
class MicroBatch:
    """b rows of s positions. `labels[i, t]` is the target of position t: nothing downstream shifts.

    Behind a row's length (stored, never inferred from ids) and in filler rows `input_ids` is the padding id,
    `labels` is 0 and `loss_mask` is 0. `sample_ids` are positions in the data set, -1 for filler rows, whose
    length is 0.
    """

    input_ids: Tensor  # [b, s] int64
    labels: Tensor  # [b, s] int64
    position_ids: Tensor  # [b, s] int64
    loss_mask: Tensor  # [b, s] float32
    lengths: Tensor  # [b] int64
    sample_ids: Tensor  # [b] int64
    cu_seqlens: Tensor | None = None  # cumulative lengths of packed rows, int32; None: rows are not packed

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MicroBatch":
        """The same micro-batch with every tensor on `device`."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value.to(device, non_blocking=non_blocking) for name, value in tensors.items()})


def collate(
    samples: Sequence[EncodedSample], sample_ids: Sequence[int], *, padded_length: int, pad_id: int
) -> MicroBatch:
    """Pad `samples` on the right to `padded_length`; a FILLER sample goes with the id -1."""
    assert samples and len(samples) == len(sample_ids), "one id per sample, and at least one sample"
    longest = max(len(sample) for sample in samples)
    assert longest <= padded_length, f"a sample of length {longest} does not fit into {padded_length}"
    shape = (len(samples), padded_length)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    labels = torch.zeros(shape, dtype=torch.int64)
    loss_mask = torch.zeros(shape, dtype=torch.float32)
    for row, sample in enumerate(samples):
        length = len(sample)
        input_ids[row, :length] = torch.tensor(sample.input_ids, dtype=torch.int64)
        labels[row, :length] = torch.tensor(sample.labels, dtype=torch.int64)
        loss_mask[row, :length] = torch.tensor(sample.loss_mask, dtype=torch.float32)
    return MicroBatch(
        input_ids=input_ids,
        labels=labels,
        position_ids=torch.arange(padded_length, dtype=torch.int64).repeat(len(samples), 1),
        loss_mask=loss_mask,
        lengths=torch.tensor([len(sample) for sample in samples], dtype=torch.int64),
        sample_ids=torch.tensor(list(sample_ids), dtype=torch.int64),
    )
