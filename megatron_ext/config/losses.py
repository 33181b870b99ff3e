"""The settings of each kind of loss. A new kind is one class here and one entry of LossConfig."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_ext.config.base import Real, Section, refusal, setting

# Names that a metrics record, a report or a per-token output has already: a loss of the same name would overwrite them.
RESERVED_LOSS_NAMES = (
    *("split", "iteration", "consumed_samples", "lr", "grad_norm", "iteration_time_ms", "tokens_per_second", "time"),
    *("loss", "mean_loss", "perplexity", "token_accuracy", "entropy", "teacher_entropy", "teacher_agreement"),
    *("num_tokens", "num_input_tokens", "tokens", "sequences", "seconds", "negative_log_likelihood"),
    *("logprobs", "elementwise_loss", "loss_mask", "sample_id", "set", "token_ids", "labels"),
)


class LossBase(Section):
    """What all losses share."""

    type: str = setting(..., "kind of loss")
    weight: Real = setting(1.0, "factor of this loss in the trained total (0: logged, not trained)", ge=0)


class CrossEntropyLoss(LossBase):
    """Next-token cross-entropy."""

    type: Literal["cross_entropy"] = setting(..., "kind of loss")
    label_smoothing: Real = setting(
        0.0, "share of the target spread evenly over the whole vocabulary", unit="probability", ge=0, lt=1
    )


class ZLoss(LossBase):
    """Squared log of the softmax denominator; keeps logits from drifting."""

    type: Literal["z_loss"] = setting(..., "kind of loss")


class DistillationLoss(LossBase):
    """What losses against a teacher's probabilities share; p stands for the teacher's, q for the student's."""

    temperature: Real = setting(1.0, "teacher's and student's logits are divided by it", gt=0)
    scale_by_temperature_squared: bool = setting(
        False, "multiply the loss by temperature squared, so that its gradient keeps its size whatever the temperature"
    )
    top_k: int | None = setting(
        None, "compare on the teacher's k most probable tokens (null: on the whole vocabulary)", unit="tokens", ge=1
    )
    tail: Literal["renormalize", "bucket", "ignore"] | None = setting(
        None,
        "with top_k, what becomes of the other tokens (renormalize: p and q are scaled to sum up to 1 over the k; "
        "bucket: they count as one token; ignore: they are left out of the sum)",
    )

    @model_validator(mode="after")
    def _check_tail(self) -> Self:
        if self.top_k is not None and self.tail is None:
            raise refusal(
                f"has top_k {self.top_k} and no tail, so what becomes of all other tokens is open",
                "set tail to renormalize, bucket or ignore",
            )
        if self.tail is not None and self.top_k is None:
            raise refusal(f"has tail {self.tail} and no top_k, so there is no tail", "set top_k, or leave tail out")
        return self


class ForwardKLLoss(DistillationLoss):
    """Divergence KL(p || q), p the teacher's and q the student's: the student covers all that p holds likely."""

    type: Literal["forward_kl"] = setting(..., "kind of loss")


class ReverseKLLoss(DistillationLoss):
    """Divergence KL(q || p): the student keeps to what the teacher holds most likely."""

    type: Literal["reverse_kl"] = setting(..., "kind of loss")


class JSDLoss(DistillationLoss):
    """Divergence beta KL(p || m) + (1 - beta) KL(q || m) from the mixture m = beta p + (1 - beta) q."""

    type: Literal["jsd"] = setting(..., "kind of loss")
    beta: Real = setting(0.5, "share of the teacher in the mixture (at 0 and 1: use the KL losses)", gt=0, lt=1)


LossConfig = Annotated[CrossEntropyLoss | ZLoss | ForwardKLLoss | ReverseKLLoss | JSDLoss, Field(discriminator="type")]


def check_loss_names(losses: dict[str, LossConfig]) -> dict[str, LossConfig]:
    """Validator of the whole map."""
    if not losses:
        raise refusal("names no loss", "use for example {lm_loss: {type: cross_entropy}}")
    for name in losses:
        if name in RESERVED_LOSS_NAMES:
            other = "lm_loss" if name.endswith("loss") else f"{name}_loss"
            raise refusal(f"names a loss {name!r}, a metric with another meaning", f"use another name, such as {other}")
        if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            raise refusal(f"names a loss {name!r}", "use letters, digits, _ and -, beginning with a letter")
    return losses
