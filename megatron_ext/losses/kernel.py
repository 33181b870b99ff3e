"""The arithmetic on one chunk of logits: one pass to measure the softmax, one pass to turn logits into their gradient.

Serves every way of making logits (chunked, materialised) and every loss. It sees this rank's real columns only, in
the type the matrix product gave; all its arithmetic is fp32.
"""

from collections.abc import Sequence

import torch

from megatron_ext.losses.base import SCALAR_STATISTICS, TokenLoss
from megatron_ext.losses.logits import ChunkProducts, LogitTransform
from megatron_ext.losses.statistics import TokenStatistics, row_blocks
from megatron_ext.losses.teacher import TeacherStatistics, TeacherTopK
from megatron_ext.losses.vocab_parallel import LOWEST, VocabShard

# Partial results of each rank: those that are always measured, and what some statistics need besides.
_ALWAYS = ("maximum", "denominator", "label_logits")
_BESIDES = {"mean_logits": "sum_logits", "entropy": "weighted_logits", "argmax": "argmax"}


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
        self.num_columns = shard.num_local_columns(width)
        self.transform = transform
        self.teacher_transform = teacher_transform or LogitTransform()
        wanted = {name for loss in self.losses for name in loss.statistics}
        self.teacher = TeacherStatistics(wanted, shard)
        besides = [partial for statistic, partial in _BESIDES.items() if statistic in wanted]
        self.partials = (*_ALWAYS, *besides, *self.teacher.partials)
        self.values_need_logits = "logits" in wanted
        self.gradient_needs_logits = any(t and not loss.is_scalar for loss, t in zip(losses, trained, strict=True))

    # ---------------------------------------------------------------------------------------------- measure

    def can_use_exponentials(self, dtype: torch.dtype) -> bool:
        """Whether the gradient can be made from the exponentials that `measure` leaves when it may overwrite."""
        needs_logits = self.values_need_logits or self.gradient_needs_logits
        return dtype == torch.float32 and not needs_logits and self.transform.softcap is None

    def products(self, student: torch.Tensor, teacher: torch.Tensor | None = None) -> ChunkProducts:
        return ChunkProducts(student, self.transform, teacher, self.teacher_transform)

    def measure(
        self,
        chunk: ChunkProducts,
        labels: torch.Tensor,
        *,
        overwrite: bool = False,
        leave_exponentials: bool = False,
    ) -> torch.Tensor:
        """[partials, tokens] fp32: what this rank's columns say of each token.

        Args:
            overwrite: the student's products may be overwritten.
            leave_exponentials: overwrite them, in fp32, by exp(logits - local maximum).
        """
        product = chunk.student
        partials = torch.zeros(len(self.partials), len(product), dtype=torch.float32, device=product.device)
        row = dict(zip(self.partials, partials, strict=True))
        if self.num_columns == 0:
            row["maximum"].fill_(LOWEST)
            if "teacher_maximum" in row:
                row["teacher_maximum"].fill_(LOWEST)
            return partials
        local, held = self.shard.locate(labels, self.width)
        picked = self.transform.apply(product.gather(1, local[:, None]).squeeze(1))
        row["label_logits"].copy_(torch.where(held, picked, 0.0))
        only_softmax = self.partials == _ALWAYS and not leave_exponentials
        for rows in row_blocks(*product.shape, product.device):
            block = product[rows].to(torch.float32, copy=not (overwrite or leave_exponentials))
            block = self.transform.apply_(block)
            part = {name: values[rows] for name, values in row.items()}
            if only_softmax:
                # torch's fused pass: the largest logit less the largest log-probability is log sum exp
                largest = block.amax(dim=1)
                logsumexp = largest - torch.log_softmax(block, dim=1, out=block).amax(dim=1)
                # no finite logit among this rank's
                part["maximum"].copy_(torch.where(largest == -torch.inf, LOWEST, logsumexp))
                part["denominator"].fill_(1.0)
                continue
            teacher = None
            if self.teacher.partials:
                assert chunk.teacher is not None, "a loss that compares with a teacher was given none"
                teacher = self.teacher_transform.apply(chunk.teacher[rows], copy=True)
            self._measure_block(block, teacher, part)
        return partials

    def _measure_block(self, block: torch.Tensor, teacher: torch.Tensor | None, row: dict[str, torch.Tensor]) -> None:
        """Fills in the rows; leaves exp(block - maximum) in `block` [rows, columns] fp32."""
        if "sum_logits" in row:
            row["sum_logits"].copy_(block.sum(dim=1))
        if "argmax" in row:  # on a CPU .argmax takes fifty times as long as .max
            maximum, index = block.max(dim=1)
            row["argmax"].copy_(index + self.shard.rank * self.width)  # exact below 2**24
        else:
            maximum = block.amax(dim=1)
        maximum = maximum.clamp_(min=LOWEST)  # -inf, where none of this rank's logits is finite, less -inf is NaN
        row["maximum"].copy_(maximum)
        block.sub_(maximum[:, None])
        if teacher is not None:
            self.teacher.measure(block, teacher, row)
        if "weighted_logits" in row:
            # the lower limit keeps a logit of -inf from making 0 * inf
            row["weighted_logits"].copy_((block.exp() * block.clamp(min=LOWEST)).sum(dim=1))
        row["denominator"].copy_(block.exp_().sum(dim=1))

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
        part = dict(zip(self.partials, gathered.unbind(1), strict=True))  # [tp, tokens] each
        maximum = part["maximum"].amax(dim=0)
        share = (part["maximum"] - maximum).exp_()
        denominator = (share * part["denominator"]).sum(dim=0)
        log_denominator = denominator.log()
        measured = {"logsumexp": maximum + log_denominator, "label_logits": part["label_logits"].sum(dim=0)}
        if "sum_logits" in part:
            measured["mean_logits"] = part["sum_logits"].sum(dim=0) / self.shard.vocab_size
        if "weighted_logits" in part:
            shifted = part["weighted_logits"] + (part["maximum"] - maximum) * part["denominator"]
            measured["entropy"] = log_denominator - (share * shifted).sum(dim=0) / denominator
        if "argmax" in part:
            best_rank = part["maximum"].argmax(dim=0, keepdim=True)
            measured["argmax"] = part["argmax"].gather(0, best_rank).squeeze(0).long()
        measured |= self.teacher.combine(part)
        tokens = self.statistics(labels, measured, products)
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
        local_maximum: torch.Tensor | None = None,
        ignored: torch.Tensor | None = None,
    ) -> None:
        """Overwrite the student's products by the gradient with respect to them, in their own type.

        Args:
            tokens: the chunk's statistics.
            upstream: [losses, tokens] fp32, the gradient with respect to each loss of each token.
            local_maximum: [tokens] where `measure` left exponentials in the chunk: what it subtracted.
            ignored: [tokens] tokens whose gradient is exactly 0 whatever their logits are.
        """
        if self.num_columns == 0 and not self.gradient_needs_logits:
            return
        if ignored is not None:
            upstream = upstream.masked_fill(ignored, 0.0)
        scalar = self._scalar_gradient(tokens, upstream)
        if ignored is not None:
            scalar = tuple(part.masked_fill(ignored, 0.0) for part in scalar)
        if self.gradient_needs_logits:
            self._replace_with_logits(chunk, tokens.with_products(chunk), upstream, scalar, ignored)
        else:
            self._replace_by_softmax(chunk.student, tokens, scalar, local_maximum, ignored)

    def _replace_by_softmax(
        self,
        product: torch.Tensor,
        tokens: TokenStatistics,
        scalar: tuple[torch.Tensor, ...],
        local_maximum: torch.Tensor | None,
        ignored: torch.Tensor | None,
    ) -> None:
        """As `replace_by_gradient`, where the gradient is softmax, onehot and constant, each times a number."""
        softmax, label, constant = scalar
        uniform = constant if "sum_logits" in self.partials else None
        at_label = softmax * (tokens.label_logits - tokens.logsumexp).exp() + label + constant
        at_label = at_label * self.transform.derivative(tokens.label_logits)
        for rows in row_blocks(*product.shape, product.device):
            block = product[rows]
            if local_maximum is None:
                gradient = self._softmax_gradient(block, tokens.logsumexp[rows], softmax[rows], uniform, rows)
            else:
                factor = softmax[rows] * (local_maximum[rows] - tokens.logsumexp[rows]).exp() * self.transform.scale
                gradient = block.mul_(factor[:, None])
                if uniform is not None:
                    gradient.add_(self.transform.scale * uniform[rows, None])
            if ignored is not None:
                gradient.masked_fill_(ignored[rows, None], 0.0)
            if gradient is not block:
                block.copy_(gradient)
        _write_at_labels(product, tokens, at_label if ignored is None else at_label.masked_fill(ignored, 0.0))

    def _softmax_gradient(
        self,
        block: torch.Tensor,
        logsumexp: torch.Tensor,
        softmax: torch.Tensor,
        uniform: torch.Tensor | None,
        rows: slice,
    ) -> torch.Tensor:
        """[rows, columns] fp32: softmax * exp(logits - logsumexp) + uniform, taken back through the transform."""
        logits = self.transform.apply(block, copy=True)
        derivative = self.transform.derivative(logits)
        gradient = logits.sub_(logsumexp[:, None]).exp_()
        if isinstance(derivative, float):
            gradient.mul_((softmax * derivative)[:, None])
            return gradient if uniform is None else gradient.add_(derivative * uniform[rows, None])
        gradient.mul_(softmax[:, None])
        if uniform is not None:
            gradient.add_(uniform[rows, None])
        return gradient.mul_(derivative)

    def _scalar_gradient(self, tokens: TokenStatistics, upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[tokens] each: the gradient's share that goes as the softmax, to the label's column, and to every column."""
        known = {name: value for name, value in tokens.measured.items() if name in SCALAR_STATISTICS}
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in known.items()}
            leaf_tokens = tokens.with_measured(leaves)
            total = torch.zeros((), device=upstream.device)
            for loss, trained, weights in zip(self.losses, self.trained, upstream, strict=True):
                if trained and loss.is_scalar:
                    total = total + (weights * loss.value(leaf_tokens)).sum()
        zeros = torch.zeros_like(tokens.logsumexp)
        if not total.requires_grad:
            return zeros, zeros, zeros
        parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found = {name: part for name, part in zip(leaves, parts, strict=True) if part is not None}
        return (
            found.get("logsumexp", zeros),
            found.get("label_logits", zeros),
            found.get("mean_logits", zeros) / self.shard.vocab_size,
        )

    def _replace_with_logits(
        self,
        chunk: ChunkProducts,
        tokens: TokenStatistics,
        upstream: torch.Tensor,
        scalar: tuple[torch.Tensor, ...],
        ignored: torch.Tensor | None,
    ) -> None:
        """As `replace_by_gradient`, with losses that need the logits themselves."""
        by_autograd = self._autograd_gradient(tokens, upstream)  # on every rank: it may communicate
        if self.num_columns == 0:
            return
        kinds = list(zip(self.losses, self.trained, upstream, strict=True))
        explicit = [(loss, u) for loss, trained, u in kinds if trained and not loss.is_scalar and loss.has_gradient]
        has_scalar = any(trained and loss.is_scalar for loss, trained, _ in kinds)
        for rows, part in tokens.blocks():
            logits = part.logits
            if has_scalar:
                softmax, label, uniform = (share[rows] for share in scalar)
                gradient = (logits - part.logsumexp[:, None]).exp_().mul_(softmax[:, None]).add_(uniform[:, None])
                local, held = part.columns
                gradient.scatter_add_(1, local[:, None], torch.where(held, label, 0.0)[:, None])
            else:
                gradient = torch.zeros_like(logits)
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


def _write_at_labels(product: torch.Tensor, tokens: TokenStatistics, values: torch.Tensor) -> None:
    """Set the label's column of the tokens whose label this rank holds.

    softmax - 1 cancels: it is computed in fp32, apart from the other columns, and rounded once.
    """
    local, held = tokens.columns
    index = (torch.arange(len(product), device=product.device), local)  # not scatter_, which is slow for 16-bit types
    product[index] = torch.where(held, values.to(product.dtype), product[index])
