"""Cuts the samples of one step into a data-parallel rank's micro-batches, one sample a row or packed. Owns the split
over ranks and micro-batches, and the padded length. Which samples a step has is loader.py's, which of them share a row
packing.py's.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from megatron_ext.data.batch import FILLER, FILLER_ID, MicroBatch, collate, collate_packed
from megatron_ext.data.chat import EncodedSample
from megatron_ext.data.packing import aligned, pack

PadTo = Literal["longest", "seq_length"]


class Samples(Protocol):
    """What the loaders need of a data set; SFTDataset is one."""

    fingerprint: str
    max_length: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> EncodedSample: ...

    def length(self, index: int) -> int: ...


class Batcher:
    """Cuts a step's samples into one rank's equally long micro-batches."""

    def __init__(
        self,
        dataset: Samples,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        pad_multiple: int,
        pad_to: PadTo,
        seq_length: int,
        pad_id: int,
        micro_batches_multiple: int,
        packing: bool,
        packing_multiple: int,
    ) -> None:
        sizes = {"micro_batch_size": micro_batch_size, "dp_size": dp_size, "pad_multiple": pad_multiple}
        sizes |= {"micro_batches_multiple": micro_batches_multiple, "packing_multiple": packing_multiple}
        for name, value in (sizes | {"seq_length": seq_length}).items():
            if value < 1:
                raise ValueError(f"{name} {value} is not positive; give at least 1")
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} is outside 0 to {dp_size - 1}; give this rank's own")
        if pad_id < 0:
            raise ValueError(f"pad_id {pad_id} is not a token id; give any id of the vocabulary")
        if pad_to not in ("longest", "seq_length"):
            raise ValueError(f"pad_to {pad_to!r} is unknown; use longest or seq_length")
        if seq_length % pad_multiple:
            raise ValueError(
                f"seq_length {seq_length} is not divisible by {pad_multiple}, as the parallel layout needs "
                f"of padded lengths; use {seq_length + -seq_length % pad_multiple}"
            )
        if packing and pad_multiple % packing_multiple:
            raise ValueError(
                f"packing_multiple {packing_multiple} does not divide pad_multiple {pad_multiple}; give what the "
                "parallel layout needs of each packed sequence (2 x CP with context parallelism, else 1)"
            )
        if len(dataset) == 0:
            raise ValueError("the data set is empty; give one with at least one sample")
        if dataset.max_length > seq_length:
            raise ValueError(
                f"the data set holds a sample of {dataset.max_length} positions, more than seq_length "
                f"{seq_length}; encode it with this seq_length"
            )
        self.dataset = dataset
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.pad_multiple = pad_multiple
        self.pad_to = pad_to
        self.seq_length = seq_length
        self.pad_id = pad_id
        self.micro_batches_multiple = micro_batches_multiple
        self.packing = packing
        self.packing_multiple = packing_multiple

    @property
    def capacity(self) -> int:
        """Positions of a packed row: those of an unpacked micro-batch."""
        return self.micro_batch_size * self.seq_length

    def num_micro_batches(self, num_samples: int) -> int:
        """Of each rank for so many samples that are not packed."""
        return self._round_up(-(-num_samples // (self.micro_batch_size * self.dp_size)))

    def make(self, indices: Sequence[int]) -> list[MicroBatch]:
        """This rank's micro-batches of a step over the samples `indices`, made up with fillers."""
        return self._make_packed(indices) if self.packing else self._make_unpacked(indices)

    def _make_unpacked(self, indices: Sequence[int]) -> list[MicroBatch]:
        rows_per_rank = self.num_micro_batches(len(indices)) * self.micro_batch_size
        ids = list(indices[self.dp_rank * rows_per_rank : (self.dp_rank + 1) * rows_per_rank])
        samples = [self.dataset[index] for index in ids]
        missing = rows_per_rank - len(ids)
        ids += [FILLER_ID] * missing
        samples += [FILLER] * missing
        padded_length = self._padded_length(max(len(sample) for sample in samples))
        size = self.micro_batch_size
        return [
            collate(
                samples[first : first + size],
                ids[first : first + size],
                padded_length=padded_length,
                pad_id=self.pad_id,
            )
            for first in range(0, rows_per_rank, size)
        ]

    def _make_packed(self, indices: Sequence[int]) -> list[MicroBatch]:
        lengths = [self.dataset.length(index) for index in indices]
        multiple = self.packing_multiple
        rows = pack(
            lengths,
            capacity=self.capacity,
            multiple=multiple,
            rows_multiple=self.dp_size * self.micro_batches_multiple,
        )
        per_rank = len(rows) // self.dp_size
        own = rows[self.dp_rank * per_rank : (self.dp_rank + 1) * per_rank]
        longest = max(sum(aligned(lengths[i], multiple) for i in row) for row in own)
        padded_length = self._padded_length(longest)
        return [
            collate_packed(
                [self.dataset[indices[i]] for i in row],
                [indices[i] for i in row],
                multiple=multiple,
                padded_length=padded_length,
                pad_id=self.pad_id,
            )
            for row in own
        ]

    def _padded_length(self, longest: int) -> int:
        if self.pad_to == "seq_length":
            return self.capacity if self.packing else self.seq_length
        return aligned(longest, self.pad_multiple)

    def _round_up(self, num_micro_batches: int) -> int:
        multiple = self.micro_batches_multiple
        return -(-num_micro_batches // multiple) * multiple
