"""The loss head over a sharded vocabulary: shards are put together and compared with a dense float64 computation."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.losses import (
    CrossEntropy,
    LogitTransform,
    TokenLoss,
    TokenStatistics,
    VocabShard,
    ZLoss,
    linear_cross_entropy,
    linear_losses,
    logits_losses,
)
from megatron_ext.losses.token_metrics import Entropy, LogProbability, TokenAccuracy

TOKENS = 24  # divisible by every number of ranks used here
FEATURES = 16
UPSTREAM = 3.0
SECONDS = 60.0


# ------------------------------------------------------------------------------------------ losses of one's own


class Focal(TokenLoss):
    """A function of scalar statistics."""

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return -(1 - tokens.label_log_probability.exp()).square() * tokens.label_log_probability


class NegativeEntropy(TokenLoss):
    """A function of the logits; an average under the model's own distribution."""

    statistics = frozenset({"logits"})

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.expectation(tokens.log_probabilities)


class SquaredEntropy(TokenLoss):
    """Trained through a statistic that is no scalar one."""

    statistics = frozenset({"entropy"})

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.entropy.square()


class Brier(TokenLoss):
    """Sums of one's own, and several statistics of the same logits."""

    statistics = frozenset({"logits"})

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        squares = tokens.sum_over_vocabulary(tokens.log_probabilities.exp().square())
        return squares - 2 * tokens.label_log_probability.exp() + 1


class EntropyByHand(TokenLoss):
    """Writes its gradient itself, from what was measured."""

    statistics = frozenset({"logits", "logsumexp", "entropy"})
    has_gradient = True

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.entropy

    def add_gradient(self, tokens: TokenStatistics, upstream: torch.Tensor, gradient: torch.Tensor) -> None:
        log_probabilities = tokens.logits - tokens.logsumexp[:, None]
        gradient -= upstream[:, None] * log_probabilities.exp() * (log_probabilities + tokens.entropy[:, None])


class MeanSquaredLogit(TokenLoss):
    """Writes its gradient itself; its value needs a sum over the ranks."""

    statistics = frozenset({"logits"})
    has_gradient = True

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.sum_over_vocabulary(tokens.logits.square()) / tokens.shard.vocab_size

    def add_gradient(self, tokens: TokenStatistics, upstream: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient += (2 / tokens.shard.vocab_size) * upstream[:, None] * tokens.logits


# ------------------------------------------------------------------- the same losses, dense: logits without padding


def at_labels(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return values[torch.arange(len(labels)), labels]


def dense_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -at_labels(torch.log_softmax(logits, dim=1), labels)


def dense_smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    target = torch.full_like(logits, 0.1 / logits.size(1))
    target[torch.arange(len(labels)), labels] += 0.9
    return -(target * torch.log_softmax(logits, dim=1)).sum(dim=1)


def dense_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -(torch.softmax(logits, dim=1) * torch.log_softmax(logits, dim=1)).sum(dim=1)


def dense_focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    probability = at_labels(torch.softmax(logits, dim=1), labels)
    return -((1 - probability) ** 2) * probability.log()


def dense_brier(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    target = torch.nn.functional.one_hot(labels, logits.size(1))
    return (torch.softmax(logits, dim=1) - target).square().sum(dim=1)


def dense_accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).double()


Dense = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, tuple[TokenLoss, Dense]] = {
    "cross_entropy": (CrossEntropy(), dense_cross_entropy),
    "smoothed": (CrossEntropy(label_smoothing=0.1), dense_smoothed),
    "z_loss": (ZLoss(), lambda logits, labels: torch.logsumexp(logits, dim=1) ** 2),
    "focal": (Focal(), dense_focal),
    "negative_entropy": (NegativeEntropy(), lambda logits, labels: -dense_entropy(logits, labels)),
    "squared_entropy": (SquaredEntropy(), lambda logits, labels: dense_entropy(logits, labels) ** 2),
    "brier": (Brier(), dense_brier),
    "entropy_by_hand": (EntropyByHand(), dense_entropy),
    "mean_squared_logit": (MeanSquaredLogit(), lambda logits, labels: logits.square().mean(dim=1)),
    "token_accuracy": (TokenAccuracy(), dense_accuracy),
    "entropy": (Entropy(), dense_entropy),
    "log_probability": (LogProbability(), lambda logits, labels: -dense_cross_entropy(logits, labels)),
}

# Three trained losses and one that is only reported.
SEVERAL = {"cross_entropy": 1.0, "smoothed": 0.5, "z_loss": 1e-2, "focal": 0.0}


# ----------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True)
class Problem:
    """The whole of a call, before it is divided over ranks."""

    hidden: torch.Tensor  # [tokens, h] or [s, b, h]
    weight: torch.Tensor  # [padded vocabulary, h]
    labels: torch.Tensor
    vocab_size: int
    token_weights: torch.Tensor | None = None
    upstream: torch.Tensor | float = UPSTREAM  # [] for the total, [losses, *labels' shape] for values
    loss_weights: Mapping[str, float] = field(default_factory=lambda: SEVERAL)
    chunk_tokens: int | str = "auto"
    sequence_parallel: bool = False
    scale: float = 1.0
    softcap: float | None = None
    gradient_scale: float = 1.0

    @property
    def losses(self) -> dict[str, TokenLoss]:
        return {name: LOSSES[name][0] for name in self.loss_weights}

    @property
    def transform(self) -> LogitTransform:
        return LogitTransform(self.scale, self.softcap)


def make_problem(
    *, vocab_size: int = 47, padded: int = 48, shape: tuple[int, ...] = (TOKENS,), seed: int = 0, **settings: Any
) -> Problem:
    """Random numbers, with token weights that are not uniform and 0 at some tokens in between."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, FEATURES, generator=generator)
    weight = torch.randn(padded, FEATURES, generator=generator) * 1.5 / FEATURES**0.5
    weight[vocab_size:] *= 20  # padding that is noticed if anything looks at it
    labels = torch.randint(0, vocab_size, shape, generator=generator)
    token_weights = torch.rand(shape, generator=generator) + 0.1
    token_weights.view(-1)[2::5] = 0.0
    return Problem(hidden, weight, labels, vocab_size, token_weights, **settings)


def per_token(problem: Problem) -> Problem:
    """The same without token weights: an upstream gradient for every loss and token, some of them 0."""
    upstream = torch.randn(len(problem.loss_weights), *problem.labels.shape, generator=torch.Generator().manual_seed(7))
    upstream.view(len(upstream), -1)[:, 3::7] = 0.0  # tokens that no loss wants
    upstream[0, 0] = 0.0
    return replace(problem, token_weights=None, upstream=upstream)


def cast(problem: Problem, hidden: torch.dtype, weight: torch.dtype) -> Problem:
    return replace(problem, hidden=problem.hidden.to(hidden), weight=problem.weight.to(weight))


@dataclass(frozen=True)
class Result:
    """Whole tensors, put together from all ranks."""

    total: torch.Tensor | None
    values: torch.Tensor  # [losses, *labels' shape]
    of_hidden: list[torch.Tensor]  # one for each rank that holds it whole
    of_weight: torch.Tensor


def dense(problem: Problem) -> Result:
    """Float64 and all logits at once; tokens of weight 0 are left out before anything is computed of them."""
    hidden = problem.hidden.double().flatten(0, -2).requires_grad_()
    weight = problem.weight.double().requires_grad_()
    labels = problem.labels.flatten()
    chosen = torch.arange(len(labels))
    if problem.token_weights is not None:
        chosen = problem.token_weights.flatten().nonzero().squeeze(1)
    logits = hidden[chosen] @ weight[: problem.vocab_size].T * problem.scale
    if problem.softcap is not None:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    values = torch.stack([LOSSES[name][1](logits, labels[chosen]) for name in problem.loss_weights])
    factors = torch.tensor(list(problem.loss_weights.values()), dtype=torch.float64)[:, None]
    total = None
    if problem.token_weights is not None:
        total = (factors * problem.token_weights.flatten().double()[chosen] * values).sum()
        (total * problem.upstream).backward()
        total = total.detach()
    else:
        (problem.upstream.flatten(1).double() * (factors != 0) * values).sum().backward()
    spread = torch.zeros(len(values), len(labels), dtype=torch.float64)
    spread[:, chosen] = values.detach()
    shape = problem.hidden.shape
    return Result(total, spread.view(-1, *problem.labels.shape), [hidden.grad.view(shape)], weight.grad)


def own_part(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()].clone()


def compute_one(problem: Problem) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = own_part(problem.hidden) if problem.sequence_parallel else problem.hidden.clone()
    weight = own_part(problem.weight).requires_grad_()
    total, values = linear_losses(
        hidden.requires_grad_(),
        weight,
        problem.labels,
        problem.losses,
        shard=VocabShard(dist.group.WORLD, problem.vocab_size),
        token_weights=problem.token_weights,
        loss_weights=problem.loss_weights,
        transform=problem.transform,
        chunk_tokens=problem.chunk_tokens,
        sequence_parallel=problem.sequence_parallel,
        gradient_scale=problem.gradient_scale,
    )
    if total is None:
        values.backward(problem.upstream)
    else:
        total.backward(torch.tensor(problem.upstream))
    assert hidden.grad.dtype == hidden.dtype
    assert weight.grad.dtype == weight.dtype
    return None if total is None else total.detach(), values.detach(), hidden.grad, weight.grad


def compute(problems: list[Problem]) -> list[tuple]:
    """On every rank."""
    return [compute_one(problem) for problem in problems]


def results_of(ranks: Any, world_size: int, problems: list[Problem]) -> list[Result]:
    """Compute on the ranks, and put together what they hold."""
    by_rank = ranks.run(world_size, compute, problems, timeout=SECONDS)
    results = []
    for problem, parts in zip(problems, zip(*by_rank, strict=True), strict=True):
        totals, values, of_hidden, of_weight = zip(*parts, strict=True)
        for rank in range(1, world_size):  # to the last bit: ranks must not drift apart
            assert torch.equal(values[rank], values[0]) or values[0].isnan().any()
            assert totals[0] is None or torch.equal(totals[rank], totals[0])
        whole = [torch.cat(of_hidden)] if problem.sequence_parallel else list(of_hidden)
        results.append(Result(totals[0], values[0], whole, torch.cat(of_weight)))
    return results


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    if not expected.any():
        return 0.0 if torch.equal(found.double(), expected) else math.inf
    return ((found.double() - expected).norm() / expected.norm()).item()


def check(found: Result, problem: Problem, *, loss: float = 1e-6, gradient: float = 1e-5) -> None:
    """The promises, against the dense computation."""
    expected = dense(problem)
    if problem.token_weights is None:
        assert found.total is None
    else:
        assert abs(found.total.item() - expected.total.item()) <= loss * abs(expected.total.item())
    assert found.values.shape == expected.values.shape
    if loss <= 1e-5:  # near 0 the rounding of the logits is what counts
        torch.testing.assert_close(found.values.double(), expected.values, rtol=loss, atol=2 * loss)
    else:
        assert relative_error(found.values, expected.values) < loss
    for of_hidden in found.of_hidden:
        assert relative_error(of_hidden, expected.of_hidden[0]) < gradient
    assert relative_error(found.of_weight, expected.of_weight) < gradient
    assert not found.of_weight[problem.vocab_size :].any(), "padding has a gradient"


def check_all(ranks: Any, world_size: int, problems: list[Problem], **tolerances: float) -> None:
    for problem, found in zip(problems, results_of(ranks, world_size, problems), strict=True):
        check(found, problem, **tolerances)


# -------------------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_fp32_against_dense(ranks, world_size: int, sequence_parallel: bool) -> None:
    """Several losses at once; chunks that divide the tokens, that do not, of one token, and larger than the tokens."""
    problems = []
    for chunk_tokens in (1, 5, 8, 1000, "auto"):
        problem = make_problem(chunk_tokens=chunk_tokens, sequence_parallel=sequence_parallel)
        problems += [problem, per_token(problem)]
    check_all(ranks, world_size, problems)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_16_bit_against_dense(ranks, world_size: int, sequence_parallel: bool) -> None:
    """bf16, fp16, and hidden states and weight of different types, in one chunk and several."""
    problems = []
    for chunk_tokens in (5, "auto"):
        problem = make_problem(chunk_tokens=chunk_tokens, sequence_parallel=sequence_parallel)
        for of_hidden, of_weight in (
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.bfloat16),
        ):
            typed = cast(problem, of_hidden, of_weight)
            problems += [typed, per_token(typed)]
    check_all(ranks, world_size, problems, loss=1e-2, gradient=2e-2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_small_fp16_gradients_survive_with_gradient_scale(ranks, world_size: int) -> None:
    """Weights so small that unscaled gradients are below fp16's range; the upstream gradient is the loss scale."""
    problem = make_problem(chunk_tokens=5, upstream=2.0**14, gradient_scale=2.0**14)
    problem = replace(problem, token_weights=problem.token_weights * 2.0**-20)
    check_all(ranks, world_size, [cast(problem, torch.float16, torch.float16)], loss=1e-2, gradient=2e-2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_upstream_is_exact_whatever_the_gradient_scale(ranks, world_size: int) -> None:
    problem = make_problem(chunk_tokens=5)
    check_all(ranks, world_size, [replace(problem, gradient_scale=scale) for scale in (UPSTREAM, 1e-3, 1e3)])


@pytest.mark.parametrize(
    ("world_size", "vocab_size", "padded"),
    [
        (2, 1187, 1280),
        (4, 1187, 1280),
        (2, 1281, 2560),  # the last rank holds one token
        (4, 970, 1280),  # the last rank holds almost nothing but padding
        (4, 960, 1280),  # only padding
        (4, 20, 48),  # two ranks hold only padding
        (3, 17, 48),
        (2, 25, 48),
    ],
)
def test_padding_over_ranks(ranks, world_size: int, vocab_size: int, padded: int) -> None:
    problem = make_problem(vocab_size=vocab_size, padded=padded, chunk_tokens=7)
    logits = replace(problem, loss_weights={"cross_entropy": 1.0, "brier": 1.0, "entropy_by_hand": 1.0})
    divided = replace(problem, sequence_parallel=True)
    typed = cast(problem, torch.bfloat16, torch.bfloat16)
    check_all(ranks, world_size, [problem, per_token(problem), divided, logits, per_token(logits)])
    check_all(ranks, world_size, [typed, per_token(typed)], loss=1e-2, gradient=2e-2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scale_and_softcap(ranks, world_size: int) -> None:
    problems = []
    for settings in ({"scale": 0.25}, {"softcap": 2.0}, {"scale": 1.7, "softcap": 3.0}):
        problem = make_problem(chunk_tokens=7, **settings)
        logits = replace(problem, loss_weights={"smoothed": 1.0, "negative_entropy": 0.5, "entropy_by_hand": 0.25})
        problems += [problem, per_token(problem), logits, per_token(logits)]
    check_all(ranks, world_size, problems)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sequence_first_hidden_states(ranks, world_size: int, sequence_parallel: bool) -> None:
    """[s, b, h] of tokens that are in no order on the way to the head."""
    problem = make_problem(shape=(8, 3), chunk_tokens=5, sequence_parallel=sequence_parallel)
    crossed = problem.hidden.transpose(0, 1).contiguous().transpose(0, 1)
    assert not crossed.is_contiguous()
    check_all(ranks, world_size, [problem, per_token(problem), replace(problem, hidden=crossed)])


def transposed_hidden(problem: Problem) -> torch.Tensor:
    stored = problem.hidden.t().contiguous().requires_grad_()
    problem_weight = own_part(problem.weight)
    total = linear_losses(
        stored.t(),
        problem_weight,
        problem.labels,
        {"cross_entropy": CrossEntropy()},
        shard=VocabShard(dist.group.WORLD, problem.vocab_size),
        token_weights=problem.token_weights,
    ).total
    total.backward(torch.tensor(UPSTREAM))
    return stored.grad


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_transposed_hidden_states(ranks, world_size: int, masked: bool) -> None:
    """Hidden states whose features lie apart in memory."""
    problem = make_problem(loss_weights={"cross_entropy": 1.0})
    if not masked:
        problem = replace(problem, token_weights=torch.rand(TOKENS) + 0.5)
    expected = dense(problem).of_hidden[0]
    for of_stored in ranks.run(world_size, transposed_hidden, problem, timeout=SECONDS):
        assert relative_error(of_stored.t(), expected) < 1e-5


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_few_tokens(ranks, world_size: int, sequence_parallel: bool) -> None:
    """One token of weight; one token at all; no token of weight: a total of 0 and gradients of exactly 0."""
    problem = make_problem(chunk_tokens=4, sequence_parallel=sequence_parallel)
    one = torch.zeros(TOKENS)
    one[11] = 0.7
    problems = [replace(problem, token_weights=one), replace(problem, token_weights=torch.zeros(TOKENS))]
    if not sequence_parallel:
        single = make_problem(shape=(1,))
        problems += [single, per_token(single)]
    check_all(ranks, world_size, problems)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tokens_of_weight_0_are_not_noticed(ranks, world_size: int, sequence_parallel: bool) -> None:
    """Hidden states that are not numbers, enormous logits and labels of no token, where nothing counts."""
    clean = make_problem(chunk_tokens=5, sequence_parallel=sequence_parallel)
    ignored = (clean.token_weights == 0).nonzero().squeeze(1)
    assert len(ignored) >= 4
    hidden, labels = clean.hidden.clone(), clean.labels.clone()
    for index, value in zip(ignored, (math.nan, math.inf, -math.inf, 1e4), strict=False):
        hidden[index] = value
    labels[ignored] = -100
    problems = [replace(clean, hidden=hidden, labels=labels)]
    logits = replace(problems[0], loss_weights={"brier": 1.0, "entropy_by_hand": 1.0})
    check_all(ranks, world_size, [*problems, logits])
    with_them, without = results_of(ranks, world_size, [*problems, clean])
    assert torch.equal(with_them.total, without.total)
    assert torch.equal(with_them.of_weight, without.of_weight)
    assert torch.equal(with_them.of_hidden[0], without.of_hidden[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_enormous_logits_at_an_upstream_of_0(ranks, world_size: int) -> None:
    """Per token: what is not wanted of a token has no gradient, whatever its logits."""
    clean = per_token(make_problem(chunk_tokens=5))
    unwanted = (clean.upstream == 0).all(dim=0)
    hidden = clean.hidden.clone()
    hidden[unwanted] = 1e4
    spoilt, reference = results_of(ranks, world_size, [replace(clean, hidden=hidden), clean])
    for found, expected in zip(spoilt.of_hidden, reference.of_hidden, strict=True):
        assert torch.equal(found, expected)
        assert not found[unwanted].any()
    assert relative_error(spoilt.of_weight, reference.of_weight.double()) < 1e-6


# ------------------------------------------------------------------------------------------------ own losses


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["focal", "negative_entropy", "squared_entropy", "brier", "entropy_by_hand", "mean_squared_logit"]
)
def test_loss_of_ones_own(ranks, world_size: int, name: str) -> None:
    """Alone, and among losses of other kinds; also over ranks that hold only padding."""
    problems = []
    for loss_weights in ({name: 1.0}, {"smoothed": 0.5, name: 2.0, "z_loss": 1e-2}, {"cross_entropy": 1.0, name: 0.0}):
        problem = make_problem(chunk_tokens=7, loss_weights=loss_weights)
        problems += [problem, per_token(problem)]
    padding = make_problem(vocab_size=20, chunk_tokens=7, loss_weights={name: 1.0, "cross_entropy": 1.0})
    if world_size != 2:
        problems += [padding, per_token(padding)]
    check_all(ranks, world_size, problems)


MATERIALIZED_LOSSES = [
    SEVERAL,
    *({name: 1.0} for name in ("focal", "negative_entropy", "squared_entropy", "brier", "entropy_by_hand")),
    {"smoothed": 0.5, "brier": 1.0, "mean_squared_logit": 1.0, "entropy": 0.0},
]


def materialized(logits: torch.Tensor, problems: list[Problem]) -> list[tuple]:
    results = []
    for problem in problems:
        own = own_part(logits, dim=1).requires_grad_()
        values = logits_losses(
            own,
            problem.labels,
            problem.losses,
            shard=VocabShard(dist.group.WORLD, problem.vocab_size),
            loss_weights=problem.loss_weights,
            transform=problem.transform,
        )
        values.backward(problem.upstream)
        results.append((values.detach(), own.grad))
    return results


@pytest.mark.parametrize(("world_size", "vocab_size"), [(1, 47), (1, 20), (2, 47), (2, 25), (3, 47), (3, 17), (4, 20)])
@pytest.mark.parametrize("settings", [{}, {"scale": 1.5, "softcap": 4.0}], ids=["plain", "softcap"])
def test_materialized_losses(ranks, world_size: int, vocab_size: int, settings: dict) -> None:
    """The gradient of the logits' shards, put together."""
    logits = 1.5 * torch.randn(TOKENS, 48, generator=torch.Generator().manual_seed(world_size))
    problems = [
        per_token(make_problem(vocab_size=vocab_size, loss_weights=loss_weights, **settings))
        for loss_weights in MATERIALIZED_LOSSES
    ]

    by_rank = ranks.run(world_size, materialized, logits, problems, timeout=SECONDS)

    for problem, parts in zip(problems, zip(*by_rank, strict=True), strict=True):
        reference = logits.double().requires_grad_()
        real = reference[:, :vocab_size] * problem.scale
        if problem.softcap is not None:
            real = problem.softcap * torch.tanh(real / problem.softcap)
        expected = torch.stack([LOSSES[name][1](real, problem.labels) for name in problem.loss_weights])
        counts = torch.tensor([weight != 0 for weight in problem.loss_weights.values()])
        expected.backward(problem.upstream.double() * counts[:, None])
        for values, _ in parts:
            torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-6, atol=2e-6)
        gradient = torch.cat([part for _, part in parts], dim=1)
        assert relative_error(gradient, reference.grad) < 1e-5
        assert not gradient[:, vocab_size:].any()
        assert not gradient[(problem.upstream == 0).all(dim=0)].any()


def reported_values(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shard = VocabShard(dist.group.WORLD, problem.vocab_size)
    hidden, weight = problem.hidden, own_part(problem.weight)
    common = {"shard": shard, "chunk_tokens": 7}
    every = linear_losses(hidden, weight, problem.labels, problem.losses, **common)
    weighted = linear_losses(
        hidden, weight, problem.labels, problem.losses, token_weights=problem.token_weights, **common
    )
    logits = logits_losses(hidden @ weight.T, problem.labels, problem.losses, shard=shard)
    return every.values, weighted.values, logits


@pytest.mark.parametrize("vocab_size", [47, 25])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_token_metrics(ranks, world_size: int, vocab_size: int) -> None:
    """Accuracy, entropy and log-probability, without a gradient: chunked, weighted and from logits."""
    problem = make_problem(
        vocab_size=vocab_size,
        loss_weights={"token_accuracy": 0.0, "entropy": 0.0, "log_probability": 0.0, "brier": 0.0},
    )
    logits = problem.hidden.double() @ problem.weight.double()[:vocab_size].T
    best = logits.argmax(dim=1)
    labels = torch.where(torch.arange(TOKENS) % 2 == 0, best, problem.labels)
    problem = replace(problem, labels=labels)
    expected = torch.stack([LOSSES[name][1](logits, labels) for name in problem.loss_weights])
    assert 0.4 < expected[0].mean() < 0.9
    for every, weighted, from_logits in ranks.run(world_size, reported_values, problem, timeout=SECONDS):
        torch.testing.assert_close(every.double(), expected, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(from_logits.double(), expected, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(weighted.double(), expected * (problem.token_weights != 0), rtol=1e-6, atol=2e-6)


def tied_accuracy(labels: torch.Tensor) -> torch.Tensor:
    width = 12 // dist.get_world_size()
    logits = torch.zeros(len(labels), width)
    return logits_losses(logits, labels, {"accuracy": TokenAccuracy()}, shard=VocabShard(dist.group.WORLD, 11))[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accuracy_of_equal_logits_counts_the_lowest_token(ranks, world_size: int) -> None:
    labels = torch.arange(11)
    for accuracy in ranks.run(world_size, tied_accuracy, labels, timeout=SECONDS):
        assert torch.equal(accuracy, (labels == 0).float())


def cross_entropy_of(problem: Problem, divided: bool) -> tuple:
    hidden = own_part(problem.hidden) if divided else problem.hidden.clone()
    hidden.requires_grad_()
    common = {"group": dist.group.WORLD, "vocab_size": problem.vocab_size, "chunk_tokens": 5}
    settings = {"label_smoothing": 0.1, "logit_scale": 1.5, "logit_softcap": 3.0, "sequence_parallel": divided}
    weight = own_part(problem.weight)
    each = linear_cross_entropy(hidden, weight, problem.labels, **common, **settings)
    total = linear_cross_entropy(hidden, weight, problem.labels, problem.token_weights, **common, **settings)
    (total * UPSTREAM).backward()
    return each.detach(), total.detach(), hidden.grad


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_linear_cross_entropy(ranks, world_size: int, divided: bool) -> None:
    """The function for a loss function of one's own passes everything on."""
    problem = make_problem(scale=1.5, softcap=3.0, loss_weights={"smoothed": 1.0})
    expected = dense(problem)
    every = dense(per_token(problem)).values[0]
    results = ranks.run(world_size, cross_entropy_of, problem, divided, timeout=SECONDS)
    for each, total, _ in results:
        torch.testing.assert_close(each.double(), every, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(total.double(), expected.total, rtol=1e-6, atol=0)
    found = torch.cat([part for *_, part in results]) if divided else results[-1][-1]
    assert relative_error(found, expected.of_hidden[0]) < 1e-5


# ----------------------------------------------------------------------------------------------- collectives

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_gather", "all_to_all")


def counted(problem: Problem, way: str) -> tuple[list[str], list[str]]:
    """Names of the collectives of forward and of backward."""
    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            return originals[name](*arguments, **keywords)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        weight = own_part(problem.weight).requires_grad_()
        shard = VocabShard(dist.group.WORLD, problem.vocab_size)
        hidden = own_part(problem.hidden) if problem.sequence_parallel else problem.hidden.clone()
        hidden.requires_grad_()
        if way == "logits":
            total = logits_losses(
                hidden @ weight.T, problem.labels, problem.losses, shard=shard, loss_weights=problem.loss_weights
            ).sum()
        else:
            with torch.set_grad_enabled("forward" not in way):
                total, values = linear_losses(
                    hidden,
                    weight,
                    problem.labels,
                    problem.losses,
                    shard=shard,
                    loss_weights=problem.loss_weights,
                    token_weights=problem.token_weights if "weighted" in way else None,
                    chunk_tokens=problem.chunk_tokens,
                    sequence_parallel=problem.sequence_parallel,
                )
                total = values.sum() if total is None else total
        in_forward = list(calls)
        calls.clear()
        if total.requires_grad:
            total.backward()
        return in_forward, list(calls)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@pytest.mark.parametrize("chunk_tokens", [3, 5, 1000])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence_parallel"])
def test_number_of_collectives(ranks, sequence_parallel: bool, chunk_tokens: int) -> None:
    """One small one a chunk where the gradient is made at once, else one in all; one for the hidden's gradient."""
    problem = make_problem(chunk_tokens=chunk_tokens, sequence_parallel=sequence_parallel)
    num_chunks = math.ceil((problem.token_weights != 0).sum().item() / chunk_tokens)
    gather = ["all_gather_into_tensor"]
    hidden = gather if sequence_parallel else []
    reduce = ["reduce_scatter_tensor"] if sequence_parallel else ["all_reduce"]
    ways = {
        "weighted": (hidden + num_chunks * gather + reduce, []),
        "per token": (hidden + gather, hidden + reduce),
        "weighted forward": (hidden + gather, []),
        "forward": (hidden + gather, []),
    }
    if not sequence_parallel:
        ways["logits"] = (gather, [])
    for way, expected in ways.items():
        for found in ranks.run(2, counted, problem, way, timeout=SECONDS):
            assert found == expected, way


def automatic_chunks(hidden: torch.Tensor, weight: torch.Tensor, vocab_size: int, losses: dict, train: bool) -> tuple:
    own = own_part(weight).requires_grad_(train)
    total, values = linear_losses(
        hidden,
        own,
        torch.arange(len(hidden)) % vocab_size,
        losses,
        shard=VocabShard(dist.group.WORLD, vocab_size),
        token_weights=torch.ones(len(hidden)),
    )
    if train:
        total.backward()
    return total.detach(), values.detach(), own.grad


@pytest.mark.parametrize("way", ["train", "evaluate a loss of the logits"])
def test_automatic_chunks_are_the_same_on_every_rank(ranks, way: str) -> None:
    """A rank that holds mostly padding has few columns, and still exchanges as many chunks as the others."""
    torch.manual_seed(0)
    tokens, width, vocab_size = 3000, 4000, 4100  # 2048 tokens of 4000 columns are 32 MiB; 100 columns are less
    hidden, weight = torch.randn(tokens, 4), torch.randn(2 * width, 4)
    losses = {"cross_entropy": CrossEntropy()} if way == "train" else {"brier": Brier()}
    results = ranks.run(2, automatic_chunks, hidden, weight, vocab_size, losses, way == "train", timeout=40.0)
    labels = torch.arange(tokens) % vocab_size
    logits = hidden.double() @ weight.double()[:vocab_size].T
    expected = dense_cross_entropy(logits, labels) if way == "train" else dense_brier(logits, labels)
    for total, values, _ in results:
        torch.testing.assert_close(values[0].double(), expected, rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(total.double(), expected.sum(), rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------- bad input


def refusals(problem: Problem, cases: dict[str, dict[str, Any]], logits_cases: dict[str, dict[str, Any]]) -> dict:
    """What each call says, on one rank; nobody waits for anybody, so a collective of ours still works afterwards."""
    shard = VocabShard(dist.group.WORLD, problem.vocab_size)
    weight = own_part(problem.weight).requires_grad_()
    texts = {}
    common = {"labels": problem.labels, "losses": problem.losses, "shard": shard}
    linear = {"hidden": problem.hidden, "weight": weight, "token_weights": problem.token_weights, **common}
    for function, standard, changes in (
        (linear_losses, linear, cases),
        (logits_losses, {"logits": torch.randn(TOKENS, len(weight)), **common}, logits_cases),
    ):
        for name, change in changes.items():
            try:
                function(**{**standard, **change})
            except Exception as error:
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                texts[f"{function.__name__}: {name}"] = f"{kind}{error}"
    answered = torch.ones(1)
    dist.all_reduce(answered)
    assert answered.item() == dist.get_world_size()
    return texts


def changed(tensor: torch.Tensor, index: int, value: float) -> torch.Tensor:
    other = tensor.clone()
    other.view(-1)[index] = value
    return other


def test_bad_input_is_refused_alike_on_every_rank(ranks) -> None:
    problem = make_problem()
    labels, token_weights = problem.labels, problem.token_weights
    assert token_weights[0] != 0
    expected = {
        "label too large": ({"labels": changed(labels, 0, 47)}, r"^labels: 1 .* vocabulary of 47, such as 47"),
        "labels in the padding": ({"labels": changed(changed(labels, 0, 47), 1, 47)}, r"^labels: 2 .* such as 47"),
        "label negative": ({"labels": changed(labels, 0, -1)}, r"^labels: 1 .* such as -1"),
        "ignored label per token": (
            {"labels": changed(labels, 2, -100), "token_weights": None},
            r"^labels: 1 .* such as -100.* weight 0",
        ),
        "other features": ({"hidden": torch.randn(TOKENS, 8)}, r"hidden has 8 features and weight 16"),
        "whole weight": (
            {"weight": problem.weight},
            r"^weight: 48 columns hold the whole .* 2 ranks; pass each",
        ),
        "small weight": (
            {"weight": problem.weight[:23]},
            r"^weight: 23 columns on each of 2 ranks are fewer than",
        ),
        "one-dimensional weight": ({"weight": problem.weight[0]}, r"weight \(16,\)"),
        "hidden of one dimension": ({"hidden": problem.hidden[0]}, r"hidden has the shape \(16,\)"),
        "negative weight": (
            {"token_weights": changed(token_weights, 3, -0.5)},
            r"^token_weights: 1 .* negative .* such as -0.5",
        ),
        "NaN weight": ({"token_weights": changed(token_weights, 3, math.nan)}, r"^token_weights: 1 .* such as nan"),
        "infinite weight": (
            {"token_weights": changed(token_weights, 3, math.inf)},
            r"^token_weights: 1 .* such as inf",
        ),
        "few weights": ({"token_weights": token_weights[1:]}, r"^token_weights have the shape \(23,\), labels \(24,\)"),
        "few labels": ({"labels": labels[1:]}, r"^labels have the shape \(23,\).* needs \(24,\)"),
        "labels of two dimensions": ({"labels": labels.view(8, 3)}, r"^labels have the shape \(8, 3\).* needs \(24,\)"),
        "labels of a part": ({"sequence_parallel": True}, r"on each of 2 ranks needs \(48,\)"),
        "no losses": ({"losses": {}}, r"^losses is empty"),
        "weight of no loss": ({"loss_weights": {"lm_los": 1.0}}, r"^loss_weights names \['lm_los'\].*cross_entropy"),
        "loss weight negative": ({"loss_weights": {"z_loss": -1.0}}, r"^loss_weights: z_loss has the weight -1"),
        "loss weight NaN": ({"loss_weights": {"z_loss": math.nan}}, r"^loss_weights: z_loss has the weight nan"),
        "no chunk": ({"chunk_tokens": 0}, r"^chunk_tokens: 0 .* 1 or more"),
        "negative chunk": ({"chunk_tokens": -4}, r"^chunk_tokens: -4"),
        "half a chunk": ({"chunk_tokens": 1.5}, r"^chunk_tokens: 1.5"),
        "chunk in words": ({"chunk_tokens": "many"}, r"^chunk_tokens: 'many' .*'auto'"),
    }
    expected_of_logits = {
        "gathered logits": ({"logits": torch.randn(TOKENS, 48)}, r"^logits: 48 columns hold the whole .* not gathered"),
        "few logits": ({"logits": torch.randn(TOKENS, 23)}, r"^logits: 23 columns on each of 2 ranks are fewer"),
        "label too large": ({"labels": changed(labels, 0, 47)}, r"^labels: 1 .* such as 47"),
        "label negative": ({"labels": changed(labels, 0, -100)}, r"^labels: 1 .* such as -100"),
        "no losses": ({"losses": {}}, r"^losses is empty"),
        "weight of no loss": ({"loss_weights": {"lm_los": 1.0}}, r"^loss_weights names \['lm_los'\]"),
    }
    first, second = ranks.run(
        2,
        refusals,
        problem,
        {name: change for name, (change, _) in expected.items()},
        {name: change for name, (change, _) in expected_of_logits.items()},
        timeout=SECONDS,
    )
    assert first == second
    patterns = {f"linear_losses: {name}": pattern for name, (_, pattern) in expected.items()}
    patterns |= {f"logits_losses: {name}": pattern for name, (_, pattern) in expected_of_logits.items()}
    assert sorted(first) == sorted(patterns), "some were not refused"
    wrong = {name: first[name] for name, pattern in patterns.items() if not re.search(pattern, first[name])}
    assert not wrong


def second_backward(problem: Problem) -> str:
    weight = own_part(problem.weight).requires_grad_()
    total = linear_losses(
        problem.hidden,
        weight,
        problem.labels,
        problem.losses,
        shard=VocabShard(dist.group.WORLD, problem.vocab_size),
        token_weights=problem.token_weights,
    ).total
    total.backward(retain_graph=True)
    once = weight.grad.clone()
    try:
        total.backward()
    except RuntimeError as error:
        assert torch.equal(weight.grad, once)
        return str(error)
    return "not refused"


def test_second_backward_through_gradients_of_forward(ranks) -> None:
    texts = ranks.run(2, second_backward, make_problem(), timeout=SECONDS)
    assert texts[0] == texts[1]
    assert "made in forward" in texts[0]
    assert "without token_weights" in texts[0]
