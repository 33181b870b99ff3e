"""Which samples each data-parallel rank sees at each step, for training (endless, resumable) and for
evaluation (each sample exactly once). Owns the order and the split over ranks and micro-batches, not the
samples.

Order. Epoch e is a permutation of the data set drawn from (seed, e); the epochs follow one another without a
gap in one endless stream. A step takes the next global_batch_size samples of it, so a global batch may cross
from one epoch into the next, and the order depends on (seed, consumed samples) alone.

Split. Data-parallel rank r takes the r-th contiguous block of global_batch_size / dp_size samples and cuts
it, in order, into micro-batches. The samples of step k, read over ranks 0, 1, ... and their micro-batches in
turn, are therefore the same list for every data-parallel size and micro-batch size.

Within a step every rank has the same number of micro-batches, and those of one rank share one padded length.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch

from megatron_ext.data.batch import FILLER, FILLER_ID, MicroBatch, collate
from megatron_ext.data.chat import EncodedSample

PadTo = Literal["longest", "seq_length"]


class Samples(Protocol):
    """What the loaders need of a data set; SFTDataset is one."""

    fingerprint: str
    max_length: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> EncodedSample: ...


class SampleOrder:
    """The endless stream of sample indices: one permutation per epoch, or file order without `shuffle`."""

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._permutation: list[int] = []

    def take(self, start: int, count: int) -> list[int]:
        """The stream's entries start, ..., start + count - 1."""
        indices: list[int] = []
        while count > 0:
            epoch, offset = divmod(start, self.num_samples)
            part = self._indices_of(epoch)[offset : offset + count]
            indices += part
            start += len(part)
            count -= len(part)
        return indices

    def _indices_of(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            if self.shuffle:
                # Hashed, so that (seed, epoch) and (seed + 1, epoch - 1) have nothing in common.
                digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
                self._permutation = torch.randperm(self.num_samples, generator=generator).tolist()
            elif not self._permutation:
                self._permutation = list(range(self.num_samples))
            self._epoch = epoch
        return self._permutation


class _Batcher:
    """Cuts one rank's rows of a step into equally long micro-batches."""

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
    ) -> None:
        sizes = {"micro_batch_size": micro_batch_size, "dp_size": dp_size, "pad_multiple": pad_multiple}
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

    def make(self, indices: Sequence[int], num_micro_batches: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step over the samples `indices`, made up with filler rows."""
        rows_per_rank = num_micro_batches * self.micro_batch_size
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

    def _padded_length(self, longest: int) -> int:
        if self.pad_to == "seq_length":
            return self.seq_length
        multiple = self.pad_multiple
        return max(1, -(-longest // multiple)) * multiple


class TrainLoader:
    """This data-parallel rank's part of each training step, without end.

    `pad_multiple` is what the parallel layout needs of a padded length (2 x CP, times TP under sequence
    parallelism). Raises ValueError when the sizes do not divide.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        seed: int,
        shuffle: bool = True,
        pad_multiple: int = 1,
        pad_to: PadTo = "longest",
        seq_length: int,
        pad_id: int,
    ) -> None:
        self._batcher = _Batcher(
            dataset,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            pad_multiple=pad_multiple,
            pad_to=pad_to,
            seq_length=seq_length,
            pad_id=pad_id,
        )
        per_pass = micro_batch_size * dp_size
        if global_batch_size < 1 or global_batch_size % per_pass:
            raise ValueError(
                f"global_batch_size {global_batch_size} is not a positive multiple of micro_batch_size "
                f"{micro_batch_size} x data-parallel size {dp_size}; use a multiple of {per_pass}"
            )
        self._dataset = dataset
        self._order = SampleOrder(len(dataset), seed=seed, shuffle=shuffle)
        self.global_batch_size = global_batch_size
        self.num_micro_batches = global_batch_size // per_pass
        self.consumed_samples = 0

    def next_step(self) -> list[MicroBatch]:
        """The next step's micro-batches for this rank (`num_micro_batches` of them)."""
        indices = self._order.take(self.consumed_samples, self.global_batch_size)
        self.consumed_samples += self.global_batch_size
        return self._batcher.make(indices, self.num_micro_batches)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands and of what it is made; equal on every rank."""
        return {"consumed_samples": self.consumed_samples, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, under any data-parallel size, micro-batch and global batch size.

        Raises ValueError naming the difference when the data set, the seed or the shuffling is another.
        """
        identity = self._identity()
        wrong_keys = state.keys() ^ {"consumed_samples", *identity}
        if wrong_keys:
            raise ValueError(
                f"the data state has missing or unknown entries ({', '.join(sorted(wrong_keys))}), so it was "
                "not written by this loader; load a checkpoint of this project"
            )
        consumed = state["consumed_samples"]
        if isinstance(consumed, bool) or not isinstance(consumed, int) or consumed < 0:
            raise ValueError(f"consumed_samples {consumed!r} in the data state is not a count; the state is damaged")
        differences = [
            f"{name} was {_abridge(state[name])} and is now {_abridge(value)}"
            for name, value in identity.items()
            if state[name] != value
        ]
        if differences:
            raise ValueError(
                f"the run cannot be continued on other data: {'; '.join(differences)} (the fingerprint "
                "covers the rows, the tokenizer, the chat template and seq_length); restore them, or start "
                "a new run with finetune: true"
            )
        self.consumed_samples = consumed

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self._dataset.fingerprint,
            "num_samples": len(self._dataset),
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
        }


class EvalLoader:
    """Steps over the whole data set, each sample once, in order; iterate it as often as needed.

    A step takes the next `global_batch_size` samples (which need not divide by anything); the last takes what
    is left. Every rank gets the same steps with the same number of micro-batches, rounded up to
    `micro_batches_multiple` (interleaved pipelines need a multiple of the pipeline size) and topped up with
    filler rows.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        pad_multiple: int = 1,
        pad_to: PadTo = "longest",
        seq_length: int,
        pad_id: int,
        micro_batches_multiple: int = 1,
    ) -> None:
        self._batcher = _Batcher(
            dataset,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            pad_multiple=pad_multiple,
            pad_to=pad_to,
            seq_length=seq_length,
            pad_id=pad_id,
        )
        sizes = {"global_batch_size": global_batch_size, "micro_batches_multiple": micro_batches_multiple}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} {value} is not positive; give at least 1")
        self._num_samples = len(dataset)
        self._global_batch_size = global_batch_size
        self._micro_batches_multiple = micro_batches_multiple

    def __len__(self) -> int:
        """Number of steps."""
        return -(-self._num_samples // self._global_batch_size)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        per_pass = self._batcher.micro_batch_size * self._batcher.dp_size
        multiple = self._micro_batches_multiple
        for first in range(0, self._num_samples, self._global_batch_size):
            indices = range(first, min(first + self._global_batch_size, self._num_samples))
            num_micro_batches = -(-len(indices) // per_pass)
            yield self._batcher.make(indices, -(-num_micro_batches // multiple) * multiple)


def _abridge(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."
