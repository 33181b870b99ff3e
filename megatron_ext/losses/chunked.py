"""The chunk loop of the linear head, with and without gradients.

Two ways to a gradient. Where the weight of every token in the total is known, gradients are made in forward, while the
chunk's logits are at hand: three matrix products. Where any gradient may come per token and loss, forward keeps
statistics only and backward makes the logits again: four products. Without a gradient: one product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.kernel import ChunkKernel, LogitTransform
from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.vocab_parallel import VocabShard
from megatron_ext.losses.weight_gradient import WeightGradient

# Memory for the logits of the chunks in work. A GPU needs larger products to be busy than a CPU core.
_AUTO_BYTES = {"cpu": 64 * 2**20}
_AUTO_BYTES_ELSEWHERE = 512 * 2**20
# Below so many tokens the products lose speed; chunks are multiples of the second number.
_AUTO_LEAST, _AUTO_STEP = 128, 64

ChunkTokens = int | Literal["auto"]


@dataclass(frozen=True)
class LinearProblem:
    """What stays the same for all chunks of a call."""

    losses: Sequence[TokenLoss]
    loss_weights: Sequence[float]
    shard: VocabShard
    transform: LogitTransform
    chunk_tokens: ChunkTokens
    sequence_parallel: bool
    gradient_scale: torch.Tensor | float

    def kernel(self, width: int) -> ChunkKernel:
        return ChunkKernel(
            self.losses, [weight != 0 for weight in self.loss_weights], self.shard, width, self.transform
        )

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, h] of the whole sequence, from this rank's part of it under sequence parallelism. One collective."""
        if self.sequence_parallel and self.shard.size > 1:
            whole = hidden.new_empty(hidden.size(0) * self.shard.size, *hidden.shape[1:])
            dist.all_gather_into_tensor(whole, hidden.contiguous(), group=self.shard.group)
            hidden = whole
        return hidden.flatten(0, -2)

    def chunks(self, num_tokens: int, columns: int, hidden: torch.Tensor) -> tuple[int, Iterator[slice]]:
        """Tokens in a chunk, and the chunks."""
        size = self.chunk_tokens
        if size == "auto":
            room = _AUTO_BYTES.get(hidden.device.type, _AUTO_BYTES_ELSEWHERE) // self.num_buffers
            size = room // max(1, columns * hidden.element_size()) // _AUTO_STEP * _AUTO_STEP
            size = max(_AUTO_LEAST, size)
            # equal chunks, rather than a small last one
            size = -(-num_tokens // -(-num_tokens // size)) if num_tokens else size
        size = max(1, min(size, num_tokens))
        return size, (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))

    @property
    def num_buffers(self) -> int:
        """Chunks in work at once: with several ranks the next chunk's product hides the exchange of the last one's."""
        return 1 if self.shard.size == 1 else 2


def _select(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The hidden states of the chosen tokens; no copy if that is all of them."""
    return hidden if len(tokens) == len(hidden) else hidden.index_select(0, tokens)


def _spread(computed: torch.Tensor, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[losses, num_tokens]: 0 where nothing was computed."""
    if len(tokens) == num_tokens:
        return computed
    return computed.new_zeros(len(computed), num_tokens).index_copy_(1, tokens, computed)


def _total(problem: LinearProblem, values: torch.Tensor, token_weights: torch.Tensor) -> torch.Tensor:
    """Sum of weight * loss over losses and tokens, [] fp32, added up in float64."""
    trained = [index for index, weight in enumerate(problem.loss_weights) if weight]
    by_loss = (values[trained].double() * token_weights).sum(dim=1)
    return (by_loss * by_loss.new_tensor([problem.loss_weights[index] for index in trained])).sum().float()


def _columns(weight: torch.Tensor, problem: LinearProblem, dtype: torch.dtype) -> torch.Tensor:
    """[columns, h] the weight's rows of real tokens, in the type of the product."""
    return weight.detach()[: problem.shard.num_local_columns(weight.size(0))].to(dtype)


def measure(
    problem: LinearProblem, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, TokenStatistics]:
    """Values [losses, tokens] and statistics of all tokens: one matrix product, one collective."""
    kernel, columns = problem.kernel(weight.size(0)), _columns(weight, problem, hidden.dtype)
    partials = hidden.new_zeros(len(kernel.partials), len(hidden), dtype=torch.float32)
    values = []
    size, chunks = problem.chunks(len(hidden), len(columns), hidden)
    buffer = hidden.new_empty(size, len(columns))
    with torch.no_grad():
        for chunk in chunks:
            product = torch.mm(hidden[chunk], columns.t(), out=buffer[: chunk.stop - chunk.start])
            partials[:, chunk] = kernel.measure(product, labels[chunk], overwrite=not kernel.values_need_logits)
            if kernel.values_need_logits:
                gathered, _ = problem.shard.all_gather(partials[:, chunk].contiguous())
                values.append(kernel.values(kernel.combine(gathered, labels[chunk], kernel.logits(product))))
        gathered, _ = problem.shard.all_gather(partials)
        statistics = kernel.combine(gathered, labels)
        return torch.cat(values, dim=1) if values else kernel.values(statistics), statistics


def measure_weighted(
    problem: LinearProblem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor,
    tokens: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """total and values as MadeInForward gives them, without a gradient."""
    values, _ = measure(problem, _select(problem.gather(hidden), tokens), weight, labels[tokens])
    return _total(problem, values, token_weights[tokens]), _spread(values, tokens, len(labels))


class _Gradients:
    """Collects the gradients of hidden states and weight, chunk by chunk."""

    def __init__(
        self, problem: LinearProblem, hidden: torch.Tensor, weight: torch.Tensor, columns: torch.Tensor, *, wanted: Any
    ) -> None:
        self.problem = problem
        self.columns = columns
        of_hidden, of_weight = wanted
        # the sum over ranks is made in fp32
        dtype = hidden.dtype if problem.shard.size == 1 else torch.float32
        self.hidden = torch.zeros_like(hidden, dtype=dtype) if of_hidden else None
        self.weight = WeightGradient(weight, len(columns)) if of_weight else None

    def add(self, chunk: slice, hidden: torch.Tensor, gradient: torch.Tensor) -> None:
        """`gradient` [tokens, columns] with respect to the chunk's products, `hidden` [tokens, h] of the chunk."""
        if self.hidden is not None:
            into = self.hidden[chunk]
            if into.dtype == gradient.dtype:
                torch.mm(gradient, self.columns, out=into)
            else:
                into.copy_(gradient @ self.columns)
        if self.weight is not None:
            self.weight.add(gradient, hidden)

    def reduce_hidden(self, tokens: torch.Tensor | None, shape: torch.Size) -> tuple[torch.Tensor | None, Any]:
        """The hidden's gradient in its own shape, and the work to wait for: ranks hold sums over their own columns."""
        if self.hidden is None:
            return None, None
        shard, gradient = self.problem.shard, self.hidden
        num_tokens = shape[:-1].numel() * (shard.size if self.problem.sequence_parallel else 1)
        if tokens is not None and len(tokens) != num_tokens:
            gradient = gradient.new_zeros(num_tokens, shape[-1]).index_copy_(0, tokens, gradient)
        if shard.size == 1:
            return gradient.view(shape), None
        if not self.problem.sequence_parallel:
            return gradient.view(shape), dist.all_reduce(gradient, group=shard.group, async_op=True)
        own = gradient.new_empty(shape)
        whole = gradient.view(-1, *shape[1:])
        return own, _KeepAlive(dist.reduce_scatter_tensor(own, whole, group=shard.group, async_op=True), whole)


class _KeepAlive(NamedTuple):
    """Work in progress, and what it reads."""

    work: Any
    tensor: torch.Tensor

    def wait(self) -> None:
        self.work.wait()


class MadeInForward(torch.autograd.Function):
    """total and values; forward makes the gradients of the total, backward hands them out."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, token_weights, tokens, problem: LinearProblem):
        kernel, columns = problem.kernel(weight.size(0)), _columns(weight, problem, hidden.dtype)
        chosen = _select(problem.gather(hidden), tokens)
        chosen_labels, chosen_weights = labels[tokens], token_weights[tokens]
        scaled = chosen_weights * problem.gradient_scale
        upstream = scaled * scaled.new_tensor(problem.loss_weights)[:, None]  # [losses, tokens]
        values = scaled.new_empty(len(problem.losses), len(tokens))
        gradients = _Gradients(problem, chosen, weight, columns, wanted=ctx.needs_input_grad[:2])
        uses_exponentials = kernel.can_use_exponentials(hidden.dtype)

        def finish(chunk: slice, product: torch.Tensor, partials: torch.Tensor, gathered: torch.Tensor, work: Any):
            if work is not None:
                work.wait()
            logits = kernel.logits(product) if kernel.values_need_logits or kernel.gradient_needs_logits else None
            statistics = kernel.combine(gathered, chosen_labels[chunk], logits)
            values[:, chunk] = kernel.values(statistics)
            local_maximum = partials[0] if uses_exponentials else None
            kernel.replace_by_gradient(product, statistics, upstream[:, chunk], local_maximum=local_maximum)
            gradients.add(chunk, chosen[chunk], product)

        size, chunks = problem.chunks(len(tokens), len(columns), hidden)
        buffers = [hidden.new_empty(size, len(columns)) for _ in range(problem.num_buffers)]
        unfinished: list[tuple] = []
        for index, chunk in enumerate(chunks):
            buffer = buffers[index % len(buffers)][: chunk.stop - chunk.start]
            product = torch.mm(chosen[chunk], columns.t(), out=buffer)
            partials = kernel.measure(product, chosen_labels[chunk], overwrite=uses_exponentials)
            gathered, work = problem.shard.all_gather(partials, async_op=True)
            unfinished.append((chunk, product, partials, gathered, work))
            if len(unfinished) == len(buffers):
                finish(*unfinished.pop(0))
        for rest in unfinished:
            finish(*rest)

        ctx.hidden_gradient, ctx.work = gradients.reduce_hidden(tokens, hidden.shape)
        ctx.weight_gradient = gradients.weight
        ctx.hidden_dtype, ctx.gradient_scale, ctx.used = hidden.dtype, problem.gradient_scale, False
        total = _total(problem, values, chosen_weights)
        values = _spread(values, tokens, len(labels))
        ctx.mark_non_differentiable(values)
        return total, values

    @staticmethod
    def backward(ctx, upstream: torch.Tensor, _values: Any):
        if ctx.used:
            raise RuntimeError(
                "the gradients of this loss were made in forward and handed out by the first backward; call the loss "
                "again, or without token_weights, for a loss that can be differentiated several times"
            )
        ctx.used = True
        factor = upstream / ctx.gradient_scale
        of_hidden, of_weight = ctx.hidden_gradient, None
        if ctx.work is not None:
            ctx.work.wait()
        if of_hidden is not None:
            of_hidden = of_hidden.mul_(factor).to(ctx.hidden_dtype)
        if ctx.weight_gradient is not None:
            of_weight = ctx.weight_gradient.deliver(factor)
        ctx.hidden_gradient = ctx.weight_gradient = None
        return of_hidden, of_weight, None, None, None, None


class Recomputed(torch.autograd.Function):
    """values; backward makes the logits again and takes any upstream gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, problem: LinearProblem):
        values, statistics = measure(problem, problem.gather(hidden), weight, labels)
        ctx.problem, ctx.names = problem, list(statistics.measured)
        ctx.save_for_backward(hidden, weight, labels, *statistics.measured.values())
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: torch.Tensor):  # [losses, tokens]
        hidden, weight, labels, *measured = ctx.saved_tensors
        problem: LinearProblem = ctx.problem
        kernel, columns = problem.kernel(weight.size(0)), _columns(weight, problem, hidden.dtype)
        whole = problem.gather(hidden)
        known = dict(zip(ctx.names, measured, strict=True))
        statistics = TokenStatistics(labels, problem.shard.locate(labels, weight.size(0)), problem.shard, None, known)
        upstream = upstream * upstream.new_tensor(problem.loss_weights).ne(0)[:, None]
        ignored = (upstream == 0).all(dim=0)
        gradients = _Gradients(problem, whole, weight, columns, wanted=ctx.needs_input_grad[:2])
        size, chunks = problem.chunks(len(whole), len(columns), hidden)
        buffer = hidden.new_empty(size, len(columns))
        for chunk in chunks:
            product = torch.mm(whole[chunk], columns.t(), out=buffer[: chunk.stop - chunk.start])
            part = statistics.rows(chunk)
            if kernel.gradient_needs_logits:
                part = part.with_logits(kernel.logits(product))
            kernel.replace_by_gradient(product, part, upstream[:, chunk], ignored=ignored[chunk])
            gradients.add(chunk, whole[chunk], product)
        of_hidden, work = gradients.reduce_hidden(None, hidden.shape)
        if work is not None:
            work.wait()
        of_hidden = None if of_hidden is None else of_hidden.to(hidden.dtype)
        of_weight = None if gradients.weight is None else gradients.weight.deliver()
        return of_hidden, of_weight, None, None
