"""Cross-entropy over a sharded vocabulary; shards are put together and compared with a dense float64 computation."""

import pytest
import torch

TOKENS = 13


def sharded_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, upstream: torch.Tensor, vocab_size: int):
    import torch.distributed as dist

    from megatron_ext.losses import VocabShard, vocab_parallel_cross_entropy

    group = dist.group.WORLD
    width = logits.size(1) // group.size()
    own = logits[:, group.rank() * width : (group.rank() + 1) * width].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(own, labels, VocabShard(group, vocab_size))
    loss.backward(upstream)
    return loss.detach(), own.grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [48, 47, 30, 12])  # 12: some ranks hold padding only
def test_value_and_gradient(ranks, world_size: int, vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    logits = 3 * torch.randn(TOKENS, 48)
    labels = torch.randint(0, vocab_size, (TOKENS,))
    upstream = torch.randn(TOKENS)
    upstream[3] = 0.0
    reference = logits.double().requires_grad_()
    expected = torch.logsumexp(reference[:, :vocab_size], 1) - reference[torch.arange(TOKENS), labels]
    expected.backward(upstream.double())

    results = ranks.run(world_size, sharded_cross_entropy, logits, labels, upstream, vocab_size)

    for loss, _ in results:
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    gradient = torch.cat([part for _, part in results], dim=1)
    assert (gradient.double() - reference.grad).norm() / reference.grad.norm() < 1e-6
