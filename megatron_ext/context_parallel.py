"""The order in which context parallelism spreads a sequence over ranks, and back.

Megatron cuts every sequence into 2 * cp chunks and gives rank r the chunks r and 2 * cp - 1 - r, one early and one
late: under a causal mask all ranks then have the same work. Pure tensor functions, no process groups.
"""

import torch


def shard_sequence(tensor: torch.Tensor, cp_rank: int, cp_size: int) -> torch.Tensor:
    """This rank's part of a full batch.

    Args:
        tensor: [b, s, ...]; s a multiple of 2 * cp_size.

    Returns:
        [b, s / cp_size, ...]
    """
    if cp_size == 1:
        return tensor
    chunks = tensor.chunk(2 * cp_size, dim=1)
    return torch.cat((chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]), dim=1)


def restore_sequence_order(gathered: torch.Tensor) -> torch.Tensor:
    """Put the parts of one or more sequences back in order.

    Args:
        gathered: [cp, s / cp, ...], the parts of all CP ranks in rank order.

    Returns:
        [s, ...]
    """
    early, late = gathered.unflatten(1, (2, -1)).unbind(1)  # [cp, chunk, ...] each
    return torch.cat((early, late.flip(0))).flatten(0, 1)
