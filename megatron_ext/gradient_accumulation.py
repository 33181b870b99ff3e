"""Makes several backward passes before one optimizer step leave the gradients that one pass would have left.

Owns the gradient buffers' contents between passes. Gradients in Megatron's buffers are reduced over ranks and divided
by their own mini-batch's denominator, so those of an earlier pass can neither be added to nor reduced again: they are
set aside during a pass, and merged by their weights after it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.parallel import ParallelContext


class GradientAccumulator:
    """Looks after the gradient buffers of a model's chunks.

    Args:
        model_chunks: chunks wrapped in Megatron's DistributedDataParallel.
    """

    def __init__(self, model_chunks: Sequence[torch.nn.Module], parallel: ParallelContext) -> None:
        self.model_chunks = model_chunks
        self.parallel = parallel
        self._weight: torch.Tensor | None = None  # of the gradients in the buffers, [] float64

    def zero(self) -> None:
        """Forget all gradients."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self._weight = None

    @contextmanager
    def backward_pass(self, denominator: torch.Tensor) -> Iterator[None]:
        """Around one pass over a mini-batch of this denominator ([] float64)."""
        # Megatron's fp32 optimizer leaves `grad` as an alias of `main_grad`: backward would add to it twice
        for chunk in self.model_chunks:
            for parameter in chunk.parameters():
                parameter.grad = None
        before = self._set_aside(denominator)
        yield
        if before is not None:
            self._merge(before)

    def _gradients(self) -> list[torch.Tensor]:
        """The flat gradient buffers of all chunks."""
        return [
            buffer.grad_data for chunk in self.model_chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ]

    def _set_aside(self, denominator: torch.Tensor) -> "_Accumulated | None":
        """Start a fresh gradient, and keep what an earlier pass left."""
        if self._weight is None:
            self._weight = denominator
            return None
        accumulated = None
        if self._any_gradient():
            gradients = [gradient.clone() for gradient in self._gradients()]
            accumulated = _Accumulated(gradients=gradients, weight=self._weight)
        # also where all of it is zero: DDP has to be ready for another reduction
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self._weight = denominator if accumulated is None else accumulated.weight + denominator
        return accumulated

    def _merge(self, before: "_Accumulated") -> None:
        """gradient = (weight_1 * gradient_1 + weight_2 * gradient_2) / (weight_1 + weight_2)."""
        assert self._weight is not None
        earlier_share = torch.where(self._weight > 0, before.weight / self._weight, 0.0)
        for gradient, earlier in zip(self._gradients(), before.gradients, strict=True):
            gradient.mul_((1.0 - earlier_share).to(gradient.dtype))
            gradient.add_(earlier.mul_(earlier_share.to(gradient.dtype)))

    def _any_gradient(self) -> bool:
        """False if the caller zeroed the buffers without `zero`; the same answer on every rank."""
        found = torch.stack([gradient.count_nonzero() for gradient in self._gradients()]).sum().reshape(1)
        for group in (self.parallel.pg.mp, self.parallel.pg.dp_cp):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return bool(found.item())


@dataclass(frozen=True)
class _Accumulated:
    """Gradients of earlier passes, and the weight of the tokens they come from."""

    gradients: list[torch.Tensor]
    weight: torch.Tensor  # [] float64
