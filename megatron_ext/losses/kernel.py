"""The arithmetic on one chunk of logits: one pass measures the softmax, one turns the logits into their gradient.

Serves every way of making logits (chunked, materialised) and every loss. It sees this rank's real columns only, in
the type the matrix product gave; all its arithmetic is fp32.
"""

from collections.abc import Sequence

import torch

from megatron_ext.losses import softmax_gradient
from megatron_ext.losses.base import FORWARD_KL, SCALAR_STATISTICS, TokenLoss
from megatron_ext.losses.logits import ChunkProducts, LogitTransform
from megatron_ext.losses.measurement import Exponentials, Measurement
from megatron_ext.losses.softmax_gradient import Shares
from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.teacher import TeacherTopK
from megatron_ext.losses.vocab_parallel import VocabShard


class ChunkKernel:
    """Measures and differentiates chunks of logits.

    Args:
        losses: what is computed of every token.
        trained: whether each of them can get a gradient.
        shard: where this rank's columns lie.
        width: columns of each rank, padding included.
        transform: from the matrix product to logits.
        teacher_transform: the same for the teacher's.
    """

    def __init__(
        self,
        losses: Sequence[TokenLoss],
        trained: Sequence[bool],
        shard: VocabShard,
        width: int,
        transform: LogitTransform,
        teacher_transform: LogitTransform | None = None,
    ) -> None:
        self.losses = list(losses)
        self.trained = list(trained)
        self.shard = shard
        self.width = width
        self.transform = transform
        self.teacher_transform = teacher_transform or LogitTransform()
        wanted = {name for loss in self.losses for name in loss.statistics}
        self._measurement = Measurement(wanted, shard, width)
        self.num_columns = self._measurement.num_columns
        self.num_partials = len(self._measurement.partials)
        self.values_need_logits = "logits" in wanted
        self.gradient_needs_logits = any(t and not loss.is_scalar for loss, t in zip(losses, trained, strict=True))
        self._compares = any(t and FORWARD_KL in loss.statistics for loss, t in zip(losses, trained, strict=True))

    # ---------------------------------------------------------------------------------------------- measure

    def can_use_exponentials(self, dtype: torch.dtype, teacher_dtype: torch.dtype | None = None) -> bool:
        """Whether the gradient can be made from the exponentials that `measure` leaves.

        Not in 16 bits the difference of two softmaxes, which would lose its digits, and not in fp16, whose range is
        too small for one.

        Args:
            dtype: of the student's products.
            teacher_dtype: of the teacher's, if there are any.
        """
        if self.values_need_logits or self.gradient_needs_logits or self.transform.softcap is not None:
            return False
        if self._compares:
            return dtype == teacher_dtype == torch.float32
        return dtype in (torch.float32, torch.bfloat16)

    def products(self, student: torch.Tensor, teacher: torch.Tensor | None = None) -> ChunkProducts:
        return ChunkProducts(student, self.transform, teacher, self.teacher_transform)

    def measure(
        self, chunk: ChunkProducts, labels: torch.Tensor, *, leave_exponentials: bool = False
    ) -> tuple[torch.Tensor, Exponentials | None]:
        """[partials, tokens] fp32: what this rank's columns say of each token; and what was left of the products.

        Args:
            leave_exponentials: replace the products by them; otherwise products are only read.
        """
        partials = self._measurement.measure(chunk, labels, leave_exponentials=leave_exponentials)
        return partials, self._measurement.exponentials(partials) if leave_exponentials else None

    def combine(
        self,
        gathered: torch.Tensor,
        labels: torch.Tensor,
        products: ChunkProducts | None = None,
        top_k: TeacherTopK | None = None,
    ) -> TokenStatistics:
        """The statistics over the whole vocabulary, from every rank's partial results [tp, partials, tokens].

        With products also what losses measure in a second pass.
        """
        tokens = self.statistics(labels, self._measurement.combine(gathered), products)
        if products is not None:
            for loss in self.losses:
                tokens = tokens.with_measured(tokens.measured | loss.second_pass(tokens, top_k))
        return tokens

    def statistics(
        self, labels: torch.Tensor, measured: dict[str, torch.Tensor], products: ChunkProducts | None = None
    ) -> TokenStatistics:
        columns = self.shard.locate(labels, self.width)
        return TokenStatistics(labels, columns, self.shard, self.shard.rank * self.width, products, measured)

    # ----------------------------------------------------------------------------------------------- values

    def values(self, tokens: TokenStatistics) -> torch.Tensor:
        """[losses, tokens] fp32."""
        with torch.no_grad():
            return torch.stack([loss.value(tokens) for loss in self.losses])

    # --------------------------------------------------------------------------------------------- gradient

    def replace_by_gradient(
        self,
        chunk: ChunkProducts,
        tokens: TokenStatistics,
        upstream: torch.Tensor,
        *,
        left: Exponentials | None = None,
        ignored: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Overwrite the student's products by the gradient with respect to them, in their own type.

        Args:
            tokens: the chunk's statistics.
            upstream: [losses, tokens] fp32, the gradient with respect to each loss of each token.
            left: what `measure` left of the products, if it did.
            ignored: [tokens] tokens whose gradient is exactly 0 whatever their logits are. Not with `left`.

        Returns:
            [tokens] fp32 by which the gradient is still to be multiplied: that costs less where few columns are left
            than here. None for 1.
        """
        if self.num_columns == 0 and not self.gradient_needs_logits:
            return None
        if ignored is not None:
            upstream = upstream.masked_fill(ignored, 0.0)
        shares = self._scalar_gradient(tokens, upstream)
        if left is not None:
            return softmax_gradient.from_exponentials(chunk, tokens, shares, left)
        if ignored is not None:
            shares = Shares(*(None if part is None else part.masked_fill(ignored, 0.0) for part in shares))
        tokens = tokens.with_products(chunk)
        if self.gradient_needs_logits:
            self._replace_with_logits(chunk, tokens, upstream, shares, ignored)
        else:
            softmax_gradient.from_logits(chunk, tokens, shares, ignored)
        return None

    def _scalar_gradient(self, tokens: TokenStatistics, upstream: torch.Tensor) -> Shares:
        """What the losses that are functions of scalar statistics say together."""
        known = {name: value for name, value in tokens.measured.items() if name in SCALAR_STATISTICS}
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in known.items()}
            leaf_tokens = tokens.with_measured(leaves)
            total = torch.zeros((), device=upstream.device)
            for loss, trained, weights in zip(self.losses, self.trained, upstream, strict=True):
                if trained and loss.is_scalar:
                    total = total + (weights * loss.value(leaf_tokens)).sum()
        if not total.requires_grad:
            return Shares()
        parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found = {name: part for name, part in zip(leaves, parts, strict=True) if part is not None}
        softmax, label, uniform, compared = (
            found.get(name) for name in ("logsumexp", "label_logits", "mean_logits", FORWARD_KL)
        )
        if compared is not None:
            softmax = compared if softmax is None else softmax + compared
        return Shares(
            softmax,
            label,
            None if uniform is None else uniform / self.shard.vocab_size,
            None if compared is None else -compared,
        )

    def _replace_with_logits(
        self,
        chunk: ChunkProducts,
        tokens: TokenStatistics,
        upstream: torch.Tensor,
        shares: Shares,
        ignored: torch.Tensor | None,
    ) -> None:
        """As `replace_by_gradient`, with losses that need the logits themselves."""
        by_autograd = self._autograd_gradient(tokens, upstream)  # on every rank: it may communicate
        if self.num_columns == 0:
            return
        kinds = zip(self.losses, self.trained, upstream, strict=True)
        explicit = [(loss, u) for loss, trained, u in kinds if trained and not loss.is_scalar and loss.has_gradient]
        for rows, part in tokens.blocks():
            logits = part.logits
            gradient = softmax_gradient.of_block(part, shares.rows(rows))
            for loss, weights in explicit:
                loss.add_gradient(part, weights[rows], gradient)
            if by_autograd is not None:
                gradient.add_(by_autograd[rows])
            if not self.transform.is_identity:
                gradient.mul_(self.transform.derivative(logits))
            if ignored is not None:
                gradient.masked_fill_(ignored[rows, None], 0.0)
            chunk.student[rows].copy_(gradient)

    def _autograd_gradient(self, tokens: TokenStatistics, upstream: torch.Tensor) -> torch.Tensor | None:
        """[tokens, columns] fp32, of the losses that only say their value. They may communicate: all rows at once."""
        chosen = [
            (loss, weights)
            for loss, trained, weights in zip(self.losses, self.trained, upstream, strict=True)
            if trained and not loss.is_scalar and not loss.has_gradient
        ]
        if not chosen:
            return None
        with torch.enable_grad():
            leaf = tokens.logits.detach().requires_grad_()
            attached = tokens.as_function_of(leaf)
            total = sum((weights * loss.value(attached)).sum() for loss, weights in chosen)
        return torch.autograd.grad(total, leaf)[0]
