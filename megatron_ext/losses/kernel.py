"""The arithmetic on one chunk of logits: one pass to measure the softmax, one pass to turn logits into their gradient.

Serves every way of making logits (chunked, materialised) and every loss. It sees this rank's real columns only, in
the type the matrix product gave; all its arithmetic is fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.vocab_parallel import LOWEST, VocabShard

# Partial results of each rank: those that are always measured, and what some statistics need besides.
_ALWAYS = ("maximum", "denominator", "label_logits")
_BESIDES = {"mean_logits": "sum_logits", "entropy": "weighted_logits", "argmax": "argmax"}
# fp32 numbers that stay in a CPU's caches between the steps of a pass
_CACHED_ELEMENTS = 2**19


@dataclass(frozen=True)
class LogitTransform:
    """From the matrix product x to the logits the losses see: softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"logit_scale: {self.scale} is not positive; use a number above 0")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"logit_softcap: {self.softcap} is not positive; use a number above 0, or none")

    def apply_(self, product: torch.Tensor) -> torch.Tensor:
        """In place, on fp32."""
        if self.softcap is not None:
            return product.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        return product.mul_(self.scale) if self.scale != 1.0 else product

    def derivative(self, logits: torch.Tensor) -> torch.Tensor | float:
        """d logits / d x, as a function of the logits."""
        if self.softcap is None:
            return self.scale
        return (logits / self.softcap).square_().neg_().add_(1.0).mul_(self.scale)


class ChunkKernel:
    """Measures and differentiates chunks of logits.

    Args:
        losses: what is computed of every token.
        trained: whether each of them can get a gradient.
        shard: where this rank's columns lie.
        width: columns of each rank, padding included.
        transform: from the matrix product to logits.
    """

    def __init__(
        self,
        losses: Sequence[TokenLoss],
        trained: Sequence[bool],
        shard: VocabShard,
        width: int,
        transform: LogitTransform,
    ) -> None:
        self.losses = list(losses)
        self.trained = list(trained)
        self.shard = shard
        self.width = width
        self.num_columns = shard.num_local_columns(width)
        self.transform = transform
        wanted = {name for loss in self.losses for name in loss.statistics}
        besides = [partial for statistic, partial in _BESIDES.items() if statistic in wanted]
        self.partials = (*_ALWAYS, *besides)
        self.values_need_logits = "logits" in wanted
        self.gradient_needs_logits = any(t and not loss.is_scalar for loss, t in zip(losses, trained, strict=True))

    # ---------------------------------------------------------------------------------------------- measure

    def can_use_exponentials(self, dtype: torch.dtype) -> bool:
        """Whether the gradient can be made from the exponentials that `measure` leaves when it may overwrite."""
        needs_logits = self.values_need_logits or self.gradient_needs_logits
        return dtype == torch.float32 and not needs_logits and self.transform.softcap is None

    def measure(self, chunk: torch.Tensor, labels: torch.Tensor, *, overwrite: bool) -> torch.Tensor:
        """[partials, tokens] fp32: what this rank's columns say of each token.

        Args:
            chunk: [tokens, columns] products of hidden states and weight.
            overwrite: the chunk may be overwritten; one of fp32 then holds exp(logits - local maximum) afterwards.
        """
        partials = torch.zeros(len(self.partials), len(chunk), dtype=torch.float32, device=chunk.device)
        row = dict(zip(self.partials, partials, strict=True))
        if self.num_columns == 0:
            row["maximum"].fill_(LOWEST)
            return partials
        local, held = self.shard.locate(labels, self.width)
        picked = self.transform.apply_(chunk.gather(1, local[:, None]).squeeze(1).float())
        row["label_logits"].copy_(torch.where(held, picked, 0.0))
        for rows in self._row_blocks(chunk):
            block = chunk[rows].to(torch.float32, copy=not overwrite)  # an fp32 block is the chunk's own memory
            self._measure_block(self.transform.apply_(block), {name: part[rows] for name, part in row.items()})
        return partials

    def _measure_block(self, block: torch.Tensor, row: dict[str, torch.Tensor]) -> None:
        """Fills in the rows; leaves exp(block - maximum) in `block` [rows, columns] fp32."""
        if "sum_logits" in row:
            row["sum_logits"].copy_(block.sum(dim=1))
        if "argmax" in row:
            row["argmax"].copy_(block.argmax(dim=1) + self.shard.rank * self.width)  # exact below 2**24
        maximum = block.amax(dim=1)
        row["maximum"].copy_(maximum)
        block.sub_(maximum[:, None])
        if "weighted_logits" in row:
            # the lower limit keeps a logit of -inf from making 0 * inf
            row["weighted_logits"].copy_((block.exp() * block.clamp(min=LOWEST)).sum(dim=1))
        row["denominator"].copy_(block.exp_().sum(dim=1))

    def combine(
        self, gathered: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor | None = None
    ) -> TokenStatistics:
        """The statistics over the whole vocabulary, from every rank's partial results [tp, partials, tokens]."""
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
        return TokenStatistics(labels, self.shard.locate(labels, self.width), self.shard, logits, measured)

    def logits(self, chunk: torch.Tensor) -> torch.Tensor:
        """[tokens, columns] fp32 logits of a chunk of products that `measure` has not overwritten."""
        return self.transform.apply_(chunk.to(torch.float32, copy=True))

    # ----------------------------------------------------------------------------------------------- values

    def values(self, tokens: TokenStatistics) -> torch.Tensor:
        """[losses, tokens] fp32."""
        with torch.no_grad():
            return torch.stack([loss.value(tokens) for loss in self.losses])

    # --------------------------------------------------------------------------------------------- gradient

    def replace_by_gradient(
        self,
        chunk: torch.Tensor,
        tokens: TokenStatistics,
        upstream: torch.Tensor,
        *,
        local_maximum: torch.Tensor | None = None,
        ignored: torch.Tensor | None = None,
    ) -> None:
        """Overwrite products [tokens, columns] by the gradient with respect to them, in their own type.

        Args:
            tokens: the chunk's statistics; their logits are those of `logits` where a loss needs them.
            upstream: [losses, tokens] fp32, the gradient with respect to each loss of each token.
            local_maximum: [tokens] where `measure` left exponentials in the chunk: what it subtracted.
            ignored: [tokens] tokens whose gradient is exactly 0 whatever their logits are.
        """
        if self.num_columns == 0 and not self.gradient_needs_logits:
            return
        if ignored is not None:
            upstream = upstream.masked_fill(ignored, 0.0)
        softmax, label, uniform = self._scalar_gradient(tokens, upstream)
        if ignored is not None:
            softmax, label, uniform = (part.masked_fill(ignored, 0.0) for part in (softmax, label, uniform))
        if self.gradient_needs_logits:
            self._replace_with_logits(chunk, tokens, upstream, (softmax, label, uniform), ignored)
            return
        uniform = uniform if "sum_logits" in self.partials else None
        at_label = softmax * (tokens.label_logits - tokens.logsumexp).exp() + label
        if uniform is not None:
            at_label = at_label + uniform
        at_label = at_label * self.transform.derivative(tokens.label_logits)
        for rows in self._row_blocks(chunk):
            block = chunk[rows]
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
        _write_at_labels(chunk, tokens, at_label if ignored is None else at_label.masked_fill(ignored, 0.0))

    def _softmax_gradient(
        self,
        block: torch.Tensor,
        logsumexp: torch.Tensor,
        softmax: torch.Tensor,
        uniform: torch.Tensor | None,
        rows: slice,
    ) -> torch.Tensor:
        """[rows, columns] fp32: softmax * exp(logits - logsumexp) + uniform, taken back through the transform."""
        logits = self.logits(block)
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
        known = {
            name: tokens.measured[name]
            for name in ("logsumexp", "label_logits", "mean_logits")
            if name in tokens.measured
        }
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in known.items()}
            leaf_tokens = TokenStatistics(tokens.labels, tokens.columns, self.shard, measured=leaves)
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
        chunk: torch.Tensor,
        tokens: TokenStatistics,
        upstream: torch.Tensor,
        scalar: tuple[torch.Tensor, ...],
        ignored: torch.Tensor | None,
    ) -> None:
        """As `replace_by_gradient`, with losses that need the logits themselves."""
        by_autograd = self._autograd_gradient(tokens, upstream)  # on every rank: it may communicate
        if self.num_columns == 0:
            return
        explicit = [
            (loss, weights)
            for loss, trained, weights in zip(self.losses, self.trained, upstream, strict=True)
            if trained and not loss.is_scalar and loss.has_gradient
        ]
        for rows in self._row_blocks(chunk):
            part = tokens.rows(rows)
            softmax, label, uniform = (share[rows] for share in scalar)
            gradient = (part.logits - part.logsumexp[:, None]).exp_().mul_(softmax[:, None]).add_(uniform[:, None])
            local, held = part.columns
            gradient.scatter_add_(1, local[:, None], torch.where(held, label, 0.0)[:, None])
            for loss, weights in explicit:
                loss.add_gradient(part, weights[rows], gradient)
            if by_autograd is not None:
                gradient.add_(by_autograd[rows])
            gradient.mul_(self.transform.derivative(part.logits))
            if ignored is not None:
                gradient.masked_fill_(ignored[rows, None], 0.0)
            chunk[rows].copy_(gradient)

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
            attached = tokens.with_logits(leaf, remeasure=True)
            total = sum((weights * loss.value(attached)).sum() for loss, weights in chosen)
        return torch.autograd.grad(total, leaf)[0]

    # ------------------------------------------------------------------------------------------------- rows

    def _row_blocks(self, chunk: torch.Tensor) -> Iterator[slice]:
        """Rows to go through together: as many as a CPU's cache holds, all of them on a GPU."""
        step = len(chunk)
        if chunk.device.type == "cpu":
            step = max(1, _CACHED_ELEMENTS // max(1, self.num_columns))
        for start in range(0, len(chunk), max(1, step)):
            yield slice(start, start + step)


def _write_at_labels(chunk: torch.Tensor, tokens: TokenStatistics, values: torch.Tensor) -> None:
    """Set the label's column of the tokens whose label this rank holds.

    softmax - 1 cancels: it is computed in fp32, apart from the other columns, and rounded once.
    """
    local, held = tokens.columns
    index = (torch.arange(len(chunk), device=chunk.device), local)  # not scatter_, which is slow for 16-bit types
    chunk[index] = torch.where(held, values.to(chunk.dtype), chunk[index])
