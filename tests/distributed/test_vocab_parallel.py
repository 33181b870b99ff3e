"""Softmax arithmetic over a sharded vocabulary; shards are put together and compared with dense float64 ones."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron_ext.losses import (
    VocabShard,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_entropy,
    vocab_parallel_expectation,
    vocab_parallel_label_logits,
    vocab_parallel_logsumexp,
)
from megatron_ext.losses.vocab_parallel import copy_to_shards, real_columns, sum_over_shards

TOKENS = 13
COLUMNS = 48
# Number of ranks and true vocabulary. Of the last ones, some ranks hold only padding.
LAYOUTS = [(1, 48), (1, 30), (2, 48), (2, 47), (3, 47), (4, 47), (4, 13), (3, 17), (4, 20), (2, 25), (4, 36)]
layouts = pytest.mark.parametrize(("world_size", "vocab_size"), LAYOUTS)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def own_columns(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()


def random_problem(seed: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, others, labels, and an upstream that is 0 at one token."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(TOKENS, COLUMNS, generator=generator)
    others = 2 * torch.randn(TOKENS, COLUMNS, generator=generator)
    labels = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    upstream = torch.randn(TOKENS, generator=generator)
    upstream[3] = 0.0
    return logits, others, labels, upstream


def sharded_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, upstream: torch.Tensor, vocab_size: int):
    own = own_columns(logits)
    loss = vocab_parallel_cross_entropy(own, labels, VocabShard(dist.group.WORLD, vocab_size))
    loss.backward(upstream)
    return loss.detach(), own.grad


@layouts
def test_cross_entropy(ranks, world_size: int, vocab_size: int) -> None:
    logits, _, labels, upstream = random_problem(vocab_size, vocab_size)
    reference = logits.double().requires_grad_()
    expected = torch.logsumexp(reference[:, :vocab_size], 1) - reference[torch.arange(TOKENS), labels]
    expected.backward(upstream.double())

    results = ranks.run(world_size, sharded_cross_entropy, logits, labels, upstream, vocab_size)

    for loss, _ in results:
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    gradient = torch.cat([part for _, part in results], dim=1)
    assert relative_error(gradient, reference.grad) < 1e-6


# --------------------------------------------------------- each function of two shards, sharded and dense


def reverse_kl(logits: torch.Tensor, others: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """sum_j p_j (log p_j - log q_j), made of the primitives: the softmax's denominators go back among the columns."""
    own, other = real_columns(logits, shard), real_columns(others, shard)
    log_p = own - copy_to_shards(vocab_parallel_logsumexp(logits, shard), shard)[:, None]
    log_q = other - copy_to_shards(vocab_parallel_logsumexp(others, shard), shard)[:, None]
    return sum_over_shards((log_p.exp() * (log_p - log_q)).sum(dim=-1), shard)


def dense_reverse_kl(logits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    log_p, log_q = torch.log_softmax(logits, dim=1), torch.log_softmax(others, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def dense_entropy(logits: torch.Tensor) -> torch.Tensor:
    return -(torch.softmax(logits, dim=1) * torch.log_softmax(logits, dim=1)).sum(dim=1)


Sharded = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, VocabShard], torch.Tensor]
Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, tuple[Sharded, Dense]] = {
    "logsumexp": (lambda z, o, y, shard: vocab_parallel_logsumexp(z, shard), lambda z, o, y: torch.logsumexp(z, 1)),
    "label_logits": (
        lambda z, o, y, shard: vocab_parallel_label_logits(z, y, shard),
        lambda z, o, y: z[torch.arange(len(y)), y],
    ),
    "entropy": (lambda z, o, y, shard: vocab_parallel_entropy(z, shard), lambda z, o, y: dense_entropy(z)),
    "expectation of another": (
        lambda z, o, y, shard: vocab_parallel_expectation(o, z, shard),
        lambda z, o, y: (torch.softmax(z, 1) * o).sum(1),
    ),
    "expectation of its own": (
        lambda z, o, y, shard: vocab_parallel_expectation(z * z + o, z, shard),
        lambda z, o, y: (torch.softmax(z, 1) * (z * z + o)).sum(1),
    ),
    "reverse KL": (lambda z, o, y, shard: reverse_kl(z, o, shard), lambda z, o, y: dense_reverse_kl(z, o)),
    "nested": (
        lambda z, o, y, shard: vocab_parallel_entropy(z, shard).square() * vocab_parallel_logsumexp(o * z, shard),
        lambda z, o, y: dense_entropy(z).square() * torch.logsumexp(o * z, 1),
    ),
}


def sharded(
    logits: torch.Tensor, others: torch.Tensor, labels: torch.Tensor, upstream: torch.Tensor, vocab_size: int
) -> list[tuple]:
    shard = VocabShard(dist.group.WORLD, vocab_size)
    results = []
    for function, _ in FUNCTIONS.values():
        own, other = own_columns(logits), own_columns(others)
        value = function(own, other, labels, shard)
        value.backward(upstream)
        results.append((value.detach(), own.grad, other.grad))
    return results


@layouts
def test_functions_and_both_gradients(ranks, world_size: int, vocab_size: int) -> None:
    logits, others, labels, upstream = random_problem(100 + vocab_size, vocab_size)
    by_rank = ranks.run(world_size, sharded, logits, others, labels, upstream, vocab_size)
    for (name, (_, dense)), parts in zip(FUNCTIONS.items(), zip(*by_rank, strict=True), strict=True):
        first, second = logits.double().requires_grad_(), others.double().requires_grad_()
        expected = dense(first[:, :vocab_size], second[:, :vocab_size], labels)
        expected.backward(upstream.double())
        values, *gradients = zip(*parts, strict=True)
        for value in values:
            assert relative_error(value, expected.detach()) < 5e-6, name
        for found, reference in zip(gradients, (first.grad, second.grad), strict=True):
            if reference is None:
                assert all(part is None for part in found), name
                continue
            whole = torch.cat(found, dim=1)
            assert relative_error(whole, reference) < 1e-5, name
            assert not whole[:, vocab_size:].any(), name


def sharded_argmax(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return vocab_parallel_argmax(own_columns(logits).detach(), VocabShard(dist.group.WORLD, vocab_size))


@layouts
def test_argmax_is_the_lowest_of_several(ranks, world_size: int, vocab_size: int) -> None:
    """Equal logits within a rank, across ranks, all of them; larger ones in the padding."""
    logits = torch.randint(-3, 3, (60, COLUMNS), generator=torch.Generator().manual_seed(1)).float()
    logits[0] = 0.0
    logits[1] = -1e30
    logits[:, vocab_size:] = 100.0
    expected = [row.index(max(row)) for row in logits[:, :vocab_size].tolist()]
    for found in ranks.run(world_size, sharded_argmax, logits, vocab_size):
        assert found.dtype == torch.int64
        assert found.tolist() == expected


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    return vocab_parallel_entropy(own_columns(logits).detach(), VocabShard(dist.group.WORLD, COLUMNS))


@pytest.mark.parametrize("world_size", [1, 2])
def test_entropy_of_logits_far_from_0(ranks, world_size: int) -> None:
    """What all logits have in common changes no softmax: only the rounding of the logits and their sum is left."""
    logits = random_problem(0, COLUMNS)[0] + 1000.0
    expected = dense_entropy(logits.double())
    for found in ranks.run(world_size, entropy_of, logits):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)


def sharded_with_excluded_tokens(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> tuple:
    shard = VocabShard(dist.group.WORLD, vocab_size)
    own = own_columns(logits)
    values = vocab_parallel_cross_entropy(own, labels, shard)
    values.sum().backward()
    return values.detach(), vocab_parallel_entropy(own.detach(), shard), own.grad


@pytest.mark.parametrize("excluded", [slice(3, 9), slice(0, 24), slice(24, 47)], ids=["some", "rank 0", "rank 1"])
def test_excluded_tokens(ranks, excluded: slice) -> None:
    """Logits of -inf, such as those of forbidden tokens, on part of a rank or all of it."""
    logits, *_ = random_problem(0, 47)
    logits[:, excluded] = -math.inf
    labels = torch.full((TOKENS,), 12 if excluded.start else 30)
    real = logits[:, :47].double().requires_grad_()
    expected = -torch.log_softmax(real, 1)[torch.arange(TOKENS), labels]
    expected.sum().backward()
    probabilities = torch.softmax(real.detach(), 1)
    entropy = torch.special.entr(probabilities).sum(1)
    results = ranks.run(2, sharded_with_excluded_tokens, logits, labels, 47)
    for values, of_values, _ in results:
        torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(of_values.double(), entropy, rtol=1e-6, atol=2e-5)
    gradient = torch.cat([part for *_, part in results], dim=1)[:, :47]
    assert relative_error(gradient, real.grad) < 1e-6
