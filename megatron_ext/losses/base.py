"""What a loss is, and the register of losses by the type name that configurations use."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from megatron_ext.config import LossBase
from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.teacher import TeacherTopK

# Through these the gradient is known without the loss's help:
# dz = d/d(logsumexp) * softmax + d/d(label_logits) * onehot + d/d(mean_logits) / vocabulary
#    + d/d(forward_kl@1.0) * (softmax - teacher's softmax)
FORWARD_KL = "forward_kl@1.0"
SCALAR_STATISTICS = frozenset({"logsumexp", "label_logits", "mean_logits", FORWARD_KL})


class TokenLoss(ABC):
    """One value per token, a function of the token's logits. Immutable; knows nothing of weights, masks and sums.

    Three ways to have a gradient, the first that fits:
    1. `statistics` names scalar statistics only (logsumexp, label_logits, mean_logits, forward_kl@1.0): `value` is
       differentiated with respect to those few numbers per token, and nothing more is asked of the loss;
    2. `has_gradient` is true: `add_gradient` writes the gradient with respect to the logits;
    3. otherwise `value`, as a function of `tokens.logits`, is differentiated by autograd, one chunk at a time.
    """

    # What `value` reads: names of TokenStatistics' attributes. "logits" stands for whatever is computed from them.
    statistics: frozenset[str] = frozenset({"logsumexp", "label_logits"})
    has_gradient: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False

    def second_pass(self, tokens: TokenStatistics, top_k: TeacherTopK | None) -> dict[str, torch.Tensor]:
        """Statistics that take the logits and the first pass's statistics together, [tokens, ...] by name.

        For losses with "logits" among their statistics. Called once for each chunk, on every rank: it may communicate.

        Args:
            top_k: what a cache knows of the teacher, if the teacher is one.
        """
        return {}

    @abstractmethod
    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        """[tokens] fp32, the same on every rank that shares the vocabulary."""

    def add_gradient(self, tokens: TokenStatistics, upstream: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add upstream [tokens] times d value / d logits to `gradient` [tokens, columns] fp32.

        Reads the logits only, and does not communicate: ranks call it for different blocks of tokens.
        """
        raise NotImplementedError

    def check_top_k(self, teacher: TeacherTopK) -> None:
        """Raises ValueError if a teacher that is known by its most likely tokens only does not suffice."""
        raise ValueError(f"{type(self).__name__} needs the teacher's whole distribution; use TeacherHidden")

    @property
    def is_scalar(self) -> bool:
        """Whether the value depends on the logits through scalar statistics only."""
        return self.statistics <= SCALAR_STATISTICS


_LOSSES: dict[str, type[TokenLoss]] = {}


def register_loss(type_name: str) -> Callable[[type[TokenLoss]], type[TokenLoss]]:
    """Class decorator: configurations name the loss by this type; its settings become arguments of the class."""

    def register(loss: type[TokenLoss]) -> type[TokenLoss]:
        if type_name in _LOSSES:
            raise ValueError(
                f"loss type {type_name!r} is already registered, by {_LOSSES[type_name].__name__}; use another name"
            )
        _LOSSES[type_name] = loss
        return loss

    return register


def build_loss(settings: LossBase) -> TokenLoss:
    """The loss of one entry of a configuration's `losses`.

    Raises:
        ValueError: nothing is registered under its type.
    """
    if settings.type not in _LOSSES:
        raise ValueError(f"loss type {settings.type!r} is not known; registered are {', '.join(sorted(_LOSSES))}")
    return _LOSSES[settings.type](**settings.model_dump(exclude={"type", "weight"}))
