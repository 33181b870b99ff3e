"""What one pass over a mini-batch gives back: metrics, and per-token outputs when the caller asked for them.

Per-token tensors stay on the device until the schedule is done; then they travel once, as one tensor: over the context
parallel ranks, from the last pipeline stage to the others, and to the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.context_parallel import restore_packed_order, restore_sequence_order
from megatron_ext.data import FILLER_ID, MicroBatch
from megatron_ext.packed_rows import bounds_of
from megatron_ext.parallel import ParallelContext
from megatron_ext.token_weights import GlobalCounts

TOKEN_COUNTS = ("num_tokens", "num_input_tokens")
"""The metrics that add up over steps; all others are means."""


class StepMetrics(Mapping[str, float]):
    """Every named loss, `loss` (the weighted total), token metrics and token counts.

    Losses are means over the global batch as `loss_reduction` says, unweighted; token metrics are means over its
    weighted tokens. `num_tokens` counts the trained tokens, `num_input_tokens` all that are not padding. Equal on
    every rank. Keeps sums and counts, so that several can be combined exactly; reading any value waits for the
    device, once.

    Args:
        loss_weights: configured weight of each loss, by name.
        token_metrics: names of the token metrics.
        sums: [losses + token metrics] float64 on the device, sum of weight * value.
        counts: of the global batch.
    """

    def __init__(
        self,
        loss_weights: Mapping[str, float],
        token_metrics: Sequence[str],
        sums: torch.Tensor,
        counts: GlobalCounts,
    ) -> None:
        self._loss_weights = loss_weights
        self._token_metrics = token_metrics
        self._totals = torch.cat((sums, torch.stack(counts)))
        self._values: dict[str, float] | None = None

    @classmethod
    def combine(cls, parts: list["StepMetrics"]) -> "StepMetrics":
        """The metrics of one batch made of all the parts' batches."""
        first = parts[0]
        totals = torch.stack([part._totals for part in parts]).sum(dim=0)
        num_sums = len(first._loss_weights) + len(first._token_metrics)
        return cls(first._loss_weights, first._token_metrics, totals[:num_sums], GlobalCounts(*totals[num_sums:]))

    def _read(self) -> dict[str, float]:
        if self._values is None:
            totals = self._totals.tolist()
            counts = GlobalCounts(*totals[-len(GlobalCounts._fields) :])
            names = [*self._loss_weights, *self._token_metrics]
            denominators = [counts.denominator] * len(self._loss_weights)
            denominators += [counts.mask_sum] * len(self._token_metrics)
            # no weighted token at all: 0 by definition, unless the sums are not numbers
            self._values = {
                name: total / denominator if denominator else total
                for name, total, denominator in zip(names, totals, denominators, strict=False)
            }
            self._values["loss"] = sum(self._values[name] * weight for name, weight in self._loss_weights.items())
            self._values |= {"num_tokens": counts.num_tokens, "num_input_tokens": counts.num_input_tokens}
        return self._values

    def __getitem__(self, name: str) -> float:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"StepMetrics({self._read()})"


@dataclass(frozen=True)
class MiniBatchResult:
    """metrics: see StepMetrics. loss_fn_outputs: one dict per sequence (fillers left out), in input order."""

    metrics: StepMetrics
    loss_fn_outputs: list[dict[str, torch.Tensor]]


def empty_outputs(micro_batches: list[MicroBatch]) -> list[dict[str, torch.Tensor]]:
    """The outputs of a closed gate: an empty dict for every sequence."""
    return [{} for batch in micro_batches for sample_id in batch.sample_ids.tolist() if sample_id != FILLER_ID]


class TokenOutputs:
    """Collects per-token values on the last pipeline stage and delivers them to every rank of the replica.

    Args:
        fields: names of the collected values, in the order they are passed to `collect`.
    """

    def __init__(self, fields: list[str], parallel: ParallelContext) -> None:
        self.fields = fields
        self.parallel = parallel
        self._collected: list[torch.Tensor] = []

    def collect(self, values: list[torch.Tensor]) -> None:
        """Keep one micro-batch: one [b, s/cp] tensor per field. Called on the last stage only."""
        self._collected.append(torch.stack([value.detach().float() for value in values]))

    def deliver(self, micro_batches: list[MicroBatch]) -> list[dict[str, torch.Tensor]]:
        """One dict per sequence: every field and `loss_mask`, [length] CPU float32, padding removed.

        Collective over the replica's CP and PP groups: every rank of it calls this.
        """
        tokens = self._share(micro_batches).cpu()  # [micro-batches, fields, b, s]
        outputs = []
        for batch, values in zip(micro_batches, tokens, strict=True):
            for sample_id, (row, span) in zip(batch.sample_ids.tolist(), batch.spans(), strict=True):
                if sample_id == FILLER_ID:
                    continue
                # clones: a view would keep the whole step's tensor alive
                per_token = {name: values[i, row, span].clone() for i, name in enumerate(self.fields)}
                per_token["loss_mask"] = batch.loss_mask[row, span].to("cpu", torch.float32, copy=True)
                outputs.append(per_token)
        return outputs

    def _share(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        parallel = self.parallel
        b, s = micro_batches[0].input_ids.shape
        full_shape = (len(micro_batches), len(self.fields), b, s)
        if parallel.is_last_stage:
            tokens = torch.stack(self._collected)  # [micro-batches, fields, b, s/cp]
            if parallel.cp_size > 1:
                local = tokens.permute(3, 0, 1, 2).contiguous()  # sequence first, as gathering concatenates there
                gathered = local.new_empty(s, *local.shape[1:])
                dist.all_gather_into_tensor(gathered, local, group=parallel.pg.cp)
                by_rank = gathered.unflatten(0, (parallel.cp_size, -1))  # [cp, s/cp, micro-batches, fields, b]
                restored = [
                    restore_sequence_order(part)
                    if batch.cu_seqlens is None
                    else restore_packed_order(part, bounds_of(batch))
                    for batch, part in zip(micro_batches, by_rank.unbind(2), strict=True)
                ]
                tokens = torch.stack(restored).permute(0, 2, 3, 1).contiguous()
        else:
            tokens = torch.empty(full_shape, dtype=torch.float32, device=parallel.device)
        if parallel.pp_size > 1:
            last = dist.get_global_rank(parallel.pg.pp, parallel.pp_size - 1)
            dist.broadcast(tokens, src=last, group=parallel.pg.pp)
        return tokens
