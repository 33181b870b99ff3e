"""Gradients made from the exponentials that the measuring pass leaves, where they are far from what fp32 can hold."""

import math

import pytest
import torch
from test_losses_chunks import Group

from megatron_ext.losses import (
    CrossEntropy,
    ForwardKL,
    LogitTransform,
    TeacherHidden,
    TokenLoss,
    VocabShard,
    ZLoss,
    linear_losses,
    logits_losses,
)
from megatron_ext.losses.kernel import ChunkKernel

TOKENS, WIDTH, VOCAB = 6, 20, 37  # two ranks, three columns of padding


def logits_of(gap: float, seed: int = 0) -> torch.Tensor:
    """[tokens, vocabulary] in float64; those of the second rank are lower by `gap`."""
    logits = 3.0 * torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, WIDTH:] -= gap
    return logits.double()


def dense(losses: list[TokenLoss], logits: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[losses, tokens] in float64."""
    log_q, log_p = logits.log_softmax(1), teacher.log_softmax(1)
    cross_entropy = -log_q.gather(1, labels[:, None]).squeeze(1)
    found = []
    for loss in losses:
        if isinstance(loss, CrossEntropy):
            uniform = -log_q.mean(dim=1)
            found.append((1 - loss.label_smoothing) * cross_entropy + loss.label_smoothing * uniform)
        elif isinstance(loss, ZLoss):
            found.append(logits.logsumexp(1).square())
        else:
            found.append((log_p.exp() * (log_p - log_q)).sum(dim=1))
    return torch.stack(found)


MIXTURES = {
    "cross-entropy": [CrossEntropy()],
    "smoothed": [CrossEntropy(0.2), ZLoss()],
    "divergence": [ForwardKL()],
    "all": [CrossEntropy(0.1), ForwardKL(), ZLoss()],
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("gap", [0.0, 40.0, 200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_of_which_one_has_no_mass(mixture: str, scale: float, gap: float, dtype: torch.dtype) -> None:
    """The label may be where the mass is not: its gradient is beyond any multiple of its rank's exponentials."""
    losses = MIXTURES[mixture]
    kernels = [
        ChunkKernel(losses, [True] * len(losses), VocabShard(Group(rank, 2), VOCAB), WIDTH, LogitTransform(scale))
        for rank in range(2)
    ]
    if not kernels[0].can_use_exponentials(dtype, torch.float32):
        assert dtype == torch.bfloat16 and any(isinstance(loss, ForwardKL) for loss in losses)
        return
    products, teacher = (logits_of(gap) / scale).to(dtype), logits_of(0.5 * gap, seed=1).float()
    labels = torch.tensor([0, WIDTH, WIDTH + 1, 5, VOCAB - 1, WIDTH - 1])
    upstream = torch.rand(len(losses), TOKENS, generator=torch.Generator().manual_seed(2)) + 0.5

    columns = [slice(0, WIDTH), slice(WIDTH, VOCAB)]
    chunks = [
        kernel.products(products[:, own].clone(), teacher[:, own].clone())
        for kernel, own in zip(kernels, columns, strict=True)
    ]
    measured = [
        kernel.measure(chunk, labels, leave_exponentials=True) for kernel, chunk in zip(kernels, chunks, strict=True)
    ]
    gathered = torch.stack([partials for partials, _ in measured])
    found = []
    for kernel, chunk, (_, left) in zip(kernels, chunks, measured, strict=True):
        statistics = kernel.combine(gathered, labels)
        values = kernel.values(statistics)
        factor = kernel.replace_by_gradient(chunk, statistics, upstream, left=left)
        found.append(chunk.student.double() * (1.0 if factor is None else factor.double()[:, None]))

    exact = products.double().requires_grad_()
    expected = dense(losses, scale * exact, teacher.double(), labels)
    torch.testing.assert_close(values.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    (reference,) = torch.autograd.grad((expected * upstream.double()).sum(), exact)
    difference = (torch.cat(found, dim=1) - reference).norm() / reference.norm()
    assert difference < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("scale", [1e-30, 2.0**14])
def test_upstream_gradients_of_any_size(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 4, generator=generator).requires_grad_() for size in (5, 9))
    call = {"shard": VocabShard(None, 9), "token_weights": torch.ones(5)}

    def gradients(upstream: float) -> tuple[torch.Tensor, ...]:
        losses = {"loss": CrossEntropy()}
        total = linear_losses(hidden, weight, torch.arange(5), losses, gradient_scale=upstream, **call).total
        return torch.autograd.grad(total, (hidden, weight), torch.tensor(upstream))

    for gradient, reference in zip(gradients(scale), gradients(1.0), strict=True):
        torch.testing.assert_close(gradient / scale, reference, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("teacher_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_of_another_type(dtype: torch.dtype, teacher_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator).to(dtype).requires_grad_() for size in (6, 50))
    of_teacher = [torch.randn(size, 12, generator=generator).to(teacher_dtype) for size in (6, 50)]
    token_weights = torch.rand(6, generator=generator)
    call = {"shard": VocabShard(None, 50), "token_weights": token_weights, "teacher": TeacherHidden(*of_teacher)}
    losses = {"kl": ForwardKL(), "loss": CrossEntropy()}
    total = linear_losses(hidden, weight, torch.arange(6), losses, **call).total
    found = torch.autograd.grad(total, (hidden, weight))

    first, second = (part.detach().double().requires_grad_() for part in (hidden, weight))
    teacher = of_teacher[0].double() @ of_teacher[1].double().T
    expected = (dense(list(losses.values()), first @ second.T, teacher, torch.arange(6)) * token_weights).sum()
    is_short = {dtype, teacher_dtype} & {torch.bfloat16, torch.float16}
    assert total.item() == pytest.approx(expected.item(), rel=1e-2 if is_short else 1e-6)
    for gradient, reference in zip(found, torch.autograd.grad(expected, (first, second)), strict=True):
        assert (gradient.double() - reference).norm() < (2e-2 if is_short else 1e-5) * reference.norm()


@pytest.mark.parametrize("low", [-20.0, -31.0, -1e4, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_labels_that_are_all_but_impossible(dtype: torch.dtype, low: float) -> None:
    """The logsumexp is read from the label's log-probability only where that has the digits for it."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.tensor([3, 4, 5, 6])
    logits[1, labels[1]] = low
    losses = {"loss": CrossEntropy(), "z": ZLoss()}
    with torch.no_grad():
        cross_entropy, squared = logits_losses(logits, labels, losses, shard=VocabShard(None, 50))
    logsumexp = logits.double().logsumexp(1)
    torch.testing.assert_close(squared.double(), logsumexp.square(), rtol=1e-6, atol=0.0)
    expected = logsumexp - logits.double().gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(cross_entropy.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("chunk_tokens", [24, 12, 8, 5])
def test_sums_of_16_bit_products(chunk_tokens: int) -> None:
    """One and two products are summed in 16 bits, more in fp32; the gradient of the weight is rounded as one would."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator).bfloat16().requires_grad_() for size in (24, 30))
    labels, token_weights = torch.arange(24), torch.rand(24, generator=generator)
    call = {"shard": VocabShard(None, 30), "token_weights": token_weights, "chunk_tokens": chunk_tokens}
    linear_losses(hidden, weight, labels, {"loss": CrossEntropy()}, **call).total.backward()
    first, second = (part.detach().double().requires_grad_() for part in (hidden, weight))
    expected = torch.nn.functional.cross_entropy(first @ second.T, labels, reduction="none") * token_weights
    references = torch.autograd.grad(expected.sum(), (first, second))
    assert weight.grad.dtype == torch.bfloat16
    for gradient, reference in zip((hidden.grad, weight.grad), references, strict=True):
        assert (gradient.double() - reference).norm() < 1e-2 * reference.norm()
