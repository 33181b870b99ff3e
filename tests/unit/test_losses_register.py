"""Losses by type name, and the settings that no loss can have."""

from typing import Any

import pytest
import torch

from megatron_ext.config import LossBase
from megatron_ext.losses import (
    CrossEntropy,
    LogitTransform,
    TokenLoss,
    TokenStatistics,
    VocabShard,
    ZLoss,
    base,
    build_loss,
    linear_losses,
    register_loss,
)


class Constant(TokenLoss):
    """With a setting of its own."""

    def __init__(self, height: float = 1.0) -> None:
        self.height = height

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return torch.full_like(tokens.logsumexp, self.height)


class ConstantSettings(LossBase):
    height: float = 2.0


def test_known_types_are_built_with_their_settings() -> None:
    class Smoothed(LossBase):
        label_smoothing: float = 0.25

    loss = build_loss(Smoothed(type="cross_entropy", weight=0.5))
    assert isinstance(loss, CrossEntropy)
    assert loss.label_smoothing == 0.25
    assert isinstance(build_loss(LossBase(type="z_loss")), ZLoss)


def test_a_registered_loss_is_built_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_LOSSES", dict(base._LOSSES))
    assert register_loss("constant")(Constant) is Constant
    loss = build_loss(ConstantSettings(type="constant", weight=0.5))
    assert isinstance(loss, Constant)
    assert loss.height == 2.0


def test_two_losses_of_one_type_are_refused() -> None:
    with pytest.raises(ValueError, match="loss type 'cross_entropy' is already registered, by CrossEntropy"):
        register_loss("cross_entropy")(Constant)
    assert isinstance(build_loss(LossBase(type="cross_entropy")), CrossEntropy)


def test_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"loss type 'cross_entropi' is not known; registered are cross_entropy,.*z_l"):
        build_loss(LossBase(type="cross_entropi"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": 0.0}, "logit_scale: 0.0 is not positive"),
        ({"scale": -1.0}, "logit_scale: -1.0 is not positive"),
        ({"scale": float("nan")}, "logit_scale: nan is not positive"),
        ({"softcap": 0.0}, "logit_softcap: 0.0 is not positive"),
        ({"softcap": -30.0}, "logit_softcap: -30.0 is not positive"),
        ({"softcap": float("nan")}, "logit_softcap: nan is not positive"),
    ],
)
def test_impossible_transform_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogitTransform(**settings)


def test_undeclared_statistics_are_refused() -> None:
    """A loss that reads what it did not name is told so, in place of a wrong value."""

    class ReadsLogits(Constant):
        def value(self, tokens: TokenStatistics) -> torch.Tensor:
            return tokens.logits.sum(dim=-1)

    class ReadsArgmax(Constant):
        def value(self, tokens: TokenStatistics) -> torch.Tensor:
            return tokens.argmax.float()

    arguments = (torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 1, 2]))
    for loss, error, message in (
        (ReadsLogits(), AssertionError, '"logits" among its statistics'),
        (ReadsArgmax(), AttributeError, "argmax was not measured"),
    ):
        with pytest.raises(error, match=message):
            linear_losses(*arguments, {"loss": loss}, shard=VocabShard(None, 6))


@pytest.mark.parametrize("token_weights", [None, torch.tensor([1.0, 0.0, 2.0])])
def test_a_loss_without_a_derivative_gives_gradients_of_0(token_weights: torch.Tensor | None) -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    labels = torch.tensor([0, 1, 2])
    total, values = linear_losses(
        hidden, weight, labels, {"constant": Constant(3.0)}, shard=VocabShard(None, 6), token_weights=token_weights
    )
    (values.sum() if total is None else total).backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()
