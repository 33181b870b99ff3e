"""Which samples each data-parallel rank sees at each step, for training (endless, resumable) and for
evaluation (each sample exactly once). Owns the order and the split over ranks and micro-batches, not the
samples.

Order. Epoch e is a permutation of the data set drawn from (seed, e); the epochs follow one another without a
gap in one endless stream. A step takes the next global_batch_size samples of it, so a global batch may cross
from one epoch into the next, and the order depends on (seed, consumed samples) alone.

Split. Data-parallel rank r takes the r-th contiguous block of global_batch_size / dp_size samples and cuts
it, in order, into micro-batches. The samples of step k, read over ranks 0, 1, ... and their micro-batches in
turn, are therefore the same list for every data-parallel size and micro-batch size.

Packing. The samples of a step are the same, but share rows as packing.py decides: a micro-batch is then one row of at
most micro_batch_size x seq_length positions, and rank r takes the r-th contiguous block of the step's rows. How many
there are differs from step to step. Nothing is carried over to the next step, so resuming needs to know no more.

Within a step every rank has the same number of micro-batches, and those of one rank share one padded length.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ext.data.batch import MicroBatch
from megatron_ext.data.batcher import Batcher, PadTo, Samples
from megatron_ext.data.packing import count_fitting


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


class TrainLoader:
    """This data-parallel rank's part of each training step, without end.

    `pad_multiple` is what the parallel layout needs of a padded length (2 x CP, times TP under sequence
    parallelism), `packing_multiple` what it needs of each sequence in a packed row (2 x CP),
    `micro_batches_multiple` what it needs of their number (the pipeline size under interleaving). Raises ValueError
    when the sizes do not divide; with packing any global batch size will do.
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
        micro_batches_multiple: int = 1,
        packing: bool = False,
        packing_multiple: int = 1,
    ) -> None:
        self._batcher = Batcher(
            dataset,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            pad_multiple=pad_multiple,
            pad_to=pad_to,
            seq_length=seq_length,
            pad_id=pad_id,
            micro_batches_multiple=micro_batches_multiple,
            packing=packing,
            packing_multiple=packing_multiple,
        )
        per_pass = micro_batch_size * dp_size
        if global_batch_size < 1 or (global_batch_size % per_pass and not packing):
            raise ValueError(
                f"global_batch_size {global_batch_size} is not a positive multiple of micro_batch_size "
                f"{micro_batch_size} x data-parallel size {dp_size}; use a multiple of {per_pass}"
            )
        self._dataset = dataset
        self._order = SampleOrder(len(dataset), seed=seed, shuffle=shuffle)
        self.global_batch_size = global_batch_size
        self.num_micro_batches = None if packing else self._batcher.num_micro_batches(global_batch_size)
        self.consumed_samples = 0

    def next_step(self) -> list[MicroBatch]:
        """The next step's micro-batches for this rank (`num_micro_batches` of them, with packing as many as needed)."""
        indices = self._order.take(self.consumed_samples, self.global_batch_size)
        self.consumed_samples += self.global_batch_size
        return self._batcher.make(indices)

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

    A step takes the next `global_batch_size` samples (which need not divide by anything), with packing as many as go
    into the rows of that many micro-batches; the last takes what is left. Every rank gets the same steps with the same
    number of micro-batches, rounded up to `micro_batches_multiple` (interleaved pipelines need a multiple of the
    pipeline size) and topped up with fillers.
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
        packing: bool = False,
        packing_multiple: int = 1,
    ) -> None:
        self._batcher = Batcher(
            dataset,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            pad_multiple=pad_multiple,
            pad_to=pad_to,
            seq_length=seq_length,
            pad_id=pad_id,
            micro_batches_multiple=micro_batches_multiple,
            packing=packing,
            packing_multiple=packing_multiple,
        )
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size {global_batch_size} is not positive; give at least 1")
        if packing:
            self._steps = self._packed_steps(dataset, self._batcher.num_micro_batches(global_batch_size) * dp_size)
        else:
            firsts = range(0, len(dataset), global_batch_size)
            self._steps = [range(first, min(first + global_batch_size, len(dataset))) for first in firsts]

    def _packed_steps(self, dataset: Samples, num_rows: int) -> list[range]:
        """Cut the data set so that the samples of a step fill the rows of a step."""
        batcher, steps, first = self._batcher, [], 0
        while first < len(dataset):
            lengths = map(dataset.length, range(first, len(dataset)))
            count = count_fitting(
                lengths, capacity=batcher.capacity, multiple=batcher.packing_multiple, num_rows=num_rows
            )
            steps.append(range(first, first + count))
            first += count
        return steps

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._steps)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return (self._batcher.make(indices) for indices in self._steps)


def _abridge(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 16 else text[:12] + "..."
