"""The loss head: from the last hidden states to the weighted total and the per-token values of every configured loss.

Plugs into Megatron-Core's GPTModel as its `output_processor`, so it works on hidden states before anything casts or
copies them. What a token weighs in the global batch is decided by the model wrapper, not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron_ext.config import Config, LogitsConfig, LossConfig
from megatron_ext.losses.base import TokenLoss, build_loss
from megatron_ext.losses.chunked import gather_sequence
from megatron_ext.losses.linear import linear_losses
from megatron_ext.losses.logits import LogitTransform
from megatron_ext.losses.materialized import logits_losses
from megatron_ext.losses.teacher import Teacher, TeacherHidden, TeacherTopK
from megatron_ext.losses.token_metrics import LogProbability, chosen_metrics
from megatron_ext.losses.vocab_parallel import VocabShard

_LOGPROBS = "logprobs"  # no loss may have this name


@dataclass(frozen=True)
class HeadInputs:
    """What the head needs of one micro-batch, beside the hidden states. Not a tuple: Megatron would cast its tensors.

    labels: [b, s] int64.
    token_weights: [b, s] fp32, of each token in the total; sums up to 1 over the global batch.
    trained: indices, counted along the sequence first ([s, b]), of the tokens whose weight is not 0.
    others: the same, of further tokens whose values are wanted; None for none.
    gradient_scale: the upstream gradient to expect.
    teacher: of distillation losses: its hidden states in the order of the student's ([s, b, h]), or a cache's tokens
        in the order of the labels ([b, s, k]).
    """

    labels: torch.Tensor
    token_weights: torch.Tensor
    trained: torch.Tensor
    others: torch.Tensor | None = None
    gradient_scale: torch.Tensor | float = 1.0
    teacher: Teacher | None = None


class TokenLosses(NamedTuple):
    """What the head returns for one micro-batch. A tuple of tensors, because Megatron's wrappers pass those through."""

    total: torch.Tensor  # [] fp32, sum of loss weight * token weight * loss; the only one with a gradient
    values: torch.Tensor  # [losses + token metrics, b, s] fp32, in the order of LossHead.names; 0 where not wanted
    logprobs: torch.Tensor  # [b, s] fp32, log-probability of each label; 0 where not wanted


class LossHead:
    """Computes the named losses of one micro-batch on the last pipeline stage.

    Args:
        losses: the configured losses by metric name.
        shard: the tensor-parallel group and the model's vocabulary size without padding.
        logits: how logits are made; None for the defaults.
        token_metrics: also compute token accuracy and entropy.
        teacher_is_cached: distillation losses compare with a cache's tokens, not with a model.
        evaluates: also compute all that an evaluation run reports: these, and the negative log-likelihood.
    """

    def __init__(
        self,
        losses: Mapping[str, LossConfig],
        shard: VocabShard,
        logits: LogitsConfig | None = None,
        *,
        token_metrics: bool = False,
        evaluates: bool = False,
        teacher_is_cached: bool = False,
    ) -> None:
        self.names = list(losses)
        self.weights = [loss.weight for loss in losses.values()]
        # cross-entropy is what logprobs say already
        self.reported_per_token = [name for name, loss in losses.items() if loss.type != "cross_entropy"]
        self._losses: dict[str, TokenLoss] = {name: build_loss(settings) for name, settings in losses.items()}
        self.needs_teacher = any(loss.needs_teacher for loss in self._losses.values())
        teacher = ("cached" if teacher_is_cached else "model") if self.needs_teacher else None
        metrics = chosen_metrics(token_metrics=token_metrics, evaluates=evaluates, teacher=teacher)
        self.token_metrics = list(metrics)
        self.shard = shard
        logits = logits or LogitsConfig()
        self.implementation = logits.implementation
        self.chunk_tokens = logits.chunk_tokens
        self._transform = LogitTransform(logits.logit_scale, logits.logit_softcap)
        self._losses |= {name: metric() for name, metric in metrics.items()}
        self._losses[_LOGPROBS] = LogProbability()
        self._loss_weights = dict.fromkeys(self._losses, 0.0) | dict(zip(self.names, self.weights, strict=True))

    @classmethod
    def from_config(cls, config: Config, shard: VocabShard) -> "LossHead":
        """The head a run's configuration describes."""
        return cls(
            config.losses,
            shard,
            config.logits,
            token_metrics=config.logging.token_metrics,
            evaluates=config.evaluation.eval_only,
            teacher_is_cached=config.teacher.teacher_cache is not None,
        )

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,  # [s, b, h]; [s/tp, b, h] under sequence parallelism
        output_layer: torch.nn.Module,
        output_weight: torch.Tensor | None,  # the tied embedding's weight, None for an untied output layer
        context: HeadInputs,
        **_: Any,
    ) -> TokenLosses:
        """Called by GPTModel on the last stage; the inputs come as its `output_processor_context`."""
        compute = self._chunked if self.implementation == "chunked" else self._materialized
        total, values = compute(hidden_states, output_layer, output_weight, context)  # values: [..., s, b]
        values = values.detach().transpose(1, 2)
        return TokenLosses(total=total, values=values[:-1], logprobs=values[-1])

    def _chunked(
        self, hidden: torch.Tensor, layer: torch.nn.Module, weight: torch.Tensor | None, inputs: HeadInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _wait_for_parameters(layer)
        arguments: dict[str, Any] = {
            "weight": layer.weight if weight is None else weight,
            "labels": inputs.labels.t(),
            "losses": self._losses,
            "shard": self.shard,
            "loss_weights": self._loss_weights,
            "transform": self._transform,
            "chunk_tokens": self.chunk_tokens,
            "sequence_parallel": layer.sequence_parallel,
            "teacher": _in_order_of_hidden(inputs.teacher),
            "validate": False,  # the wrapper has checked the global batch
        }
        total, values = linear_losses(
            hidden,
            token_weights=inputs.token_weights.t(),
            tokens=inputs.trained,
            gradient_scale=inputs.gradient_scale,
            **arguments,
        )
        assert total is not None
        if inputs.others is not None:
            # apart from the trained tokens, whose sums would otherwise depend on whether these are wanted
            with torch.no_grad():
                ones = torch.ones_like(inputs.token_weights.t())
                values = values + linear_losses(hidden, token_weights=ones, tokens=inputs.others, **arguments).values
        return total, values

    def _materialized(
        self, hidden: torch.Tensor, layer: torch.nn.Module, weight: torch.Tensor | None, inputs: HeadInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _bias = layer(hidden, weight=weight)  # [s, b, vocab/tp]
        values = logits_losses(
            logits.flatten(0, 1),
            inputs.labels.t().flatten(),
            self._losses,
            shard=self.shard,
            loss_weights=self._loss_weights,
            transform=self._transform,
            teacher=self._whole_teacher(inputs.teacher, layer.sequence_parallel),
            validate=False,
        )
        token_weights = inputs.token_weights.t().flatten()
        trained = [index for index, loss_weight in enumerate(self._loss_weights.values()) if loss_weight]
        # where before the product: 0 * NaN is NaN
        weighted = torch.where(token_weights != 0, values[trained], 0.0) * token_weights
        loss_weights = values.new_tensor(self.weights)[trained]
        total = (weighted.sum(dim=1) * loss_weights).sum()
        return total, values.view(-1, *inputs.labels.t().shape)

    def _whole_teacher(self, teacher: Teacher | None, sequence_parallel: bool) -> torch.Tensor | TeacherTopK | None:
        """The teacher's logits [s * b, vocab/tp], or what a cache has of them."""
        if not isinstance(teacher, TeacherHidden):
            return _in_order_of_hidden(teacher)
        hidden = gather_sequence(teacher.hidden, self.shard) if sequence_parallel else teacher.hidden
        return hidden.flatten(0, 1) @ teacher.weight.to(hidden.dtype).t()


def _in_order_of_hidden(teacher: Teacher | None) -> Teacher | None:
    if not isinstance(teacher, TeacherTopK):
        return teacher
    ids, log_probabilities = teacher.ids.transpose(0, 1), teacher.log_probabilities.transpose(0, 1)
    return TeacherTopK(ids, log_probabilities, teacher.log_tail.t(), teacher.temperature)


def _wait_for_parameters(output_layer: torch.nn.Module) -> None:
    """Run what calling the layer would run first: with overlap_param_gather, DDP waits there for its parameters."""
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
