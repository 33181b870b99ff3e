"""How tokens are divided into chunks, and the worked examples of the documentation."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from megatron_ext.losses import LogitTransform, TeacherHidden, VocabShard, linear_losses
from megatron_ext.losses.chunked import LinearProblem

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "losses.md"


class Group:
    """What VocabShard asks of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def problem(rank: int, size: int, vocab_size: int, chunk_tokens: int | str = "auto") -> LinearProblem:
    shard = VocabShard(Group(rank, size), vocab_size)  # type: ignore[arg-type]
    return LinearProblem([], [], shard, LogitTransform(), chunk_tokens, False, 1.0, None)


@pytest.mark.parametrize("vocab_size", [151936, 90000, 76000])
def test_all_ranks_have_the_same_chunks(vocab_size: int) -> None:
    """However few real columns the last one has: they exchange one message for each chunk."""
    hidden = torch.empty(5000, 1)
    chunks = [list(problem(rank, 2, vocab_size).chunks(hidden, 75968)[1]) for rank in range(2)]
    assert chunks[0] == chunks[1]


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 1000, 2048])
@pytest.mark.parametrize("chunk_tokens", ["auto", 1, 7, 5000])
def test_chunks_cover_all_tokens_once(num_tokens: int, chunk_tokens: int | str) -> None:
    size, chunks = problem(0, 1, 49152, chunk_tokens).chunks(torch.empty(num_tokens, 1), 49152)
    covered = [token for chunk in chunks for token in range(chunk.start, chunk.stop)]
    assert covered == list(range(num_tokens))
    assert size <= max(1, num_tokens)


def test_automatic_chunks_bound_the_memory() -> None:
    """Whatever the number of tokens: 96 MiB, or the size of the weight's gradient, or 512 MiB."""
    for features, limit in ((1, 96 * 2**20), (1024, 49152 * 1024 * 4), (8192, 512 * 2**20)):
        for tokens in (2048, 8192, 100_000):
            size, chunks = problem(0, 1, 49152).chunks(torch.empty(tokens, features), 49152)
            assert limit / 2 < size * 49152 * 4 <= limit
            assert {chunk.stop - chunk.start for chunk in chunks[:-1]} <= {size}
            assert size - 32 * len(chunks) < chunks[-1].stop - chunks[-1].start <= size


@pytest.mark.parametrize(("dtype", "teacher_dtype"), [("float32", "float32"), ("bfloat16", "float32")])
def test_a_teachers_logits_share_the_memory(dtype: str, teacher_dtype: str) -> None:
    types = getattr(torch, dtype), getattr(torch, teacher_dtype)
    teacher = TeacherHidden(torch.empty(5000, 1, dtype=types[1]), torch.empty(1, 1))
    of = dataclasses.replace(problem(0, 1, 49152), teacher=teacher)
    size, _ = of.chunks(torch.empty(5000, 1, dtype=types[0]), 49152)
    bytes_at_once = size * 49152 * sum(each.itemsize for each in types)
    assert 48 * 2**20 < bytes_at_once <= 96 * 2**20


def examples() -> dict[str, type]:
    """The losses that the documentation shows, as it shows them."""
    import megatron_ext.losses.base as base

    names: dict[str, object] = {}
    known = dict(base._LOSSES)
    try:
        header = "import torch\nfrom megatron_ext.losses import TokenLoss, TokenStatistics, register_loss\n"
        for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL):
            if "(TokenLoss)" in block:
                exec(header + block, names)
    finally:
        base._LOSSES.clear()
        base._LOSSES.update(known)
    return {name: value for name, value in names.items() if isinstance(value, type)}


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("Focal", lambda log_q, labels: _focal(log_q.gather(1, labels[:, None]).squeeze(1))),
        ("SquaredProbabilities", lambda log_q, _: log_q.exp().square().sum(1)),
    ],
)
def test_documented_losses_work(name: str, dense) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    labels, token_weights = torch.randint(0, 11, (9,)), torch.rand(9)
    loss = examples()[name]()
    result = linear_losses(
        hidden, weight, labels, {name: loss}, shard=VocabShard(None, 11), token_weights=token_weights, chunk_tokens=4
    )
    result.total.backward()
    exact = hidden.detach().double().requires_grad_()
    expected = (dense((exact @ weight.detach().double().t()).log_softmax(1), labels) * token_weights).sum()
    expected.backward()
    assert result.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (hidden.grad - exact.grad).norm() < 1e-5 * exact.grad.norm()


def _focal(log_probability: torch.Tensor) -> torch.Tensor:
    return -((1 - log_probability.exp()) ** 2) * log_probability
