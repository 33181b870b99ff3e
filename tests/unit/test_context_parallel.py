"""The zig-zag order against Megatron's description of it, written out by hand."""

import pytest
import torch

from megatron_ext.context_parallel import restore_sequence_order, shard_sequence


def test_rank_gets_one_early_and_one_late_chunk() -> None:
    sequence = torch.arange(8).view(1, 8)
    assert shard_sequence(sequence, 0, 2).tolist() == [[0, 1, 6, 7]]
    assert shard_sequence(sequence, 1, 2).tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_restore_undoes_shard(cp_size: int) -> None:
    sequence = torch.randn(3, 24, 5)
    parts = [shard_sequence(sequence, rank, cp_size).transpose(0, 1) for rank in range(cp_size)]
    restored = restore_sequence_order(torch.stack(parts))
    assert torch.equal(restored.transpose(0, 1), sequence)
