"""Micro-batches: padded tensors made from encoded samples. Owns the tensors' shapes, where in them a sequence lies, and
what padding holds; which samples go where is the loader's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ext.data.chat import EncodedSample
from megatron_ext.data.packing import aligned

FILLER_ID = -1
FILLER = EncodedSample(input_ids=[], labels=[], loss_mask=[])
"""A row of padding alone, for ranks and micro-batches that would otherwise be short."""


@dataclass(frozen=True)
class MicroBatch:
    """b rows of s positions. `labels[i, t]` is the target of position t: nothing downstream shifts.

    A row is one of the n sequences, b = n; or it is packed: `cu_seqlens` is set, b = 1, and sequence i has the row's
    positions from cu_seqlens[i] up to cu_seqlens[i + 1], its `lengths[i]` tokens in front and padding behind them.
    From cu_seqlens[n] on there is padding alone.

    Behind a sequence's length (stored, never inferred from ids) and in fillers `input_ids` is the padding id,
    `labels` is 0 and `loss_mask` is 0. `sample_ids` are positions in the data set, -1 for fillers, whose length is 0.
    """

    input_ids: Tensor  # [b, s] int64
    labels: Tensor  # [b, s] int64
    position_ids: Tensor  # [b, s] int64, from 0 in each sequence
    loss_mask: Tensor  # [b, s] float32
    lengths: Tensor  # [n] int64
    sample_ids: Tensor  # [n] int64
    cu_seqlens: Tensor | None = None  # [n + 1] int32, starts at 0, ascends; None: rows are not packed

    def sequence_of_position(self) -> Tensor:
        """[b, s] int64: which of the n sequences a position belongs to; padding belongs to the one before it."""
        b, s = self.input_ids.shape
        device = self.lengths.device
        if self.cu_seqlens is None:
            return torch.arange(b, device=device)[:, None].expand(b, s)
        starts = self.cu_seqlens[:-1].long()
        return torch.searchsorted(starts, torch.arange(s, device=device), right=True)[None] - 1

    def is_token(self) -> Tensor:
        """[b, s] bool: the positions that are not padding."""
        position = torch.arange(self.input_ids.size(1), device=self.lengths.device)[None]
        if self.cu_seqlens is None:
            return position < self.lengths[:, None]
        ends = self.cu_seqlens[:-1] + self.lengths
        return position < ends[self.sequence_of_position()]

    def spans(self) -> list[tuple[int, slice]]:
        """Row and positions of each sequence's tokens; a filler's are empty."""
        lengths = self.lengths.tolist()
        if self.cu_seqlens is None:
            return [(row, slice(0, length)) for row, length in enumerate(lengths)]
        starts = self.cu_seqlens.tolist()[:-1]
        return [(0, slice(start, start + length)) for start, length in zip(starts, lengths, strict=True)]

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


def collate_packed(
    samples: Sequence[EncodedSample], sample_ids: Sequence[int], *, multiple: int = 1, padded_length: int, pad_id: int
) -> MicroBatch:
    """One row that holds all `samples`, each padded to a multiple; without any sample it holds one filler."""
    if not samples:
        samples, sample_ids = [FILLER], [FILLER_ID]
    assert len(samples) == len(sample_ids), "one id per sample"
    sizes = [aligned(len(sample), multiple) for sample in samples]
    assert sum(sizes) <= padded_length, f"samples of {sum(sizes)} positions do not fit into {padded_length}"
    input_ids = torch.full((1, padded_length), pad_id, dtype=torch.int64)
    labels = torch.zeros(1, padded_length, dtype=torch.int64)
    position_ids = torch.zeros(1, padded_length, dtype=torch.int64)
    loss_mask = torch.zeros(1, padded_length, dtype=torch.float32)
    start = 0
    for sample, size in zip(samples, sizes, strict=True):
        own = slice(start, start + len(sample))
        input_ids[0, own] = torch.tensor(sample.input_ids, dtype=torch.int64)
        labels[0, own] = torch.tensor(sample.labels, dtype=torch.int64)
        loss_mask[0, own] = torch.tensor(sample.loss_mask, dtype=torch.float32)
        position_ids[0, start : start + size] = torch.arange(size)
        start += size
    return MicroBatch(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        loss_mask=loss_mask,
        lengths=torch.tensor([len(sample) for sample in samples], dtype=torch.int64),
        sample_ids=torch.tensor(list(sample_ids), dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32),
    )
