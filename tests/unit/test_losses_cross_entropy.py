"""Vocab-parallel cross-entropy on one rank, against float64 arithmetic written out here."""

import math

import pytest
import torch

from megatron_ext.losses import CrossEntropy, VocabShard, vocab_parallel_cross_entropy


class OneRank:
    """A group of one, without a process group."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def shard(vocab_size: int) -> VocabShard:
    return VocabShard(OneRank(), vocab_size)  # type: ignore[arg-type]


def dense(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    real = logits[:, :vocab_size]
    values = []
    for row, label in zip(real, labels.tolist(), strict=True):
        largest = row.max()
        values.append(largest + torch.log(torch.exp(row - largest).sum()) - row[label])
    return torch.stack(values)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("vocab_size", [50, 43, 1])
def test_value_and_gradient(dtype: torch.dtype, tolerance: float, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(17, 50)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab_size, (17,))
    upstream = torch.randn(17)
    upstream[::4] = 0.0
    reference = logits.detach().double().requires_grad_()
    expected = dense(reference, labels, vocab_size)
    expected.backward(upstream.double())

    loss = vocab_parallel_cross_entropy(logits, labels, shard(vocab_size))
    loss.backward(upstream)

    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    error = (logits.grad.double() - reference.grad).norm() / reference.grad.norm().clamp(min=1e-12)
    assert error < 10 * tolerance
    assert logits.grad.dtype == dtype


def test_logits_are_not_written_to() -> None:
    logits = torch.randn(5, 8, requires_grad=True)
    before = logits.detach().clone()
    vocab_parallel_cross_entropy(logits, torch.arange(5), shard(8)).sum().backward()
    assert torch.equal(logits.detach(), before)


def test_padding_is_no_part_of_the_softmax() -> None:
    logits = torch.zeros(2, 8, requires_grad=True)
    with torch.no_grad():
        logits[:, 6:] = 100.0
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0, 5]), shard(6))
    assert loss.tolist() == pytest.approx([math.log(6)] * 2)
    loss.sum().backward()
    assert torch.equal(logits.grad[:, 6:], torch.zeros(2, 2))


def test_overflow_at_an_ignored_position_stays_there() -> None:
    logits = torch.randn(3, 8)
    logits[1] = float("inf")
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3]), shard(8))
    loss.backward(torch.tensor([1.0, 0.0, 1.0]))
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(logits.grad[1], torch.zeros(8))


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1]), shard(3))
    assert loss.item() == pytest.approx(1e4)


def test_second_backward_gives_the_same_gradient() -> None:
    """Logits that are there can be differentiated as often as the graph is kept."""
    logits = torch.randn(6, 9, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.arange(6), shard(8))
    upstream = torch.randn(6)
    (first,) = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
    assert torch.equal(first, kept)
    assert torch.equal(second, kept)
    (doubled,) = torch.autograd.grad(loss, logits, 2 * upstream)
    torch.testing.assert_close(doubled, 2 * kept)


@pytest.mark.parametrize("label", [8, -1, -100])
def test_label_outside_the_vocabulary_is_refused(label: int) -> None:
    """8 is a column of the padding."""
    with pytest.raises(ValueError, match=rf"labels: 1 .* vocabulary of 8, such as {label}"):
        vocab_parallel_cross_entropy(torch.randn(3, 9), torch.tensor([0, label, 7]), shard(8))


@pytest.mark.parametrize("labels", [torch.tensor([0, 1]), torch.tensor([[0, 1, 2]]), torch.tensor(1)])
def test_labels_of_another_shape_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="labels have the shape"):
        vocab_parallel_cross_entropy(torch.randn(3, 9), labels, shard(8))


def test_fewer_columns_than_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="logits: 9 columns on each of 1 ranks are fewer than the vocabulary of 10"):
        vocab_parallel_cross_entropy(torch.randn(3, 9), torch.tensor([0, 1, 2]), shard(10))


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.0, float("nan")])
def test_label_smoothing_that_is_no_share_is_refused(label_smoothing: float) -> None:
    with pytest.raises(ValueError, match=f"label_smoothing: {label_smoothing}"):
        CrossEntropy(label_smoothing)
