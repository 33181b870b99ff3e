"""Exact evaluation over whole data sets: every sequence once, the mean over all weighted tokens of the set."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ext.config import Config
from megatron_ext.data import FILLER_ID, EvalLoader, MicroBatch, SFTDataset
from megatron_ext.model_wrapper import MegatronModelWrapper
from megatron_ext.outputs import MiniBatchResult, StepMetrics
from megatron_ext.parallel import ParallelContext


@dataclass(frozen=True)
class EvaluationStep:
    """One pass: what this replica put in, and what came out."""

    micro_batches: list[MicroBatch]
    result: MiniBatchResult

    @property
    def sample_ids(self) -> list[int]:
        """Of this replica's sequences, fillers left out: one for each of `result.loss_fn_outputs`."""
        ids = [sample_id for batch in self.micro_batches for sample_id in batch.sample_ids.tolist()]
        return [sample_id for sample_id in ids if sample_id != FILLER_ID]


class Evaluator:
    """Evaluates a model on the configured sets.

    Leaves no trace in training: modules return to their mode, and eval mode draws no random numbers.

    Args:
        datasets: the evaluation sets by name.
        pad_id: token id that fills rows up.
    """

    def __init__(
        self,
        datasets: Mapping[str, SFTDataset],
        wrapper: MegatronModelWrapper,
        config: Config,
        parallel: ParallelContext,
        *,
        pad_id: int,
    ) -> None:
        self.wrapper = wrapper
        micro_batch_size = config.eval_micro_batch_size
        # four micro-batches a stage keep the pipeline's bubble small whatever global_batch_size is
        micro_batches = 4 * parallel.pp_size if parallel.pp_size > 1 else 1
        self.loaders = {
            name: EvalLoader(
                dataset,
                global_batch_size=micro_batches * micro_batch_size * parallel.dp_size,
                micro_batch_size=micro_batch_size,
                dp_rank=parallel.dp_rank,
                dp_size=parallel.dp_size,
                pad_multiple=config.sequence_multiple,
                pad_to=config.data.pad_to,
                seq_length=config.data.seq_length,
                pad_id=pad_id,
                # the interleaved schedule takes multiples of the pipeline size only
                micro_batches_multiple=parallel.pp_size if parallel.vp_size > 1 else 1,
                packing=config.data.packing,
                packing_multiple=config.packing_multiple,
            )
            for name, dataset in datasets.items()
        }

    def steps(self, name: str, *, return_per_token_outputs: bool = True) -> Iterator[EvaluationStep]:
        """One pass over a set, in data order; what it holds does not grow with the set. Every rank must call it."""
        for micro_batches in self.loaders[name]:
            result = self.wrapper.forward(micro_batches, return_per_token_outputs=return_per_token_outputs)
            yield EvaluationStep(micro_batches, result)

    def run(self, *, return_per_token_outputs: bool = True) -> dict[str, MiniBatchResult]:
        """Every set as if it were one mini-batch. Every rank must call it.

        Returns:
            By set: the metrics, equal on every rank, and this replica's per-token outputs in data order (all of them:
            `steps` is for sets that are too large for that).
        """
        results = {}
        for name in self.loaders:
            parts: list[StepMetrics] = []
            outputs = []
            for step in self.steps(name, return_per_token_outputs=return_per_token_outputs):
                parts.append(step.result.metrics)
                # packed rows hold sequences as they fit
                order = sorted(range(len(step.sample_ids)), key=step.sample_ids.__getitem__)
                outputs += [step.result.loss_fn_outputs[i] for i in order]
            results[name] = MiniBatchResult(metrics=StepMetrics.combine(parts), loss_fn_outputs=outputs)
        return results
