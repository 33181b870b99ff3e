"""Refuses arguments that cannot be right, naming what and why, before anything is computed or communicated.

What is checked is the same on every rank that shares the vocabulary, so that all of them raise and none waits.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.teacher import Teacher, TeacherTopK
from megatron_ext.losses.vocab_parallel import VocabShard, check_width


def check_arguments(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor | None,
    losses: Mapping[str, Any],
    loss_weights: Mapping[str, float],
    shard: VocabShard,
    chunk_tokens: int | str,
    sequence_parallel: bool,
    validate: bool,
) -> None:
    """Raises ValueError, see `linear_losses`."""
    if weight.dim() != 2 or hidden.dim() not in (2, 3):
        raise ValueError(
            f"hidden has the shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; "
            "use [tokens, h] or [s, b, h], and [vocab/tp, h]"
        )
    if weight.size(1) != hidden.size(-1):
        raise ValueError(
            f"hidden has {hidden.size(-1)} features and weight {weight.size(1)}; both need the model's hidden size"
        )
    check_types(labels, token_weights, hidden=hidden, weight=weight)
    ranks = shard.size if sequence_parallel else 1
    expected = (hidden.size(0) * ranks, *hidden.shape[1:-1])
    if tuple(labels.shape) != expected:
        divided = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"labels have the shape {tuple(labels.shape)}, but hidden {tuple(hidden.shape)}{divided} "
            f"needs {expected}: one label for each token"
        )
    if validate:
        check_width(weight.size(0), shard, "weight")
    if chunk_tokens != "auto" and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens: {chunk_tokens!r} is no number of tokens; use 1 or more, or 'auto'")
    check_losses(losses, loss_weights)
    if token_weights is not None and token_weights.shape != labels.shape:
        raise ValueError(
            f"token_weights have the shape {tuple(token_weights.shape)}, labels {tuple(labels.shape)}; "
            "one weight for each label is needed"
        )
    if validate:
        check_tokens(labels, token_weights, shard.vocab_size)


def check_types(labels: torch.Tensor, token_weights: torch.Tensor | None, **floats: torch.Tensor) -> None:
    """Raises ValueError for tensors of a kind that cannot be meant."""
    for name, tensor in floats.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is of type {tensor.dtype}; use a floating-point type")
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels are of type {labels.dtype}; token ids are int64")
    if token_weights is not None and token_weights.requires_grad:
        raise ValueError("token_weights require a gradient, which they do not get; detach them")


def check_losses(losses: Mapping[str, Any], loss_weights: Mapping[str, float]) -> None:
    """Raises ValueError for no loss at all, and for weights of losses that are not there or no weights."""
    if not losses:
        raise ValueError("losses is empty; name at least one, for example {'lm_loss': CrossEntropy()}")
    unknown = sorted(set(loss_weights) - set(losses))
    if unknown:
        raise ValueError(f"loss_weights names {unknown}, which are not among the losses {sorted(losses)}")
    for name, weight in loss_weights.items():
        if not 0 <= weight < float("inf"):
            raise ValueError(f"loss_weights: {name} has the weight {weight}; use a number of at least 0")


def check_tokens(labels: torch.Tensor, token_weights: torch.Tensor | None, vocab_size: int) -> None:
    """Raises ValueError for labels outside the vocabulary where they count, and for impossible token weights.

    Waits for the device once.
    """
    outside = (labels < 0) | (labels >= vocab_size)
    wrong = torch.zeros_like(outside)
    if token_weights is not None:
        wrong = ~((token_weights >= 0) & (token_weights < float("inf")))  # NaN compares false
        outside = outside & (token_weights != 0)
    num_outside, num_wrong = torch.stack((outside.sum(), wrong.sum())).tolist()
    if num_wrong:
        first = token_weights[wrong][0].item()
        raise ValueError(
            f"token_weights: {num_wrong} of them are negative or not finite, such as {first}; "
            "use 0 for tokens that do not count"
        )
    if num_outside:
        first = labels[outside][0].item()
        raise ValueError(
            f"labels: {num_outside} of the tokens that count are outside the vocabulary of {vocab_size}, such as "
            f"{first}; give tokens that do not count the weight 0"
        )


def check_teacher(
    teacher: Teacher | None,
    losses: Iterable[TokenLoss],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    """Raises ValueError for distillation losses without a teacher that suits them."""
    comparing = [loss for loss in losses if loss.needs_teacher]
    if not comparing:
        return
    names = ", ".join(sorted({type(loss).__name__ for loss in comparing}))
    if teacher is None:
        raise ValueError(f"{names} compares with a teacher, but teacher is None; pass TeacherHidden or TeacherTopK")
    if isinstance(teacher, TeacherTopK):
        check_top_k(teacher, comparing, labels)
        return
    if teacher.hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher: hidden has the shape {tuple(teacher.hidden.shape)}, the student's {tuple(hidden.shape)}; "
            "both need the same tokens"
        )
    if teacher.weight.size(0) != weight.size(0) or teacher.weight.size(1) != teacher.hidden.size(-1):
        raise ValueError(
            f"teacher: weight has the shape {tuple(teacher.weight.shape)}; it needs {weight.size(0)} rows, as the "
            f"student's, of its own {teacher.hidden.size(-1)} features"
        )


def check_top_k(teacher: TeacherTopK, comparing: Iterable[TokenLoss], labels: torch.Tensor) -> None:
    """Raises ValueError for a cached teacher of other tokens, or one that losses cannot do with."""
    shapes = tuple(teacher.ids.shape), tuple(teacher.log_probabilities.shape), tuple(teacher.log_tail.shape)
    if shapes != (shapes[0], shapes[0], tuple(labels.shape)) or shapes[0][:-1] != tuple(labels.shape):
        raise ValueError(
            f"teacher: ids have the shape {shapes[0]}, log_probabilities {shapes[1]}, log_tail {shapes[2]}; "
            f"labels {tuple(labels.shape)} need k ids and log-probabilities, and one tail, for each token"
        )
    for loss in comparing:
        loss.check_top_k(teacher)
