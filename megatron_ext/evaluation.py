"""Exact evaluation over whole data sets: every sequence once, the mean over all weighted tokens of the set."""

from collections.abc import Mapping

from megatron_ext.config import Config
from megatron_ext.data import EvalLoader, SFTDataset
from megatron_ext.model_wrapper import MegatronModelWrapper
from megatron_ext.outputs import StepMetrics
from megatron_ext.parallel import ParallelContext


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
            )
            for name, dataset in datasets.items()
        }

    def run(self) -> dict[str, StepMetrics]:
        """The metrics of each set, equal on every rank. Every rank must call it."""
        return {
            name: StepMetrics.combine(
                [self.wrapper.forward(step, return_per_token_outputs=False).metrics for step in loader]
            )
            for name, loader in self.loaders.items()
        }
