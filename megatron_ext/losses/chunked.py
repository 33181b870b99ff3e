"""The chunk loop of the linear head, with and without gradients.

Two ways to a gradient. Where the weight of every token in the total is known, gradients are made in forward, while the
chunk's logits are at hand: three matrix products. Where any gradient may come per token and loss, forward keeps
statistics only and backward makes the logits again: four products. Without a gradient: one product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.losses.base import TokenLoss
from megatron_ext.losses.kernel import ChunkKernel
from megatron_ext.losses.logits import ChunkProducts, LogitTransform
from megatron_ext.losses.measurement import Exponentials
from megatron_ext.losses.teacher import Teacher, TeacherHidden, TeacherTopK
from megatron_ext.losses.vocab_parallel import VocabShard
from megatron_ext.losses.weight_gradient import WeightGradient
from megatron_ext.losses.workspace import WORKSPACE

# Memory for the logits of the chunks in work, at least and at most; in between it is that of the weight's fp32
# gradient, which is there anyway, and without a gradient twice that. Products lose speed when one side is much narrower
# than the other, and a GPU needs larger ones to be busy than a CPU core.
_AUTO_BYTES = {"cpu": (96 * 2**20, 512 * 2**20)}
_AUTO_BYTES_ELSEWHERE = (512 * 2**20, 512 * 2**20)
_AUTO_STEP = 32  # chunks are multiples of it

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
    teacher: Teacher | None

    def kernel(self, width: int) -> ChunkKernel:
        trained = [weight != 0 for weight in self.loss_weights]
        teacher_transform = self.teacher.transform if isinstance(self.teacher, TeacherHidden) else None
        return ChunkKernel(self.losses, trained, self.shard, width, self.transform, teacher_transform)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, h] of the whole sequence, from this rank's part of it under sequence parallelism."""
        return (gather_sequence(hidden, self.shard) if self.sequence_parallel else hidden).flatten(0, -2)

    def chunks(self, hidden: torch.Tensor, width: int, *, forward_only: bool = False) -> tuple[int, list[slice]]:
        """Tokens in a chunk, and the chunks of hidden [tokens, h].

        Decided by what is the same on every rank that shares the vocabulary, as chunks are what they exchange: by the
        width with padding, not by how many real columns a rank has.
        """
        size, num_tokens = self.chunk_tokens, len(hidden)
        if size == "auto":
            least, most = _AUTO_BYTES.get(hidden.device.type, _AUTO_BYTES_ELSEWHERE)
            room = min(most, max(least, width * hidden.size(-1) * 4))
            room *= 2 if forward_only else 1  # no gradient of the weight is there either
            of_teacher = 0 if self.teacher_dtype is None else self.teacher_dtype.itemsize
            column = self.in_work * (hidden.element_size() + of_teacher)  # bytes
            steps = max(1, room // (width * column * _AUTO_STEP))
            # as many chunks as that takes, of equal size
            num_chunks = -(-num_tokens // (steps * _AUTO_STEP)) or 1
            size = -(-num_tokens // (num_chunks * _AUTO_STEP)) * _AUTO_STEP
        size = max(1, min(size, num_tokens))
        return size, [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]

    @property
    def in_work(self) -> int:
        """Chunks in work at once: with several ranks the next chunk's product hides the exchange of the last one's."""
        return 1 if self.shard.size == 1 else 2

    @property
    def teacher_dtype(self) -> torch.dtype | None:
        """The type of a teacher's products, which lie in memory beside the student's; None without any."""
        return self.teacher.hidden.dtype if isinstance(self.teacher, TeacherHidden) else None


def gather_sequence(hidden: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[s, ...] from each rank's [s/tp, ...]. One collective."""
    if shard.size == 1:
        return hidden
    whole = hidden.new_empty(hidden.size(0) * shard.size, *hidden.shape[1:])
    dist.all_gather_into_tensor(whole, hidden.contiguous(), group=shard.group)
    return whole


class _Products:
    """Makes the products of chunks of tokens, in memory that is used again. A context: behind it no product is valid.

    Args:
        tokens: indices of the tokens to compute; None for all.
        forward_only: no gradient is made of them, now or later.
    """

    def __init__(
        self,
        problem: LinearProblem,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        tokens: torch.Tensor | None = None,
        *,
        forward_only: bool = False,
    ) -> None:
        self.kernel = problem.kernel(weight.size(0))
        self.columns = _columns(weight, problem, hidden.dtype)  # [columns, h]
        self.hidden = _select(problem.gather(hidden), tokens)  # [tokens, h]
        self.labels = _chosen(labels, tokens)
        self._teacher_hidden, self._teacher_columns, self._top_k = None, None, None
        teacher = problem.teacher
        if isinstance(teacher, TeacherHidden):
            self._teacher_hidden = _select(problem.gather(teacher.hidden.detach()), tokens)
            self._teacher_columns = _columns(teacher.weight, problem, teacher.hidden.dtype)
        elif teacher is not None:
            self._top_k = teacher.flatten() if tokens is None else teacher.flatten().select(tokens)
        size, self.chunks = problem.chunks(self.hidden, weight.size(0), forward_only=forward_only)
        self._buffers, self._teacher_buffers = (
            [] if of is None else [_borrow_product(size, len(self.columns), of) for _ in range(problem.in_work)]
            for of in (self.hidden, self._teacher_hidden)
        )
        self._made = 0

    def __enter__(self) -> "_Products":
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in (*self._buffers, *self._teacher_buffers):
            WORKSPACE.give_back(buffer)
        self._buffers, self._teacher_buffers = [], []

    @property
    def in_work(self) -> int:
        """How many chunks' products stay valid."""
        return len(self._buffers)

    def make(self, chunk: slice) -> ChunkProducts:
        """The products of a chunk; overwritten after `in_work` more calls."""
        index, length = self._made % self.in_work, chunk.stop - chunk.start
        self._made += 1
        student = torch.mm(self.hidden[chunk], self.columns.t(), out=self._buffers[index][:length])
        teacher = None
        if self._teacher_hidden is not None:
            out = self._teacher_buffers[index][:length]
            teacher = torch.mm(self._teacher_hidden[chunk], self._teacher_columns.t(), out=out)
        return self.kernel.products(student, teacher)

    def top_k(self, chunk: slice) -> TeacherTopK | None:
        return None if self._top_k is None else self._top_k.select(chunk)


def _borrow_product(num_rows: int, num_columns: int, of: torch.Tensor) -> torch.Tensor:
    return WORKSPACE.borrow(num_rows, num_columns, of.dtype, of.device)


def _select(hidden: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """The hidden states of the chosen tokens; no copy for all of them."""
    return hidden if tokens is None else hidden.index_select(0, tokens)


def _chosen(per_token: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    return per_token if tokens is None else per_token[tokens]


def _spread(computed: torch.Tensor, tokens: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    """[losses, num_tokens]: 0 where nothing was computed."""
    if tokens is None:
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
    problem: LinearProblem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tokens: torch.Tensor | None = None,
    *,
    forward_only: bool = True,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Values [losses, tokens] and statistics of the tokens: one matrix product, one collective for all chunks.

    Losses that need the logits for their value have one collective a chunk, and their own.
    """
    with torch.no_grad(), _Products(problem, hidden, weight, labels, tokens, forward_only=forward_only) as made:
        kernel, shard = made.kernel, problem.shard
        if len(made.hidden) == 0:
            return hidden.new_zeros(len(problem.losses), 0, dtype=torch.float32), {}
        partials = hidden.new_zeros(kernel.num_partials, len(made.hidden), dtype=torch.float32)
        values, measured = [], []
        for chunk in made.chunks:
            products = made.make(chunk)
            part, _ = kernel.measure(products, made.labels[chunk])
            partials[:, chunk] = part
            if kernel.values_need_logits:  # while the products are there
                gathered, _ = shard.all_gather(part)
                statistics = kernel.combine(gathered, made.labels[chunk], products, made.top_k(chunk))
                values.append(kernel.values(statistics))
                measured.append(statistics.measured)
        if values:
            by_name = {name: torch.cat([each[name] for each in measured]) for name in measured[0]}
            return torch.cat(values, dim=1), by_name
        gathered, _ = shard.all_gather(partials)
        statistics = kernel.combine(gathered, made.labels)
        return kernel.values(statistics), statistics.measured


def measure_weighted(
    problem: LinearProblem,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor,
    tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """total and values as MadeInForward gives them, without a gradient."""
    values, _ = measure(problem, hidden, weight, labels, tokens)
    return _total(problem, values, _chosen(token_weights, tokens)), _spread(values, tokens, len(labels))


class _Gradients:
    """Collects the gradients of hidden states and weight, chunk by chunk."""

    def __init__(self, problem: LinearProblem, made: _Products, weight: torch.Tensor, *, wanted: Any) -> None:
        self.problem = problem
        self.columns = made.columns
        of_hidden, of_weight = wanted
        # the sum over ranks is made in fp32
        dtype = made.hidden.dtype if problem.shard.size == 1 else torch.float32
        self.hidden = torch.zeros_like(made.hidden, dtype=dtype) if of_hidden else None
        self.weight = WeightGradient(weight, len(made.columns), len(made.chunks)) if of_weight else None

    def add(
        self, chunk: slice, hidden: torch.Tensor, gradient: torch.Tensor, factor: torch.Tensor | None = None
    ) -> None:
        """`gradient` [tokens, columns] times `factor` [tokens] with respect to the chunk's products, `hidden`
        [tokens, h] of the chunk."""
        if self.hidden is not None:
            into = self.hidden[chunk]
            if into.dtype == gradient.dtype:
                torch.mm(gradient, self.columns, out=into)
            else:
                into.copy_(gradient @ self.columns)
            if factor is not None:
                into.mul_(factor[:, None])
        if self.weight is not None:
            self.weight.add(gradient, hidden if factor is None else (hidden * factor[:, None]).to(hidden.dtype))

    def reduce_hidden(self, tokens: torch.Tensor | None, shape: torch.Size) -> tuple[torch.Tensor | None, Any]:
        """The hidden's gradient in its own shape, and the work to wait for: ranks hold sums over their own columns."""
        if self.hidden is None:
            return None, None
        shard, gradient = self.problem.shard, self.hidden
        num_tokens = shape[:-1].numel() * (shard.size if self.problem.sequence_parallel else 1)
        if tokens is not None:
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
        made = _Products(problem, hidden, weight, labels, tokens)
        kernel, chosen_weights = made.kernel, _chosen(token_weights, tokens)
        scaled = chosen_weights * problem.gradient_scale
        upstream = scaled * scaled.new_tensor(problem.loss_weights)[:, None]  # [losses, tokens]
        values = scaled.new_empty(len(problem.losses), len(made.labels))
        gradients = _Gradients(problem, made, weight, wanted=ctx.needs_input_grad[:2])
        uses_exponentials = kernel.can_use_exponentials(hidden.dtype, problem.teacher_dtype)
        needs_products = kernel.values_need_logits or kernel.gradient_needs_logits

        def finish(chunk: slice, products: ChunkProducts, left: Exponentials | None, gathered: torch.Tensor, work: Any):
            if work is not None:
                work.wait()
            statistics = kernel.combine(
                gathered, made.labels[chunk], products if needs_products else None, made.top_k(chunk)
            )
            values[:, chunk] = kernel.values(statistics)
            factor = kernel.replace_by_gradient(products, statistics, upstream[:, chunk], left=left)
            gradients.add(chunk, made.hidden[chunk], products.student, factor)

        unfinished: list[tuple] = []
        with made:
            for chunk in made.chunks:
                products = made.make(chunk)
                partials, left = kernel.measure(products, made.labels[chunk], leave_exponentials=uses_exponentials)
                gathered, work = problem.shard.all_gather(partials, async_op=True)
                unfinished.append((chunk, products, left, gathered, work))
                if len(unfinished) == made.in_work:
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
    @torch.autograd.function.once_differentiable
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
        values, measured = measure(problem, hidden, weight, labels, forward_only=False)
        ctx.problem, ctx.names = problem, list(measured)
        ctx.save_for_backward(hidden, weight, labels, *measured.values())
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: torch.Tensor):  # [losses, tokens]
        hidden, weight, labels, *measured = ctx.saved_tensors
        problem: LinearProblem = ctx.problem
        made = _Products(problem, hidden, weight, labels)
        kernel = made.kernel
        statistics = kernel.statistics(labels, dict(zip(ctx.names, measured, strict=True)))
        upstream = upstream * upstream.new_tensor(problem.loss_weights).ne(0)[:, None]
        ignored = (upstream == 0).all(dim=0)
        gradients = _Gradients(problem, made, weight, wanted=ctx.needs_input_grad[:2])
        with made:
            for chunk in made.chunks:
                products = made.make(chunk)
                part = statistics.rows(chunk)
                kernel.replace_by_gradient(products, part, upstream[:, chunk], ignored=ignored[chunk])
                # a gradient of 0 times a hidden state that is not finite would not be 0
                gradients.add(chunk, made.hidden[chunk].masked_fill(ignored[chunk, None], 0.0), products.student)
        of_hidden, work = gradients.reduce_hidden(None, hidden.shape)
        if work is not None:
            work.wait()
        of_hidden = None if of_hidden is None else of_hidden.to(hidden.dtype)
        of_weight = None if gradients.weight is None else gradients.weight.deliver()
        return of_hidden, of_weight, None, None
