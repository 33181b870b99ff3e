"""The settings of each kind of loss. A new kind is one class here and one entry of LossConfig."""

import re
from typing import Annotated, Literal

from pydantic import Field

from megatron_ext.config.base import Real, Section, refusal, setting

# Names that a metrics record, a report or a per-token output has already: a loss of the same name would overwrite them.
RESERVED_LOSS_NAMES = (
    *("split", "iteration", "consumed_samples", "lr", "grad_norm", "iteration_time_ms", "tokens_per_second", "time"),
    *("loss", "mean_loss", "perplexity", "token_accuracy", "entropy"),
    *("num_tokens", "num_input_tokens", "tokens", "sequences"),
    *("logprobs", "elementwise_loss", "loss_mask", "sample_id", "token_ids"),
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


LossConfig = Annotated[CrossEntropyLoss | ZLoss, Field(discriminator="type")]


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
