"""Runs a list of micro-batches through the model, with gradients or without, on Megatron-Core's schedules.

Owns what happens to a mini-batch between the data and the optimizer: Megatron's schedule and hooks, and
the reduction of metrics. Losses come from `losses/`, what a token weighs from `token_weights.py`, several passes before
one step are `gradient_accumulation.py`'s, per-token outputs go through `outputs.py`, stepping the optimizer is the
caller's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_model_config

from megatron_ext.config import Config
from megatron_ext.context_parallel import packed_order, shard_sequence
from megatron_ext.data import MicroBatch
from megatron_ext.gradient_accumulation import GradientAccumulator
from megatron_ext.losses import HeadInputs, LossHead, TeacherHidden, TeacherTopK, TokenLosses
from megatron_ext.outputs import MiniBatchResult, StepMetrics, TokenOutputs, empty_outputs
from megatron_ext.packed_rows import bounds_of, packed_seq_params, packing_problem
from megatron_ext.parallel import ParallelContext
from megatron_ext.schedule import run_schedule
from megatron_ext.token_weights import GlobalCounts, count_globally, token_weights


def _finalize_unscaled(model: list, _num_tokens: Any = None, **kwargs: Any) -> None:
    """Reduce gradients without dividing: the loss is already divided by the global denominator."""
    finalize_model_grads(model, None, **kwargs)


class TeacherSignals(Protocol):
    """A teacher model, or a cache of what one said."""

    def signals(
        self, inputs: "Sequence[_StageInputs]", micro_batches: Sequence[MicroBatch]
    ) -> Sequence[TeacherHidden | TeacherTopK | None]:
        """What the head needs of each micro-batch, on the last stage; every rank calls it, once a step.

        Args:
            inputs: this rank's part of each micro-batch.
            micro_batches: the same micro-batches as they came from the loader.
        """
        ...


class MegatronModelWrapper:
    """A model of one or more chunks (one per virtual pipeline stage) that computes losses and gradients.

    Args:
        model_chunks: GPTModel chunks, wrapped in Megatron's DistributedDataParallel for training; bare for evaluation.
        config: the run's configuration.
        losses: the loss head for the configured losses.
        parallel: where this rank stands.
        optimizer: gives the loss scale of fp16; may be None for evaluation.
        teacher: whom distillation losses compare with; needed if there are any.
    """

    def __init__(
        self,
        model_chunks: list[torch.nn.Module],
        config: Config,
        *,
        losses: LossHead,
        parallel: ParallelContext,
        optimizer: MegatronOptimizer | None = None,
        teacher: TeacherSignals | None = None,
    ) -> None:
        if losses.needs_teacher and teacher is None:
            raise ValueError("losses compare with a teacher, but teacher is None; pass a Teacher or a CachedTeacher")
        self.teacher = teacher
        self.model_chunks = model_chunks
        self.losses = losses
        self.parallel = parallel
        self.loss_reduction = config.training.loss_reduction
        self.sequence_multiple = config.sequence_multiple
        self.packing_multiple = config.packing_multiple
        self._optimizer = optimizer
        self._is_trainable = all(isinstance(chunk, DistributedDataParallel) for chunk in model_chunks)
        self._gradients = GradientAccumulator(model_chunks, parallel)
        self._connect_schedule(config, optimizer)

    def _connect_schedule(self, config: Config, optimizer: MegatronOptimizer | None) -> None:
        """Megatron's schedules find these functions on the model's config."""
        trainable = [chunk for chunk in self.model_chunks if isinstance(chunk, DistributedDataParallel)]
        model_config = get_model_config(self.model_chunks[0])
        assert model_config.calculate_per_token_loss, "gradients are summed over ranks, not averaged"
        model_config.finalize_model_grads_func = _finalize_unscaled
        if optimizer is not None:
            model_config.grad_scale_func = optimizer.scale_loss
        if trainable and config.parallel.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in trainable]
            model_config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync

    # ----------------------------------------------------------------------------------------------- public

    def zero_grad(self) -> None:
        """Forget the accumulated gradients; call it after every optimizer step."""
        self._gradients.zero()

    def forward(self, micro_batches: list[MicroBatch], *, return_per_token_outputs: bool = True) -> MiniBatchResult:
        """Evaluate: no graph, eval mode. See `forward_backward_mini_batch`."""
        return self.forward_backward_mini_batch(
            micro_batches, forward_only=True, return_per_token_outputs=return_per_token_outputs
        )

    def forward_backward(
        self, micro_batches: list[MicroBatch], *, return_per_token_outputs: bool = True
    ) -> MiniBatchResult:
        """Losses and gradients. See `forward_backward_mini_batch`."""
        return self.forward_backward_mini_batch(
            micro_batches, forward_only=False, return_per_token_outputs=return_per_token_outputs
        )

    @property
    def per_token_fields(self) -> list[str]:
        """Names of the per-token outputs, beside `loss_mask`."""
        return ["logprobs", "elementwise_loss", *self.losses.reported_per_token]

    def forward_backward_mini_batch(
        self,
        micro_batches: list[MicroBatch],
        *,
        forward_only: bool = False,
        return_per_token_outputs: bool = True,
    ) -> MiniBatchResult:
        """Losses, and unless `forward_only` gradients, of the mini-batch whose micro-batches the DP ranks hold.

        Every loss is sum(weight * loss) / sum(weight) over the tokens of all micro-batches on all data-parallel ranks,
        or with `loss_reduction: sequence_mean` the mean over sequences of each one's own mean. A second call before
        `zero_grad` leaves the gradients that one call with all the micro-batches would have left. Every rank must
        call it, with the same number of micro-batches.

        Args:
            micro_batches: this replica's share, all of one shape; the same on its TP, PP and CP ranks.
            forward_only: evaluate: no graph is built, modules are in eval mode during the call and in their former
                mode after it.
            return_per_token_outputs: also collect per-token values and deliver them on every rank of the replica.
                Loss, gradients and metrics are bit-identical either way.

        Returns:
            Metrics, and one dict per sequence in input order (empty dicts unless per-token outputs were asked for).

        Raises:
            ValueError: no micro-batches, shapes that differ or cannot be divided over the ranks, impossible cu_seqlens,
                trained labels outside the vocabulary, or masks that are negative or not finite; on every rank alike.
        """
        self._check(micro_batches)
        counts = count_globally(micro_batches, self.loss_reduction, self.parallel, self.losses.shard.vocab_size)
        collector = self._open_gate() if return_per_token_outputs else None
        trains = not forward_only and any(weight > 0 for weight in self.losses.weights)
        assert forward_only or self._is_trainable, "bare model chunks are for evaluation: build them with wrap_with_ddp"

        with (
            self._gradients.backward_pass(counts.denominator) if trains else nullcontext(),
            self._evaluation_mode() if forward_only else nullcontext(),
        ):
            reports = self._run_schedule(micro_batches, counts.denominator, collector, forward_only=not trains)
        metrics = self._reduce_metrics(reports, counts)
        outputs = collector.deliver(micro_batches) if collector is not None else empty_outputs(micro_batches)
        return MiniBatchResult(metrics=metrics, loss_fn_outputs=outputs)

    # --------------------------------------------------------------------------------------------- schedule

    def _run_schedule(
        self,
        micro_batches: list[MicroBatch],
        denominator: torch.Tensor,  # [] float64
        collector: TokenOutputs | None,
        forward_only: bool,
    ) -> list[torch.Tensor]:
        """The sums of each micro-batch, see `_loss_func`; empty on all but the last stage."""
        parallel = self.parallel
        prepared = [self._prepare(batch, denominator, wants_all=collector is not None) for batch in micro_batches]
        if self.teacher is not None:
            signals = self.teacher.signals(prepared, micro_batches)
            prepared = [part.with_teacher(signal) for part, signal in zip(prepared, signals, strict=True)]

        def forward_step(inputs: "Iterator[_StageInputs]", chunk: torch.nn.Module) -> tuple[Any, Any]:
            inputs = next(inputs)
            output = chunk(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                attention_mask=None,
                packed_seq_params=inputs.packed,
                output_processor=self.losses,
                output_processor_context=inputs.head,
            )
            return output, partial(self._loss_func, inputs, collector)

        b, s = micro_batches[0].input_ids.shape
        with torch.no_grad() if forward_only else nullcontext():
            return run_schedule(
                forward_step,
                prepared,
                self.model_chunks,
                parallel,
                micro_batch_size=b,
                seq_length=s,
                forward_only=forward_only,
            )

    def _loss_func(
        self, inputs: "_StageInputs", collector: TokenOutputs | None, token_losses: TokenLosses
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Megatron's loss function: (the total, 0 so that nothing is divided again, sums of each loss and metric)."""
        token_losses = TokenLosses(*token_losses)  # Float16Module rebuilds tuples without their names
        with torch.no_grad():
            # where before the product: 0 * NaN is NaN
            values = torch.where(inputs.loss_mask != 0, token_losses.values, 0.0).double()
            losses, metrics = values.split((len(self.losses.names), len(self.losses.token_metrics)))
            sums = torch.cat((losses * inputs.weights, metrics * inputs.loss_mask)).sum(dim=(1, 2))
        if collector is not None:
            collector.collect(self._per_token_fields(token_losses))
        return token_losses.total, torch.zeros((), dtype=torch.int, device=sums.device), sums

    def _per_token_fields(self, token_losses: TokenLosses) -> list[torch.Tensor]:
        losses = token_losses.values[: len(self.losses.names)]
        elementwise = torch.einsum("l,lbs->bs", losses.new_tensor(self.losses.weights), losses)
        reported = [losses[self.losses.names.index(name)] for name in self.losses.reported_per_token]
        return [token_losses.logprobs, elementwise, *reported]

    def _open_gate(self) -> TokenOutputs:
        return TokenOutputs(self.per_token_fields, self.parallel)

    def _prepare(self, batch: MicroBatch, denominator: torch.Tensor, wants_all: bool) -> "_StageInputs":
        """This rank's part of a micro-batch, on its device."""
        parallel = self.parallel
        bounds = None if batch.cu_seqlens is None else bounds_of(batch)
        order = None if bounds is None or parallel.cp_size == 1 else packed_order(bounds, parallel.cp_size)

        def own(rows: torch.Tensor) -> torch.Tensor:
            if order is not None:
                return rows[:, order[parallel.cp_rank]]
            return rows if parallel.cp_size == 1 else shard_sequence(rows, parallel.cp_rank, parallel.cp_size)

        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(parallel.device, non_blocking=True)

        mask, weights = own(batch.loss_mask.float()), own(token_weights(batch, self.loss_reduction))
        # indices are made where the batch is, commonly on the host, because a GPU would have to be waited for
        others = None
        if wants_all:
            others = to_device(_indices(own(batch.is_token()) & (mask == 0)))
        weights_on_device = to_device(weights)
        scale = torch.where(denominator > 0, 1.0 / denominator, 0.0).float()
        head = HeadInputs(
            labels=to_device(own(batch.labels)),
            token_weights=weights_on_device * scale,
            trained=to_device(_indices(mask != 0)),
            others=others,
            gradient_scale=1.0 if self._optimizer is None else self._optimizer.get_loss_scale().reshape(()),
        )
        return _StageInputs(
            input_ids=to_device(own(batch.input_ids)),
            position_ids=to_device(own(batch.position_ids)),
            loss_mask=to_device(mask),
            weights=weights_on_device,
            head=head,
            packed=None if bounds is None else packed_seq_params(bounds, parallel.device),
        )

    def _check(self, micro_batches: list[MicroBatch]) -> None:
        if not micro_batches:
            raise ValueError("micro_batches is empty; every rank needs at least one, top up with zero-weight rows")
        shapes = {tuple(batch.input_ids.shape) for batch in micro_batches}
        if len(shapes) > 1:
            raise ValueError(
                f"micro_batches have shapes {sorted(shapes)}; pad the micro-batches of one step to one shape"
            )
        for index, batch in enumerate(micro_batches):
            problem = None if batch.cu_seqlens is None else packing_problem(batch, self.packing_multiple)
            if problem is not None:
                raise ValueError(f"micro-batch {index}: {problem}")
        ((_, s),) = shapes
        multiple = self.sequence_multiple
        if s % multiple:
            raise ValueError(f"sequence length {s} is not divisible by {multiple}, as this layout needs; pad the rows")

    # ---------------------------------------------------------------------------------------------- metrics

    def _reduce_metrics(self, reports: list[torch.Tensor], counts: GlobalCounts) -> StepMetrics:
        parallel, head = self.parallel, self.losses
        if parallel.is_last_stage:
            sums = torch.stack(reports).sum(dim=0)  # [losses + token metrics] float64
            if parallel.pg.dp_cp.size() > 1:
                dist.all_reduce(sums, group=parallel.pg.dp_cp)
        else:
            sums = torch.empty(len(head.names) + len(head.token_metrics), dtype=torch.float64, device=parallel.device)
        if parallel.pp_size > 1:
            dist.broadcast(sums, src=dist.get_global_rank(parallel.pg.pp, parallel.pp_size - 1), group=parallel.pg.pp)
        return StepMetrics(dict(zip(head.names, head.weights, strict=True)), head.token_metrics, sums, counts)

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        modes = [(module, module.training) for chunk in self.model_chunks for module in chunk.modules()]
        for module, _ in modes:
            module.training = False
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


@dataclass(frozen=True)
class _StageInputs:
    """A micro-batch as this rank's stage takes it: its part of the sequence, on its device."""

    input_ids: torch.Tensor  # [b, s/cp]
    position_ids: torch.Tensor  # [b, s/cp]
    loss_mask: torch.Tensor  # [b, s/cp] fp32
    weights: torch.Tensor  # [b, s/cp] fp32, what a token weighs before the division by the denominator
    head: HeadInputs
    packed: PackedSeqParams | None  # where the sequences of a packed row begin; None: rows are not packed

    def with_teacher(self, teacher: TeacherHidden | TeacherTopK | None) -> "_StageInputs":
        return replace(self, head=replace(self.head, teacher=teacher))


def _indices(chosen: torch.Tensor) -> torch.Tensor:
    """Where [b, s] is true, counted as the hidden states [s, b] lie in memory."""
    return chosen.t().flatten().nonzero().squeeze(1)
