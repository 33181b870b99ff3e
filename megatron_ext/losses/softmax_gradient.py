"""Gradients that are made of softmaxes: from logits, or from the exponentials that the measuring pass left.

With respect to a token's logits: softmax * q + label * onehot + uniform + teacher * p, where q and p are the student's
and the teacher's probabilities and the factors are numbers of that token.
"""

from typing import NamedTuple

import torch

from megatron_ext.losses import looking
from megatron_ext.losses.logits import ChunkProducts
from megatron_ext.losses.measurement import Exponentials
from megatron_ext.losses.statistics import TokenStatistics

# A factor of a token is taken out of its gradient as long as what remains stays far from the limits of the type.
_SMALLEST_FACTOR, _LARGEST_RATIO = 1e-30, 1e30


class Shares(NamedTuple):
    """The factors, [tokens] fp32 each; None: no such part."""

    softmax: torch.Tensor | None = None
    label: torch.Tensor | None = None
    uniform: torch.Tensor | None = None
    teacher: torch.Tensor | None = None

    def rows(self, rows: slice) -> "Shares":
        return Shares(*(None if part is None else part[rows] for part in self))


def of_block(tokens: TokenStatistics, shares: Shares) -> torch.Tensor:
    """[tokens, columns] fp32 in memory of its own, with respect to the logits of few tokens."""
    gradient = _probabilities(tokens.logits, tokens.logsumexp, shares.softmax)
    if gradient is None:
        gradient = torch.zeros_like(tokens.logits)
    if shares.uniform is not None:
        gradient.add_(shares.uniform[:, None])
    if shares.teacher is not None:
        gradient.add_(_probabilities(tokens.teacher_logits, tokens.measured["teacher_logsumexp@1.0"], shares.teacher))
    if shares.label is not None:
        local, held = tokens.columns
        gradient.scatter_add_(1, local[:, None], torch.where(held, shares.label, 0.0)[:, None])
    return gradient


def _probabilities(logits: torch.Tensor, logsumexp: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor | None:
    """Times the factor, in memory of their own."""
    return None if factor is None else (logits - logsumexp[:, None]).exp_().mul_(factor[:, None])


def from_logits(chunk: ChunkProducts, tokens: TokenStatistics, shares: Shares, ignored: torch.Tensor | None) -> None:
    """Replace the student's products by the gradient with respect to them; that of `ignored` tokens is exactly 0."""
    at_labels = _at_labels(chunk, tokens, shares)
    if ignored is not None and at_labels is not None:
        at_labels = at_labels.masked_fill(ignored, 0.0)
    for rows, part in tokens.blocks():
        gradient = of_block(part, shares.rows(rows)._replace(label=None))
        if not chunk.transform.is_identity:
            gradient.mul_(chunk.transform.derivative(part.logits))
        if ignored is not None:
            gradient.masked_fill_(ignored[rows, None], 0.0)
        chunk.student[rows].copy_(gradient)
    _write_at_labels(chunk.student, tokens, at_labels)


def from_exponentials(
    chunk: ChunkProducts, tokens: TokenStatistics, shares: Shares, left: Exponentials
) -> torch.Tensor | None:
    """Replace the student's exponentials by the gradient with respect to its products, but for a factor of each token,
    which is returned, [tokens]; None for 1.
    """
    product, scale = chunk.student, chunk.transform.scale
    at_labels = _at_labels(chunk, tokens, shares, left)
    softmax = torch.zeros_like(tokens.logsumexp) if shares.softmax is None else shares.softmax
    factor = softmax * (left.maximum - tokens.logsumexp).exp() * scale
    uniform = None if shares.uniform is None else shares.uniform * scale
    of_teacher = None
    if shares.teacher is not None:
        of_teacher = shares.teacher * (left.teacher_maximum - tokens.measured["teacher_logsumexp@1.0"]).exp() * scale
    others = [part for part in (at_labels, uniform, of_teacher) if part is not None]
    if _can_be_taken_out(factor, others):
        at_labels, uniform, of_teacher = (None if p is None else p / factor for p in (at_labels, uniform, of_teacher))
        taken_out = factor
    else:
        product.mul_(factor[:, None])
        taken_out = None
    if of_teacher is not None:
        product.addcmul_(chunk.teacher, of_teacher[:, None])
    if uniform is not None:
        product.add_(uniform[:, None])
    _write_at_labels(product, tokens, at_labels)
    return taken_out


def _can_be_taken_out(factor: torch.Tensor, others: list[torch.Tensor]) -> bool:
    """Saves a pass over the chunk."""
    if not looking.is_free(factor) or not len(factor):
        return False
    smallest = factor.abs().min().item()
    return smallest > _SMALLEST_FACTOR and all(part.abs().max() < smallest * _LARGEST_RATIO for part in others)


def _at_labels(
    chunk: ChunkProducts, tokens: TokenStatistics, shares: Shares, left: Exponentials | None = None
) -> torch.Tensor | None:
    """[tokens] the gradient with respect to the label's product, None if it is like every other.

    softmax - 1 cancels: it is computed in fp32, apart from the other columns, and rounded once.
    """
    if shares.label is None:
        return None
    total = shares.label
    if shares.softmax is not None:
        total = total + shares.softmax * tokens.label_log_probability.exp()
    if shares.uniform is not None:
        total = total + shares.uniform
    if shares.teacher is not None:
        at_labels = chunk.teacher.gather(1, tokens.columns[0][:, None]).squeeze(1)
        if left is None:
            at_labels, reference = chunk.teacher_transform.apply(at_labels), tokens.measured["teacher_logsumexp@1.0"]
            probability = (at_labels - reference).exp()
        else:
            shift = left.teacher_maximum - tokens.measured["teacher_logsumexp@1.0"]
            probability = at_labels * shift.exp()
        total = total + shares.teacher * probability
    return total * chunk.transform.derivative(tokens.label_logits)


def _write_at_labels(product: torch.Tensor, tokens: TokenStatistics, values: torch.Tensor | None) -> None:
    """Set the label's column of the tokens whose label this rank holds."""
    if values is None:
        return
    local, held = tokens.columns
    index = (torch.arange(len(product), device=product.device), local)  # not scatter_, which is slow for 16-bit types
    product[index] = torch.where(held, values.to(product.dtype), product[index])
