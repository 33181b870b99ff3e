"""The chunked head in one process, against float64 arithmetic written out here."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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

LOSSES: dict[str, TokenLoss] = {
    "cross_entropy": CrossEntropy(),
    "smoothed": CrossEntropy(label_smoothing=0.1),
    "z_loss": ZLoss(),
    "reported": CrossEntropy(),
}
LOSS_WEIGHTS = {"cross_entropy": 1.0, "smoothed": 0.5, "z_loss": 1e-2, "reported": 0.0}
FACTORS = torch.tensor(list(LOSS_WEIGHTS.values()), dtype=torch.float64)[:, None]


class SquaredProbabilities(TokenLoss):
    """A loss of the logits themselves."""

    statistics = frozenset({"logits"})

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.sum_over_vocabulary(tokens.log_probabilities.exp().square())


def dense_values(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[losses, tokens] of LOSSES, from logits without padding."""
    values = []
    for row, label in zip(logits, labels.tolist(), strict=True):
        lse = row.max() + torch.log(torch.exp(row - row.max()).sum())
        cross_entropy = lse - row[label]
        smoothed = 0.9 * cross_entropy + 0.1 * (lse - row.sum() / len(row))
        values.append(torch.stack([cross_entropy, smoothed, lse * lse, cross_entropy]))
    return torch.stack(values, dim=1) if values else logits.new_zeros(len(LOSSES), 0)


def inputs(tokens: int, features: int, columns: int, vocab_size: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, labels, and token weights some of which are 0."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, features, generator=generator).requires_grad_()
    weight = (1.5 * torch.randn(columns, features, generator=generator) / features**0.5).requires_grad_()
    labels = torch.randint(0, vocab_size, (tokens,), generator=generator)
    token_weights = torch.rand(tokens, generator=generator) + 0.1
    token_weights[1::4] = 0.0
    return hidden, weight, labels, token_weights


def assert_close_in_norm(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """An error relative to the norm; exactly 0 where 0 is expected."""
    difference = (found.double() - expected).norm()
    assert difference <= tolerance * expected.norm(), f"{difference:.3e} of {expected.norm():.3e}"


def compare(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    token_weights: torch.Tensor | None,
    vocab_size: int,
    upstream: torch.Tensor,
    chunk_tokens: Any,
) -> None:
    """Values and both gradients against float64, of the total or of every value."""
    call = {"shard": VocabShard(None, vocab_size), "loss_weights": LOSS_WEIGHTS, "chunk_tokens": chunk_tokens}
    total, values = linear_losses(hidden, weight, labels, LOSSES, token_weights=token_weights, **call)
    found = torch.autograd.grad(values if total is None else total, (hidden, weight), upstream)

    first, second = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = dense_values(first @ second[:vocab_size].T, labels)
    if token_weights is None:
        objective = (expected * upstream.double() * (FACTORS != 0)).sum()
    else:
        objective = (expected * FACTORS * token_weights.double()).sum()
        assert total.item() == pytest.approx(objective.item(), rel=1e-6, abs=1e-12)
        objective = objective * upstream.double()
        expected = expected * (token_weights != 0)
    torch.testing.assert_close(values.detach().double(), expected.detach(), rtol=1e-6, atol=2e-6)
    for gradient, reference in zip(found, torch.autograd.grad(objective, (first, second)), strict=True):
        # a gradient that is all but 0, as that of one token in the vocabulary, is rounding
        difference = (gradient.double() - reference).norm()
        assert difference <= 1e-5 * reference.norm() + 1e-6 * upstream.double().norm()
    assert not found[1][vocab_size:].any()


sizes = st.integers(1, 12)


@st.composite
def problems(draw: st.DrawFn) -> tuple:
    tokens, features, columns = draw(sizes), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    vocab_size = draw(st.integers(1, columns))
    hidden, weight, labels, token_weights = inputs(tokens, features, columns, vocab_size, draw(st.integers(0, 99)))
    mask = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 7.0]), min_size=tokens, max_size=tokens))
    chunk_tokens = draw(st.one_of(st.just("auto"), st.integers(1, 14)))
    return hidden, weight, labels, token_weights * torch.tensor(mask), vocab_size, chunk_tokens


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([1.0, -3.0, 0.0, 2.0**14]))
def test_total_against_dense(problem: tuple, upstream: float) -> None:
    *tensors, vocab_size, chunk_tokens = problem
    compare(*tensors, vocab_size, torch.tensor(upstream), chunk_tokens)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 99))
def test_values_against_dense(problem: tuple, seed: int) -> None:
    hidden, weight, labels, token_weights, vocab_size, chunk_tokens = problem
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(len(LOSSES), len(labels), generator=generator) * (token_weights != 0)
    compare(hidden, weight, labels, None, vocab_size, upstream, chunk_tokens)


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from([None, 2.0]), st.sampled_from([1.0, 0.3]))
def test_chunked_is_materialized(problem: tuple, softcap: float | None, scale: float) -> None:
    """Both ways to the logits, and both strategies: the total is the weighted sum of the values."""
    hidden, weight, labels, token_weights, vocab_size, chunk_tokens = problem
    call: dict[str, Any] = {"shard": VocabShard(None, vocab_size), "transform": LogitTransform(scale, softcap)}
    losses = LOSSES | {"squares": SquaredProbabilities()}
    loss_weights = LOSS_WEIGHTS | {"squares": 2.0}
    call["loss_weights"] = loss_weights
    factors = torch.tensor(list(loss_weights.values()))[:, None]

    def gradients(total: torch.Tensor) -> tuple:
        return torch.autograd.grad(total, (hidden, weight))

    total, _ = linear_losses(
        hidden, weight, labels, losses, token_weights=token_weights, chunk_tokens=chunk_tokens, **call
    )
    per_token = linear_losses(hidden, weight, labels, losses, chunk_tokens=chunk_tokens, **call).values
    from_logits = logits_losses(hidden @ weight.T, labels, losses, **call)
    torch.testing.assert_close(per_token, from_logits, rtol=2e-6, atol=4e-6)
    totals = [(values * token_weights * factors).sum() for values in (per_token, from_logits)]
    for other in totals:
        assert total.item() == pytest.approx(other.item(), rel=2e-6, abs=1e-6)
    found, *others = (gradients(each) for each in (total, *totals))
    for other in others:
        for gradient, reference in zip(found, other, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5 * (1 + reference.abs().max().item()))


def test_real_padding_of_the_vocabulary() -> None:
    """151665 tokens of Qwen padded to 151936."""
    hidden, weight, labels, token_weights = inputs(9, 16, 151936, 151665)
    labels[0] = 151664
    call = {"shard": VocabShard(None, 151665), "chunk_tokens": 4}
    logits = hidden.detach().double() @ weight.detach().double()[:151665].T
    each = torch.arange(len(labels))
    expected = torch.logsumexp(logits, 1) - logits[each, labels]
    of_logits = torch.softmax(logits, 1)
    of_logits[each, labels] -= 1
    of_logits *= token_weights.double()[:, None] * 3.0

    total = linear_losses(hidden, weight, labels, {"loss": CrossEntropy()}, token_weights=token_weights, **call).total
    (3.0 * total).backward()

    assert total.item() == pytest.approx((expected * token_weights.double()).sum().item(), rel=1e-6)
    assert_close_in_norm(hidden.grad, of_logits @ weight.detach().double()[:151665], 1e-5)
    assert_close_in_norm(weight.grad[:151665], of_logits.T @ hidden.detach().double(), 1e-5)
    assert not weight.grad[151665:].any()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = function(*arguments, **(keywords or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_are_never_there_at_once(weighted: bool, softcap: float | None, dtype: torch.dtype) -> None:
    """No tensor of all tokens and the vocabulary, in forward and backward."""
    tokens, features, columns, chunk_tokens = 600, 8, 200, 16
    hidden, weight, labels, token_weights = inputs(tokens, features, columns, columns)
    hidden, weight = (part.detach().to(dtype).requires_grad_() for part in (hidden, weight))
    losses = LOSSES | {"squares": SquaredProbabilities(), "entropy": Entropy(), "accuracy": TokenAccuracy()}
    with Largest() as largest:
        total, values = linear_losses(
            hidden,
            weight,
            labels,
            losses,
            shard=VocabShard(None, columns),
            loss_weights={"accuracy": 0.0},
            token_weights=token_weights if weighted else None,
            transform=LogitTransform(softcap=softcap),
            chunk_tokens=chunk_tokens,
        )
        (values.sum() if total is None else total).backward()
    partials, largest_allowed = 8, max(chunk_tokens * columns, columns * features, tokens * features)
    assert largest_allowed < tokens * columns / 20
    assert largest.elements <= max(largest_allowed, tokens * partials)


def test_automatic_chunks_bound_the_logits() -> None:
    """3000 tokens of 20000 columns are 229 MiB; 96 MiB at once are promised, and twice that without a gradient."""
    hidden, weight, labels, token_weights = inputs(3000, 2, 20000, 20000)
    for has_gradient, limit in ((True, 96 * 2**20), (False, 192 * 2**20)):
        with Largest() as largest, torch.set_grad_enabled(has_gradient):
            linear_cross_entropy(hidden, weight, labels, token_weights)
        assert limit / 2 < 4 * largest.elements <= limit


# ------------------------------------------------------------------------------------- what is left out


def total_of(*tensors: torch.Tensor, **settings: Any) -> torch.Tensor:
    hidden, weight, labels, token_weights = tensors
    shard = VocabShard(None, weight.size(0))
    total, _ = linear_losses(hidden, weight, labels, LOSSES, shard=shard, token_weights=token_weights, **settings)
    assert total is not None
    return total


@pytest.mark.parametrize("spoil", [math.nan, math.inf, 1e30])
def test_tokens_of_weight_0_are_not_noticed(spoil: float) -> None:
    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    clean = torch.autograd.grad(total := total_of(hidden, weight, labels, token_weights), (hidden, weight))
    ignored = token_weights == 0
    spoilt = hidden.detach().masked_fill(ignored[:, None], spoil).requires_grad_()
    other = total_of(spoilt, weight, labels.masked_fill(ignored, -100), token_weights)
    found = torch.autograd.grad(other, (spoilt, weight))
    assert torch.equal(other, total)
    for gradient, reference in zip(found, clean, strict=True):
        assert torch.equal(gradient, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("losses", [LOSSES, {"squares": SquaredProbabilities()}], ids=["scalar", "logits"])
def test_no_token_counts(losses: dict, dtype: torch.dtype) -> None:
    """A total of 0 that is still attached, and gradients of exactly 0; without a gradient the same total."""
    hidden, weight, labels, _ = inputs(9, 4, 10, 10)
    hidden, weight = (part.detach().to(dtype).requires_grad_() for part in (hidden, weight))
    call = {"shard": VocabShard(None, 10), "token_weights": torch.zeros(9)}
    total, values = linear_losses(hidden, weight, labels, losses, **call)
    assert total.item() == 0.0
    assert not values.any()
    total.backward()
    for part in (hidden, weight):
        assert part.grad.dtype == dtype
        assert not part.grad.any()


@pytest.mark.parametrize("losses", [LOSSES, {"squares": SquaredProbabilities()}], ids=["scalar", "logits"])
def test_no_token_counts_without_a_gradient(losses: dict) -> None:
    hidden, weight, labels, _ = inputs(9, 4, 10, 10)
    with torch.no_grad():
        total, values = linear_losses(
            hidden, weight, labels, losses, shard=VocabShard(None, 10), token_weights=torch.zeros(9)
        )
    assert total.item() == 0.0
    assert values.shape == (len(losses), 9)
    assert not values.any()


def test_no_loss_is_trained() -> None:
    """All losses of weight 0: values as ever, a total of 0."""
    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    call = {"shard": VocabShard(None, 10), "token_weights": token_weights}
    total, values = linear_losses(hidden, weight, labels, LOSSES, loss_weights=dict.fromkeys(LOSSES, 0.0), **call)
    assert total.item() == 0.0
    torch.testing.assert_close(values, linear_losses(hidden, weight, labels, LOSSES, **call).values)
    per_token = linear_losses(
        hidden, weight, labels, LOSSES, loss_weights=dict.fromkeys(LOSSES, 0.0), shard=VocabShard(None, 10)
    )
    torch.testing.assert_close(per_token.values * (token_weights != 0), values)


def test_a_reported_loss_changes_no_gradient() -> None:
    """Not even one whose gradient would not be a number."""

    class Broken(TokenLoss):
        def value(self, tokens: TokenStatistics) -> torch.Tensor:
            return tokens.logsumexp.sub(tokens.logsumexp).sqrt()  # 0, with an infinite derivative

    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    call = {"shard": VocabShard(None, 10), "token_weights": token_weights}
    alone = linear_losses(hidden, weight, labels, LOSSES, loss_weights=LOSS_WEIGHTS, **call).total
    more = LOSSES | {"broken": Broken(), "entropy": Entropy(), "log_probability": LogProbability()}
    weights = LOSS_WEIGHTS | {"broken": 0.0, "entropy": 0.0, "log_probability": 0.0}
    together = linear_losses(hidden, weight, labels, more, loss_weights=weights, **call).total
    assert torch.equal(alone, together)
    for one, other in zip(
        torch.autograd.grad(alone, (hidden, weight)), torch.autograd.grad(together, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(one, other)


# --------------------------------------------------------------------------------- backward and what it returns


def test_second_backward_through_gradients_of_forward_is_refused() -> None:
    tensors = inputs(9, 4, 10, 10)
    total = total_of(*tensors)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out by the first backward; call the loss again"):
        total.backward()


def test_values_can_be_differentiated_several_times() -> None:
    hidden, weight, labels, _ = inputs(9, 4, 10, 10)
    values = linear_losses(hidden, weight, labels, LOSSES, shard=VocabShard(None, 10), chunk_tokens=4).values
    upstream = torch.randn(values.shape)
    first = torch.autograd.grad(values, (hidden, weight), upstream, retain_graph=True)
    kept = [part.clone() for part in first]
    for _ in range(2):
        for gradient, reference in zip(
            torch.autograd.grad(values, (hidden, weight), upstream, retain_graph=True), kept, strict=True
        ):
            assert torch.equal(gradient, reference)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_is_trained_gets_a_gradient(frozen: str, weighted: bool) -> None:
    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    token_weights = token_weights if weighted else None

    def run() -> None:
        total, values = linear_losses(
            hidden, weight, labels, LOSSES, shard=VocabShard(None, 10), token_weights=token_weights, chunk_tokens=4
        )
        (values.sum() if total is None else total).backward()

    run()
    of_hidden, of_weight = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    run()
    if frozen == "hidden":
        assert hidden.grad is None
        torch.testing.assert_close(weight.grad, of_weight, rtol=0, atol=0)
    else:
        assert weight.grad is None
        torch.testing.assert_close(hidden.grad, of_hidden, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_tokens", [2, 100])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("is_embedding_too", [False, True])
def test_gradient_goes_to_main_grad(chunk_tokens: int, weighted: bool, is_embedding_too: bool) -> None:
    """fp32 sums for a bf16 weight, added to what is there; backward then returns nothing of weight."""
    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    hidden, weight = (part.detach().bfloat16().requires_grad_() for part in (hidden, weight))
    weight.main_grad = torch.ones(10, 4)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = is_embedding_too
    first, second = hidden.detach().double(), weight.detach().double().requires_grad_()
    factors = token_weights.double() if weighted else torch.ones(9, dtype=torch.float64)
    (3 * (dense_values(first @ second.T, labels) * factors).sum()).backward()

    total, values = linear_losses(
        hidden,
        weight,
        labels,
        LOSSES | {"reported": CrossEntropy()},
        shard=VocabShard(None, 10),
        token_weights=token_weights if weighted else None,
        chunk_tokens=chunk_tokens,
    )
    (3 * (values.sum() if total is None else total)).backward()

    assert weight.grad_added_to_main_grad
    assert_close_in_norm(weight.main_grad - 1, second.grad, 2e-2)
    if is_embedding_too:
        assert not weight.grad.any()


def test_inputs_are_not_written_to() -> None:
    tensors = inputs(9, 4, 10, 10)
    before = [part.detach().clone() for part in tensors]
    total_of(*tensors, chunk_tokens=4).backward()
    for part, was in zip(tensors, before, strict=True):
        assert torch.equal(part.detach(), was)


def test_autocast_changes_nothing() -> None:
    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    outside = torch.autograd.grad(total := total_of(hidden, weight, labels, token_weights), (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside_total = total_of(hidden, weight, labels, token_weights)
    inside = torch.autograd.grad(inside_total, (hidden, weight))
    assert torch.equal(total, inside_total)
    for gradient, reference in zip(inside, outside, strict=True):
        assert torch.equal(gradient, reference)


@pytest.mark.parametrize("count", ["some", "all"])
def test_tokens_may_be_named_in_any_order(count: str) -> None:
    """`tokens` says which to compute; the order in which it names them is nobody's concern."""
    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    if count == "all":
        token_weights = token_weights + 0.5
    named = token_weights.nonzero().squeeze(1).flip(0)
    call = {"shard": VocabShard(None, 10), "token_weights": token_weights, "chunk_tokens": 4}
    expected, expected_values = linear_losses(hidden, weight, labels, LOSSES, **call)
    total, values = linear_losses(hidden, weight, labels, LOSSES, tokens=named, **call)
    torch.testing.assert_close(values, expected_values)
    torch.testing.assert_close(total, expected)
    for found, reference in zip(
        torch.autograd.grad(total, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(found, reference)


@pytest.mark.parametrize("weighted", [True, False])
def test_no_tokens_at_all(weighted: bool) -> None:
    hidden, weight, labels, token_weights = inputs(0, 4, 10, 10)
    total, values = linear_losses(
        hidden, weight, labels, LOSSES, shard=VocabShard(None, 10), token_weights=token_weights if weighted else None
    )
    assert values.shape == (len(LOSSES), 0)
    (values.sum() if total is None else total).backward()
    assert not weight.grad.any()


def test_float64_hidden_states_are_taken() -> None:
    """Computed in fp32 after the product, as all types."""
    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    wide = [part.detach().double().requires_grad_() for part in (hidden, weight)]
    narrow = torch.autograd.grad(total := total_of(hidden, weight, labels, token_weights), (hidden, weight))
    other = total_of(*wide, labels, token_weights, chunk_tokens=4)
    torch.testing.assert_close(other, total)
    for found, reference in zip(torch.autograd.grad(other, wide), narrow, strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.float(), reference)


def test_linear_cross_entropy_needs_no_more_than_three_tensors() -> None:
    hidden, weight, labels, token_weights = inputs(9, 4, 10, 10)
    each = linear_cross_entropy(hidden, weight, labels)
    total = linear_cross_entropy(hidden, weight, labels, token_weights)
    expected = dense_values(hidden.detach().double() @ weight.detach().double().T, labels)[0]
    torch.testing.assert_close(each.detach().double(), expected, rtol=1e-6, atol=2e-6)
    assert total.item() == pytest.approx((expected * token_weights).sum().item(), rel=1e-6)
    assert each.requires_grad
    assert total.requires_grad
