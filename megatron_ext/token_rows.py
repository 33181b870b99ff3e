"""Brings the per-token outputs of one evaluation step from the data-parallel ranks to rank 0, in data order.

By tensor collectives over the data-parallel group, a step at a time, so that what is held does not grow with the set.
How rows are written is `token_file.py`'s.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.parallel import ParallelContext


@dataclass(frozen=True)
class TokenRow:
    """The per-token values of one sequence: [length] CPU float32 each, by name."""

    sample_id: int
    values: dict[str, torch.Tensor]


class RowGatherer:
    """Collects rows on rank 0.

    Args:
        fields: names of the gathered values, the same on every rank, also on one without a sequence.
    """

    def __init__(self, fields: Sequence[str], parallel: ParallelContext) -> None:
        self.fields = list(fields)
        self.parallel = parallel
        # the other ranks of a replica hold what its first rank holds
        self._takes_part = parallel.tp_rank == parallel.cp_rank == parallel.pp_rank == 0

    def gather(self, sample_ids: Sequence[int], outputs: Sequence[Mapping[str, torch.Tensor]]) -> list[TokenRow]:
        """All replicas' sequences of one step, by ascending sample id, on rank 0; nothing elsewhere.

        Collective over the data-parallel group of rank 0: every rank calls it.

        Args:
            sample_ids: of this replica's sequences.
            outputs: their per-token outputs, `loss_fn_outputs` of the wrapper.
        """
        assert len(sample_ids) == len(outputs), "one sample id for each output"
        if not self._takes_part:
            return []
        lengths = [len(output[self.fields[0]]) for output in outputs]
        index = torch.tensor([*zip(sample_ids, lengths, strict=True)], dtype=torch.int64).view(-1, 2)
        columns = [torch.cat([output[name] for output in outputs] or [torch.empty(0)]) for name in self.fields]
        values = torch.stack(columns)  # [fields, tokens]
        rows = [row for part in self._gather(index, values) for row in self._cut(*part)]
        return sorted(rows, key=lambda row: row.sample_id)

    def _gather(self, index: torch.Tensor, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(index, values) of every replica, on rank 0."""
        parallel = self.parallel
        if parallel.dp_size == 1:
            return [(index, values)]
        group, device = parallel.pg.dp, parallel.device
        sizes = torch.empty(parallel.dp_size, 2, dtype=torch.int64, device=device)
        own = torch.tensor([[index.size(0), values.size(1)]], dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(sizes, own, group=group)
        counts = sizes.tolist()
        most_rows, most_tokens = sizes.amax(dim=0).tolist()
        # ranks send the same shape: padded to the largest
        padded_index = index.new_zeros(most_rows, 2)
        padded_index[: index.size(0)] = index
        padded_values = values.new_zeros(len(self.fields), most_tokens)
        padded_values[:, : values.size(1)] = values
        indices, all_values = (self._to_first(tensor.to(device)) for tensor in (padded_index, padded_values))
        return [
            (part[:num_rows], tokens[:, :num_tokens])
            for (num_rows, num_tokens), part, tokens in zip(counts, indices, all_values, strict=False)
        ]

    def _to_first(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every replica's tensor, on the host of rank 0; an empty list elsewhere."""
        parallel = self.parallel
        received = [torch.empty_like(tensor) for _ in range(parallel.dp_size)] if parallel.is_main else None
        dist.gather(tensor, received, dst=dist.get_global_rank(parallel.pg.dp, 0), group=parallel.pg.dp)
        return [part.cpu() for part in received or []]

    def _cut(self, index: torch.Tensor, values: torch.Tensor) -> list[TokenRow]:
        rows, start = [], 0
        for sample_id, length in index.tolist():
            cut = values[:, start : start + length].clone()  # a view would keep the whole step's tensor alive
            rows.append(TokenRow(sample_id, dict(zip(self.fields, cut, strict=True))))
            start += length
        return rows
