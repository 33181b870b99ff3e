"""The order in which context parallelism spreads a sequence over ranks, and back.

Megatron cuts every sequence into 2 * cp chunks and gives rank r the chunks r and 2 * cp - 1 - r, one early and one
late: under a causal mask all ranks then have the same work. Of a packed row every sequence is cut so, on its own, and a
rank has its parts of them one after another. Pure tensor functions, no process groups.
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


def packed_order(bounds: torch.Tensor, cp_size: int) -> torch.Tensor:
    """Which positions of a packed row each rank has, in its order.

    Args:
        bounds: [n + 1], where the row's sequences begin, and its end; all multiples of 2 * cp_size.

    Returns:
        [cp, s / cp] int64.
    """
    bounds = bounds.long()
    position = torch.arange(int(bounds[-1]), device=bounds.device)
    sequence = torch.searchsorted(bounds, position, right=True) - 1
    chunk_length = bounds.diff()[sequence] // (2 * cp_size)
    chunk = (position - bounds[sequence]) // chunk_length
    rank = torch.minimum(chunk, 2 * cp_size - 1 - chunk)
    return rank.argsort(stable=True).view(cp_size, -1)


def restore_packed_order(gathered: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Put the parts of a packed row back in order.

    Args:
        gathered: [cp, s / cp, ...], the parts of all CP ranks in rank order.
        bounds: as for `packed_order`.

    Returns:
        [s, ...]
    """
    order = packed_order(bounds, gathered.size(0)).flatten().to(gathered.device)
    restored = torch.empty_like(gathered.flatten(0, 1))
    restored[order] = gathered.flatten(0, 1)
    return restored
